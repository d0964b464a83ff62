"""Ranks that hold the same KV load a part each, and take the rest from each other."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import peer_memory
import pytest
from peer_memory import Memory

from kvcache_client.devices import CopyError
from kvcache_client.worker import exchange, loads, meeting, peers

BLOCK = 32
LENGTH = 30 * BLOCK + 7


@pytest.fixture(params=["v1"])  # the random schedules of `test_device_cache.py` have both
def runner(request: Any) -> str:
    return str(request.param)


@pytest.fixture
def memory(monkeypatch: Any) -> Memory:
    return peer_memory.use(monkeypatch)


@pytest.fixture
def sharing(engines: Any, sim: Any, memory: Memory, monkeypatch: Any) -> Any:
    """`sharing(name, ranks)` makes an engine whose ranks share loads, by default with MLA."""

    def make(name: str, ranks: int = 2, **options: Any) -> Any:
        extra = {"peer_loads": "auto", "overlap": "off"} | options.pop("extra", {})
        specs = options.pop("specs", None) or sim.latent()
        options = {"heads": 8} | options
        engine = engines(name, specs=specs, tensor_parallel_size=ranks, extra=extra, **options)
        if extra["peer_loads"] == "auto":
            peer_memory.wait_met(engine)
        return engine

    return make


@pytest.fixture
def saved(sharing: Any, prompt: Any, idle: Any) -> tuple[list[int], Any]:
    """Tokens that an engine has saved, and an engine that has never seen them."""
    tokens = prompt(LENGTH)
    one, two = sharing("one"), sharing("two")
    one.generate(tokens)
    idle()
    return tokens, two


def counted(engine: Any, name: str) -> list[int]:
    return [worker.counters.get(name, 0) for worker in engine.workers]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("compress", ["off", "auto"])
def test_each_rank_copies_its_part_from_the_region(
    sharing: Any, sim: Any, prompt: Any, idle: Any, memory: Memory, monkeypatch: Any, ranks: int, compress: str
) -> None:
    tokens, extra = prompt(LENGTH), {"compress": compress}
    monkeypatch.setenv("KVCACHE_COPY_COMPRESS_ON_CPU", "1")
    specs = sim.latent(8, sim.torch.bfloat16, 64)
    one, two = (sharing(name, ranks, specs=specs, extra=extra) for name in ("one", "two"))
    one.generate(tokens)
    idle()
    assert two.generate(tokens, 3) == sim.expected(tokens, 3)
    assert two.prefills["r0"] == (7, 0, 30 * BLOCK)
    assert counted(two, "loads_shared") == [1] * ranks
    assert counted(two, "chunks_not_pulled") == [0] * ranks
    raw = 8 * 64 * 2 * BLOCK
    assert memory.taken == 30 * raw * (ranks - 1)  # each rank's part, by all others


def test_heads_that_several_ranks_hold(sharing: Any, sim: Any, prompt: Any, idle: Any, memory: Memory) -> None:
    tokens, specs = prompt(LENGTH), sim.full(heads=1, total=2)
    one, two = (sharing(name, 4, specs=specs, heads=2) for name in ("one", "two"))
    one.generate(tokens)
    idle()
    assert two.generate(tokens, 3) == sim.expected(tokens, 3)
    assert two.prefills["r0"] == (7, 0, 30 * BLOCK)
    assert counted(two, "loads_shared") == [1] * 4 and memory.taken == 30 * 2 * 3 * sim.PAGE // 2


def test_windows_and_attention(sharing: Any, sim: Any, prompt: Any, idle: Any, memory: Memory) -> None:
    if not sim.HAS_GROUPS:
        pytest.skip("they are not cached before 0.32")
    specs = sim.full(2, heads=1, total=1) | sim.windows(2, 2 * BLOCK, 2, heads=1, total=1)
    tokens = prompt(LENGTH)
    one, two = (sharing(name, specs=specs, heads=1, blocks=200) for name in ("one", "two"))
    one.generate(tokens)
    idle()
    assert two.generate(tokens, 3) == sim.expected(tokens, 3)
    assert two.prefills["r0"][2] == 30 * BLOCK
    assert memory.taken


def test_small_loads_and_engines_of_one_rank_are_as_ever(
    sharing: Any, sim: Any, prompt: Any, idle: Any, memory: Memory, monkeypatch: Any
) -> None:
    tokens = prompt(LENGTH)
    monkeypatch.setattr(loads, "SHARED_BYTES", 1 << 30)
    one, two, off = sharing("one"), sharing("two"), sharing("off", extra={"peer_loads": "off"})
    one.generate(tokens)
    idle()
    for engine in (two, off):
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"] == (7, 0, 30 * BLOCK)
    assert not memory.taken and off.workers[0].loads.peers is None


@pytest.mark.parametrize("fault", ["unreadable", "stopped", "gone", "its copy fails"])
def test_what_a_peer_does_not_give_comes_from_the_region(
    sharing: Any, sim: Any, prompt: Any, idle: Any, memory: Memory, fault: str
) -> None:
    """And the engine serves on."""
    tokens, more = prompt(LENGTH), prompt(LENGTH)
    one, two = sharing("one"), sharing("two")
    for each in (tokens, more):
        one.generate(each)
        idle()
    first, second = (worker.loads.peers for worker in two.workers)
    with contextlib.ExitStack() as stack:
        if fault == "unreadable":
            memory.fault = "the memory cannot be read"
        elif fault == "stopped":  # for longer than the other one waits
            stack.enter_context(stopped(second, 0.5))
        elif fault == "gone":
            second._put(lambda: second._meeting.leave(0) or [])
            time.sleep(0.1)
        else:
            stack.enter_context(failing(two._copiers(slice(1, 2))[1]))
        assert two.generate(tokens, 3) == sim.expected(tokens, 3)
    memory.fault = ""
    if fault in ("unreadable", "stopped"):
        assert two.prefills["r0"] == (7, 0, 30 * BLOCK)
    if fault == "stopped":
        assert counted(two, "chunks_not_pulled")[0]
    assert two.generate(more, 3, name="next") == sim.expected(more, 3)
    assert two.prefills["next"] == (7, 0, 30 * BLOCK)
    assert first.drain(5) and second.drain(5)


@contextlib.contextmanager
def failing(loader: Any) -> Iterator[None]:
    def fail(job: Any) -> None:
        raise CopyError("the test fails it")

    before, loader._copy = loader._copy, fail
    yield
    loader._copy = before


@contextlib.contextmanager
def stopped(each: Any, seconds: float) -> Iterator[None]:
    """Nothing is heard of a rank, and its own load does not end, for some time."""
    each._put(lambda: time.sleep(seconds) or [])
    yield


@pytest.mark.parametrize("what", ["leaves", "shares nothing"])
def test_nobody_waits_for_a_rank_that_says_so(saved: Any, sim: Any, monkeypatch: Any, what: str) -> None:
    monkeypatch.setattr(exchange, "PATIENCE", 1000.0)
    tokens, two = saved
    other = two.workers[1].loads.peers
    if what == "shares nothing":
        other._failed = "the test says so"
        assert two.generate(tokens, 3) == sim.expected(tokens, 3)
    else:
        with two.held_copies(slice(1, 2)):
            two.add("r0", tokens, 3)
            two.step()
            other._put(lambda: other._meeting.leave(0) or [])
        two.run()
        assert two.outputs["r0"] == sim.expected(tokens, 3)
    assert two.prefills["r0"] == (7, 0, 30 * BLOCK)
    assert counted(two, "chunks_not_pulled")[0]


def test_what_nobody_expected_fails_a_load_and_not_the_engine(saved: Any, sim: Any) -> None:
    tokens, two = saved
    broken = two.workers[1].loads.peers
    broken._exchange.landed = lambda *what: 1 / 0
    assert two.generate(tokens, 3) == sim.expected(tokens, 3)
    assert broken._failed.startswith("ZeroDivisionError") and broken.drain(5)
    assert not broken.begin((10**6, 0), None), "nothing begins after the end"
    assert two.reset()
    assert two.generate(tokens, 3, name="again") == sim.expected(tokens, 3)


def test_a_request_waits_until_all_ranks_have_taken_what_is_theirs(saved: Any, sim: Any, memory: Memory) -> None:
    """Until then, its blocks are given to nobody: a rank that has all may still be read by others."""
    tokens, two = saved
    memory.open.clear()
    request = two.add("r", tokens, 3)
    for _ in range(20):
        two.step()
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"
    memory.open.set()
    two.run()
    assert two.outputs["r"] == sim.expected(tokens, 3)


def test_an_engine_ends_while_ranks_wait_for_each_other(saved: Any, sim: Any, memory: Memory) -> None:
    tokens, two = saved
    two.add("r", tokens, 3)
    memory.open.clear()
    two.step()
    threading.Timer(0.3, memory.open.set).start()
    two.finish()


def test_ranks_that_do_not_meet_load_all(
    engines: Any, sim: Any, prompt: Any, idle: Any, memory: Memory, monkeypatch: Any
) -> None:
    """They may be on other hosts."""
    monkeypatch.setattr(meeting.Meeting, "_address", lambda self, rank: f"\0nobody {id(self)} {rank}")
    monkeypatch.setattr(meeting, "MEETING_SECONDS", 0.5)
    tokens = prompt(LENGTH)
    options = {"specs": sim.latent(), "heads": 8, "tensor_parallel_size": 2, "extra": {"peer_loads": "auto"}}
    one, two = (engines(name, **options) for name in ("one", "two"))
    one.generate(tokens)
    idle()
    for name in ("early", "late"):
        assert two.generate(tokens, 3, name=name) == sim.expected(tokens, 3)
        assert two.prefills[name] == (7, 0, 30 * BLOCK)
        assert two.reset()
        time.sleep(0.7)
    assert all("not all ranks" in worker.loads.peers._failed for worker in two.workers)


def test_peers_that_are_no_faster_than_the_region_are_left_alone(
    saved: Any, sim: Any, memory: Memory, monkeypatch: Any
) -> None:
    tokens, two = saved
    monkeypatch.setattr(peers, "_RATE_BYTES", 1)
    memory.pause = 0.05
    assert two.generate(tokens, 3) == sim.expected(tokens, 3)
    assert [worker.loads.peers.ready for worker in two.workers] == [False, False]
    assert two.reset()
    taken = memory.taken
    assert two.generate(tokens, 3, name="again") == sim.expected(tokens, 3)
    assert two.prefills["again"] == (7, 0, 30 * BLOCK) and memory.taken == taken


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_other_users_are_not_heard(saved: Any, sim: Any) -> None:
    tokens, two = saved
    address = two.workers[0].loads.peers._meeting._address(0)
    script = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        f"s.connect({address!r}); s.settimeout(10); sys.exit(len(s.recv(4096)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=30).returncode == 0
    assert two.generate(tokens, 3) == sim.expected(tokens, 3)
    assert counted(two, "loads_shared") == [1, 1]
