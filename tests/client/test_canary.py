"""The canary: a request in many computes what it could load, and what is spoilt in the region is found by that."""

from __future__ import annotations

import random
from typing import Any

import pytest
from chains import KINDS, SIZE, offsets, spoil
from steps import BLOCK, SPEC, Request, Rig, idle

from kvcache_client import Session
from kvcache_client.step_plan import CheckJob, StepPlan, pick_refs

torch = pytest.importorskip("torch")


def canary_rig(rigs: Any, name: str, dtype: Any = None, **settings: Any) -> Rig:
    return rigs(name, dtype=dtype or torch.float32, verify="off", **settings)


def compute_like(rig: Rig, other: Rig, pairs: dict[int, int], noise: float = 0.0) -> None:
    """Let `rig` have computed in block n what `other` has in block pairs[n], but for `noise`."""
    draw = torch.Generator().manual_seed(1)
    for mine, theirs in zip(rig.tensors, other.tensors, strict=True):
        for to, source in pairs.items():
            values = theirs[source].float()
            mine[to] = (values + noise * torch.randn(values.shape, generator=draw)).to(mine.dtype)


def stored(rigs: Any, daemon: Any, dtype: Any = None) -> tuple[Rig, Request]:
    one = canary_rig(rigs, "one", dtype, canary_every=0)
    request = Request("r", 4 * BLOCK)
    one.run(request, [0, 1, 2, 3])
    idle(daemon, 4)
    return one, request


def test_a_canary_that_finds_what_it_should_says_nothing(rigs: Any, daemon: Any, until: Any) -> None:
    one, request = stored(rigs, daemon, torch.bfloat16)
    two = canary_rig(rigs, "two", torch.bfloat16, canary_every=1)
    again = Request("s", 4 * BLOCK + 1, request.block_hashes)
    for _ in range(3):  # however often it is asked for
        assert two.scheduler.matched_tokens(again, 0) == (0, False)
        idle(daemon, 4)  # and no lease is held
    two.admit(again, [10, 11, 12, 13, 14])
    assert two.step({again: 2 * BLOCK}).checks == []
    assert two.step({again: 2 * BLOCK + 1}).checks == []
    compute_like(two, one, {10: 0, 11: 1, 12: 2, 13: 3}, noise=0.01)
    plan = two.step({again: 1}, given=[12])
    assert sorted(plan.checks[0].blocks) == [10, 11, 12, 13]
    assert plan.given == [12]  # and the step waits with writing there
    until(lambda: two.worker.counters.get("canary_checked") == 4, "the comparison")
    assert two.scheduler.counters["canary_requests"] == 1
    assert "canary_mismatches" not in two.worker.counters
    assert "canary_mismatches" not in daemon.status()["counters"]
    idle(daemon, 4)


