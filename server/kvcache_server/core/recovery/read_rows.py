"""Reads the previous daemon's cache from the region's rows, and the manifest that explains their numbers. Pure.

A daemon may have been killed between any two stores, so each row is judged on its own. A row with a wrong checksum is
FREE: no client knows of its block. READY blocks are restored with their parents and last use. A reservation continues
if its writers live, because they will settle it; the shards of dead writers are dead.

There may be millions of rows, so numpy, or one pass of a loop, processes them. restore.py builds a cache from the
result.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Set
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache_proto.region import (
    CHECKED,
    CONTINUED,
    DOOMED,
    FREE,
    FREED,
    HEADER,
    READY,
    ROW,
    ROW_FIELDS,
    WRITING,
    RegionRows,
    pages_of,
    row_of,
)
from kvcache_proto.types import FULL, MAX_HASHES, SUFFIX
from kvcache_server.core.journal import Manifest
from kvcache_server.core.pool import Runs

_ROW = np.dtype(
    {
        "names": list(ROW_FIELDS),
        "formats": [kind for kind, _ in ROW_FIELDS.values()],
        "offsets": [offset for _, offset in ROW_FIELDS.values()],
        "itemsize": ROW,
    }
)

_MIX = np.uint64(0x9E3779B97F4A7C15)

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Snapshot:
    """The content of the rows, which it also repairs. All arrays have one entry per row that is not FREE.

    Attributes:
        page, pages: the first page of the block, and the length of its first run.
        scattered: by position, the runs of blocks that have several, or another number of pages than their group.
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
        self.scattered: dict[int, Runs] = {}
        self._shard_count: list[int] = []
        self._read()
        self._check()
        self._free_overlaps()
        self._finish_commits()
        self._resolve_parents()
        self._free_twins()
        self.visible = self._find_visible()
        self._find_pending()

    def doomed(self) -> list[int]:
        """Return the positions of blocks whose pages may not be used until their writers have settled."""
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
        rows = np.frombuffer(self.rows.buffer, _ROW, self.rows.geometry.pages, HEADER)
        self.page: Ints = np.flatnonzero((rows["state"] >= WRITING) & (rows["state"] <= DOOMED))
        self.last = int((rows["generation"] & np.uint64(FREED - 1)).max())
        # Whole rows, because the checksum includes the bytes between fields, and numpy copies only fields.
        self.raw: npt.NDArray[Any] = rows.view(f"V{ROW}")[self.page]
        self.row: npt.NDArray[Any] = self.raw.view(_ROW)
        self.state: Ints = self.row["state"].astype(np.int64)
        self.pages: Ints = self.row["run_pages"].astype(np.int64)
        # Not covered by the checksum; values below 1 have a special meaning in the order of eviction.
        self.tick: Ints = np.clip(self.row["tick"], 1, 1 << 62).astype(np.int64)

    def runs(self, position: int) -> Runs:
        """Return the pages of a block."""
        return self.scattered.get(position) or ((int(self.page[position]), int(self.pages[position])),)

    def at(self, position: int) -> int:
        """Return the row's offset in the region."""
        return row_of(int(self.page[position]))

    def _set(self, position: int, state: int) -> None:
        self.state[position] = state
        self.rows.set_state(self.at(position), state)

    def _check(self) -> None:
        """Free rows with wrong checksums, and READY rows with unknown numbers; doom other rows with unknown numbers."""
        row, begin, end = self.row, CHECKED.start, CHECKED.stop
        packed, crc32 = self.raw.view(np.uint8).data, zlib.crc32
        sums = [crc32(packed[at + begin : at + end]) for at in range(0, len(packed), ROW)]
        whole: Bools = row["check"] == np.array(sums, dtype=np.uint64)
        keys = (row["namespace"].astype(np.int64) << 16) | row["group"]
        unique, code = np.unique(keys, return_inverse=True)
        expected = []
        for key in unique.tolist():
            spec, number = self.manifest.namespaces.get(key >> 16), key & 0xFFFF
            group = spec.groups[number] if spec and number < len(spec.groups) else None
            size = pages_of(group.block_bytes, self.rows.geometry.page_bytes) if group else -1
            expected.append((spec.hash_bytes, size) if spec and group else (-1, -1))
            self.groups.append((key >> 16, number) if group else None)
            self._shard_count.append(len(group.shards) if group else 1)
        self.code: Ints = code.astype(np.int64)
        numbers: list[Ints] = [np.array([each[at] for each in expected], np.int64)[self.code] for at in (0, 1)]
        hash_bytes, pages = numbers
        known: Bools = (row["hash_bytes"] == hash_bytes) & self._follow_runs(whole, pages)
        known &= np.isin(row["engine"], list(self.manifest.engines)) & (row["position"] < MAX_HASHES)
        self.known: Bools = whole & known
        for namespace, generation in self.manifest.cleared.items():
            old = self.known & (self.state == READY) & (row["namespace"] == namespace)
            for position in np.flatnonzero(old & (row["generation"] <= generation)).tolist():
                self._set(position, FREE)
        for position in np.flatnonzero(~self.known).tolist():
            doubtful = whole[position] and self.state[position] != READY
            self._set(position, DOOMED if doubtful else FREE)
            self.counters["rows_discarded"] += 1

    def _follow_runs(self, whole: Bools, pages: Ints) -> Bools:
        """Find the runs of each block; return a flag per row: True if the block has as many pages as it should.

        Other blocks' runs are cut off once they have enough pages, or at the end of the region. A further run belongs
        to one block only, and only once.
        """
        end = self.rows.geometry.pages
        self.pages = np.clip(self.pages, 1, np.where(pages > 0, np.minimum(pages, end - self.page), end - self.page))
        good: Bools = (self.row["run_pages"] == self.pages) & (self.pages == pages)
        followed: set[int] = set()
        for position in np.flatnonzero(whole & (self.row["next"] > 0)).tolist():
            generation = int(self.row["generation"][position])
            runs, following = [(int(self.page[position]), int(self.pages[position]))], int(self.row["next"][position])
            while following:
                found = self.rows.read_run(row_of(following - 1), generation) if following <= end else None
                if found is None or following in followed:
                    break
                followed.add(following)
                runs.append((following - 1, min(found[0], end - following + 1)))
                following = found[1]
            self.scattered[position] = tuple(runs)
            good[position] = not following and sum(count for _, count in runs) == pages[position]
        return good

    def _free_overlaps(self) -> None:
        """Free blocks that overlap. They only do if a process wrote where it must not."""
        taken: list[tuple[Ints, Ints]] = [(self.page[self.state != FREE], self.pages[self.state != FREE])]
        further = [run for position, runs in self.scattered.items() if self.state[position] != FREE for run in runs[1:]]
        taken.append((np.array([run[0] for run in further], np.int64), np.array([run[1] for run in further], np.int64)))
        begins, counts = (np.concatenate(each) for each in zip(*taken, strict=True))
        order = np.argsort(begins)
        if not (begins[order][:-1] + counts[order][:-1] > begins[order][1:]).any():
            return
        claimed = bytearray(self.rows.geometry.pages)
        # Blocks that may still be written stay; of the rest, the latest one.
        rank = np.lexsort((-self.row["generation"].astype(np.float64), self.state == READY))
        for position in rank.tolist():
            if self.state[position] == FREE:
                continue
            runs = self.runs(position)
            pages = {page for begin, count in runs for page in range(begin, begin + count) if not claimed[page]}
            if len(pages) < sum(count for _, count in runs):
                self.counters["rows_discarded"] += 1
                self.known[position] = False
                first = int(self.page[position])
                if self.state[position] == READY or first not in pages:
                    self._set(position, FREE)
                    continue
                runs = ((first, 1), *((page, 1) for page in sorted(pages - {first})))
                self._set(position, DOOMED)
                self.scattered[position] = runs
            for page, count in runs:
                claimed[page : page + count] = b"\1" * count

    def close_free_rows(self) -> None:
        """Close all rows that are not in use, so that readers notice when their pages are given away."""
        rows = np.frombuffer(self.rows.buffer, _ROW, self.rows.geometry.pages, HEADER)
        free: Bools = (rows["generation"] > 0) & (rows["generation"] < FREED)
        free[self.page[self.state != FREE]] = False
        generation, state = rows["generation"], rows["state"]
        for position, runs in self.scattered.items():
            if self.state[position] != FREE:
                own = self.row["generation"][position]
                free[[page for page, _ in runs[1:] if state[page] == CONTINUED and generation[page] == own]] = False
        for page in np.flatnonzero(free).tolist():
            self.rows.close_row(row_of(page))

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
            above, suffix = self._above()
            matches = (self.row["generation"][found] == wanted) & (self.code[found] == above[self.code])
            alike = (self._words(found) == self._words(np.arange(count))).all(axis=1)
            matches &= alike | ~suffix[self.code]
            parent[matches] = found[matches]
        parent[wanted == 0] = count
        parent[~alive] = count + 1
        for child in np.flatnonzero(np.isin(parent, list(self.heir))).tolist():
            late = parent[child] = self.heir[int(parent[child])]
            self.rows.set_parent(self.at(child), int(self.row["generation"][late]))
        for early in self.heir:
            self._set(early, DOOMED)
        self.parent = parent

    def _above(self) -> tuple[Ints, Bools]:
        """Return, by code, the code of the group with the parents of its blocks, and whether that is another group.

        The block of a suffix group has the same hash as its parent."""
        above, suffix = np.arange(len(self.groups)), np.zeros(len(self.groups), np.bool_)
        for code, key in enumerate(self.groups):
            groups = self.manifest.namespaces[key[0]].groups if key else ()
            if key and groups[key[1]].kind == SUFFIX and groups[0].kind == FULL:
                suffix[code] = True
                above[code] = self.groups.index((key[0], 0)) if (key[0], 0) in self.groups else -1
        return above, suffix

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
        """Return a flag per row: True if the block is READY with all its ancestors. O(n log depth): each round looks
        twice as far up."""
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
        """Collect the hidden blocks that can become visible in `pending`; free or doom the rest."""
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
                good = hopeful[position] = good and (self.state[position] == READY or not self.dead(position))
                if good:
                    self.pending.append(position)
                elif self.state[position] == READY:
                    self._set(position, FREE)
                    self.counters["blocks_recovered"] += 1
                    self.counters["blocks_unreachable"] += 1
                else:
                    self._set(position, DOOMED)
