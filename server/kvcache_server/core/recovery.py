"""The last daemon's cache, read back from the region's rows and the manifest of what their numbers mean. Pure.

A daemon may have been killed between any two stores, so that a row is taken for what it says alone: one whose checksum
fails is FREE, for nobody was ever told of it. READY blocks are found again with their parents and their last use. A
reservation goes on where its writers live, for they will settle it; the shards of writers that are gone are dead.

There may be millions of rows: what is done with each is done by numpy, or by one pass of a loop.
"""

from __future__ import annotations

import zlib
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
    slots_per_extent,
)
from kvcache_proto.types import MAX_HASHES, MIN_HASH_BYTES, REF_BYTES, GroupSpec, PoolGeometry, Verdict
from kvcache_server.core.cache import Cache
from kvcache_server.core.extent import Extent
from kvcache_server.core.index import GONE, HIDDEN, UNQUEUED, Account, Block, Grant, Group, Reservation
from kvcache_server.core.journal import Manifest, SessionEnded
from kvcache_server.core.limits import Limits
from kvcache_server.core.sessions import Engine, Namespace

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


def reopen(
    buffer: memoryview,
    geometry: PoolGeometry,
    limits: Limits,
    manifest: Manifest,
    living: Set[int],
    now: float,
    secret: bytes = b"",
) -> Cache:
    """Return the cache that the last daemon left in the region; `manifest.epoch` and `secret` are the new daemon's.

    `living` are the sessions of the manifest whose files are locked: they may be writing, and may come back.
    """
    cache = Cache(buffer, geometry, limits, epoch=manifest.epoch, secret=secret)
    registry, reservations = cache.registry, cache.reservations
    for number, spec in manifest.namespaces.items():
        registry.add_namespace(Namespace(number, spec))
    for number, name in manifest.engines.items():
        cache.engines[name] = Engine(number, name)
    registry.last_namespace, registry.last_engine = manifest.last_namespace, manifest.last_engine
    registry.last_session, reservations.last_writers = manifest.last_session, manifest.last_writers
    reservations.writers = {writers: number for number, writers in manifest.writers.items() if living >= {*writers}}
    _Recovery(cache, manifest, frozenset(living), now).run()
    cache.await_sessions(
        {number: registry.engine(manifest.sessions[number].engine) for number in living},
        {number: manifest.sessions[number].user for number in living},
        now,
    )
    for number in manifest.sessions.keys() - living:
        cache.effects.records.append(SessionEnded(number))
    registry.prune()
    return cache


class _Cut(NamedTuple):
    """An extent as its row says."""

    number: int
    slot_bytes: int
    generation: int
    rows: int
    slots: int
    cleared: int  # of the slots, from the first one on: no row behind them was ever written


def _cuts(rows: RegionRows) -> Iterator[_Cut]:
    """Yield the extents that are cut; one whose row was being written is not, nor does it hold a block."""
    size = rows.geometry.extent_bytes
    for index in range(rows.geometry.extents):
        slot_bytes, generation, at, slots = rows.extent_row(index)
        whole = slot_bytes and slots == slots_per_extent(size, slot_bytes)
        if whole and at == rows.extent_start(index) + size - slots * SLOT_ROW:
            yield _Cut(index, slot_bytes, generation, at, slots, rows.cleared(index, slots))


