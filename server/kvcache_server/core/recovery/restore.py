"""Builds a cache from what snapshot.py has read: extents, index, and unfinished reservations. Pure."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from kvcache_proto.region import READY
from kvcache_proto.types import MIN_HASH_BYTES, REF_BYTES, GroupSpec, Verdict
from kvcache_server.core.extent import Extent
from kvcache_server.core.index import (
    CLASS_MASK,
    FIRST_TICK,
    GOES_FIRST,
    GONE,
    HIDDEN,
    NEXT_TICK,
    OFTEN,
    TICKS_PER_SECOND,
    UNQUEUED,
    Account,
    Block,
    Grant,
    Group,
    Reservation,
)
from kvcache_server.core.pool import Pool
from kvcache_server.core.recovery.snapshot import Snapshot
from kvcache_server.core.registry import Registry
from kvcache_server.core.reservations import Reservations
from kvcache_server.core.sessions import Engine, Namespace

Ints = npt.NDArray[np.int64]
AHEAD = 60  # seconds by which ticks may be ahead of the clock, after bursts of lookups


class Restoration:
    """Fills the parts of an empty cache."""

    def __init__(
        self,
        snapshot: Snapshot,
        pool: Pool,
        registry: Registry,
        reservations: Reservations,
        counters: Counter[str],
        now: float,
        quarantine: float,
    ) -> None:
        """`quarantine` is for how many seconds the slots of dead writers are not used."""
        self.old = snapshot  # of the previous daemon
        snapshot.tick = _continued(snapshot.tick, now)
        self._pool, self._registry, self._reservations, self._counters = pool, registry, reservations, counters
        self.now, self.until = now, now + quarantine
        self.groups: list[Group] = []
        self.engines: dict[int, Engine] = {}
        self.reservations: dict[int, Reservation] = {}
        self.reservers: dict[int, int] = {}  # the engine of each reservation
        self.granted: dict[int, dict[int, Grant]] = {}  # by reservation and position
        self.blocks: dict[int, Block] = {}  # by position among the rows

    def run(self) -> None:
        self._name()
        self._adopt_extents()
        self._show()
        for position in self.old.pending:
            self._pend(position)
        for position in self.old.doomed():
            self._hold(position)
        self._settle_up()
        self._pool.resume(self.old.last)
        self._counters.update(self.old.counters)

    def _name(self) -> None:
        """Create the namespaces, engines and tuples of writers that the rows refer to by number."""
        manifest, registry, reservations = self.old.manifest, self._registry, self._reservations
        for number, spec in manifest.namespaces.items():
            registry.add_namespace(Namespace(number, spec))
        for number, name in manifest.engines.items():
            self.engines[number] = registry.engines[name] = Engine(number, name)
        registry.last_namespace, registry.last_engine = manifest.last_namespace, manifest.last_engine
        registry.last_session, reservations.last_writers = manifest.last_session, manifest.last_writers
        living = self.old.living
        reservations.writers = {writers: number for number, writers in manifest.writers.items() if living >= {*writers}}
        for each in self.old.groups:
            self.groups.append(registry.namespaces[each[0]].groups[each[1]] if each else _unknown_group())

    # Cached blocks.

    def _adopt_extents(self) -> None:
        pool = self._pool
        # Rows are ordered by extent, and each extent has some, so no extent is searched for.
        begins = np.flatnonzero(np.diff(self.old.extent, prepend=-1))
        tops = np.maximum.reduceat(self.old.tick, begins).tolist() if len(begins) else []
        self.extents: list[Extent[Block]] = []
        for cut, top in zip(self.old.cuts, tops, strict=True):
            extent = pool.adopt(cut.number, cut.slot_bytes, cut.generation, cut.slots, cut.cleared)
            extent.newest = top & ~CLASS_MASK
            self.extents.append(extent)
        pool.set_time(self.now)
        pool.tick = max([pool.tick, *(top & ~CLASS_MASK for top in tops)])
        self.refs = self._refs()

    def _ref(self, position: int) -> bytes:
        return self.refs[REF_BYTES * position : REF_BYTES * (position + 1)]

    def _refs(self) -> bytes:
        """Return the slot references of all rows, REF_BYTES each."""
        starts = np.array([self.old.rows.extent_start(cut.number) for cut in self.old.cuts], np.uint64)
        sizes = np.array([cut.slot_bytes for cut in self.old.cuts], np.uint64)
        generations = np.array([cut.generation for cut in self.old.cuts], np.uint64)
        refs = np.empty((len(self.old.row), 3), np.uint64)
        refs[:, 0] = starts[self.old.extent] + self.old.slot.astype(np.uint64) * sizes[self.old.extent]
        refs[:, 1] = self.old.row["generation"]
        refs[:, 2] = generations[self.old.extent]
        return refs.tobytes()

    def _account(self, code: int, engine: int) -> Account:
        account = self._registry.account(self.engines[engine], self.groups[code])
        account.share.live = False  # until its engine attaches
        return account

    def _show(self) -> None:
        """Put the visible blocks into the index, below their parents, and leaves into the order of eviction."""
        chosen = np.flatnonzero(self.old.visible)
        chosen = chosen[np.argsort(self.old.tick[chosen], kind="stable")]
        positions, refs = chosen.tolist(), self.refs
        row, code, engine = self.old.row[chosen], self.old.code[chosen], self.old.row["engine"][chosen]
        owners, owner = np.unique((code << 32) | engine, return_inverse=True)
        accounts = [self._account(key >> 32, key & 0xFFFFFFFF) for key in owners.tolist()]
        packed = row["hash"].tobytes()
        lengths = row["hash_bytes"].tolist()
        hashes = [packed[at : at + length] for at, length in zip(range(0, len(packed), 32), lengths, strict=True)]
        blocks = [
            Block(UNQUEUED, tick, name, refs[REF_BYTES * at : REF_BYTES * at + REF_BYTES], accounts[of])
            for tick, name, at, of in zip(
                self.old.tick[chosen].tolist(), hashes, positions, owner.tolist(), strict=True
            )
        ]
        self.blocks = dict(zip(positions, blocks, strict=True))
        count, by_position, homes = len(self.old.row), self.blocks, [extent.blocks for extent in self.extents]
        roots, visibles = [each.group.root for each in accounts], [each.group.visible for each in accounts]
        places = (
            self.old.parent[chosen].tolist(),
            self.old.extent[chosen].tolist(),
            self.old.slot[chosen].tolist(),
        )
        for block, name, of, above, number, slot in zip(blocks, hashes, owner.tolist(), *places, strict=True):
            homes[number][slot] = visibles[of][name] = block
            # The same as Block.link, inlined.
            block.parent = parent = by_position[above] if above < count else roots[of]
            block.next = child = parent.child
            if child is not None:
                child.prev = block
            parent.child = block
        for block in blocks:  # ordered by last use: a sorted list is a heap
            account = block.account
            account.share.bytes += account.group.slot_bytes
            if block.child is None:
                block.queued = tick = block.tick
                account.orders[tick & CLASS_MASK].heap.append(block)
        self._counters["blocks_recovered"] += len(blocks)

    # Blocks that were being written.

    def _pend(self, position: int) -> None:
        """Restore a hidden block that waits for its writers or its parent."""
        block = self._block(position)
        above = int(self.old.parent[position])
        group = block.account.group
        block.link(self.blocks[above] if above < len(self.old.row) else group.root)
        grant = self._grant(position, block)
        grant.ready = bool(self.old.state[position] == READY)
        self._counters["blocks_recovered" if grant.ready else "blocks_resumed"] += 1
        if grant.ready:
            grant.settled, grant.extent.busy = grant.reservation.all_shards, grant.extent.busy - 1
        group.pending[block.hash] = grant

    def _hold(self, position: int) -> None:
        """Keep a slot unused until its writers have settled and a new quarantine is over.

        The quarantine starts again, because a settled shard may be that of a writer that died shortly before the
        daemon.
        """
        extent, slot = self.extents[self.old.extent[position]], int(self.old.slot[position])
        dead = self.old.dead(position) if self.old.known[position] else 0
        if self.old.known[position] and int(self.old.row["settled"][position]) | dead != self.old.shards(position):
            grant = self._grant(position, self._block(position))
            grant.block.pins, grant.verdict = GONE, Verdict.FAILED
            grant.settled |= dead
            grant.tainted_until = self.until
            self._counters["blocks_resumed"] += 1
        else:
            extent.blocks[slot] = Block(HIDDEN, 0, b"", b"", _unknown_group().root.account)
            extent.busy += 1
            self._pool.quarantine.add(self.until, extent, slot)
        self._counters["shards_dead"] += dead.bit_count()

    def _block(self, position: int) -> Block:
        row = self.old.row[position]
        account = self._account(int(self.old.code[position]), int(row["engine"]))
        account.share.bytes += account.group.slot_bytes
        block = Block(HIDDEN, int(self.old.tick[position]), self.old.hash(position), self._ref(position), account)
        self.blocks[position] = block
        self.extents[self.old.extent[position]].blocks[self.old.slot[position]] = block
        return block

    def _grant(self, position: int, block: Block) -> Grant:
        row = self.old.row[position]
        number, namespace = int(row["reservation"]), self.groups[self.old.code[position]].namespace
        reservation = self.reservations.get(number)
        engine = int(row["engine"])
        if reservation is not None and (reservation.namespace != namespace or self.reservers[number] != engine):
            # Such rows only exist if a process wrote where it must not. The slot waits until its writers end.
            number = self._reservations.last = self._reservations.last + 1
            reservation = None
        if reservation is None:
            reservation = Reservation(number, namespace, int(row["owner"]), self.old.writers(position), self.now)
            reservation.writers_number = int(row["writers"])
            self.reservations[number] = reservation
            self.reservers[number] = engine
        extent = self.extents[self.old.extent[position]]
        extent.busy += 1
        grant = Grant(block, extent, int(self.old.slot[position]), reservation)
        grant.settled = int(row["settled"])
        taken = self.granted.setdefault(number, {})
        place = int(row["position"])
        taken[place if place not in taken else max(taken) + 1] = grant
        return grant

    def _settle_up(self) -> None:
        """Give each reservation its grants in order; those whose blocks are gone have failed."""
        # Forged numbers may be large, and numpy would turn a list of small and large ones into inexact floats.
        mine = self.old.visible & np.isin(self.old.row["reservation"], np.array(list(self.reservations), np.uint64))
        for position in np.flatnonzero(mine).tolist():
            block, reservation = (
                self.blocks[position],
                self.reservations[int(self.old.row["reservation"][position])],
            )
            grant = Grant(block, self.extents[self.old.extent[position]], int(self.old.slot[position]), reservation)
            grant.ready, grant.settled = True, reservation.all_shards
            self.granted[reservation.id].setdefault(int(self.old.row["position"][position]), grant)
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
                engine = self._registry.engines[some.block.account.engine]
                engine.reservations[number] = reservation
                engine.writing += sum(grant.extent.slot_bytes for grant in grants if not grant.whole)
                self._counters["reservations_recovered"] += 1


def _continued(ticks: Ints, now: float) -> Ints:
    """Return ticks of the previous daemon as this one continues them at `now`.

    Those of older releases are only an order, and those from the future are of an engine that wrote where it must not,
    or of a clock that has started again. Such blocks count as just used, in their order.
    """
    end = FIRST_TICK + int(now * TICKS_PER_SECOND)
    found: Ints = (ticks & ~CLASS_MASK) | np.minimum(ticks & CLASS_MASK, OFTEN)
    odd = np.flatnonzero(((ticks < FIRST_TICK) & (ticks != GOES_FIRST)) | (ticks > end + AHEAD * TICKS_PER_SECOND))
    order = odd[np.argsort(ticks[odd], kind="stable")]
    end = end & ~CLASS_MASK
    cls = np.where(ticks[order] < FIRST_TICK, 0, found[order] & CLASS_MASK)
    found[order] = (end + NEXT_TICK * np.arange(1, len(order) + 1)) | cls
    return found


def _unknown_group() -> Group:
    """Return a placeholder for an unknown group."""
    return Group(0, 0, GroupSpec(1, 1), MIN_HASH_BYTES)
