"""Ranks that share loads, without sockets and devices: whatever is late, lost or fails, each load ends whole."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_client.devices.layout import Parts
from kvcache_client.worker.exchange import MOST_EARLY, NOT_SHARED, PATIENCE, End, Exchange, Fill, Pull, Tell
from kvcache_client.worker.places import Column, Piece, Places, divide

KEY = (7, 0)


def test_a_chunk_is_taken_from_the_peer_once_both_ranks_have_one() -> None:
    exchange = Exchange()
    assert exchange.begin(KEY, 2, {1: [0, 1]}, 0.0) == []
    assert exchange.told(1, KEY, 0, 0.0) == []  # its own blocks may still be read by what ran before
    assert exchange.landed(KEY, 0, "", 0.0) == [Tell(KEY, 0), Pull(KEY, 1, 0)]
    assert exchange.pulled(KEY, 1, 0, "") == []
    assert exchange.told(1, KEY, 1, 0.0) == [Pull(KEY, 1, 1)]
    assert exchange.landed(KEY, 1, "", 0.0) == [Tell(KEY, 1)]
    assert exchange.pulled(KEY, 1, 1, "") == [End(KEY, "")]
    assert not exchange._loads


def test_a_peer_that_is_ahead_has_told_already() -> None:
    exchange = Exchange()
    assert exchange.told(1, KEY, 0, 0.0) == []
    exchange.begin(KEY, 1, {1: [0]}, 0.0)
    assert exchange.landed(KEY, 0, "", 0.0) == [Tell(KEY, 0), Pull(KEY, 1, 0)]


def test_what_a_peer_does_not_copy_comes_from_the_region() -> None:
    exchange = Exchange()
    exchange.begin(KEY, 1, {1: [0, 1], 2: [0]}, 0.0)
    assert exchange.told(1, KEY, NOT_SHARED, 0.0) == [Fill(KEY, 1, (0, 1))]
    assert exchange.landed(KEY, 0, "", 0.0) == [Tell(KEY, 0)]
    assert exchange.gone(2) == [Fill(KEY, 2, (0,))]
    assert exchange.filled(KEY, "") == []
    assert exchange.filled(KEY, "") == [End(KEY, "")]


def test_a_peer_is_not_waited_for_twice() -> None:
    """One that has been stopped is late once; later loads do not wait for it until it is heard of again."""
    exchange = Exchange()
    exchange.begin(KEY, 1, {1: [0]}, 0.0)
    assert exchange.deadline() is None and exchange.expire(2 * PATIENCE) == [], "its own copies take as long"
    exchange.landed(KEY, 0, "", 1.0)
    assert exchange.deadline() == 1.0 + PATIENCE
    assert exchange.expire(0.9 + PATIENCE) == []
    assert exchange.expire(1.0 + PATIENCE) == [Fill(KEY, 1, (0,))]
    assert exchange.filled(KEY, "") == [End(KEY, "")]
    assert exchange.begin((8, 0), 1, {1: [0]}, 3.0) == [Fill((8, 0), 1, (0,))]
    assert exchange.told(1, KEY, 0, 3.0) == []
    assert exchange.begin((9, 0), 1, {1: [0]}, 3.0) == []


def test_a_peer_whose_memory_cannot_be_read_is_given_up() -> None:
    exchange = Exchange()
    exchange.begin(KEY, 1, {1: [0, 1, 2]}, 0.0)
    exchange.landed(KEY, 0, "", 0.0)
    exchange.told(1, KEY, 1, 0.0)
    assert exchange.pulled(KEY, 1, 1, "no such memory") == [Fill(KEY, 1, (0, 1, 2))]
    assert exchange.told(1, KEY, 0, 0.0) == []
    assert exchange.filled(KEY, "") == [End(KEY, "")]


@pytest.mark.parametrize("own", [True, False])
def test_a_copy_from_the_region_fails(own: bool) -> None:
    """The peer does not wait for what has failed."""
    exchange = Exchange()
    exchange.begin(KEY, 1, {1: [0]}, 0.0)
    assert exchange.landed(KEY, 0, "broken" if own else "", 0.0) == [Tell(KEY, NOT_SHARED if own else 0)]
    assert exchange.told(1, KEY, NOT_SHARED, 0.0) == [Fill(KEY, 1, (0,))]
    assert exchange.filled(KEY, "" if own else "broken") == [End(KEY, "broken")]


def test_what_is_said_of_loads_that_never_begin_here_is_forgotten() -> None:
    exchange = Exchange()
    for number in range(2 * MOST_EARLY):
        exchange.told(1, (number, 0), 0, 0.0)
    assert len(exchange._early) == MOST_EARLY
    assert exchange.decline((3 * MOST_EARLY, 0)) == [Tell((3 * MOST_EARLY, 0), NOT_SHARED)]
    assert not exchange._early
    assert exchange.told(1, (5, 0), 0, 0.0) == [] and not exchange._early


@given(st.integers(0, 2**32))
def test_ranks_copy_together_what_one_would_copy(seed: int) -> None:
    draw = random.Random(seed)
    columns, slots, parts = draw.randint(1, 3), draw.randint(1, 20), draw.choice((Parts(1, 1), Parts(4, 8)))
    places = Places(100, [Column(0, 16, columns, 0)], parts)
    skip, short = draw.randrange(columns), draw.randrange(columns)
    blocks = draw.sample(range(1000), max(1, slots * columns - skip - short))
    offsets = np.array(draw.sample(range(0, 100_000, 1000), slots))

    def copies(pieces: Iterable[Piece]) -> list[tuple[int, int]]:
        return sorted(pair for each in pieces for pair in zip(each.blocks.tolist(), each.offsets.tolist(), strict=True))

    number, every = draw.randint(2, 4), draw.randint(1, 3)
    ranks = divide(places, offsets, blocks, skip, number, every)
    assert len(ranks) == number and len({len(chunks) for chunks in ranks}) == 1
    all_pieces = [piece for chunks in ranks for pieces in chunks for piece in pieces]
    assert copies(all_pieces) == copies(places.cut(offsets, blocks, skip))
    sizes = [sum(len(piece.blocks) for pieces in chunks for piece in pieces) for chunks in ranks]
    assert max(sizes) - min(sizes) <= 2 * columns * parts.number * -(-slots // (number * every)), sizes


class Ranks:
    """A few exchanges, and messages and copies on their way, in any order that sockets and devices may bring."""

    def __init__(self, count: int, draw: random.Random) -> None:
        self.draw, self.now = draw, 0.0
        self.exchanges = {rank: Exchange() for rank in range(count)}
        self.messages: dict[tuple[int, int], list[Tell]] = {
            (a, b): [] for a in range(count) for b in range(count) if a != b
        }
        self.copies: list[tuple[int, Any]] = []  # that run, by rank: a chunk of its own, or a Fill
        self.chunks: dict[Any, list[Collection[int]]] = {}  # of each load, those of each rank
        self.held: dict[tuple[int, Any], set[tuple[int, int]]] = {}  # by rank and load, whose chunks it has
        self.ended: dict[tuple[int, Any], str] = {}
        self.silent: set[int] = set()  # ranks that nothing is heard of any more
        self.spoilt: set[tuple[int, Any]] = set()  # loads of which a copy has failed on the rank

    def begin(self, rank: int, key: Any, declines: bool) -> None:
        if declines:
            self.act(rank, self.exchanges[rank].decline(key))
            return
        self.held[rank, key] = set()
        own = self.chunks[key][rank]
        theirs = {each: self.chunks[key][each] for each in self.exchanges if each != rank}
        self.act(rank, self.exchanges[rank].begin(key, len(own), theirs, self.now))
        self.copies += [(rank, (key, chunk)) for chunk in own]

    def act(self, rank: int, actions: Any) -> None:
        for action in actions:
            assert (rank, action.key) not in self.ended, "nothing comes after the end"
            if isinstance(action, Tell):
                for peer in self.exchanges:
                    if peer != rank:
                        self.messages[rank, peer].append(action)
            elif isinstance(action, Pull):
                there = self.held.get((action.peer, action.key), set())
                assert (action.peer, action.chunk) in there, "a chunk is taken that the peer does not have"
                broken = "unreadable" if self.draw.random() < 0.1 else ""
                if not broken:
                    self.held[rank, action.key].add((action.peer, action.chunk))
                self.act(rank, self.exchanges[rank].pulled(*action, broken))
            elif isinstance(action, Fill):
                self.copies.append((rank, action))
            else:
                self.ended[rank, action.key] = action.error

    def step(self) -> bool:
        """Let one thing happen; return False if nothing is left."""
        due = [pair for pair, some in self.messages.items() if some and pair[0] not in self.silent]
        waiting = [rank for rank, each in self.exchanges.items() if each.deadline() is not None]
        kinds = [kind for kind, some in (("copy", self.copies), ("message", due), ("time", waiting)) if some]
        if not kinds:
            return False
        match self.draw.choice(kinds):
            case "copy":
                rank, what = self.copies.pop(self.draw.randrange(len(self.copies)))
                error = "broken" if self.draw.random() < 0.05 else ""
                if isinstance(what, Fill):
                    self.held[rank, what.key] |= {(what.peer, chunk) for chunk in what.chunks}
                    key, actions = what.key, self.exchanges[rank].filled(what.key, error)
                else:
                    key, chunk = what
                    if not error:
                        self.held[rank, key].add((rank, chunk))
                    actions = self.exchanges[rank].landed(key, chunk, error, self.now)
                if error:
                    self.spoilt.add((rank, key))
                self.act(rank, actions)
            case "message":
                pair = self.draw.choice(due)
                message = self.messages[pair].pop(0)
                self.act(pair[1], self.exchanges[pair[1]].told(pair[0], message.key, message.chunk, self.now))
            case "time":
                self.now += self.draw.choice((0.01, PATIENCE))
                for rank, exchange in self.exchanges.items():
                    self.act(rank, exchange.expire(self.now))
        return True


@given(st.integers(0, 2**32), st.integers(2, 4))
def test_each_load_ends_once_and_is_whole_or_failed(seed: int, count: int) -> None:
    draw = random.Random(seed)
    ranks, begun = Ranks(count, draw), dict.fromkeys(range(count), 0)
    for number in range(4):
        ranks.chunks[number, 0] = [range(draw.randint(1, 3)) for _ in range(count)]
    while True:
        some = [rank for rank in begun if begun[rank] < 4]
        if some and draw.random() < 0.3:
            rank = draw.choice(some)
            ranks.begin(rank, (begun[rank], 0), declines=draw.random() < 0.1)
            begun[rank] += 1
        elif draw.random() < 0.02:
            gone = draw.choice([*begun])
            ranks.silent.add(gone)
            if draw.random() < 0.5:
                for rank, exchange in ranks.exchanges.items():
                    if rank != gone:
                        ranks.act(rank, exchange.gone(gone))
        elif not ranks.step() and not some:
            break
    assert ranks.ended.keys() == ranks.held.keys()
    for (rank, key), error in ranks.ended.items():
        assert bool(error) == ((rank, key) in ranks.spoilt)
        every = {(owner, chunk) for owner, chunks in enumerate(ranks.chunks[key]) for chunk in chunks}
        assert error or ranks.held[rank, key] == every
