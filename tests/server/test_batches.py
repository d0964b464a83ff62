"""A subscriber to events knows what lookups find, whatever happens and whichever batches are lost."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest
from follower import Follower, Known, Message, maps
from host import LARGE, SMALL, Client, Host, Story, chain, digest, found, refs_of, spec_of

from kvcache_proto import messages as m
from kvcache_proto.errors import KVCacheError
from kvcache_proto.types import MAX_BLOCKS, REF_BYTES, GroupSpec, NamespaceSpec, Verdict
from kvcache_server.events.batches import STEP, Batch, Batches


def as_int(name: bytes) -> int:
    return int.from_bytes(name[-8:], "big")


def present(stream: Batches) -> dict[bytes, Known]:
    """What lookups find, by topic."""
    return {
        f"kv@{namespace.id}".encode(): {
            (group.number, as_int(name)) for group in namespace.groups for name in group.visible if not group.is_suffix
        }
        for namespace in stream._cache.namespaces.values()
    }


def told(stream: Batches) -> list[dict[str, Any]]:
    """All events that are due."""
    events = []
    while stream.changes:
        for batch in stream.due(0.0):
            events += maps(batch.payload)
    return events


def stored(names: list[str], parent: str | None = None, tokens: int = 16, group: int = 0) -> dict[str, Any]:
    above = as_int(digest(parent)) if parent else None
    shape = {"token_ids": [], "block_size": tokens, "lora_id": None, "medium": "CPU", "lora_name": None}
    hashes = [as_int(digest(name)) for name in names]
    return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": above, **shape, "group_idx": group}


def removed(names: list[str], group: int = 0) -> dict[str, Any]:
    hashes = [as_int(digest(name)) for name in names]
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "CPU", "group_idx": group}


def again(stream: Batches, start: int, prefix: bytes = b"", now: float = 0.0) -> Iterator[Batch]:
    """The batches of a replay."""
    return (batch for batch in stream.replay(start, prefix, now) if batch is not None)


CLEARED = {"type": "AllBlocksCleared"}


def store_at_once(engine: Client, names: list[str]) -> None:
    """Store a chain that becomes visible in one step, however long it is."""
    first = engine.reserve(names[:1])
    for at in range(1, len(names), MAX_BLOCKS):
        engine.store(names[at : at + MAX_BLOCKS], names[at - 1])
    assert engine.settle(first.reservation) == [Verdict.VISIBLE]


def follow(host: Host, **options: Any) -> Batches:
    stream = Batches(host.cache, **{"topic": "kv@{namespace}", "keep": 1000, "first": 100, **options})
    host.followers.append(stream.follow)
    return stream


# Plain stories.


def test_a_run_is_one_event_and_hangs_on_its_parent() -> None:
    host = Host()
    stream = follow(host)
    engine = Client(host, "one", SMALL)
    assert told(stream) == [CLEARED]  # a new namespace: who remembers blocks of an earlier one forgets them
    engine.store(chain("a", 3))
    engine.store(["b0", "b1"], parent="a1")
    assert told(stream) == [stored(["a0", "a1", "a2"]), stored(["b0", "b1"], "a1")]


def test_no_event_reports_a_block_before_lookups_find_it() -> None:
    host = Host()
    stream = follow(host)
    engine = Client(host, "one", SMALL)
    told(stream)
    reserved = engine.reserve(chain("a", 3))
    assert told(stream) == []
    engine.settle(reserved.reservation, at=(1, 2))  # hidden: their parent is being written
    assert told(stream) == []
    engine.settle(reserved.reservation, at=(0,))
    assert told(stream) == [stored(chain("a", 3))]


def test_evicted_cleared_and_invalidated_blocks_are_reported_as_removed() -> None:
    host = Host(28)
    stream = follow(host)
    engine = Client(host, "one", spec_of(256 << 10))  # seven of them
    engine.store(chain("a", 7))
    told(stream)
    engine.store(["b0"])
    assert told(stream) == [removed(["a6"]), stored(["b0"])]
    lease = engine.acquire(["a0", "a1", "a2"])
    region = host.geometry.region_id
    second = lease.slots[REF_BYTES : 2 * REF_BYTES]
    engine.ask(m.Invalidate(1, b"", region, second, 0, 0))
    assert told(stream) == [removed(["a1", "a5", "a4", "a3", "a2"])]
    engine.ask(m.Clear(1, b""))
    assert told(stream) == [CLEARED]
    engine.store(["b0"])
    assert told(stream) == [stored(["b0"])]
    engine.ask(m.Release(1, b"", [lease.lease]))
    host.cache.tick(1.0)
    assert told(stream) == []


def test_clearing_one_namespace_does_not_affect_another() -> None:
    host = Host()
    stream = follow(host)
    one, two = Client(host, "one", SMALL), Client(host, "two", LARGE)
    for engine in (one, two):
        engine.store(chain("a", 2))
    batches = stream.due(0.0)
    assert {batch.topic: maps(batch.payload) for batch in batches} == {
        f"kv@{engine.spec.id}".encode(): [CLEARED, stored(["a0", "a1"])] for engine in (one, two)
    }
    one.ask(m.Clear(1, b"", one.spec.id))
    (batch,) = stream.due(0.0)
    assert (batch.topic, maps(batch.payload)) == (f"kv@{one.spec.id}".encode(), [CLEARED])


def test_events_distinguish_groups() -> None:
    host = Host()
    stream = follow(host)
    session = host.open("one")
    spec = NamespaceSpec("m", (GroupSpec(16, 4096), GroupSpec(32, 8192)), {}, 8)
    namespace = host.handle(session, m.Attach(1, b"", spec, (0,))).namespace
    told(stream)
    for group in (0, 1):
        runs = [m.Run([digest("a")])]
        reserved = host.handle(session, m.Reserve(1, b"", namespace, runs, group))
        host.handle(session, m.Settle(1, b"", host.geometry.region_id, reserved.reservation, (0,), 0))
    assert told(stream) == [stored(["a"]), stored(["a"], tokens=32, group=1)]


def test_arrays_for_subscribers_of_vllm_0_23() -> None:
    host = Host()
    stream = follow(host, dialect="0.23", hashes="bytes")
    engine = Client(host, "one", SMALL)
    engine.store(chain("a", 1))
    engine.store(["b"], parent="a0")
    engine.ask(m.Clear(1, b""))
    engine.store(["c"])
    (batch,) = stream.due(7.0)
    rest = [None, "CPU", None, None, 0]
    assert msgspec.msgpack.decode(batch.payload) == [
        7.0,
        [["AllBlocksCleared"], ["BlockStored", [digest("c")], None, [], 16, *rest]],
        None,
    ]


def test_large_changes_come_in_several_batches_with_their_numbers() -> None:
    host = Host(124)
    stream = follow(host)
    engine = Client(host, "one", spec_of(4096))
    names = chain("n", 3 * STEP + 5)
    store_at_once(engine, names)
    batches = stream.due(0.0)
    assert [batch.number for batch in batches] == [100, 101, 102, 103]
    events = [maps(batch.payload) for batch in batches]
    assert events[0].pop(0) == CLEARED
    assert [len(each["block_hashes"]) for (each,) in events] == [STEP, STEP, STEP, 5]
    assert [each["parent_block_hash"] for (each,) in events] == [
        None,
        *(as_int(digest(names[at * STEP - 1])) for at in (1, 2, 3)),
    ]


# What gets lost.


class Wire:
    """A connection between a stream and a follower: it loses batches, and replays them on request."""

    def __init__(self, draw: random.Random, loss: float) -> None:
        self.draw, self.loss = draw, loss
        self.stream: Batches | None = None
        self.follower = Follower(self.replay, maps)

    def replay(self, start: int, topic: bytes) -> Iterable[Message]:
        assert self.stream is not None
        return again(self.stream, start, topic)

    def carry(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            if self.draw.random() >= self.loss:
                if batch.topic not in self.follower.last and maps(batch.payload)[:1] != [CLEARED]:
                    self.follower.catch_up(batch.topic)  # it joins late
                self.follower.hear(*batch)

    def flush(self) -> None:
        assert self.stream is not None
        while self.stream.changes:
            self.carry(self.stream.due(0.0))

    def check(self) -> None:
        """After the losses of a while: what is missing is asked for, as it will be with the next batch."""
        assert self.stream is not None
        for topic in present(self.stream):
            self.follower.catch_up(topic)
        here = present(self.stream)
        assert {topic: self.follower.known.get(topic, set()) for topic in here} == here


def meddle(story: Story) -> None:
    """What operators do, and blocks that were found to be wrong."""
    draw, host = story.draw, story.host
    if draw.random() < 0.1:
        client = draw.choice(story.clients)
        reply = client.acquire([draw.choice("abcdef") * length for length in (1, 2, 3)], pin=False)
        if reply.hits:
            at = draw.randrange(reply.hits) * REF_BYTES
            client.ask(m.Invalidate(1, b"", host.geometry.region_id, reply.slots[at : at + REF_BYTES], 0, 0))
    if draw.random() < 0.03:
        client = draw.choice(story.clients)
        try:
            client.ask(m.Clear(1, b"", draw.choice(["", client.spec.id])))
        except KVCacheError:
            assert host.cache.eviction.frozen


@pytest.mark.parametrize("seed", range(60))
def test_a_subscriber_knows_what_lookups_find(seed: int) -> None:
    """Saves, evictions, clears, invalidate, sessions that end, restarts; lost batches, and few that are kept."""
    draw = random.Random(seed)
    host = Host()
    wire = Wire(draw, loss=draw.choice([0.0, 0.3, 0.9]))
    options: dict[str, Any] = {"keep": draw.choice([1, 3, 1000])}
    wire.stream = follow(host, **options)
    story = Story(host, seed)
    for life in range(1, 4):
        for step in range(80):
            story.step()
            meddle(story)
            if draw.random() < 0.7:
                wire.flush()
            if step % 10 == 9:
                wire.flush()
                wire.check()
        living = [client.session for client in story.every() if client.session in host.living]
        host.restart(tuple(session for session in living if draw.random() < 0.25))
        wire.stream = follow(host, first=life << 40, **options)
        for batch in wire.stream.announce(0.0):  # to whom is there; meanwhile the cache goes on
            wire.carry([batch])
            wire.flush()
        there = set(found(host.cache).values())  # a lease on what is invalidated is lost
        story.leases = [each for each in story.leases if each[0].session in host.living and refs_of([each]) <= there]
        story.come_back()
        wire.flush()
        wire.check()
    assert wire.follower.gaps or wire.loss < 0.5


def test_a_replay_beyond_the_buffer_begins_with_the_current_content_while_the_cache_changes() -> None:
    host = Host(124)
    stream = follow(host, keep=2)
    engine = Client(host, "one", spec_of(4096))
    names = chain("n", 3 * STEP)
    store_at_once(engine, names)
    stream.due(0.0)
    follower = Follower(lambda start, topic: (), maps)
    replay = again(stream, 0)
    follower.hear(*next(replay))
    lease = engine.acquire(names[:STEP], pin=True).lease
    engine.ask(m.Clear(1, b""))  # all but the leased ones go, before their turn comes
    engine.store(["new"])
    live = stream.due(0.0)
    for batch in (*replay, *live):
        follower.hear(*batch)
    assert lease
    assert follower.known == present(stream)
    assert follower.last == {live[-1].topic: live[-1].number}


def test_a_replay_has_no_more_numbers_than_are_missing() -> None:
    host = Host(124)
    stream = follow(host, keep=1)
    engine = Client(host, "one", spec_of(4096))
    store_at_once(engine, chain("n", 4 * STEP))
    batches = stream.due(0.0)
    last = batches[-1].number
    told_again = list(again(stream, last - 2))
    assert [batch.number for batch in told_again] == [last - 2, last - 1, last]
    assert told_again[-1] == batches[-1]
    events = [event for batch in told_again[:2] for event in maps(batch.payload)]
    assert events[0] == CLEARED
    assert sum(len(each["block_hashes"]) for each in events[1:]) == 4 * STEP


def test_each_step_of_a_replay_is_short_even_if_few_numbers_are_missing() -> None:
    """Blocks cleared between two steps are not reported if they were not examined yet: this shows how far one goes."""
    host = Host(124)
    stream = follow(host, keep=1)
    engine = Client(host, "one", spec_of(4096))
    store_at_once(engine, chain("n", 6 * STEP))
    last = stream.due(0.0)[-1].number
    replay = stream.replay(last - 1, b"", 0.0)
    assert [next(replay), next(replay)] == [None, None]
    engine.ask(m.Clear(1, b""))
    told_again = [batch for batch in replay if batch is not None]
    assert [batch.number for batch in told_again] == [last - 1, last]
    seconds, (first, *rest), rank = msgspec.msgpack.decode(told_again[0].payload)
    assert (seconds, first, rank) == (0.0, CLEARED, None)
    assert [len(each["block_hashes"]) for each in rest] == [STEP] * 3


def test_a_replay_of_several_groups_does_not_use_numbers_of_kept_batches() -> None:
    host = Host()
    stream = follow(host, keep=1)
    session = host.open("one")
    spec = NamespaceSpec("m", (GroupSpec(16, 4096), GroupSpec(32, 8192)), {}, 8)
    namespace = host.handle(session, m.Attach(1, b"", spec, (0,))).namespace
    for group in (0, 1):
        runs = [m.Run([digest("a")])]
        reserved = host.handle(session, m.Reserve(1, b"", namespace, runs, group))
        host.handle(session, m.Settle(1, b"", host.geometry.region_id, reserved.reservation, (0,), 0))
    last = stream.due(0.0)[-1].number
    follower = Follower(lambda start, topic: (), maps)
    batches = list(again(stream, last - 1))
    for batch in batches:
        follower.hear(*batch)
    assert [batch.number for batch in batches] == [last - 1, last]
    assert follower.known == present(stream)


def test_a_replay_of_kept_batches_repeats_what_was_sent() -> None:
    host = Host()
    stream = follow(host)
    engine = Client(host, "one", SMALL)
    batches = []
    for name in "abc":
        engine.store([name])
        batches += stream.due(0.0)
    assert list(again(stream, 100, b"kv@", 1.0)) == batches
    assert list(again(stream, 101, b"", 1.0)) == batches[1:]
    assert list(again(stream, 100, b"kv@another", 1.0)) == []


def test_a_recreated_namespace_continues_with_higher_numbers() -> None:
    host = Host()
    stream = follow(host, keep=1)
    numbers: list[int] = []
    for _ in range(3):
        session = host.open("one")
        host.handle(session, m.Attach(1, b"", SMALL, (0,)))
        numbers += [batch.number for batch in stream.due(0.0)]
        host.living.pop(session)
        host.end(session)
        assert not host.cache.namespaces
    assert numbers == sorted(set(numbers))
