"""Engines of the vLLM that can be imported here, without a model.

`make test` runs each test with one of the two model runners, `make test-long` with the other one, and `make test-all`
with each version of vLLM.
"""

from __future__ import annotations

import logging
import random
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvcache_proto.types import UNNAMED

BLOCK = 32
HELD = ("leases", "reservations", "pinned_bytes", "blocks_writing", "blocks_hidden")

# A folder of this name is a namespace package, so that there is always something to find.
if getattr(find_spec("vllm"), "origin", None) is None:
    pytest.skip("needs vLLM (`pip install -e .[cpu,test]`)", allow_module_level=True)


RUNNERS = ("v1", "v2")


@pytest.hookimpl(tryfirst=True)  # before marks select tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of a vLLM that is older or newer than its dependencies are no business of these tests.

    The test's name decides, evenly and the same in every run, with which runner a test is not long.
    """
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        case = getattr(item, "callspec", None)
        if case and "runner" in case.params:
            name = item.name.replace(case.params["runner"], "")
            if case.params["runner"] != RUNNERS[zlib.crc32(name.encode()) % 2]:
                item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def sim() -> Any:
    """The module `simulated`. It is not imported before a test runs: that takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import simulated
    return simulated


@pytest.fixture(params=RUNNERS)
def runner(request: Any) -> str:
    """The order of calls: that of Model Runner V1, or V2."""
    return str(request.param)


@pytest.fixture(scope="module")
def daemon(start_module_daemon: Any) -> Any:
    return start_module_daemon(size="64MiB")


@pytest.fixture
def engines(sim: Any, daemon: Any, runner: str, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`engines(name, **options)` makes an engine, with our connector unless `endpoint` is None.

    After the test nothing may be left of its requests, in the engines nor in the daemon.
    """
    made: list[Any] = []

    def make(name: str, **options: Any) -> Any:
        endpoint = options.pop("endpoint", daemon.endpoint)
        made.append(sim.Engine(tmp_path / "model", name, endpoint, v2=runner == "v2", **options))
        return made[-1]

    yield make
    try:
        for engine in made:
            engine.finish()
            assert engine.free_blocks == engine.blocks - 1, "all device blocks are free but vLLM's null block"
        if made and daemon.process.poll() is None:
            daemon.wait_status(lambda s: not any(s["pool"][what] for what in HELD), "an idle cache")
            daemon.check_integrity()
    finally:
        for engine in made:
            engine.close()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: Any) -> None:
    """Requests wait for the ranks of a pipeline to join as long as a busy host takes."""
    monkeypatch.setattr("kvcache_client.scheduler.membership.PATIENCE", 30.0)


@pytest.fixture
def prompt(request: Any) -> Callable[..., list[int]]:
    """`prompt(n, begin=())` returns n tokens that no other test has, after those of `begin`."""
    draw = random.Random(request.node.nodeid)
    return lambda count, begin=(): [*begin, *(draw.randrange(512) for _ in range(count - len(begin)))]


@pytest.fixture
def idle(daemon: Any) -> Callable[[], None]:
    """`idle()` waits until nothing is being saved, loaded or held."""

    def wait() -> None:
        daemon.wait_status(lambda s: not any(s["pool"][what] for what in HELD), "an idle cache")

    return wait


@pytest.fixture
def stored(daemon: Any) -> Callable[[], int]:
    """`stored()` counts cached blocks, but not those of namespaces that resets have left: the daemon removes them."""

    def count() -> int:
        found = daemon.status()["namespaces"]
        lasting = [each for each in found if not str(each["identity"].get("weights", "")).startswith(UNNAMED)]
        return sum(int(each["blocks"]) for each in lasting)

    return count


@pytest.fixture
def unleased(daemon: Any) -> Callable[[], None]:
    """`unleased()` waits until no lease is held: a release is not waited for."""
    return lambda: daemon.wait_status(lambda s: not s["pool"]["leases"], "the end of all leases") and None


@pytest.fixture
def one_by_one(sim: Any, idle: Callable[[], None]) -> Callable[..., None]:
    """`one_by_one(engines, prompts)` has each engine answer the prompts while its copies take long."""

    def run(engines: Sequence[Any], prompts: Sequence[list[int]]) -> None:
        for engine in engines:
            engine.delay(0.01)
            for at, tokens in enumerate(prompts):
                engine.add(f"r{at}", tokens, 1 + at % 3)
            engine.run()
            engine.step()
            for at, tokens in enumerate(prompts):
                assert engine.outputs[f"r{at}"] == sim.expected(tokens, 1 + at % 3)
            idle()

    return run


@pytest.fixture
def take() -> Callable[[Any, int], list[tuple[int, bool]]]:
    """`take(engine, tokens)` has vLLM take so many tokens of the next offer; returns all offers, as they come."""

    def cut(engine: Any, tokens: int) -> list[tuple[int, bool]]:
        connector, offers = engine.scheduler.connector, []
        ask = connector.get_num_new_matched_tokens

        def instead(request: Any, computed: int) -> tuple[int, bool]:
            offers.append(ask(request, computed))
            return (tokens, tokens > 0) if len(offers) == 1 else offers[-1]

        connector.get_num_new_matched_tokens = instead
        return offers

    return cut


@pytest.fixture
def spoil(sim: Any) -> Callable[..., None]:
    """`spoil(engine, tokens, block, rank, token, name)` changes a byte in the region, as faulty memory would.

    It is of that token of a block in a layer, by default the last, and of its last part: a head, or the value.
    """

    def change(engine: Any, tokens: list[int], block: int, rank: int = 0, token: int = 0, name: str = "") -> None:
        region = engine.workers[rank]._session.region.buffer
        layers = engine.runners[rank].layers
        layer = layers[name or list(layers)[-1]]
        digest = sim.chain(tokens)[block * BLOCK + token]
        at = bytes(region).find(layer.content(sim.np.array([digest], sim.np.uint64))[0, -1].tobytes())
        assert at >= 0
        region[at] ^= 1

    return change


@pytest.fixture
def lines(sim: Any) -> Iterator[list[str]]:
    """The lines of the connector's logger. By a filter: vLLM configures its log again, and drops others' handlers."""
    found: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        found.append(record.getMessage())
        return True

    logger = logging.getLogger("vllm.kvcache")
    logger.addFilter(note)
    try:
        yield found
    finally:
        logger.removeFilter(note)
