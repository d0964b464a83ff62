"""How a rank holds blocks: its shards of them, and the places of its device blocks in the slots of a group. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache_client import compression
from kvcache_client.address_ranges import Runs
from kvcache_client.devices.layout import Parts

Numbers = npt.NDArray[np.int64]


WHOLE = Parts(1, 1)  # blocks that are not divided


class Shards(NamedTuple):
    """How the ranks of an engine hold a block: `number` shards.

    Each rank holds `parts` consecutive shards, and `replicas` consecutive ranks hold the same ones. A part is a KV
    head, or else a stripe of the rank's bytes. `order` are the ranks of a pipeline stage in the order of what they
    hold, unless it is their own.
    """

    number: int
    replicas: int
    parts: int = 1
    by_head: bool = False
    order: tuple[int, ...] = ()

    def of_rank(self, rank: int) -> tuple[range, tuple[int, ...]]:
        """Return the shards that `rank` reads, and those of them that it writes: its replicas share the work."""
        if self.order:
            stage, at = divmod(rank, len(self.order))
            rank = stage * len(self.order) + self.order.index(at)
        first = rank // self.replicas * self.parts
        writes = range(rank % self.replicas, self.parts, self.replicas)
        return range(first, first + self.parts), tuple(first + part for part in writes)

    def sharers(self, rank: int, ranks: int) -> tuple[int, ...]:
        """Return those of all `ranks` that read the same shards as `rank`."""
        mine = self.of_rank(rank)[0]
        return tuple(each for each in range(ranks) if self.of_rank(each)[0] == mine)


class RankTable(NamedTuple):
    """A KV cache group of the engine, in the slots of a cached group."""

    layers: tuple[str, ...]  # their names
    block_bytes: int  # that the rank has per block of the group
    blocks: int  # of the group in a slot
    compress: bool = False  # whether they are stored compressed


@dataclass(frozen=True)
class RankFacts:
    """The properties of a rank that its work depends on.

    An engine has `groups`, the tables in the slots of each group of the namespace, unless it has just one, of full
    attention.
    """

    block_bytes: int  # that the rank has per block of the engine; with `groups`, per block hash in the first one
    blocks_per_slot: int = 1  # blocks of the engine per cached block
    experts: bool = False  # whether the model routes tokens to experts
    groups: Sequence[Sequence[RankTable]] = ()
    compress: bool = False  # whether blocks are stored compressed, in an engine without `groups`
    sharers: tuple[int, ...] = ()  # the ranks that hold the same KV and share its loads, this one included
    joins_later: bool = False  # with a plan's namespace. Until then, only this rank's sizes are right in the given one


class Piece(NamedTuple):
    """The copies of one job: device blocks of one layout, and the offset of each in the region."""

    layout: int
    blocks: Numbers
    offsets: Numbers


class Column(NamedTuple):
    """A table in the slots of a group: blocks, or parts of them, that take `bytes` bytes each."""

    layout: int
    bytes: int
    blocks: int  # in a slot
    raw: int = 0  # bytes before they were compressed; 0 if they are not


class Places:
    """The places of one group: a slot contains the blocks of each table in turn, `columns` in all, of `bytes` bytes.

    If blocks are divided into parts, the rank has a shard for each, which contains that part of the blocks.
    """

    def __init__(self, begin: int, tables: Sequence[Column], parts: Parts = WHOLE) -> None:
        """The rank's shards begin at `begin` of a slot. With `parts`, `tables` are of these."""
        inside: list[int] = []
        layouts: list[int] = []
        headers: list[int] = []
        at = begin
        for layout, size, count, raw in tables:
            inside += range(at, at + size * count, size)
            layouts += [layout] * count
            for block in inside[-count:] if raw else ():
                headers += range(block, block + compression.pieces_of(raw))
            at += size * count
        self._tables, self._headers = tables, np.array(headers, np.int64)
        self._parts, self._part_bytes = parts, at - begin
        self.begin, self.bytes, self.columns = begin, parts.number * self._part_bytes, len(inside)
        self._inside: Numbers = np.array(inside, np.int64)
        self._layouts = {layout: np.flatnonzero(np.array(layouts) == layout) for layout in dict.fromkeys(layouts)}

    def lost(self, region: memoryview, slots: Numbers, runs: Runs | None, parts: Sequence[int]) -> Numbers:
        """Return the indices of saved `slots` with a block that could not be compressed.

        `runs` translate offsets beyond the region's end; `parts` are those that were saved.
        """
        if not len(self._headers):
            return np.empty(0, np.int64)
        inside = (np.array(parts, np.int64)[:, None] * self._part_bytes + self._headers).ravel()
        offsets = slots[:, None] + inside
        if runs is not None:
            offsets = runs.locate(offsets)
        return np.flatnonzero(np.frombuffer(region, np.uint8)[offsets].any(axis=1))

    def raw(self, shards: memoryview) -> memoryview | None:
        """Return the blocks in `shards`, all of the rank's in a slot, as they were before they were compressed; None
        if one could not be."""
        if not len(self._headers):
            return shards
        found, at, stored = [], 0, np.frombuffer(shards, np.uint8)
        inside = np.arange(self._parts.number)[:, None] * self._part_bytes + self._headers - self.begin
        if stored[inside].any():
            return None
        for _, size, count, raw in [*self._tables] * self._parts.number:
            blocks = stored[at : at + size * count].reshape(count, size)
            found.append((compression.decompress(blocks, raw) if raw else blocks).tobytes())
            at += size * count
        return memoryview(b"".join(found))

    def cut(
        self, slots: npt.NDArray[np.integer], blocks: Sequence[int], skip: int = 0, parts: Sequence[int] | None = None
    ) -> list[Piece]:
        """Return the copies between `slots`, by their offsets, and `blocks`, in the order of the slots.

        The first `skip` blocks of the slots are not among `blocks`. `parts` are those to be copied, all if not given.
        """
        offsets, numbers = slots.astype(np.int64)[:, None] + self._inside, np.array(blocks, np.int64)
        if len(self._layouts) == 1:
            (layout,) = self._layouts
            return [self._divided(layout, numbers, offsets.ravel()[skip : skip + len(numbers)], parts)]
        numbers, places = numbers.reshape(-1, self.columns), self._layouts.items()
        cuts = (self._divided(each, numbers[:, some].ravel(), offsets[:, some].ravel(), parts) for each, some in places)
        return [each for each in cuts if len(each.blocks)]

    def _divided(self, layout: int, blocks: Numbers, offsets: Numbers, parts: Sequence[int] | None) -> Piece:
        if self._parts.number > 1:
            some = (np.arange(self._parts.number) if parts is None else np.array(parts, np.int64))[:, None]
            blocks = (blocks * self._parts.apart + some).ravel()
            offsets = (offsets + some * self._part_bytes).ravel()
            order = np.argsort(offsets, kind="stable")  # their order in the region
            blocks, offsets = blocks[order], offsets[order]
        return Piece(layout, blocks, offsets)


