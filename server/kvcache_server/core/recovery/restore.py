"""Builds a cache from the result of read_rows.py: pages, index, and unfinished reservations. Pure."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from kvcache_proto.region import FREE, READY
from kvcache_proto.types import MIN_HASH_BYTES, REF_BYTES, GroupSpec, Verdict
from kvcache_server.core.index import (
    CLASS_MASK,
    EVICT_FIRST,
    FIRST_TICK,
    GONE,
    HIDDEN,
    NEXT_TICK,
    OFTEN,
    PACE_SHIFT,
    TICK_MASK,
    TICKS_PER_SECOND,
    UNQUEUED,
    Account,
    Block,
    Grant,
    Group,
    Reservation,
)
from kvcache_server.core.pool import Pool
from kvcache_server.core.recovery.read_rows import Snapshot
from kvcache_server.core.registry import Registry
from kvcache_server.core.reservations import Reservations
from kvcache_server.core.sessions import Engine, Namespace

Ints = npt.NDArray[np.int64]
_FIRST_UNPACED, _UNPACED_EVICT_FIRST = 1 << 59, 4  # in ticks without paces: a time in 2^-20 s, and two bits of class
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
    ) -> None:
        self.old = snapshot  # of the previous daemon
        snapshot.tick = _continued(snapshot.tick, now)
        self._pool, self._registry, self._reservations, self._counters = pool, registry, reservations, counters
        self.now, self.until = now, now + reservations.limits.quarantine  # of the slots of dead writers
        self.groups: list[Group] = []
        # Stands for unknown ones.
        self._unknown = Group(0, 0, GroupSpec(1, 1), MIN_HASH_BYTES, pool.geometry.page_bytes)
        self.engines: dict[int, Engine] = {}
        self.reservations: dict[int, Reservation] = {}
        self.reservers: dict[int, int] = {}  # the engine of each reservation
        self.granted: dict[int, dict[int, Grant]] = {}  # by reservation and position
        self.blocks: dict[int, Block] = {}  # by position among the rows

    def run(self) -> None:
        self._name()
        self._pool.set_time(self.now)
        self._pool.tick = max(self._pool.tick, int(self.old.tick.max(initial=0)) & ~TICK_MASK)
        self._resume_pool()
        self._show()
        for position in self.old.pending:
            self._pend(position)
        for position in self.old.doomed():
            self._hold(position)
        self._settle_up()
        self.old.close_free_rows()
        self._counters.update(self.old.counters)

    def _name(self) -> None:
        """Create the namespaces, engines and tuples of writers that the rows refer to by number."""
        manifest, registry, reservations = self.old.manifest, self._registry, self._reservations
        for number, spec in manifest.namespaces.items():
            registry.add_namespace(Namespace(number, spec, self._pool.geometry.page_bytes))
        for number, name in manifest.engines.items():
            self.engines[number] = registry.engines[name] = Engine(number, name)
        registry.last_namespace, registry.last_engine = manifest.last_namespace, manifest.last_engine
        registry.last_session, reservations.last_writers = manifest.last_session, manifest.last_writers
        living = self.old.living
        reservations.writers = {writers: number for number, writers in manifest.writers.items() if living >= {*writers}}
        for each in self.old.groups:
            self.groups.append(registry.namespaces[each[0]].groups[each[1]] if each else self._unknown)

    # Cached blocks.

    def _resume_pool(self) -> None:
        """Give the pool the pages that no row claims, and close their rows."""
        old, pages = self.old, self._pool.geometry.pages
        taken = old.state != FREE
        ends: Ints = np.zeros(pages + 1, np.int64)
        np.add.at(ends, old.page[taken], 1)
        np.add.at(ends, (old.page + old.pages)[taken], -1)
        for position, runs in old.scattered.items():
            if taken[position]:
                first, count = int(old.page[position]), int(old.pages[position])
                ends[first], ends[first + count] = ends[first] - 1, ends[first + count] + 1
                for page, count in runs:
                    ends[page], ends[page + count] = ends[page] + 1, ends[page + count] - 1
        free = np.concatenate(([False], np.cumsum(ends[:-1]) == 0, [False]))
        edges = np.flatnonzero(free[1:] != free[:-1]).tolist()
        self._pool.resume(old.last, [(begin, end - begin) for begin, end in zip(edges[::2], edges[1::2], strict=True)])
        refs = np.empty((len(old.row), 2), np.uint64)
        refs[:, 0] = self._pool.geometry.data_offset + old.page * self._pool.geometry.page_bytes
        refs[:, 1] = old.row["generation"]
        self.refs = refs.tobytes()  # to the blocks of all rows, REF_BYTES each

    def _ref(self, position: int) -> bytes:
        return self.refs[REF_BYTES * position : REF_BYTES * (position + 1)]

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
        count, by_position, homes = len(self.old.row), self.blocks, self._pool.blocks
        roots, visibles = [each.group.root for each in accounts], [each.group.visible for each in accounts]
        places = self.old.parent[chosen].tolist(), self.old.page[chosen].tolist()
        for block, name, of, above, page in zip(blocks, hashes, owner.tolist(), *places, strict=True):
            homes[page] = visibles[of][name] = block
            # The same as Block.link, inlined.
            block.parent = parent = by_position[above] if above < count else roots[of]
            block.next = child = parent.child
            if child is not None:
                child.prev = block
            parent.child = block
        for block in blocks:
            account = block.account
            account.share.bytes += account.group.allocated_bytes
            if block.child is None:
                account.leaves.append(block)
                block.queued = len(account.leaves)
        for position, runs in self.old.scattered.items():
            if position in self.blocks:
                self._pool.adopt(self.blocks[position], runs)
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
            grant.settled = grant.reservation.all_shards
            self._pool.busy -= group.pages
        group.pending[block.hash] = grant

    def _hold(self, position: int) -> None:
        """Keep pages unused until their writers have settled and a new quarantine is over.

        The quarantine starts again, because a settled shard may be that of a writer that died shortly before the
        daemon.
        """
        dead = self.old.dead(position) if self.old.known[position] else 0
        if self.old.known[position] and int(self.old.row["settled"][position]) | dead != self.old.shards(position):
            grant = self._grant(position, self._block(position))
            grant.block.pins, grant.verdict = GONE, Verdict.FAILED
            grant.settled |= dead
            grant.tainted_until = self.until
            self._counters["blocks_resumed"] += 1
        else:
            block = Block(HIDDEN, 0, b"", self._ref(position), self._unknown.root.account)
            runs = self.old.runs(position)
            pages = sum(count for _, count in runs)
            self._pool.adopt(block, runs)
            self._pool.busy += pages
            self._pool.quarantine.add(self.until, block, pages)
        self._counters["shards_dead"] += dead.bit_count()

    def _block(self, position: int) -> Block:
        row = self.old.row[position]
        account = self._account(int(self.old.code[position]), int(row["engine"]))
        account.share.bytes += account.group.allocated_bytes
        block = Block(HIDDEN, int(self.old.tick[position]), self.old.hash(position), self._ref(position), account)
        self.blocks[position] = block
        self._pool.adopt(block, self.old.runs(position))
        return block

    def _grant(self, position: int, block: Block) -> Grant:
        row = self.old.row[position]
        number, namespace = int(row["reservation"]), self.groups[self.old.code[position]].namespace
        engine, reservation = int(row["engine"]), self.reservations.get(number)
        if reservation is not None and (reservation.namespace != namespace or self.reservers[number] != engine):
            # Such rows only exist if a process wrote where it must not. The pages wait until their writers end.
            number = self._reservations.last = self._reservations.last + 1
            reservation = None
        if reservation is None:
            writers = self.old.writers(position), int(row["writers"])
            reservation = Reservation(number, namespace, int(row["owner"]), *writers, self.now)
            self.reservations[number] = reservation
            self.reservers[number] = engine
        self._pool.busy += block.account.group.pages
        grant = Grant(block, self.old.at(position), reservation)
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
            reservation = self.reservations[int(self.old.row["reservation"][position])]
            grant = Grant(self.blocks[position], self.old.at(position), reservation)
            grant.ready, grant.settled = True, reservation.all_shards
            self.granted[reservation.id].setdefault(int(self.old.row["position"][position]), grant)
        for number, reservation in self.reservations.items():
            granted = self.granted[number]
            some = next(iter(granted.values()))
            for position in range(max(granted) + 1):
                if position not in granted:
                    granted[position] = Grant(some.block, some.row, reservation)
                    granted[position].settled, granted[position].verdict = reservation.all_shards, Verdict.FAILED
            grants = [granted[position] for position in range(len(granted))]
            reservation.unsettled = sum(not grant.is_settled for grant in grants)
            if reservation.unsettled:
                reservation.grants = grants
                engine = self._registry.engines[some.block.account.engine]
                engine.reservations[number] = reservation
                engine.writing += sum(
                    each.block.account.group.allocated_bytes for each in grants if not each.is_settled
                )
                self._counters["reservations_recovered"] += 1


def _continued(ticks: Ints, now: float) -> Ints:
    """Return ticks of the previous daemon as this one continues them at `now`.

    Those without paces, from older versions, get none. Those of still older ones are only an order, and those from the
    future come from an engine that wrote where it must not, or from a restarted clock. Such blocks count as just used,
    in their order.
    """
    times = (ticks - _FIRST_UNPACED >> PACE_SHIFT) * NEXT_TICK
    unpaced = (ticks >= _FIRST_UNPACED) & (ticks < FIRST_TICK)
    ticks = np.where(unpaced, FIRST_TICK + times | ticks & CLASS_MASK, ticks)
    ticks = np.where(ticks == _UNPACED_EVICT_FIRST, EVICT_FIRST, ticks)
    end = FIRST_TICK + int(now * TICKS_PER_SECOND)
    found: Ints = (ticks & ~CLASS_MASK) | np.minimum(ticks & CLASS_MASK, OFTEN)
    odd = np.flatnonzero(((ticks < FIRST_TICK) & (ticks != EVICT_FIRST)) | (ticks > end + AHEAD * TICKS_PER_SECOND))
    order = odd[np.argsort(ticks[odd], kind="stable")]
    end = end & ~TICK_MASK
    low = np.where(ticks[order] < FIRST_TICK, 0, found[order] & TICK_MASK)
    found[order] = (end + NEXT_TICK * np.arange(1, len(order) + 1)) | low
    return found
