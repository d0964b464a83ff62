"""Blocks that are spoilt in the region, on a real daemon: their checksums find it, and nothing else, and the log names
who stored them. test_canary.py is what finds it without them."""

from __future__ import annotations

import itertools
import random
import secrets
import stat
from typing import Any

import pytest
from chains import KINDS, SIZE, offsets, spoil
from immutable import immutable
from steps import BLOCK, LAYERS, PAGE, Request, Rig, idle

from kvcache_client import GroupSpec, Lease, NamespaceSpec, Session
from kvcache_client.session.checksums import chosen
from kvcache_client.settings import ConnectorSettings
from kvcache_client.step_plan import CheckJob, LoadJob, SaveJob, StepPlan
from kvcache_client.worker.places import RankFacts, Shards
from kvcache_client.worker.worker import Worker

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("kind", KINDS)
def test_a_spoilt_block_is_a_failed_load_that_names_its_writer(
    rigs: Any, daemon: Any, kind: str, caplog: Any, until: Any
) -> None:
    one, two = rigs("one", dtype=torch.float32, verify="all"), rigs("two", dtype=torch.float32, verify="all")
    request = Request("r", 5 * BLOCK)
    one.run(request, [0, 1, 2, 3, 4])
    idle(daemon, 5)
    again = Request("s", 5 * BLOCK + 1, request.block_hashes)
    assert two.scheduler.matched_tokens(again, 0) == (5 * BLOCK, True)
    at = offsets(again_lease(two, again).packed)[2]
    spoil(two.worker._session.region.buffer, at, one.block(9), kind, random.Random(kind))
    two.admit(again, [20, 21, 22, 23, 24, 25], 0, 5 * BLOCK)
    two.step()
    assert two.await_loads() == {"s"}
    assert two.scheduler.counters["loads_failed"] == 1
    assert two.worker.counters["blocks_corrupt"] == 1
    assert [two.block(20), two.block(21)] == [one.block(0), one.block(1)]
    status = daemon.wait_status(lambda s: s["pool"]["blocks"] == 2, "the end of the block and of those below it")
    assert (status["counters"]["blocks_corrupt"], status["counters"]["blocks_invalidated"]) == (1, 3)
    until(lambda: "stored by engine one (session" in caplog.text, "the line of the client")
    line = next(line for line in daemon.log.splitlines() if "stored by engine one (session" in line)
    assert "ERROR" in line and "found by engine two" in line
    idle(daemon, 2)
    # What was dropped is computed, stored and found again.
    assert two.scheduler.matched_tokens(again, 0) == (0, False)
    two.admit(again, [20, 21, 22, 23, 24, 25])
    two.step({again: 5 * BLOCK + 1})
    two.scheduler.finished(again)
    two.step()
    idle(daemon, 5)
    assert one.scheduler.matched_tokens(Request("t", 5 * BLOCK + 1, request.block_hashes), 0) == (5 * BLOCK, True)