def divide(
    places: Places, offsets: npt.NDArray[np.integer], blocks: Sequence[int], skip: int, number: int, every: int
) -> list[list[list[Piece]]]:
    """Return the copies of each of `number` ranks that share a load, as chunks of `every` slots of each rank.

    `offsets`, `blocks` and `skip` are as for `Places.cut`.
    """
    slots, columns = len(offsets), places.columns

    def pieces(some: range) -> list[Piece]:
        if not some:
            return []
        ends = [(max(0, slot * columns - skip), (slot + 1) * columns - skip) for slot in some]
        inside = [block for begin, end in ends for block in blocks[begin:end]]
        return places.cut(offsets[some.start : some.stop : some.step], inside, 0 if some.start else skip)

    chunks = range(0, slots, every * number)
    return [
        [pieces(range(begin + rank, min(begin + every * number, slots), number)) for begin in chunks]
        for rank in range(number)
    ]


def without_nulls(pieces: Sequence[Piece], parts: Parts = WHOLE) -> list[Piece]:
    """Leave out copies of block 0, with all its parts: it means none in an engine with several groups."""
    found = []
    for layout, blocks, offsets in pieces:
        there = blocks >= parts.number
        if there.any():
            found.append(Piece(layout, blocks[there], offsets[there]))
    return found