def test_a_canary_whose_blocks_may_have_been_given_away_finds_nothing(rigs: Any, daemon: Any, until: Any) -> None:
    _, request = stored(rigs, daemon)
    two = canary_rig(rigs, "two", canary_every=1)
    again = Request("s", 4 * BLOCK + 1, request.block_hashes)
    two.scheduler.matched_tokens(again, 0)
    two.admit(again, [10, 11, 12, 13, 14])
    two.step({again: 4 * BLOCK + 1})
    two.worker.abandon()
    two.step({again: 1})
    until(lambda: two.worker.counters.get("canary_failed"), "the end of the copy")
    assert "canary_mismatches" not in two.worker.counters
    idle(daemon, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_canary_finds_what_is_spoilt(rigs: Any, daemon: Any, kind: str, caplog: Any, until: Any) -> None:
    one, request = stored(rigs, daemon)
    two = canary_rig(rigs, "two", canary_every=1)
    with Session.connect(daemon.endpoint, engine="one", deadline=10.0) as session:
        namespace = session.attach(SPEC)
        with namespace.acquire(request.block_hashes) as lease:
            at = offsets(lease.packed)[2]
        if kind == "bit":
            session.region.buffer[at + 4 * 77 + 3] ^= 0x40  # the highest of an exponent
        else:
            spoil(session.region.buffer, at, one.block(9), kind, random.Random(1))
        again = Request("s", 4 * BLOCK + 1, request.block_hashes)
        assert two.scheduler.matched_tokens(again, 0) == (0, False)
        two.admit(again, [10, 11, 12, 13, 14])
        two.step({again: 4 * BLOCK + 1})
        compute_like(two, one, {10: 0, 11: 1, 12: 2, 13: 3}, noise=1e-5)
        two.scheduler.finished(again)
        two.step()  # the last one before the engine sleeps
        status = daemon.wait_status(lambda s: s["pool"]["blocks"] == 2, "the end of the block and of the one below it")
        assert status["counters"]["canary_mismatches"] == 1
        until(lambda: "stored by engine one (session" in caplog.text, "the line of the client")
        assert "a canary" in caplog.text
        assert "stored by engine one (session" in daemon.log
        idle(daemon, 2)


def test_one_request_in_many_is_a_canary(rigs: Any, daemon: Any) -> None:
    _, request = stored(rigs, daemon)
    two = canary_rig(rigs, "two", canary_every=5)
    answers = []
    for number in range(20):
        again = Request(f"s{number}", 4 * BLOCK + 1, request.block_hashes)
        answers.append(two.scheduler.matched_tokens(again, 0)[1])
        two.scheduler.finished(again)
    assert answers.count(False) == 4
    idle(daemon, 4)


def test_a_canary_that_is_aborted_reset_or_evicted_leaves_nothing(rigs: Any, daemon: Any, until: Any) -> None:
    one, request = stored(rigs, daemon)
    two = canary_rig(rigs, "two", canary_every=1)
    aborted, moved, evicted = (Request(name, 4 * BLOCK + 1, request.block_hashes) for name in ("a", "m", "e"))
    assert two.scheduler.matched_tokens(aborted, 0) == (0, False)
    two.admit(aborted, [10, 11, 12, 13, 14])
    two.step({aborted: BLOCK})
    two.scheduler.finished(aborted)
    assert two.step().checks == []

    assert two.scheduler.matched_tokens(evicted, 0) == (0, False)
    two.admit(evicted, [10, 11, 12, 13, 14])
    two.step({evicted: 4 * BLOCK + 1})  # and computes other KV than what is cached
    two.session.clear()
    one.run(Request("o", 6 * BLOCK), [20, 21, 22, 23, 24, 25])  # where they were
    idle(daemon, 6)
    two.scheduler.finished(evicted)
    assert len(two.step().checks) == 1
    until(lambda: two.worker.counters.get("canary_lost") == 4, "the end of the comparison")
    assert not {"canary_checked", "canary_mismatches"} & two.worker.counters.keys()

    again = Request("r", 4 * BLOCK, request.block_hashes)
    one.run(again, [0, 1, 2, 3])
    idle(daemon, 10)
    due = Request("d", 4 * BLOCK + 1, request.block_hashes)
    for waiting in (moved, due):
        assert two.scheduler.matched_tokens(waiting, 0) == (0, False)
    two.admit(due, [15, 16, 17, 18, 19])
    two.step({due: 4 * BLOCK + 1})
    two.scheduler.reset()
    two.admit(moved, [10, 11, 12, 13, 14])
    assert two.step({moved: 4 * BLOCK + 1}).checks == []
    two.scheduler.finished(moved)
    assert two.step().checks == []


def test_a_canary_takes_only_blocks_that_the_engine_computed(rigs: Any, daemon: Any) -> None:
    """Preempted, it finds three of its blocks in the engine's own prefix cache, where they may be somebody else's."""
    _, request = stored(rigs, daemon)
    two = canary_rig(rigs, "two", canary_every=1)
    again = Request("s", 4 * BLOCK + 1, request.block_hashes)
    assert two.scheduler.matched_tokens(again, 0) == (0, False)
    two.admit(again, [10, 11, 12, 13, 14])
    two.step({again: 2 * BLOCK})
    assert two.scheduler.matched_tokens(again, 3 * BLOCK) == (0, False)
    two.admit(again, [20, 21, 22, 23, 24], 3 * BLOCK)
    two.step({again: BLOCK + 1})
    two.scheduler.finished(again)
    (check,) = two.step().checks
    assert check.blocks == [23]


def test_kv_of_which_no_noise_is_known_has_no_canary(rigs: Any, daemon: Any, caplog: Any) -> None:
    rig = rigs("one", canary_every=1)  # plain bytes
    assert "no canaries" in caplog.text
    request = Request("r", 4 * BLOCK)
    rig.run(request, [0, 1, 2, 3])
    idle(daemon, 4)


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_spoilt_blocks_beside_as_many_good_ones(chain: Any, daemon: Any, until: Any, count: int) -> None:
    """A check of two blocks, one of which is spoilt: it alone is dropped, with what is below it."""
    draw, length = random.Random(9), 8
    one = chain(length)
    one.save(0, list(range(length)))
    region, worker = one.session.region.buffer, one.rig.worker
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        victim, good = draw.sample(range(length), 2)
        lease = one.acquire(length, until)
        at = offsets(lease.packed)[victim]
        if kind == "bit":  # the highest of an exponent
            region[at + 4 * draw.randrange(SIZE // 4) + 3] ^= 0x40
        else:
            spoil(region, at, one.rig.block(16 + victim), kind, draw)
        lease.release()
        blocks = [victim, good]
        check = CheckJob("r", lease.region_id, pick_refs(lease.packed, blocks), blocks)
        worker.begin(StepPlan(one.number(), checks=[check]))
        one.acquire(victim, until).release()
        one.save(victim, list(range(victim, length)))
    until(lambda: worker.counters["canary_checked"] == 2 * count, "the last comparison")
    assert worker.counters["canary_mismatches"] == count
    assert daemon.status()["counters"]["canary_mismatches"] == count


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_clean_comparisons_find_nothing(chain: Any, daemon: Any, until: Any, count: int) -> None:
    length = 8
    one = chain(length)
    one.save(0, list(range(length)))
    worker = one.rig.worker
    compute_like(one.rig, one.rig, {16 + n: n for n in range(length)}, noise=0.002)
    lease = one.acquire(length, until)
    for number in range(count // length):
        blocks = list(range(16, 16 + length)) if number % 2 else list(range(length))
        worker.begin(StepPlan(one.number(), checks=[CheckJob("r", lease.region_id, lease.packed, blocks)]))
        if not number % 100:
            until(lambda done=number: worker.counters.get("canary_checked", 0) >= done * length, "the comparisons")
    until(lambda: worker.counters["canary_checked"] == count, "the last comparison")
    assert not {"canary_mismatches", "canary_lost", "canary_failed"} & worker.counters.keys()
    assert daemon.status()["pool"]["blocks"] == length
    lease.release()
