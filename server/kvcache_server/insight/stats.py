"""The figures of `status`, and what is counted for them beyond the core's state. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import inf

import msgspec

from kvcache_proto.counts import CLIENT_COUNTS, MAX_COUNT, MAX_GAIN, MAX_NAMES, OTHER
from kvcache_proto.errors import BadArgument
from kvcache_proto.messages import ReportClient
from kvcache_proto.types import Breaker, NamespaceSpec
from kvcache_server import status
from kvcache_server.core.cache import Cache
from kvcache_server.core.index import Block
from kvcache_server.core.limits import LOOK, STEP
from kvcache_server.core.sessions import Namespace, Session
from kvcache_server.insight.early_evictions import EarlyEvictions
from kvcache_server.insight.infinite_cache import InfiniteCache
from kvcache_server.insight.optimum import Comparison
from kvcache_server.slices import Steps
from kvcache_server.status import Daemon, Histogram, Pool, Status

# A report is one frame. Beyond this many characters, namespaces are reported without identities and groups. Of a
# namespace's engines, only those with the most bytes are named.
MOST_IDENTITY = 1 << 20
MOST_ENGINES = 64

_BOUNDS = (1, 10, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86400, 3 * 86400, 7 * 86400)
_SAMPLES = 4096
_LOW = 8  # position of the lowest byte of the generation in a block's reference
_EVERY = 8  # one eviction in this many is measured: this costs a fiftieth of storing a block


class Report:
    def __init__(
        self,
        cache: Cache,
        residency: Residency,
        infinite: Mapping[bytes, InfiniteCache],
        early: EarlyEvictions,
        telemetry: Telemetry,
    ) -> None:
        """`infinite` is by the tag of the group."""
        self._cache, self._residency, self._infinite, self._telemetry = cache, residency, infinite, telemetry
        self._early, self._comparison = early, Comparison(cache)

    def figures(self, now: float, daemon: Callable[[], Daemon]) -> Steps[Status]:
        """Return all figures; `daemon()` returns those of the process.

        O(namespaces, accounts, sessions, grants), in slices: each part is reported as of its turn.
        """
        # Sessions first: a report without a session also has the memory that its end has freed.
        sessions, away = yield from self._sessions(now)
        pool, namespaces = (yield from self._pool()), (yield from self._namespaces())
        cache = self._cache
        hindsight = yield from self._comparison.figures(now)
        return Status(
            pool=pool,
            namespaces=namespaces,
            sessions=sessions,
            away=away,
            life=cache.epoch,
            grace=cache.in_grace,
            evictions=dict(cache.evictions),
            evicted_unread=cache.evicted_unread,
            eviction=cache.eviction_figures(),
            refusals=dict(cache.refusals),
            hints=cache.retained(now),
            client_counts=dict(self._telemetry.total),
            counters={**cache.counters, "blocks_evicted": cache.evictions.total()},
            daemon=daemon(),
            evicted_early=self._early.count,
            hindsight=hindsight,
        )

    def _pool(self) -> Steps[Pool]:
        groups = [group for namespace in self._cache.namespaces.values() for group in namespace.groups]
        writing = hidden = 0
        for group in groups:
            pending = list(group.pending.values())
            for at in range(0, len(pending), LOOK):
                ready = sum(grant.ready for grant in pending[at : at + LOOK])
                hidden += ready
                writing += len(pending[at : at + LOOK]) - ready
                yield
        pinned = yield from self._pinned()
        cache = self._cache
        return Pool(
            **msgspec.structs.asdict(cache.memory_figures()),
            blocks=sum(len(group.visible) for group in groups),
            blocks_writing=writing,
            blocks_hidden=hidden,
            pinned_bytes=pinned,
            leases=sum(len(session.leases) for session in cache.holders()),
            reservations=sum(len(engine.reservations) for engine in cache.engines.values()),
            residence=self._residency.residence,
            doubled_bytes=cache.doubled_bytes(),
        )

    def _pinned(self) -> Steps[int]:
        """Return the bytes of the blocks that leases hold, each counted once. O(leases, blocks that they hold)."""
        found: dict[int, Block] = {}  # by id(): no other block has it while this one is referenced here
        size = looks = 0
        for session in self._cache.holders():
            for lease in list(session.leases.values()):
                for block in lease.blocks:
                    each: Block | None = block
                    while each is not None and each.parent is not None and id(each) not in found:
                        found[id(each)] = each
                        size += each.account.group.allocated_bytes
                        each = each.parent
                        looks += 1
                        if looks % LOOK == 0:
                            yield
                looks += 1
                if looks % LOOK == 0:
                    yield
        return size

    def _namespaces(self) -> Steps[list[status.Namespace]]:
        engines: dict[int, Counter[str]] = {
            number: Counter() for number in self._cache.namespaces
        }  # bytes of each, by namespace
        for at, share in enumerate(self._cache.shares(), 1):
            engines.setdefault(share.namespace, Counter())[share.engine] += share.bytes
            if at % LOOK == 0:
                yield
        found: list[status.Namespace] = []
        said = 0
        for namespace in list(self._cache.namespaces.values()):
            said += _length(namespace.spec)
            found.append(self._namespace(namespace, engines.get(namespace.number, Counter()), said <= MOST_IDENTITY))
            if len(found) % STEP == 0:
                yield
        return found

    def _namespace(self, namespace: Namespace, engines: Counter[str], with_spec: bool) -> status.Namespace:
        named = dict(engines.most_common(MOST_ENGINES))
        if len(named) < len(engines):
            named[OTHER] = named.get(OTHER, 0) + engines.total() - sum(named.values())
        spec, groups = namespace.spec, namespace.groups
        return status.Namespace(
            id=namespace.id,
            model=spec.model,
            identity=spec.identity if with_spec else {},
            groups=[status.Group.of(group.spec) for group in groups] if with_spec else [],
            hash_bytes=spec.hash_bytes,
            block_tokens=[group.spec.block_tokens for group in groups],
            block_bytes=[group.spec.block_bytes for group in groups],
            overhead=round(namespace.overhead, 4),
            lookups=namespace.lookups,
            requested_blocks=namespace.requested_blocks,
            hit_blocks=namespace.hit_blocks,
            hit_bytes=sum(group.read_blocks * group.spec.block_bytes for group in groups),
            lost_blocks=sum(self._infinite[group.tag].missed_blocks for group in groups if group.tag in self._infinite),
            saved_blocks=sum(group.saved_blocks for group in groups),
            saved_bytes=sum(group.saved_blocks * group.spec.block_bytes for group in groups),
            blocks=sum(len(group.visible) for group in groups),
            bytes=engines.total(),
            engines=named,
        )

    def _sessions(self, now: float) -> Steps[tuple[list[status.Session], list[status.Away]]]:
        """Return the sessions, and those that are away."""
        owned, written = Counter[int](), Counter[int]()  # reservations, by session
        reservations = [each for engine in self._cache.engines.values() for each in engine.reservations.values()]
        for at, reservation in enumerate(reservations, 1):
            owned[reservation.owner] += 1
            written.update(set(reservation.writers))
            if at % LOOK == 0:
                yield
        found: list[status.Session] = []
        for session in list(self._cache.sessions.values()):
            client = self._telemetry.of(session.id)
            found.append(
                status.Session(
                    id=session.id,
                    engine=session.engine.name,
                    label=session.label,
                    age_s=round(now - session.opened, 1),
                    leases=len(session.leases),
                    reservations=owned[session.id],
                    namespaces={namespace.id: list(shards) for namespace, shards in session.attached.values()},
                    breaker="unknown" if client.breaker is None else client.breaker.name.lower(),
                    counts=dict(client.counts),
                )
            )
            if len(found) % STEP == 0:
                yield
        return found, [
            status.Away(id=number, engine=session.engine.name, reservations=written[number])
            for number, session in self._cache.disconnected.items()
        ]


def _length(spec: NamespaceSpec) -> int:
    """Return the approximate number of characters in a report for the identity and the groups of a namespace."""
    return sum(map(len, [*spec.identity, *spec.identity.values()])) + len(spec.groups) * (80 + 8 * spec.shards)


# Kept for the report.


class Residency:
    """How long blocks were cached.

    Blocks have no timestamps, because there may be millions. Generations of slots increase with time, so a few pairs of
    (generation, time) show when a slot was granted.

    Attributes: `residence` is a histogram of the time in seconds that evicted blocks were cached, of one in 8.
    """

    def __init__(self) -> None:
        self.residence = Histogram.of(_BOUNDS)
        self._generations: list[int] = []
        self._times: list[float] = []
        self._now = 0.0

    def tick(self, generation: int, now: float) -> None:
        """Record that `generation` is the last one used by `now`. Call it a few times per second.

        The age of blocks from before the first call, such as those of an earlier daemon, is unknown.
        """
        self._now = now
        if self._generations and generation == self._generations[-1]:
            return
        self._generations.append(generation)
        self._times.append(now)
        if len(self._times) > _SAMPLES:  # drop every second old sample: old times need not be exact
            del self._generations[1 : _SAMPLES // 2 : 2], self._times[1 : _SAMPLES // 2 : 2]

    def evicted(self, blocks: Iterable[Block]) -> None:
        """Count the blocks that are in the sample and were stored by this daemon."""
        first = self._generations[0] if self._generations else inf
        for generation in [block.generation for block in blocks if not block.ref[_LOW] % _EVERY]:
            if generation > first:
                at = bisect_left(self._generations, generation)
                given = self._times[at] if at < len(self._times) else self._now
                self.residence.add(max(0.0, self._now - given))


class Client(msgspec.Struct):
    """The telemetry of one session's client. `breaker` is None if it has sent none."""

    breaker: Breaker | None = None
    counts: Counter[str] = msgspec.field(default_factory=Counter)


