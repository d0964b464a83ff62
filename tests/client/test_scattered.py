"""Blocks that lie in several runs of pages, stored and loaded by ranks through a real daemon: every byte arrives."""

from __future__ import annotations

import random
from typing import Any

import pytest
from scattered import scatter, write
from steps import BLOCK, LAYERS, PAGE, Request, Rig, idle

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_proto.errors import RegionError

torch = pytest.importorskip("torch")


@pytest.fixture
def daemon(start_daemon: Any) -> Any:
    daemon = start_daemon(size="4MiB")
    scatter(daemon.endpoint)
    return daemon


def pieces(rig: Rig, request: Request) -> list[list[memoryview]]:
    """Return the pieces of each block of a request that is looked up now."""
    lookup = rig.scheduler._requests.get(request.request_id).lookup
    region = rig.worker._session.region
    assert lookup is not None and region is not None
    return region.views(lookup.lease.packed, LAYERS * PAGE, 0, LAYERS * PAGE)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_scattered_blocks_are_stored_loaded_and_verified(rigs: Any, daemon: Any, overlap: str) -> None:
    one, two = (rigs(name, dtype=torch.float32, verify="all", overlap=overlap) for name in ("one", "two"))
    before = daemon.status()["pool"]["blocks"]
    request = Request("r", 8 * BLOCK)
    one.run(request, list(range(8)))
    idle(daemon)
    assert daemon.status()["pool"]["blocks"] < before, "crumbs have given way"
    again = Request("s", 8 * BLOCK + 1, request.block_hashes)
    assert two.scheduler.matched_tokens(again, 0) == (8 * BLOCK, True)
    found = pieces(two, again)
    assert sum(len(each) > 1 for each in found) > 4, "they are meant to be scattered"
    assert [b"".join(each) for each in found] == [one.block(number) for number in range(8)]
    two.admit(again, list(range(20, 29)), 0, 8 * BLOCK)
    two.step()
    assert two.await_loads() == {"s"}
    assert [two.block(20 + number) for number in range(8)] == [one.block(number) for number in range(8)]
    assert two.worker.counters["blocks_verified"] == 8
    assert "blocks_corrupt" not in two.worker.counters
    assert "blocks_corrupt" not in daemon.status()["counters"]


def test_a_spoilt_piece_is_found(rigs: Any, daemon: Any) -> None:
    one, two = (rigs(name, dtype=torch.float32, verify="all") for name in ("one", "two"))
    request = Request("r", 6 * BLOCK)
    one.run(request, list(range(6)))
    idle(daemon)
    again = Request("s", 6 * BLOCK + 1, request.block_hashes)
    assert two.scheduler.matched_tokens(again, 0) == (6 * BLOCK, True)
    found = pieces(two, again)
    victim = next(number for number, each in enumerate(found) if number > 1 and len(each) > 1)
    found[victim][-1][random.Random(1).randrange(len(found[victim][-1]))] ^= 4
    two.admit(again, list(range(20, 27)), 0, 6 * BLOCK)
    two.step()
    assert two.await_loads() == {"s"}
    assert two.worker.counters["blocks_corrupt"] == 1
    daemon.wait_status(lambda s: s["counters"].get("blocks_corrupt") == 1, "the alarm")


def test_a_canary_compares_pieces(rigs: Any, daemon: Any, until: Any) -> None:
    one = rigs("one", dtype=torch.float32, canary_every=1)
    request = Request("r", 6 * BLOCK)
    one.run(request, list(range(6)))
    idle(daemon)
    again = Request("s", 6 * BLOCK + 1, request.block_hashes)
    assert one.scheduler.matched_tokens(again, 0) == (0, False), "it is computed although it is cached"
    one.admit(again, list(range(7)))
    one.step({again: again.num_tokens})
    one.scheduler.finished(again)
    one.step()
    until(lambda: one.worker.counters.get("canary_checked"), "the comparison")
    assert "canary_mismatches" not in one.worker.counters


def test_shards_are_written_and_read_in_pieces(daemon: Any) -> None:
    """Each shard has its own part of a scattered block, whose ends lie within pages."""
    shards = (5000, 300, 9000)
    spec = NamespaceSpec("sharded", (GroupSpec(16, shards),))
    names, draw = [bytes([number]) * 32 for number in range(1, 7)], random.Random(5)
    data = {name: [draw.randbytes(size) for size in shards] for name in names}
    with Session.connect(daemon.endpoint, engine="one", deadline=10.0) as session:
        namespace = session.attach(spec, range(3))
        reservation = namespace.reserve(names)
        assert len(reservation.slots) == len(names)
        scattered = [slot for slot in reservation.slots if len(slot.views(2)) > 1]
        assert scattered
        with pytest.raises(RegionError, match="write to `views`"):
            scattered[0].view(2)
        for name, slot in zip(names, reservation.slots, strict=True):
            for shard, each in enumerate(data[name]):
                write(slot, each, shard)
        reservation.commit()
        with namespace.acquire(names) as lease:
            assert lease.hits == len(names)
            for name, slot in zip(names, lease.slots, strict=True):
                assert [bytes(slot.view(shard)) for shard in range(3)] == data[name]
                assert all(view.readonly for shard in range(3) for view in slot.views(shard))
