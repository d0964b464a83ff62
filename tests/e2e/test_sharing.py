"""Two real engines and one daemon: what one has computed the other one loads, and no token differs."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
import zmq
from cache_state import BLOCK, BLOCK_BYTES, full, hits, wait_idle
from follower import PATIENCE, Subscriber, sockets

from kvcache_server.admin_client import AdminClient

MAX_LEN = 1024  # tokens
EDGES = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK + 7, MAX_LEN - 10]


DEBUG = {"VLLM_LOGGING_LEVEL": "DEBUG"}  # with a line for each request and each of its copies


@pytest.fixture(scope="module")
def daemon(start_module_daemon: Any) -> Any:
    return start_module_daemon(size="128MiB", events="tcp://127.0.0.1:*", events_replay="tcp://127.0.0.1:*")


@pytest.fixture(scope="module")
def socket() -> Any:
    with sockets() as make:
        yield make


@pytest.fixture(scope="module")
def told(socket: Any, daemon: Any) -> Any:
    """What the first engine publishes."""
    sub = socket(zmq.SUB)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    sub.connect(f"ipc://{daemon.folder}/told")
    return sub


@pytest.fixture(scope="module")
def first(engines: Any, daemon: Any, told: Any) -> Any:
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{daemon.folder}/told"}
    return engines("first", daemon.endpoint, env=DEBUG, kv_events_config=config)


@pytest.fixture(scope="module")
def second(engines: Any, daemon: Any, first: Any) -> Any:
    return engines("second", daemon.endpoint, env=DEBUG)


def figures(daemon: Any) -> tuple[int, int, int]:
    """Requested, hit and present blocks."""
    (namespace,) = daemon.status()["namespaces"]
    return namespace["requested_blocks"], namespace["hit_blocks"], namespace["blocks"]


def test_the_second_engine_hits_every_full_block_at_once(
    first: Any, second: Any, daemon: Any, prompt: Any, reference: Any
) -> None:
    prompts = [prompt(n) for n in EDGES]
    assert first.generate(*prompts) == reference(prompts)
    time.sleep(1.0)  # and no further request to the first engine
    requested, hit, blocks = figures(daemon)
    assert blocks >= full(prompts)
    assert second.generate(*prompts) == reference(prompts)
    assert [now - then for now, then in zip(figures(daemon), (requested, hit, blocks), strict=True)] == [
        full(prompts),
        full(prompts),
        0,
    ]
    wait_idle(daemon, second)


@pytest.mark.parametrize("length", EDGES)
def test_a_second_pass_after_a_reset(first: Any, daemon: Any, prompt: Any, reference: Any, length: int) -> None:
    prompts = [prompt(length)]
    assert first.generate(*prompts) == reference(prompts)
    wait_idle(daemon, first)
    assert first.ask("reset")["reset"]
    before = hits(daemon)
    assert first.generate(*prompts) == reference(prompts)
    assert hits(daemon) - before == full(prompts)


def test_shared_prefixes(first: Any, second: Any, daemon: Any, prompt: Any, reference: Any) -> None:
    shared = prompt(8 * BLOCK)
    prompts = [prompt(12 * BLOCK + 5, shared), prompt(9 * BLOCK, shared), prompt(8 * BLOCK + 1, shared), shared]
    assert first.generate(prompts[0]) == reference(prompts[:1])
    wait_idle(daemon, first)
    before = hits(daemon)
    assert second.generate(prompts[1]) == reference(prompts[1:2])
    assert hits(daemon) - before == 8
    assert second.generate(*prompts) == reference(prompts)
    assert first.generate(*prompts) == reference(prompts)


def test_generated_blocks_are_shared_too(first: Any, second: Any, daemon: Any, prompt: Any, reference: Any) -> None:
    """A conversation: the next question holds the answer to the last one."""
    question = prompt(BLOCK + 3)
    (answer,) = first.generate(question, max_tokens=3 * BLOCK)
    assert [answer] == reference([question], 3 * BLOCK)
    wait_idle(daemon, first)
    follow_up = prompt(len(question) + len(answer) + 5, question + answer)
    before = hits(daemon)
    assert second.generate(follow_up) == reference([follow_up])
    computed = len(question) + len(answer) - 1  # the last token was never fed back
    assert hits(daemon) - before == computed // BLOCK


def test_both_at_once_with_one_prefix(first: Any, second: Any, daemon: Any, prompt: Any, reference: Any) -> None:
    shared = prompt(10 * BLOCK)
    prompts = [prompt(10 * BLOCK + 3 * n, shared) for n in range(1, 12)] + [prompt(4 * BLOCK) for _ in range(5)]
    expected = reference(prompts)
    for engine in (first, second):
        engine.ask("add", prompts=prompts)
    for engine in (first, second):
        answers = engine.ask("finish")["tokens"]
        assert [answers[name] for name in sorted(answers, key=lambda name: int(name[1:]))] == expected
    wait_idle(daemon)


def test_requests_of_one_prefix_that_come_together_load_it_once(
    first: Any, second: Any, daemon: Any, prompt: Any, reference: Any
) -> None:
    def told(status: dict[str, Any]) -> tuple[int, int]:
        """What the second engine has asked its rank to load, and what that has loaded, in bytes."""
        counts = [session["counts"] for session in status["sessions"] if session["engine"].startswith("second-")]
        return sum(each.get("needed_bytes", 0) for each in counts), sum(each.get("loaded_bytes", 0) for each in counts)

    shared, last = prompt(24 * BLOCK), prompt(BLOCK + 1)
    prompts = [prompt(24 * BLOCK + 3 * n, shared) for n in range(1, 9)]
    first.generate([*shared, 1], last)
    wait_idle(daemon, first)
    heard: list[tuple[float, tuple[int, int]]] = []

    def quiet(status: dict[str, Any]) -> bool:
        """Whether it has told nothing new for three seconds: it tells what it counts every second."""
        if not heard or heard[-1][1] != told(status):
            heard.append((time.monotonic(), told(status)))
        return time.monotonic() - heard[-1][0] > 3.0

    needed, loaded = told(daemon.wait_status(quiet, "what it has loaded until now"))
    assert second.generate(*prompts) == reference(prompts)
    second.generate(last)  # with this one, all before it are told
    whole = 24 * BLOCK_BYTES
    status = daemon.wait_status(lambda s: min(told(s)) - needed >= whole + BLOCK_BYTES, "what it has loaded")
    assert told(status) == (needed + whole + BLOCK_BYTES, loaded + whole + BLOCK_BYTES)


def test_aborted_requests_leave_nothing_behind(
    first: Any, second: Any, daemon: Any, prompt: Any, reference: Any
) -> None:
    prompts = [prompt(20 * BLOCK + n) for n in range(6)]
    first.generate(*prompts)
    wait_idle(daemon, first)
    for steps in (1, 2, 3):  # before, while and after the loads are running
        answers = second.ask("generate", prompts=prompts, max_tokens=20, abort=[0, 2, 4], steps_before_abort=steps)[
            "tokens"
        ]
        assert [answers[at] for at in (1, 3, 5)] == reference([prompts[at] for at in (1, 3, 5)], 20)
        wait_idle(daemon)
        second.ask("reset")
    assert second.generate(*prompts) == reference(prompts)
    wait_idle(daemon, second)


def test_why_there_was_no_hit(first: Any, daemon: Any, prompt: Any) -> None:
    """Under the name that vLLM gives its requests."""
    first.generate(prompt(3 * BLOCK + 1))
    first.generate(prompt(3))  # a step more, in which what was saved is settled
    wait_idle(daemon, first)
    with AdminClient(daemon.endpoint) as admin:
        latest = admin.why("").latest[0]
        (told,) = admin.why(latest[:-1]).explained
    assert told.engine.startswith("first-")
    assert told.request == latest
    assert (told.tokens, told.block_tokens, told.blocks, told.hits) == (3 * BLOCK + 1, BLOCK, 3, 0)
    assert [(run.first, run.last, run.cached_now) for run in told.runs] == [(0, 2, 3)]
    assert told.runs[0].cause in ("new", "diverged", "began_empty")


def test_what_an_operator_reads(first: Any, second: Any) -> None:
    for said in (" hit, ", " to load", "stored 31 blocks (992 tokens), 1.9 MiB", "engine first", "KV cache server at"):
        assert said in first.log, said
    assert "loaded 31 blocks (992 tokens)" in second.log
    for engine in (first, second):
        assert "/kvcache_client/" not in engine.log, "a traceback of ours"


def test_an_engine_tells_what_host_memory_has_of_its_blocks(
    first: Any, second: Any, daemon: Any, told: Any, socket: Any, prompt: Any, reference: Any
) -> None:
    """Its events of medium CPU: saves, what lookups found of others, what they found no more. The daemon says alike."""
    events = pytest.importorskip("vllm.distributed.kv_events")  # there; not with the warnings of torch's own imports
    decoder = msgspec.msgpack.Decoder(events.KVEventBatch)
    device: dict[Any, list[int]] = {}  # tokens by hash
    host: dict[Any, list[int]] = {}
    parents: dict[Any, Any] = {}
    gone: set[Any] = set()

    def hear(found: Any, what: str) -> None:
        """Read until `found`; an engine tells of what has ended when it steps."""
        until = time.monotonic() + PATIENCE
        while not found():
            assert time.monotonic() < until, f"{what} was not told"
            first.generate(prompt(3), max_tokens=1)
            while told.poll(20):
                for event in decoder.decode(told.recv_multipart()[2]).events:
                    known = host if getattr(event, "medium", "") == "CPU" else device
                    if isinstance(event, events.BlockStored):
                        assert event.block_size == BLOCK and event.group_idx == 0
                        above = event.parent_block_hash
                        for at, name in enumerate(event.block_hashes):
                            known[name] = event.token_ids[at * BLOCK : (at + 1) * BLOCK]
                            parents[name], above = above, name
                    elif isinstance(event, events.BlockRemoved):
                        gone.update(event.block_hashes if known is host else ())
                        for name in event.block_hashes:
                            known.pop(name, None)

    def chain(of: dict[Any, list[int]], tokens: list[int]) -> list[Any]:
        """The hashes of the full blocks of a prompt, from the root on."""
        names: list[Any] = []
        for at in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
            above = names[-1] if names else None
            names += [n for n, block in of.items() if block == tokens[at : at + BLOCK] and parents[n] == above]
        return names

    mine, others = prompt(5 * BLOCK + 7), prompt(3 * BLOCK + 1)
    assert first.generate(mine) == reference([mine])
    hear(lambda: len(chain(host, mine)) == 5, "its own save")
    assert chain(host, mine) == chain(device, mine), "a router matches them"
    assert second.generate(others) == reference([others])
    wait_idle(daemon, second)
    assert not chain(host, others)
    assert first.generate(others) == reference([others])
    hear(lambda: len(chain(host, others)) == 3, "what the other one has saved")
    names = {*chain(host, mine), *chain(host, others)}
    follower = Subscriber(socket, daemon.status()["daemon"]["events"])
    follower.catch_up(b"")
    assert any({(0, name) for name in names} <= known for known in follower.known.values())  # one of the namespaces
    wait_idle(daemon)
    with AdminClient(daemon.endpoint) as admin:
        assert admin.clear()
    assert first.ask("reset")["reset"]
    assert not gone & names
    assert first.generate(mine) == reference([mine])
    hear(lambda: gone >= names - {*chain(host, others)} and len(chain(host, mine)) == 5, "that it went and came again")
