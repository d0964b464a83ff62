"""Reads the previous daemon's cache from the region's rows, and the manifest that explains their numbers. Pure.

A daemon may have been killed between any two stores, so each row is judged on its own. A row with a wrong checksum is
FREE: no client was told about its block. READY blocks are restored with their parents and last use. A reservation
continues if its writers live, because they will settle it; the shards of dead writers are dead.

There may be millions of rows, so numpy, or one pass of a loop, processes them. restore.py builds a cache from the
result.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Set
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache_proto.region import (
    CHECKED,
    DOOMED,
    FREE,
    READY,
    ROW_FIELDS,
    SLOT_ROW,
    WRITING,
    RegionRows,
    slot_size,
    slots_per_extent,
)
from kvcache_proto.types import FULL, MAX_HASHES, TAIL
from kvcache_server.core.journal import Manifest

_ROW = np.dtype(
    {
        "names": list(ROW_FIELDS),
        "formats": [kind for kind, _ in ROW_FIELDS.values()],
        "offsets": [offset for _, offset in ROW_FIELDS.values()],
        "itemsize": SLOT_ROW,
    }
)

_MIX = np.uint64(0x9E3779B97F4A7C15)

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Cut(NamedTuple):
    """An extent as described by its row."""

    number: int
    slot_bytes: int
    generation: int
    rows: int
    slots: int
    cleared: int  # of the slots, the first ones; no later row was ever written


def _cuts(rows: RegionRows) -> Iterator[Cut]:
    """Yield the extents that are cut. An extent whose row was incomplete contains no blocks and is left out."""
    size = rows.geometry.extent_bytes
    for index in range(rows.geometry.extents):
        slot_bytes, generation, at, slots = rows.extent_row(index)
        whole = slot_bytes and slots == slots_per_extent(size, slot_bytes)
        if whole and at == rows.extent_start(index) + size - slots * SLOT_ROW:
            yield Cut(index, slot_bytes, generation, at, slots, rows.cleared(index, slots))


class Snapshot:
    """The content of the rows, which it also repairs. All arrays have one entry per row that is not FREE.

    Attributes:
        cuts: the extents with such rows; `extent` has positions in this list.
        groups: numbers of namespace and group, None if unknown; `code` has positions in this list.
        parent: the position of the parent; one beyond the last for a root, two beyond for none.
        visible: whether lookups will find the block.
        pending: positions of blocks that may become visible, parents first.
        known: whether the row names an existing group and engine.
        last: the last generation that was used.
    """

    def __init__(self, rows: RegionRows, manifest: Manifest, living: Set[int]) -> None:
        """`living` are sessions of the manifest with locked files: they may be writing, and may come back."""
        self.rows, self.manifest, self.living = rows, manifest, frozenset(living)
        self.counters: Counter[str] = Counter()
        self.groups: list[tuple[int, int] | None] = []
        self.pending: list[int] = []
        self._shard_count: list[int] = []
        self._read()
        self._check()
        self._finish_commits()
        self._resolve_parents()
        self._free_twins()
        self.visible = self._find_visible()
        self._find_pending()

    def doomed(self) -> list[int]:
        """Return the positions of slots that may not be used until their writers have settled."""
        return [int(position) for position in np.flatnonzero(self.state == DOOMED)]

    def hash(self, position: int) -> bytes:
        row = self.row[position]
        return bytes(row["hash"].tobytes()[: int(row["hash_bytes"])])

    def shards(self, position: int) -> int:
        """Return all shards of the row's block as a bit set."""
        return (1 << self._shard_count[int(self.code[position])]) - 1

    def writers(self, position: int) -> tuple[int, ...]:
        shards = self._shard_count[int(self.code[position])]
        writers = self.manifest.writers.get(int(self.row["writers"][position]), ())
        return writers if len(writers) == shards else (0,) * shards

    def dead(self, position: int) -> int:
        """Return the unsettled shards with dead writers as a bit set."""
        settled = int(self.row["settled"][position])
        gone = sum(1 << shard for shard, writer in enumerate(self.writers(position)) if writer not in self.living)
        return gone & ~settled & self.shards(position)

    # Steps.

    def _read(self) -> None:
        cuts = list(_cuts(self.rows))
        buffer = self.rows.buffer
        views = [np.frombuffer(buffer, _ROW, cut.cleared, cut.rows) for cut in cuts]
        taken = [np.flatnonzero((view["state"] >= WRITING) & (view["state"] <= DOOMED)) for view in views]
        generations = [self.rows.extent_row(index)[1] for index in range(self.rows.geometry.extents)]
        self.last = max([*generations, *(int(view["generation"].max()) for view in views if len(view))])
        self.cuts = [cut for cut, used in zip(cuts, taken, strict=True) if len(used)]
        counts = [len(used) for used in taken if len(used)]
        self.extent: Ints = np.repeat(np.arange(len(counts)), counts)  # position in `cuts`
        self.slot: Ints = np.concatenate([used for used in taken if len(used)] or [np.zeros(0, np.int64)])
        # Whole rows, because the checksum includes the bytes between fields, and numpy copies only fields.
        rows = [view.view(f"V{SLOT_ROW}")[used] for view, used in zip(views, taken, strict=True) if len(used)]
        self.raw: npt.NDArray[Any] = np.concatenate([np.zeros(0, f"V{SLOT_ROW}"), *rows])
        self.row: npt.NDArray[Any] = self.raw.view(_ROW)
        self.state: Ints = self.row["state"].astype(np.int64)
        # Not covered by the checksum; values below 1 have a special meaning in the order of eviction.
        self.tick: Ints = np.clip(self.row["tick"], 1, 1 << 62).astype(np.int64)

    def _at(self, position: int) -> int:
        """Return the row's offset in the region."""
        cut = self.cuts[int(self.extent[position])]
        return cut.rows + int(self.slot[position]) * SLOT_ROW

    def _set(self, position: int, state: int) -> None:
        self.state[position] = state
        self.rows.set_state(self._at(position), state)

    def _check(self) -> None:
        """Free rows with wrong checksums, and READY rows with unknown numbers; doom other rows with unknown numbers."""
        row, begin, end = self.row, CHECKED.start, CHECKED.stop
        packed, crc32 = self.raw.view(np.uint8).data, zlib.crc32
        sums = [crc32(packed[at + begin : at + end]) for at in range(0, len(packed), SLOT_ROW)]
        whole: Bools = row["check"] == np.array(sums, dtype=np.uint64)
        keys = (row["namespace"].astype(np.int64) << 16) | row["group"]
        unique, code = np.unique(keys, return_inverse=True)
        expected = []
        for key in unique.tolist():
            spec, number = self.manifest.namespaces.get(key >> 16), key & 0xFFFF
            group = spec.groups[number] if spec and number < len(spec.groups) else None
            expected.append((spec.hash_bytes, slot_size(group.block_bytes)) if spec and group else (-1, -1))
            self.groups.append((key >> 16, number) if group else None)
            self._shard_count.append(len(group.shards) if group else 1)
        self.code: Ints = code.astype(np.int64)
        hash_bytes, slot_bytes = (np.array([each[at] for each in expected], np.int64)[self.code] for at in (0, 1))
        cut_bytes = np.array([cut.slot_bytes for cut in self.cuts], np.int64)[self.extent]
        known: Bools = (row["hash_bytes"] == hash_bytes) & (cut_bytes == slot_bytes)
        known &= np.isin(row["engine"], list(self.manifest.engines)) & (row["position"] < MAX_HASHES)
        self.known: Bools = whole & known
        for position in np.flatnonzero(~self.known).tolist():
            doubtful = whole[position] and self.state[position] != READY
            self._set(position, DOOMED if doubtful else FREE)
            self.counters["rows_discarded"] += 1

    def _finish_commits(self) -> None:
        """Make blocks READY whose shards are all committed; doom blocks that a later block superseded."""
        heirs: dict[tuple[int, bytes], int] = {}
        self.heir: dict[int, int] = {}
        for position in np.flatnonzero(self.state == WRITING).tolist():
            if int(self.row["settled"][position]) == self.shards(position):
                self._set(position, READY)
                continue
            name = int(self.code[position]), self.hash(position)
            rival = heirs.setdefault(name, position)
            if rival != position:
                generation = self.row["generation"]
                late, early = sorted((position, rival), key=lambda each: -int(generation[each]))
                heirs[name], self.heir[early] = late, late
        for early, late in reversed(self.heir.items()):  # a block later than `late` was entered later
            self.heir[early] = self.heir.get(late, late)

    def _resolve_parents(self) -> None:
        """Find each row's parent, as described for `parent`."""
        count = len(self.row)
        alive = (self.state == READY) | (self.state == WRITING)
        candidates = np.flatnonzero(alive)
        generation = self.row["generation"][candidates]
        order = np.argsort(generation)
        wanted = self.row["parent"]
        nearest = np.minimum(np.searchsorted(generation[order], wanted), max(len(order) - 1, 0))
        parent: Ints = np.full(count, count + 1, np.int64)
        if len(order):
            found = candidates[order[nearest]]
            above, tail = self._above()
            matches = (self.row["generation"][found] == wanted) & (self.code[found] == above[self.code])
            alike = (self._words(found) == self._words(np.arange(count))).all(axis=1)
            matches &= alike | ~tail[self.code]
            parent[matches] = found[matches]
        parent[wanted == 0] = count
        parent[~alive] = count + 1
        for child in np.flatnonzero(np.isin(parent, list(self.heir))).tolist():
            late = parent[child] = self.heir[int(parent[child])]
            self.rows.set_parent(self._at(child), int(self.row["generation"][late]))
        for early in self.heir:
            self._set(early, DOOMED)
        self.parent = parent

    def _above(self) -> tuple[Ints, Bools]:
        """Return, by code, that of the group with the parents of its blocks, and whether that is another one.

        The block of a tail has the same hash as its parent."""
        above, tail = np.arange(len(self.groups)), np.zeros(len(self.groups), np.bool_)
        for code, key in enumerate(self.groups):
            groups = self.manifest.namespaces[key[0]].groups if key else ()
            if key and groups[key[1]].kind == TAIL and groups[0].kind == FULL:
                tail[code] = True
                above[code] = self.groups.index((key[0], 0)) if (key[0], 0) in self.groups else -1
        return above, tail

    def _words(self, positions: Ints) -> npt.NDArray[np.uint64]:
        """Return the hashes of rows as four words each."""
        words: npt.NDArray[np.uint64] = self.row["hash"][positions].view("<u8").reshape(-1, 4).astype(np.uint64)
        return words

    def _free_twins(self) -> None:
        """Free READY rows whose hash another row has. They only exist if a process wrote where it must not."""
        ready = np.flatnonzero(self.state == READY)
        words = self._words(ready)
        mixed = self.code[ready].astype(np.uint64)
        for word in range(4):  # a hash of the hashes; equal values are compared in full below
            mixed = (mixed ^ words[:, word]) * _MIX
            mixed ^= mixed >> np.uint64(29)
        order = np.argsort(mixed)
        alike = np.flatnonzero(mixed[order][1:] == mixed[order][:-1])
        seen: dict[tuple[int, bytes], int] = {}
        for position in sorted({int(ready[order[at + step]]) for at in alike.tolist() for step in (0, 1)}):
            if seen.setdefault((int(self.code[position]), self.hash(position)), position) != position:
                self._set(position, FREE)
                self.counters["rows_discarded"] += 1

    def _find_visible(self) -> Bools:
        """Return which blocks are READY with all their ancestors. O(n log depth): each round looks twice as far up."""
        count = len(self.row)
        good: Bools = np.append(self.state == READY, [True, False])
        up: Ints = np.append(self.parent, [count, count + 1])
        for _ in range(count.bit_length() + 1):
            if up.min(initial=count) >= count:
                break
            good &= good[up]
            up = up[up]
        good &= up == count  # otherwise it is a cycle, which no daemon writes
        return good[:count]

    def _find_pending(self) -> None:
        """Collect the hidden blocks that can become visible in `pending`; free or doom the others."""
        count, visible = len(self.row), self.visible
        hopeful: dict[int, bool] = {}
        for start in np.flatnonzero(~visible & ((self.state == READY) | (self.state == WRITING))).tolist():
            path, position = [], start
            while position < count and position not in hopeful and not visible[position]:
                hopeful[position] = False
                path.append(position)
                position = int(self.parent[position])
            good = position == count or (position < count and bool(visible[position] or hopeful[position]))
            for position in reversed(path):
                good = hopeful[position] = good and self._writers_live(position)
                if good:
                    self.pending.append(position)
                elif self.state[position] == READY:
                    self._set(position, FREE)
                    self.counters["blocks_recovered"] += 1
                    self.counters["blocks_unreachable"] += 1
                else:
                    self._set(position, DOOMED)

    def _writers_live(self, position: int) -> bool:
        return self.state[position] == READY or not self.dead(position)