def again_lease(rig: Rig, request: Request) -> Lease:
    lookup = rig.scheduler._requests.get(request.request_id).lookup
    assert lookup is not None
    return lookup.lease


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_spoilt_blocks_are_found(chain: Any, daemon: Any, until: Any, count: int) -> None:
    draw = random.Random(7)
    length, each = 16, dict.fromkeys(KINDS, 0)
    one = chain(length)
    one.save(0, list(range(length)))
    region = one.session.region.buffer
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        victim = draw.randrange(length)
        lease = one.acquire(length, until)
        spoil(
            region,
            offsets(lease.packed)[victim],
            one.rig.block(length - 1 - victim if victim != length // 2 else 31),
            kind,
            draw,
        )
        assert one.load(lease, list(range(16, 32))) == {16 + victim}, (number, kind)
        lease.release()
        one.acquire(victim, until).release()
        one.save(victim, list(range(victim, length)))
        each[kind] += 1
    assert set(each.values()) == {count // 4}
    counters = daemon.wait_status(lambda s: s["pool"]["blocks"] == length, "the last ones")["counters"]
    assert counters["blocks_corrupt"] == one.rig.worker.counters["blocks_corrupt"] == count


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_clean_loads_are_found_clean(chain: Any, daemon: Any, until: Any, count: int) -> None:
    """Beside saves that evict all the time: the region holds a part of what is stored."""
    draw, loaded, length = random.Random(8), 0, 16
    chains = [chain(length) for _ in range(40)]
    others = itertools.cycle(range(40))
    while loaded < count:
        one = draw.choice(chains)
        lease = one.namespace.acquire(one.hashes, verify=True)
        if lease.hits < length:
            lease.release()
            one.hashes = [secrets.token_bytes(32) for _ in range(length)]
            one.save(0, draw.sample(range(16), length))
            continue
        assert one.load(lease, list(range(16, 32))) == set()
        loaded += length
        lease.release()
        if draw.random() < 0.02:  # a chain that begins anew while others are read
            chains[next(others)].hashes = [secrets.token_bytes(32) for _ in range(length)]
    counters = chains[0].rig.worker.counters
    assert counters["blocks_verified"] == loaded
    assert "blocks_corrupt" not in counters
    assert "blocks_corrupt" not in daemon.status()["counters"]


def test_a_sample_is_chosen_by_its_hash_on_both_sides(rigs: Any, daemon: Any) -> None:
    one, two = rigs("one", verify="sample"), rigs("two", verify="all")
    region, taken, hashes = one.session.region.geometry.region_id, [0, 16], []
    for number in range(20):  # counters, of which the key takes these two
        names = (bytes([number, tries]) + bytes(30) for tries in range(256))
        hashes.append(next(name for name in names if bool(chosen("sample", [name], region)) == (number in taken)))
    request = Request("r", 20 * BLOCK, hashes)
    one.run(request, list(range(20)))
    idle(daemon, 20)
    again = Request("s", 20 * BLOCK + 1, hashes)
    assert two.scheduler.matched_tokens(again, 0) == (20 * BLOCK, True)
    two.admit(again, list(range(21)), 0, 20 * BLOCK)
    (job,) = two.step().loads
    assert [bool(any(job.sums[8 * n : 8 * n + 8])) for n in range(20)] == [n in (0, 16) for n in range(20)]
    two.await_loads()
    assert two.worker.counters["blocks_verified"] == 2
    assert chosen("sample", hashes, region) == taken


def test_counters_as_hashes_are_sampled_and_in_each_region_others() -> None:
    hashes = [number.to_bytes(8, "little") + bytes(24) for number in range(16_000)]
    one, two = (chosen("sample", hashes, bytes([region]) * 16) for region in (1, 2))
    for taken in (one, two):
        assert 800 < len(taken) < 1200
    assert len(set(one) & set(two)) < 200


def test_who_does_not_verify_pays_nothing_and_is_told_nothing(rigs: Any, daemon: Any) -> None:
    one, two = rigs("one", verify="all"), rigs("two", verify="off")
    request = Request("r", 4 * BLOCK)
    one.run(request, [0, 1, 2, 3])
    idle(daemon, 4)
    again = Request("s", 4 * BLOCK + 1, request.block_hashes)
    assert two.scheduler.matched_tokens(again, 0) == (4 * BLOCK, True)
    two.admit(again, [5, 6, 7, 8, 9], 0, 4 * BLOCK)
    assert [job.sums for job in two.step().loads] == [b""]
    two.await_loads()
    assert "blocks_verified" not in two.worker.counters


def test_a_slot_that_changes_hands_takes_no_sum_along(chain: Any, rigs: Any, daemon: Any, until: Any) -> None:
    """Its next writer makes none: it is not verified, and not taken for spoilt."""
    one = chain(1)
    one.save(0, [3])
    lease = one.acquire(1, until)
    where = offsets(lease.packed)
    lease.release()
    assert one.session.clear() == 1
    other = chain(1)
    reservation = other.namespace.reserve(other.hashes)
    assert offsets(reservation.packed) == where
    job = SaveJob("r", reservation.region_id, reservation.id, [0], reservation.packed, [4])
    reservation._open = False
    one.rig.worker.begin(StepPlan(one.number(), saves=[job]))
    lease = other.acquire(1, until)
    assert lease.sums == bytes(8)
    lease.release()


class Pair:
    """Two ranks of an engine, each with a shard."""

    def __init__(self, endpoint: str) -> None:
        spec = NamespaceSpec("pair", (GroupSpec(BLOCK, (SIZE, SIZE)),))
        self.sessions = [Session.connect(endpoint, engine="pair", deadline=10.0) for _ in range(3)]
        self.workers = [
            Worker(self.sessions[rank], spec, ConnectorSettings(), Shards(2, 1), rank, RankFacts(SIZE))
            for rank in (0, 1)
        ]
        for worker in self.workers:
            worker.register({str(n): torch.randn(8, PAGE // 4) for n in range(LAYERS)}, 8)
        self.namespace = self.sessions[2].attach(spec)
        self.hashes = [secrets.token_bytes(32) for _ in range(3)]
        self.plans = 0

    def run(self, **jobs: Any) -> None:
        self.plans += 1
        for worker in self.workers:
            worker.begin(StepPlan(self.plans, **jobs))
            worker.load(StepPlan(self.plans, **jobs))

    def save(self, first: int) -> None:
        parent = self.hashes[first - 1] if first else None
        reservation = self.namespace.reserve(self.hashes[first:], parent)
        reservation._open = False
        numbers = list(range(3 - first))
        job = SaveJob("r", reservation.region_id, reservation.id, numbers, reservation.packed, numbers, numbers)
        self.run(saves=[job])

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.sessions[2].close()


def test_each_rank_answers_for_its_shard(daemon: Any, until: Any) -> None:
    pair = Pair(daemon.endpoint)
    try:
        pair.save(0)
        daemon.wait_status(lambda s: s["pool"]["blocks"] == 3, "the blocks")
        lease = pair.namespace.acquire(pair.hashes, verify=True)
        region = pair.sessions[2].region.buffer
        region[offsets(lease.packed)[1] + SIZE + 77] ^= 1
        pair.run(loads=[LoadJob("r", lease.region_id, lease.packed, [5, 6, 7], 0, lease.sums)])
        for worker in pair.workers:
            until(worker.received, "the end of the load")
        assert [worker.take_errors() for worker in pair.workers] == [set(), {6}]
        lease.release()
        writer = pair.sessions[1].daemon.connection.handshake.welcome.session
        daemon.wait_status(lambda s: s["pool"]["blocks"] == 1, "the end of the block and the one below it")
        assert "shard 1 of cached blocks is wrong (corrupt), found by engine pair" in daemon.log
        assert f"stored by engine pair (session {writer})" in daemon.log

        pair.save(1)
        daemon.wait_status(lambda s: s["pool"]["blocks"] == 3, "the blocks")
        with pair.namespace.acquire(pair.hashes) as lease:
            region[offsets(lease.packed)[2] + 3] ^= 0x40
            # Blocks 1 and 2 were saved from where 0 and 1 lie.
            check = CheckJob("r", lease.region_id, lease.packed, [0, 0, 1])
            pair.run(checks=[check])
            for worker in pair.workers:
                until(lambda worker=worker: worker.counters.get("canary_checked") == 3, "the comparison")
        assert [worker.counters.get("canary_mismatches") for worker in pair.workers] == [1, None]
        daemon.wait_status(lambda s: s["pool"]["blocks"] == 2, "the end of the block")
    finally:
        pair.close()


def test_a_daemon_that_was_killed_leaves_the_sums_to_the_next(start_daemon: Any, until: Any) -> None:
    daemon = start_daemon(keep="true")
    one = Rig(daemon.endpoint, "one", dtype=torch.float32, verify="all")
    try:
        request = Request("r", 5 * BLOCK)
        one.run(request, [0, 1, 2, 3, 4])
        idle(daemon, 5)
        daemon.kill()
        daemon = start_daemon(endpoint=daemon.endpoint, keep="true")
        daemon.wait_status(lambda s: len([e for e in s["sessions"] if e["engine"] == "one"]) == 2, "both sessions")
        again = Request("s", 5 * BLOCK + 1, request.block_hashes)
        until(lambda: one.scheduler.matched_tokens(again, 0) == (5 * BLOCK, True), "the hits")
        at = offsets(again_lease(one, again).packed)[3]
        spoil(one.worker._session.region.buffer, at, one.block(9), "bit", random.Random(1))
        one.admit(again, [20, 21, 22, 23, 24, 25], 0, 5 * BLOCK)
        one.step()
        assert one.await_loads() == {"s"}
        assert one.worker.counters["blocks_verified"] == 5
        assert one.worker.counters["blocks_corrupt"] == 1
        assert daemon.wait_status(lambda s: s["pool"]["blocks"] == 3, "the end of two blocks")
        daemon.kill()
        daemon = start_daemon(endpoint=daemon.endpoint, keep="true")
        assert daemon.status()["pool"]["blocks"] == 3  # what was forgotten stays so
    finally:
        one.close()


def test_the_file_of_the_sums_is_the_daemons_own(daemon: Any) -> None:
    path = daemon.folder / "kv.sums"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_blocks * 512 < (64 << 20) // 400  # nobody has verified


def test_without_room_for_sums_the_daemon_serves_and_says_so(start_daemon: Any, short_folder: Any) -> None:
    sums = short_folder / "kv.sums"
    sums.touch(0o600)
    immutable(sums, True)  # refused, as on a full mount
    try:
        daemon = start_daemon()
    finally:
        immutable(sums, False)
    assert "no checksums of blocks are kept" in daemon.log
    one, two = (Rig(daemon.endpoint, name, dtype=torch.float32, verify="all") for name in ("one", "two"))
    try:
        request = Request("r", 4 * BLOCK)
        one.run(request, [0, 1, 2, 3])
        idle(daemon, 4)
        again = Request("s", 4 * BLOCK + 1, request.block_hashes)
        assert two.scheduler.matched_tokens(again, 0) == (4 * BLOCK, True)
        two.admit(again, [5, 6, 7, 8, 9], 0, 4 * BLOCK)
        two.step()
        two.await_loads()
        assert [two.block(5), two.block(8)] == [one.block(0), one.block(3)]
        assert "blocks_verified" not in two.worker.counters
    finally:
        one.close()
        two.close()
