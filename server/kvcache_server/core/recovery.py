"""What the last daemon's cache was, read from the region's rows and the manifest of what their numbers mean. Pure.

A daemon may have been killed between any two stores, so that each row is taken at its word: one whose checksum fails is
FREE, for nobody was ever told of it. READY blocks are found again with their parents and their last use. A reservation
goes on where its writers live, for they will settle it; the shards of writers that are gone are dead.

There may be millions of rows: what is done with each is done by numpy, or by one pass of a loop. restore.py makes a
cache of what is found here.
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
from kvcache_proto.types import MAX_HASHES
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
    """An extent as its row says."""

    number: int
    slot_bytes: int
    generation: int
    rows: int
    slots: int
    cleared: int  # of the slots, from the first one on: no row behind them was ever written


def _cuts(rows: RegionRows) -> Iterator[Cut]:
    """Yield the extents that are cut; one whose row was being written is not, nor does it hold a block."""
    size = rows.geometry.extent_bytes
    for index in range(rows.geometry.extents):
        slot_bytes, generation, at, slots = rows.extent_row(index)
        whole = slot_bytes and slots == slots_per_extent(size, slot_bytes)
        if whole and at == rows.extent_start(index) + size - slots * SLOT_ROW:
            yield Cut(index, slot_bytes, generation, at, slots, rows.cleared(index, slots))


class Snapshot:
    """One reading of the rows, which also mends them. All arrays have an entry for each row that is not FREE.

    Attributes:
        cuts: the extents that have such rows; `extent` has positions in it.
        groups: number of the namespace and of the group; None where nobody knows it. `code` has positions in it.
        parent: the parent's position; one beyond the last for a root, two beyond where there is none.
        visible: what lookups will find.
        pending: positions of what will become visible or may, parents first.
        known: whether the row names a group and an engine that there are.
        last: the last generation that was given.
    """

    def __init__(self, rows: RegionRows, manifest: Manifest, living: Set[int]) -> None:
        """`living` are the sessions of the manifest whose files are locked: they may be writing, and may come back."""
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
        """Return the positions of slots that nobody may use until their writers have settled."""
        return [int(position) for position in np.flatnonzero(self.state == DOOMED)]

    def hash(self, position: int) -> bytes:
        row = self.row[position]
        return bytes(row["hash"].tobytes()[: int(row["hash_bytes"])])

    def shards(self, position: int) -> int:
        """Return the bit set of all shards of the row's block."""
        return (1 << self._shard_count[int(self.code[position])]) - 1

    def writers(self, position: int) -> tuple[int, ...]:
        shards = self._shard_count[int(self.code[position])]
        return self.manifest.writers.get(int(self.row["writers"][position]), (0,) * shards)

    def dead(self, position: int) -> int:
        """Return the bit set of the unsettled shards whose writers are gone."""
        settled = int(self.row["settled"][position])
        gone = sum(1 << shard for shard, writer in enumerate(self.writers(position)) if writer not in self.living)
        return gone & ~settled & self.shards(position)

    # What the rows say.

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
        # Whole, for what lies between the fields is under the checksum, too, and numpy copies fields alone.
        rows = [view.view(f"V{SLOT_ROW}")[used] for view, used in zip(views, taken, strict=True) if len(used)]
        self.raw: npt.NDArray[Any] = np.concatenate([np.zeros(0, f"V{SLOT_ROW}"), *rows])
        self.row: npt.NDArray[Any] = self.raw.view(_ROW)
        self.state: Ints = self.row["state"].astype(np.int64)
        # Not under the checksum; 0 and below have a meaning of their own in the order of eviction.
        self.tick: Ints = np.clip(self.row["tick"], 1, 1 << 62).astype(np.int64)

    def _at(self, position: int) -> int:
        """Return where in the region the row lies."""
        cut = self.cuts[int(self.extent[position])]
        return cut.rows + int(self.slot[position]) * SLOT_ROW

    def _set(self, position: int, state: int) -> None:
        self.state[position] = state
        self.rows.set_state(self._at(position), state)

    def _check(self) -> None:
        """Free what fails its checksum, or is READY with numbers that nobody knows; DOOM what else is not known."""
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
        """Make READY what was settled to the last shard; DOOM what has a rival for its hash that came later."""
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
        for early, late in reversed(self.heir.items()):  # whoever came later than `late` was entered later
            self.heir[early] = self.heir.get(late, late)

    def _resolve_parents(self) -> None:
        """Find each row's parent: a position, or one beyond the last for a root, or two beyond for one without."""
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
            matches = (self.row["generation"][found] == wanted) & (self.code[found] == self.code)
            parent[matches] = found[matches]
        parent[wanted == 0] = count
        parent[~alive] = count + 1
        for child in np.flatnonzero(np.isin(parent, list(self.heir))).tolist():
            late = parent[child] = self.heir[int(parent[child])]
            self.rows.set_parent(self._at(child), int(self.row["generation"][late]))
        for early in self.heir:
            self._set(early, DOOMED)
        self.parent = parent

    def _free_twins(self) -> None:
        """Free what is READY with a name that another row has: only who writes where it must not makes such rows."""
        ready = np.flatnonzero(self.state == READY)
        words = self.row["hash"][ready].view("<u8").reshape(-1, 4).astype(np.uint64)
        mixed = self.code[ready].astype(np.uint64)
        for word in range(4):  # two equal names mix alike; two that are not rarely do, and are then told apart
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
        """Return what is READY with all its ancestors. O(n log depth): each round looks twice as far up."""
        count = len(self.row)
        good: Bools = np.append(self.state == READY, [True, False])
        up: Ints = np.append(self.parent, [count, count + 1])
        for _ in range(count.bit_length() + 1):
            if up.min(initial=count) >= count:
                break
            good &= good[up]
            up = up[up]
        good &= up == count  # what never gets there is a circle, which no daemon writes
        return good[:count]

    def _find_pending(self) -> None:
        """Let what is not visible yet wait for its writers, where it can become so; give up the rest."""
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
