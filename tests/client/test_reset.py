"""A reset of the cache, as sleep and pause begin with: which weights the engine goes on with, and what ends first."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from steps import BLOCK, PATIENCE, Request, idle

from kvcache_client.devices import Job
from kvcache_client.engines.vllm.wrapped import before_sleep
from kvcache_client.settings import parse_settings
from kvcache_proto.errors import ConfigError
from kvcache_proto.types import UNNAMED


def weights(daemon: Any) -> list[str]:
    """Return the weights ids of the namespaces that anybody has joined, oldest first."""
    return [namespace["identity"]["weights"] for namespace in daemon.status()["namespaces"]]


def answer(rig: Any, request: Request) -> tuple[int | None, bool]:
    """Ask until there is an answer, as the engine does."""
    until = time.monotonic() + PATIENCE
    while (found := rig.scheduler.matched_tokens(request, 0)) == (None, False):
        assert time.monotonic() < until, "it waits for ever"
        rig.step()
    rig.session.ping()  # a namespace that was left for another is joined
    return found


def again(name: str, request: Request) -> Request:
    return Request(name, request.num_tokens + 1, request.block_hashes)


def test_with_the_same_checkpoint_an_engine_keeps_its_namespace(rigs: Any, daemon: Any) -> None:
    rig, other = rigs("one", on_reset="keep"), rigs("two")
    request = Request("r", 4 * BLOCK)
    rig.run(request, [0, 1, 2, 3])
    idle(daemon, 4)
    running = Request("s", 3 * BLOCK)
    rig.admit(running, [4, 5, 6])
    rig.step({running: 2 * BLOCK})
    assert rig.scheduler.reset()
    rig.step({running: BLOCK})
    rig.scheduler.finished(running)  # known at the reset, and not computed again: nothing of it is stored
    rig.step()
    assert answer(rig, again("t", request)) == (4 * BLOCK, True)
    rig.run(Request("u", 2 * BLOCK), [10, 11])
    for _ in range(3):
        rig.step()
    idle(daemon, 6)
    assert weights(daemon) == [""]
    assert other.scheduler.matched_tokens(again("v", request), 0) == (4 * BLOCK, True)


def test_with_another_checkpoint_it_leaves_and_stays_there_until_that_changes_too(rigs: Any, daemon: Any) -> None:
    rig = rigs("one", on_reset="keep")
    request = Request("r", 4 * BLOCK)
    rig.run(request, [0, 1, 2, 3])
    idle(daemon, 4)
    rig.scheduler.reset()
    rig.checkpoint = "files 2"  # after the reset, and before the first request: while it slept
    assert answer(rig, again("s", request)) == (0, False)
    rig.step()
    rig.session.ping()
    moved = weights(daemon)[-1]
    assert moved
    rig.scheduler.reset()
    assert answer(rig, again("t", request)) == (0, False)
    assert weights(daemon)[-1] == moved, "the files are those of the last reset"
    rig.checkpoint = "files 1"  # the first ones again
    rig.scheduler.reset()
    assert answer(rig, again("u", request)) == (0, False), "what they were called at the start says nothing now"
    assert weights(daemon)[-1] not in ("", moved)


def test_a_checkpoint_that_cannot_be_read_is_another_one(rigs: Any, daemon: Any) -> None:
    rig = rigs("one", on_reset="keep")
    del rig.checkpoint
    rig.scheduler.reset()
    assert answer(rig, Request("r", 4 * BLOCK)) == (0, False)
    rig.step()
    rig.session.ping()
    assert weights(daemon)[-1].startswith(UNNAMED)


def test_while_the_checkpoint_is_looked_at_requests_wait_a_little_and_nothing_is_saved(
    rigs: Any, daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache_client.scheduler.membership.PATIENCE", 0.01)
    rig, look = rigs("one", on_reset="keep"), threading.Event()
    rig.scheduler._membership._read_checkpoint = lambda: look.wait(PATIENCE) and "files 1"
    request = Request("r", 4 * BLOCK)
    rig.run(request, [0, 1, 2, 3])
    idle(daemon, 4)
    rig.scheduler.reset()
    first = again("s", request)
    assert rig.scheduler.matched_tokens(first, 0) == (None, False)
    assert answer(rig, first) == (0, False)
    assert rig.scheduler.counters["lookups_declined_weights"] >= 1
    rig.run(Request("t", 2 * BLOCK), [4, 5])
    look.set()
    assert answer(rig, again("u", request)) in ((0, False), (4 * BLOCK, True))
    until = time.monotonic() + PATIENCE
    while rig.scheduler.matched_tokens(again("u", request), 0) != (4 * BLOCK, True):
        assert time.monotonic() < until, "it is not settled"
    for _ in range(4):  # nobody takes the lease
        rig.step()
    idle(daemon, 4)


def test_a_version_is_shared_by_those_that_name_it_and_left_by_the_next_reset(rigs: Any, daemon: Any) -> None:
    rig, other = rigs("one", on_reset="v2"), rigs("two", on_reset="v2")
    for engine in (rig, other):
        assert engine.scheduler.reset()
        engine.session.ping()
        engine.step()
    request = Request("r", 4 * BLOCK)
    rig.run(request, [0, 1, 2, 3])
    daemon.wait_status(lambda s: rig.step() and s["pool"]["blocks"] == 4, "what the first one has saved")
    assert weights(daemon)[-1] == "v2"
    assert other.scheduler.matched_tokens(again("s", request), 0) == (4 * BLOCK, True)
    assert rig.scheduler.reset()
    rig.session.ping()
    assert weights(daemon)[-1].startswith(UNNAMED), "a version names one state of the weights"


@pytest.mark.parametrize(
    "extra", [{"on_reset": ""}, {"on_reset": "v1", "weights_version": "v1"}, {"on_reset": "v" * 257}]
)
def test_a_version_that_is_none(extra: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"on_reset '.*': new, keep, or the version of other weights"):
        parse_settings(extra)


def test_copies_end_before_the_devices_memory_is_taken_away(rigs: Any, daemon: Any) -> None:
    rig, order, copied = rigs("one"), [], threading.Event()

    class Rank:
        def sleep(self, level: int = 1) -> str:
            order.append(f"asleep at {level}")
            return "slept"

    before_sleep(Rank, rig.worker.drain)
    before_sleep(Rank, rig.worker.drain)  # a second connector wraps nothing twice
    region, device = rig.session.region, rig.worker._device
    import numpy as np

    def ended(job: Job) -> None:
        copied.wait(PATIENCE)
        order.append("copied")

    device.save(Job(region, np.array([0]), np.array([region.bytes // 2]), ended))
    sleeper = threading.Thread(target=lambda: order.append(Rank().sleep(level=2)))
    sleeper.start()
    sleeper.join(0.05)  # it gets as far as it can
    copied.set()
    sleeper.join()
    assert order == ["copied", "asleep at 2", "slept"]


def test_a_worker_class_that_is_not_there_costs_one_line(caplog: pytest.LogCaptureFixture, rigs: Any) -> None:
    before_sleep("vllm.v1.worker.nowhere.Worker", rigs("one").worker.drain)
    assert "sleep does not wait for copies" in caplog.text