class _Recovery:
    """One reading of the rows. All arrays have an entry for each row that is not FREE."""

    def __init__(self, cache: Cache, manifest: Manifest, living: frozenset[int], now: float) -> None:
        self.cache, self.rows, self.manifest, self.living = cache, cache.rows, manifest, living
        self.now, self.until = now, now + cache.limits.quarantine
        self.engines = {engine.number: engine for engine in cache.engines.values()}
        self.groups: list[Group] = []
        self.reservations: dict[int, Reservation] = {}
        self.reservers: dict[int, int] = {}  # the engine of each
        self.granted: dict[int, dict[int, Grant]] = {}  # by reservation and position
        self.blocks: dict[int, Block] = {}  # by position among the rows

    def run(self) -> None:
        self._read()
        self._check()
        self._finish_commits()
        self._resolve_parents()
        self._free_twins()
        visible = self._visible()
        self._adopt_extents()
        self._show(visible)
        self._go_on(visible)
        self.cache.pool.resume(self.last, self.manifest.retired)
        self.cache.resizing.wanted = self.manifest.wanted
        self.cache.bound(self.cache.limits)  # the pool may be smaller than the region

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
            namespace, number = self.cache.namespaces.get(key >> 16), key & 0xFFFF
            group = namespace.groups[number] if namespace and number < len(namespace.groups) else None
            expected.append((group.hash_bytes, group.slot_bytes) if group else (-1, -1))
            self.groups.append(group or _nowhere())
        self.code: Ints = code.astype(np.int64)
        hash_bytes, slot_bytes = (np.array([each[at] for each in expected], np.int64)[self.code] for at in (0, 1))
        cut_bytes = np.array([cut.slot_bytes for cut in self.cuts], np.int64)[self.extent]
        known: Bools = (row["hash_bytes"] == hash_bytes) & (cut_bytes == slot_bytes)
        known &= np.isin(row["engine"], list(self.engines)) & (row["position"] < MAX_HASHES)
        self.known: Bools = whole & known
        for position in np.flatnonzero(~self.known).tolist():
            doubtful = whole[position] and self.state[position] != READY
            self._set(position, DOOMED if doubtful else FREE)
            self.cache.counters["rows_discarded"] += 1

    def _shards(self, position: int) -> int:
        """Return the bit set of all shards of the row's block."""
        return (1 << len(self.groups[self.code[position]].spec.shards)) - 1

    def _finish_commits(self) -> None:
        """Make READY what was settled to the last shard; DOOM what has a rival for its hash that came later."""
        heirs: dict[tuple[int, bytes], int] = {}
        self.heir: dict[int, int] = {}
        for position in np.flatnonzero(self.state == WRITING).tolist():
            if int(self.row["settled"][position]) == self._shards(position):
                self._set(position, READY)
                continue
            name = int(self.code[position]), self._hash(position)
            rival = heirs.setdefault(name, position)
            if rival != position:
                generation = self.row["generation"]
                late, early = sorted((position, rival), key=lambda each: -int(generation[each]))
                heirs[name], self.heir[early] = late, late
        for early, late in reversed(self.heir.items()):  # whoever came later than `late` was entered later
            self.heir[early] = self.heir.get(late, late)

    def _hash(self, position: int) -> bytes:
        row = self.row[position]
        return bytes(row["hash"].tobytes()[: int(row["hash_bytes"])])

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
            if seen.setdefault((int(self.code[position]), self._hash(position)), position) != position:
                self._set(position, FREE)
                self.cache.counters["rows_discarded"] += 1

    def _visible(self) -> Bools:
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

    # What the cache has.

    def _adopt_extents(self) -> None:
        pool = self.cache.pool
        # The rows lie in the order of their extents, each of which has some: no extent is searched for in all rows.
        begins = np.flatnonzero(np.diff(self.extent, prepend=-1))
        tops = np.maximum.reduceat(self.tick, begins).tolist() if len(begins) else []
        self.extents: list[Extent[Block]] = []
        for cut, top in zip(self.cuts, tops, strict=True):
            extent = pool.adopt(cut.number, cut.slot_bytes, cut.generation, cut.slots, cut.cleared)
            extent.newest = top
            self.extents.append(extent)
        pool.tick = max(tops, default=0)
        self.refs = self._refs()

    def _ref(self, position: int) -> bytes:
        return self.refs[REF_BYTES * position : REF_BYTES * (position + 1)]

    def _refs(self) -> bytes:
        """Return the references of all rows, REF_BYTES each."""
        starts = np.array([self.rows.extent_start(cut.number) for cut in self.cuts], np.uint64)
        sizes = np.array([cut.slot_bytes for cut in self.cuts], np.uint64)
        generations = np.array([cut.generation for cut in self.cuts], np.uint64)
        refs = np.empty((len(self.row), 3), np.uint64)
        refs[:, 0] = starts[self.extent] + self.slot.astype(np.uint64) * sizes[self.extent]
        refs[:, 1] = self.row["generation"]
        refs[:, 2] = generations[self.extent]
        return refs.tobytes()

    def _account(self, code: int, engine: int) -> Account:
        account = self.cache.registry.account(self.engines[engine], self.groups[code])
        account.live = False  # until its engine attaches
        return account

    def _show(self, visible: Bools) -> None:
        """Put the visible blocks into the index, under their parents, and the leaves in the order of their last use."""
        chosen = np.flatnonzero(visible)
        chosen = chosen[np.argsort(self.tick[chosen], kind="stable")]
        positions, refs = chosen.tolist(), self.refs
        row, code, engine = self.row[chosen], self.code[chosen], self.row["engine"][chosen]
        owners, owner = np.unique((code << 32) | engine, return_inverse=True)
        accounts = [self._account(key >> 32, key & 0xFFFFFFFF) for key in owners.tolist()]
        packed = row["hash"].tobytes()
        lengths = row["hash_bytes"].tolist()
        hashes = [packed[at : at + length] for at, length in zip(range(0, len(packed), 32), lengths, strict=True)]
        blocks = [
            Block(UNQUEUED, tick, name, refs[REF_BYTES * at : REF_BYTES * at + REF_BYTES], accounts[of])
            for tick, name, at, of in zip(self.tick[chosen].tolist(), hashes, positions, owner.tolist(), strict=True)
        ]
        self.blocks = dict(zip(positions, blocks, strict=True))
        count, by_position, homes = len(self.row), self.blocks, [extent.blocks for extent in self.extents]
        roots, visibles = [each.group.root for each in accounts], [each.group.visible for each in accounts]
        places = (self.parent[chosen].tolist(), self.extent[chosen].tolist(), self.slot[chosen].tolist())
        for block, name, of, above, number, slot in zip(blocks, hashes, owner.tolist(), *places, strict=True):
            homes[number][slot] = visibles[of][name] = block
            # As Block.link does, without the call.
            block.parent = parent = by_position[above] if above < count else roots[of]
            block.next = child = parent.child
            if child is not None:
                child.prev = block
            parent.child = block
        for block in blocks:  # by their last use: a list in this order is a heap
            account = block.account
            account.bytes += account.group.slot_bytes
            if block.child is None:
                block.queued = block.tick
                account.order.append(block)
        self.cache.counters["blocks_recovered"] += len(blocks)

    # What was being written.

    def _go_on(self, visible: Bools) -> None:
        """Let what is not visible yet wait for its writers, where it can become so; give up the rest."""
        count = len(self.row)
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
                    self._pend(position)
                elif self.state[position] == READY:
                    self._set(position, FREE)
                    self.cache.counters["blocks_recovered"] += 1
                    self.cache.counters["blocks_unreachable"] += 1
                else:
                    self._set(position, DOOMED)
        for position in np.flatnonzero(self.state == DOOMED).tolist():
            self._hold(position)
        self._settle_up(visible)

    def _writers(self, position: int) -> tuple[int, ...]:
        shards = len(self.groups[self.code[position]].spec.shards)
        return self.manifest.writers.get(int(self.row["crew"][position]), (0,) * shards)

    def _dead(self, position: int) -> int:
        """Return the bit set of the unsettled shards whose writers are gone."""
        settled = int(self.row["settled"][position])
        gone = sum(1 << shard for shard, writer in enumerate(self._writers(position)) if writer not in self.living)
        return gone & ~settled & self._shards(position)

    def _writers_live(self, position: int) -> bool:
        return self.state[position] == READY or not self._dead(position)

    def _pend(self, position: int) -> None:
        """Let the block wait, out of sight, for its writers or its parent."""
        block = self._block(position)
        above = int(self.parent[position])
        group = block.account.group
        block.link(self.blocks[above] if above < len(self.row) else group.root)
        grant = self._grant(position, block)
        grant.ready = bool(self.state[position] == READY)
        self.cache.counters["blocks_recovered" if grant.ready else "blocks_resumed"] += 1
        if grant.ready:
            grant.settled, grant.extent.busy = grant.reservation.all_shards, grant.extent.busy - 1
        group.pending[block.hash] = grant

    def _hold(self, position: int) -> None:
        """Keep a slot from everybody until its writers have settled and the quarantine is over, begun anew.

        For a shard that counts as settled may be that of a writer who died shortly before the daemon did.
        """
        extent, slot = self.extents[self.extent[position]], int(self.slot[position])
        dead = self._dead(position) if self.known[position] else 0
        if self.known[position] and int(self.row["settled"][position]) | dead != self._shards(position):
            grant = self._grant(position, self._block(position))
            grant.block.pins, grant.verdict = GONE, Verdict.FAILED
            grant.settled |= dead
            grant.tainted_until = self.until
            self.cache.counters["blocks_resumed"] += 1
        else:
            extent.blocks[slot] = Block(HIDDEN, 0, b"", b"", _nowhere().root.account)
            extent.busy += 1
            self.cache.pool.quarantine.add(self.until, extent, slot)
        self.cache.counters["shards_dead"] += dead.bit_count()

    def _block(self, position: int) -> Block:
        row = self.row[position]
        account = self._account(int(self.code[position]), int(row["engine"]))
        account.bytes += account.group.slot_bytes
        block = Block(HIDDEN, int(self.tick[position]), self._hash(position), self._ref(position), account)
        self.blocks[position] = block
        self.extents[self.extent[position]].blocks[self.slot[position]] = block
        return block

    def _grant(self, position: int, block: Block) -> Grant:
        row = self.row[position]
        number, group = int(row["reservation"]), self.groups[self.code[position]]
        reservation = self.reservations.get(number)
        engine = int(row["engine"])
        if reservation is not None and (reservation.group is not group or self.reservers[number] != engine):
            # Only who writes where it must not makes such rows: this one waits for its writers to end.
            number = self.cache.reservations.last = self.cache.reservations.last + 1
            reservation = None
        if reservation is None:
            reservation = Reservation(number, group, int(row["owner"]), self._writers(position), self.now)
            reservation.writers_number = int(row["crew"])
            self.reservations[number] = reservation
            self.reservers[number] = engine
        extent = self.extents[self.extent[position]]
        extent.busy += 1
        grant = Grant(block, extent, int(self.slot[position]), reservation)
        grant.settled = int(row["settled"])
        taken = self.granted.setdefault(number, {})
        place = int(row["position"])
        taken[place if place not in taken else max(taken) + 1] = grant
        return grant

    def _settle_up(self, visible: Bools) -> None:
        """Give each reservation its grants in their order; those whose blocks are gone have failed."""
        # Numbers that are forged may be large, and a list of small and large ones becomes one of inexact floats.
        mine = visible & np.isin(self.row["reservation"], np.array(list(self.reservations), np.uint64))
        for position in np.flatnonzero(mine).tolist():
            block, reservation = self.blocks[position], self.reservations[int(self.row["reservation"][position])]
            grant = Grant(block, self.extents[self.extent[position]], int(self.slot[position]), reservation)
            grant.ready, grant.settled = True, reservation.all_shards
            self.granted[reservation.id].setdefault(int(self.row["position"][position]), grant)
        for number, reservation in self.reservations.items():
            granted = self.granted[number]
            some = next(iter(granted.values()))
            for position in range(max(granted) + 1):
                if position not in granted:
                    granted[position] = Grant(some.block, some.extent, some.slot, reservation)
                    granted[position].settled, granted[position].verdict = reservation.all_shards, Verdict.FAILED
            grants = [granted[position] for position in range(len(granted))]
            reservation.unsettled = sum(not grant.whole for grant in grants)
            if reservation.unsettled:
                reservation.grants = grants
                engine = self.cache.engines[some.block.account.engine]
                engine.reservations[number] = reservation
                engine.writing += reservation.unsettled * reservation.group.slot_bytes
                self.cache.counters["reservations_recovered"] += 1


def _nowhere() -> Group:
    """Return the group of blocks whose group nobody knows."""
    return Group(0, 0, GroupSpec(1, 1), MIN_HASH_BYTES)