_SILENT = Client()


class Telemetry:
    """What clients report: the states of their breakers, and their counters.

    `total` has the counts of all clients together, including former ones.
    """

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        self._clients: dict[int, Client] = {}  # by session

    def of(self, session: int) -> Client:
        return self._clients.get(session, _SILENT)

    def tell(self, session: Session, request: ReportClient) -> None:
        """Store the telemetry of a session's client, and add it to the total. Raises BadArgument; then nothing has
        changed."""
        counts = request.counts
        if request.breaker not in list(Breaker):
            raise BadArgument(f"breaker {request.breaker}: one of {', '.join(str(int(each)) for each in Breaker)}")
        if len(counts) > MAX_NAMES or not all(0 <= count <= MAX_GAIN for count in counts.values()):
            raise BadArgument(f"{len(counts)} counts: at most {MAX_NAMES}, each 0 to {MAX_GAIN}")
        client = self._clients.setdefault(session.id, Client())
        client.breaker = Breaker(request.breaker)
        for name, count in counts.items():
            known = name if name in CLIENT_COUNTS else OTHER
            for told in (client.counts, self.total):
                told[known] = min(told[known] + count, MAX_COUNT)

    def forget(self, session: int) -> None:
        """Drop the telemetry of a session's client; the total keeps it."""
        self._clients.pop(session, None)
