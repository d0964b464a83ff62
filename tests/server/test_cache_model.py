"""The cache compared with a naive model: the same commands and answers, and all invariants after each.

Blocks are evicted by age, as always while the guard says so; test_worth.py compares eviction by worth."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from host import geometry_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcache_proto import messages as m
from kvcache_proto.errors import BadArgument
from kvcache_proto.types import GroupSpec, NamespaceSpec, Outcome, Refusal, Verdict
from kvcache_server.core.cache import Cache
from kvcache_server.core.eviction.policy import LRU
from kvcache_server.core.integrity import check_integrity
from kvcache_server.core.limits import Limits

ROOM = 6  # blocks
SHARDS = 2
SHARD_BYTES = 64 << 10
QUARANTINE, SUPERSEDE = 10.0, 2.0
PINNED = 4  # blocks that may be pinned at one time
RANKS = ("scheduler", "rank 0", "rank 1")

paths = st.text(alphabet="ab", min_size=1, max_size=4)


def digest(path: str) -> bytes:
    return path.encode().ljust(8, b".")


@dataclass
class ModelGrant:
    path: str
    reservation: int
    created: float
    writers: dict[int, str]  # unsettled shards
    tick: int
    fate: Verdict | None = None
    tainted_until: float = 0.0


@dataclass
class Model:
    """One engine, one namespace, in the plainest words: sets of paths, and a look at all of them for each question."""

    room: int = ROOM
    tick: int = 0
    visible: dict[str, int] = field(default_factory=dict)  # path -> last use of it or of any descendant ever cached
    own: dict[str, int] = field(default_factory=dict)
    current: dict[str, ModelGrant] = field(default_factory=dict)  # being written, or whole and hidden
    hidden: set[str] = field(default_factory=set)
    grants: dict[int, list[ModelGrant]] = field(default_factory=dict)
    leases: dict[int, str] = field(default_factory=dict)
    quarantined: list[float] = field(default_factory=list)

    def used(self) -> int:
        open_grants = [g for grants in self.grants.values() for g in grants if g.writers]
        return len(self.visible) + len(self.hidden) + len(open_grants) + len(self.quarantined)

    def use(self, path: str, tick: int) -> None:
        for end in range(1, len(path) + 1):
            if path[:end] in self.visible:
                self.visible[path[:end]] = max(self.visible[path[:end]], tick)

    def next_tick(self) -> int:
        self.tick += 1
        return self.tick

    def children(self, path: str) -> list[str]:
        known = set(self.visible) | set(self.current)
        return [other for other in known if len(other) == len(path) + 1 and other.startswith(path)]

    def evict(self, keep: str) -> bool:
        leaves = [p for p in self.visible if not self.children(p) and p not in self.leases.values() and p != keep]
        if not leaves:
            return False
        del self.visible[min(leaves, key=self.visible.__getitem__)]
        return True

    def pinned(self) -> set[str]:
        return {lease[:end] for lease in self.leases.values() for end in range(1, len(lease) + 1)}

    def acquire(self, run: list[str], pin: bool, lease: int) -> tuple[int, int, int]:
        hits = 0
        while hits < len(run) and run[hits] in self.visible:
            hits += 1
        end = hits
        while end < len(run) and (run[end] in self.current or run[end] in self.visible):
            end += 1
        pending, withheld = end - hits, 0
        if pin:
            while len(self.pinned() | set(run[:hits])) > PINNED:
                hits, withheld, pending = hits - 1, withheld + 1, 0
        if hits:
            self.use(run[hits - 1], self.next_tick())
            if lease:
                self.leases[lease] = run[hits - 1]
        return hits, pending, withheld

    def reserve(self, number: int, parent: str, run: list[str], now: float) -> list[Refusal]:
        answers, granted = [], []
        above: str | None = parent if not parent or parent in self.visible or parent in self.current else None
        for path in run:
            rival = self.current.get(path)
            if above is None:
                answers.append(Refusal.NO_PARENT)
                continue
            if path in self.visible:
                self.use(path, self.next_tick())
                answers.append(Refusal.PRESENT)
            elif rival is not None and (path in self.hidden or now - rival.created < SUPERSEDE):
                answers.append(Refusal.IN_FLIGHT)
            elif self.used() >= self.room and not self.evict(above):
                answers.append(Refusal.NO_SPACE)
                above = None
                continue
            else:
                if rival is not None:
                    rival.fate = Verdict.SUPERSEDED
                grant = ModelGrant(path, number, now, {0: RANKS[1], 1: RANKS[2]}, self.next_tick())
                self.current[path] = grant
                granted.append(grant)
                self.grants.setdefault(number, []).append(grant)
                answers.append(Refusal.GRANTED)
            above = path
        return answers

    def settle(self, grant: ModelGrant, shards: set[int], outcome: Outcome) -> Verdict:
        failed = outcome != Outcome.COMMITTED
        if failed and grant.fate is None:
            self.doom(grant)
        for shard in shards:
            grant.writers.pop(shard)
        if grant.writers:
            return grant.fate or Verdict.PARTIAL
        if grant.fate is not None:
            if grant.tainted_until:
                self.quarantined.append(grant.tainted_until)
            return grant.fate
        if grant.path[:-1] and grant.path[:-1] not in self.visible:
            self.hidden.add(grant.path)
            return Verdict.HIDDEN
        self.show(grant.path)
        return Verdict.VISIBLE

    def show(self, path: str) -> None:
        tick = self.current.pop(path).tick
        self.hidden.discard(path)
        self.visible[path] = tick
        self.use(path, tick)
        for child in self.children(path):
            if child in self.hidden:
                self.show(child)

    def doom(self, grant: ModelGrant) -> None:
        for path in [p for p in self.current if p.startswith(grant.path)]:
            gone = self.current.pop(path)
            gone.fate = Verdict.FAILED if gone is grant else Verdict.ORPHANED
            self.hidden.discard(path)


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        geometry = geometry_of(ROOM * SHARDS)
        limits = Limits(
            pin_quota=(PINNED + 0.5) / ROOM,
            write_quota=1.0,
            supersede_after=SUPERSEDE,
            quarantine=QUARANTINE,
        )
        self.cache = Cache(memoryview(bytearray(geometry.region_bytes)), geometry, limits, seed=7, policy=LRU)
        self.region = geometry.region_id
        self.model = Model()
        self.now = 0.0
        self.sessions: dict[str, int] = {}
        self.spec = NamespaceSpec("m", (GroupSpec(16, (SHARD_BYTES, SHARD_BYTES)),), hash_bytes=8)
        for rank in RANKS:
            self.start(rank)

    def start(self, rank: str) -> None:
        session = self.cache.open_session("engine", rank, self.now)
        shards = () if rank == RANKS[0] else (int(rank[-1]),)
        self.namespace = self.ask_as(session, m.Attach(1, b"", self.spec, shards)).namespace
        self.sessions[rank] = session

    def ask_as(self, session: int, request: m.Request):
        return self.cache.handle(session, request, self.now)

    @rule(path=paths, pin=st.booleans())
    def acquire(self, path: str, pin: bool) -> None:
        run = [path[:end] for end in range(1, len(path) + 1)]
        reply = self.ask_as(self.sessions[RANKS[0]], m.Acquire(1, b"", self.namespace, list(map(digest, run)), pin=pin))
        if set(RANKS) - set(self.sessions):
            assert reply.hits == 0
        else:
            assert (reply.hits, reply.pending, reply.withheld) == self.model.acquire(run, pin, reply.lease)
            assert bool(reply.lease) == (pin and reply.hits > 0)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.model.leases)))
        assert self.ask_as(self.sessions[RANKS[0]], m.Release(0, b"", [lease])) is None
        del self.model.leases[lease]

    @precondition(lambda self: len(self.sessions) == len(RANKS))
    @rule(path=paths, times=st.integers(2, 6))
    def acquire_often(self, path: str, times: int) -> None:
        """Many leases of one prefix: past the quota if each counted all of it."""
        for end in range(times):
            self.acquire(path[: 1 + end % len(path)], pin=True)

    @rule(path=paths, cut=st.integers(0, 4))
    def reserve(self, path: str, cut: int) -> None:
        cut = min(cut, len(path) - 1)
        run = [path[:end] for end in range(cut + 1, len(path) + 1)]
        parent = digest(path[:cut]) if cut else None
        request = m.Reserve(1, b"", self.namespace, [m.Run(list(map(digest, run)), parent)])
        if set(RANKS) - set(self.sessions):
            with pytest.raises(BadArgument, match="shards are attached"):
                self.ask_as(self.sessions[RANKS[0]], request)
            return
        number = self.cache.reservations.last + 1
        expected = self.model.reserve(number, path[:cut], run, self.now)
        reply = self.ask_as(self.sessions[RANKS[0]], request)
        assert [Refusal(answer) for answer in reply.answers] == expected
        assert reply.reservation == (number if Refusal.GRANTED in expected else 0)

    @precondition(lambda self: len(self.sessions) == len(RANKS))
    @rule(path=paths)
    def store(self, path: str) -> None:
        """Reserve a whole chain and commit what is granted: the common way, which fills the pool and evicts."""
        self.reserve(path, 0)
        for number, position in self.unsettled():
            if number == self.cache.reservations.last:
                for shard in (0, 1):
                    self.commit(number, position, shard)

    @precondition(lambda self: len(self.sessions) == len(RANKS))
    @rule(stored=st.lists(paths, min_size=4, max_size=8), used=st.lists(paths, max_size=3), last=paths)
    def store_many(self, stored: list[str], used: list[str], last: str) -> None:
        """Fill the pool, use some of it, and need room again: what goes, and in which order."""
        for path in stored:
            self.store(path)
        for path in used:
            self.acquire(path, pin=False)
        self.store(last)

    def commit(self, number: int, position: int, shard: int) -> None:
        request = m.Settle(1, b"", self.region, number, (shard,), Outcome.COMMITTED, [position])
        verdict = self.ask_as(self.sessions[RANKS[shard + 1]], request).verdicts[0]
        assert Verdict(verdict) == self.model.settle(self.model.grants[number][position], {shard}, Outcome.COMMITTED)

    def unsettled(self) -> list[tuple[int, int]]:
        return [(n, i) for n, grants in self.model.grants.items() for i, g in enumerate(grants) if g.writers]

    @precondition(lambda self: self.unsettled())
    @rule(data=st.data(), shard=st.integers(0, 1), outcome=st.sampled_from(list(Outcome)))
    def settle(self, data: st.DataObject, shard: int, outcome: Outcome) -> None:
        number, position = data.draw(st.sampled_from(self.unsettled()))
        grant = self.model.grants[number][position]
        if grant.writers.get(shard) not in self.sessions:
            return
        request = m.Settle(1, b"", self.region, number, (shard,), outcome, [position])
        verdict = self.ask_as(self.sessions[grant.writers[shard]], request).verdicts[0]
        assert Verdict(verdict) == self.model.settle(grant, {shard}, outcome)

    @precondition(lambda self: self.unsettled() and RANKS[0] in self.sessions)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number, position = data.draw(st.sampled_from(self.unsettled()))
        grant = self.model.grants[number][position]
        request = m.Settle(1, b"", self.region, number, (0, 1), Outcome.NEVER_STARTED, [position])
        reply = self.ask_as(self.sessions[RANKS[0]], request)
        assert Verdict(reply.verdicts[0]) == self.model.settle(grant, set(grant.writers), Outcome.NEVER_STARTED)

    @rule(rank=st.sampled_from(RANKS[1:]))
    def kill_and_restart(self, rank: str) -> None:
        if rank not in self.sessions:
            self.start(rank)
            return
        self.cache.end_session(self.sessions.pop(rank), self.now)
        self.cache.sweeper.finish()
        shard = int(rank[-1])
        for grants in list(self.model.grants.values()):
            for grant in grants:
                if shard in grant.writers:
                    grant.tainted_until = self.now + QUARANTINE
                    self.model.settle(grant, {shard}, Outcome.FAILED)
        # A shard that another life of the rank reserved is its own; a new life must not settle the old one's.
        for grants in self.model.grants.values():
            for grant in grants:
                assert shard not in grant.writers

    @rule(seconds=st.sampled_from([0.5, 2.5, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.cache.tick(self.now)
        self.model.quarantined = [until for until in self.model.quarantined if until > self.now]

    @invariant()
    def holds(self) -> None:
        check_integrity(self.cache)
        group = self.cache.namespaces[1].groups[0]
        assert {b.hash for b in group.visible.values()} == set(map(digest, self.model.visible))
        assert set(group.pending) == set(map(digest, self.model.current))
        assert len(self.cache.pool.quarantine) == len(self.model.quarantined)
        assert self.cache.engines["engine"].pins.bytes >= len(self.model.pinned()) * group.allocated_bytes


CacheMachine.TestCase.settings = settings(stateful_step_count=60, deadline=None)
TestCacheAgainstModel = CacheMachine.TestCase
