"""Blocks that are kept although no engine reads them: retained by hints of engines, or pinned by an operator. Pure.

A retention names a chain of blocks, from its root on. Cached blocks are held as by a lease: the deepest one is pinned.
Blocks that are not cached yet are held once they are. Each owner (an engine, or the operator) has a quota, and all
engines together have one. Blocks that do not fit are refused. The retentions of an engine stay and count until their
time is over, even if the engine ends before.

An operator's pins have no end, and the state file contains them.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcache_proto import messages as m
from kvcache_proto.errors import BadArgument, ClientError, NotPermitted
from kvcache_proto.types import FULL, check_hashes
from kvcache_server import status
from kvcache_server.core.effects import Hinted
from kvcache_server.core.eviction.policy import DROPPED, Eviction
from kvcache_server.core.index import EVICT_FIRST, Block, Group
from kvcache_server.core.invalidation import Invalidation
from kvcache_server.core.journal import PinEnded, PinMade
from kvcache_server.core.limits import LOOK, STEP, Limits
from kvcache_server.core.lookups import boundary
from kvcache_server.core.pins import Lease, Pins
from kvcache_server.core.pool import Pool
from kvcache_server.core.registry import Registry
from kvcache_server.core.sessions import Session
from kvcache_server.core.sweeper import Sweeper

_MOST_WANTED = 8 * LOOK  # blocks of a retention that will be stored soon
TOGETHER = 0.5  # of the pool: the quota of all engines together
MOST, MOST_OF_ONE = 8192, 1024  # retentions, in all and per owner: some passes over all take a millisecond
NAMES, NAMES_OF_ONE = 1 << 20, 1 << 16  # hashes in them
_TIGHTENED = 4  # steps towards exact counts per request: some milliseconds
_MOST_NAMED = 64  # engines in the figures
FOR_EVER = math.inf


class _Cached(NamedTuple):
    """The first `blocks` blocks of a retention: those of its group, and those of suffix groups that belong to them.

    `size` and `cover` are as in Lease.
    """

    blocks: int
    chain: Sequence[Block]
    suffixes: Sequence[Block]
    size: int = 0
    cover: int = 0


@dataclass(eq=False, slots=True)
class Owner:
    """An engine that retains blocks, or has retained them until it ended; without a name, the operator.

    Attributes: `pins` counts the bytes that it holds, `retentions` are by the last hash and the tag of its group, the
    oldest first.
    """

    engine: str
    pins: Pins = field(default_factory=Pins)
    retentions: dict[bytes, Retention] = field(default_factory=dict)
    names: int = 0  # in all retentions together


@dataclass(eq=False, slots=True)
class Retention:
    """A chain that its owner wants to keep.

    Attributes: `lease` holds the first `held` of `names`, and may hold `wanted`: the rest did not fit. `until` is when
    it ends. `number` counts up, and identifies a pin.
    """

    number: int
    owner: Owner
    group: Group
    names: list[bytes]
    label: str = ""
    until: float = FOR_EVER
    request: str = ""
    key: bytes = b""
    wanted: int = 0
    held: int = 0
    lease: Lease | None = None

    def __post_init__(self) -> None:
        self.key = self.names[-1] + self.group.tag
        self.wanted = len(self.names)

    @property
    def ended(self) -> bool:
        return self.owner.retentions.get(self.key) is not self

    @property
    def sound(self) -> bool:
        """Whether lookups find the blocks that it holds."""
        return self.lease is None or all(each.is_found for each in self.lease.blocks)


class Retentions:
    """All retentions, and the engines' reports of blocks that are not needed again.

    Attributes: `refused` counts blocks that were not retained, by reason; `ended` counts retentions by cause; `waiting`
    are those that want more than they hold, by number. Blocks hidden by the first `examined` changes of invalidation
    have been released.
    """

    def __init__(
        self,
        pool: Pool,
        eviction: Eviction,
        invalidation: Invalidation,
        registry: Registry,
        sweeper: Sweeper,
        limits: Limits,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.dropped = 0  # blocks
        self.examined = 0
        self.operator = Owner("")
        self.engines: dict[str, Owner] = {}
        self.waiting: dict[int, Retention] = {}
        self._pool, self._eviction, self._invalidation = pool, eviction, invalidation
        self._registry = registry
        self._sweeper, self._effects = sweeper, sweeper.effects
        self._left: deque[Retention] = deque()  # to be looked at
        self._last = 0
        self._next_end = FOR_EVER
        self.limits = limits  # `tick` ends retentions that exceed a lowered quota

    # State.

    def owners(self) -> Iterator[Owner]:
        yield self.operator
        yield from self.engines.values()

    def all(self) -> list[Retention]:
        return [each for owner in self.owners() for each in owner.retentions.values()]

    def of_request(self, engine: str, request: str) -> list[Retention]:
        owner = self.engines.get(engine)
        return [each for each in owner.retentions.values() if each.request == request] if owner is not None else []

    @property
    def doubted(self) -> bool:
        """Whether blocks may be held that lookups no longer find."""
        return self._invalidation.under_way > 0 or self._invalidation.changes > self.examined

    @property
    def retained_bytes(self) -> int:
        """Bytes that hints of engines hold; an upper bound, as Pins.bytes is."""
        return sum(owner.pins.bytes for owner in self.engines.values())

    @property
    def quota(self) -> int:
        """Bytes that one engine may hold."""
        return int(self.limits.retain_quota * self._pool.capacity)

    @property
    def quota_together(self) -> int:
        """Bytes that all engines together may hold."""
        return int(TOGETHER * self._pool.capacity)

    @property
    def operator_quota(self) -> int:
        return int(self.limits.operator_quota * self._pool.capacity)

    def _room(self, owner: Owner) -> int:
        """Return the quota of `owner`, or the rest of the quota of all engines together if that is less."""
        if owner is self.operator:
            return self.operator_quota
        others = self.retained_bytes - owner.pins.bytes
        return min(self.quota, self.quota_together - others)

    # Requests of engines.

    def retain(self, session: Session, request: m.Retain) -> m.Retained:
        """Retain a chain, or extend the time of its retention. Raises BadArgument, UnknownHandle.

        The blocks that fit are held now or, if counting them takes long, soon.
        """
        _, group = session.group(request.namespace, request.group)
        check_hashes(request.hashes, group.hash_bytes)
        if not 0 < request.seconds <= m.MAX_SECONDS:
            raise BadArgument(f"retain for {request.seconds} s: more than 0, at most {m.MAX_SECONDS:.0f}")
        if not request.hashes:
            return m.Retained(request.id, 0)
        owner = self.engines.get(session.engine.name)
        if owner is None:
            owner = self.engines[session.engine.name] = Owner(session.engine.name)
        until = self._sweeper.now + request.seconds
        found = owner.retentions.get(request.hashes[-1] + group.tag)
        if found is not None:
            if not found.sound:
                self._let_go(found)
            # Several requests share the prefix: the longest time counts.
            found.until, found.wanted, found.request = max(found.until, until), len(found.names), request.request
            if found.held < found.wanted:
                self.waiting[found.number] = found
        else:
            found = Retention(self._last + 1, owner, group, request.hashes, "", until, request.request)
            if not self._admit(found):
                self._refuse(found, "count", len(request.hashes))
                return m.Retained(request.id, 0, "count")
        self._next_end = min(self._next_end, until)
        why = self._hold(found)
        return m.Retained(request.id, found.held, why)

    def drop(self, session: Session, request: m.Drop) -> m.Dropped:
        """Let the end of a chain be evicted first, up to the last block in other use: one that has another child, or
        that is leased, retained or pinned. Raises BadArgument, UnknownHandle.
        """
        _, group = session.group(request.namespace, request.group)
        check_hashes(request.hashes, group.hash_bytes)
        if request.after < 0:
            raise BadArgument(f"after {request.after}: 0 or more blocks")
        found = group.prefix(request.hashes)
        below: Block | None = None
        dropped = 0
        for block in reversed(found[request.after :]):
            if block.pins or any(each is not below and not each.account.group.is_suffix for each in block.children()):
                break
            self._eviction.evict_suffixes(block, DROPPED)
            if block.child is not below or (below is not None and below.next is not None):
                break
            block.tick = EVICT_FIRST
            below = block
            dropped += 1
        if dropped:
            self._eviction.drop(found[-1])
            self.dropped += dropped
        return m.Dropped(request.id, dropped)

    # Requests of operators.

    def pin(self, session: Session, request: m.Pin) -> m.Pinned:
        """Pin a chain. Raises NotPermitted unless an operator requests it and it fits, BadArgument, ClientError."""
        _check_operator(session)
        namespace = self._registry.find(request.namespace)
        group = namespace.group(request.group)
        check_hashes(request.hashes, group.hash_bytes)
        if not request.hashes:
            raise BadArgument("a pin without a block")
        pins, quota = self.operator.retentions, self.operator_quota
        found = pins.get(request.hashes[-1] + group.tag)
        if found is None:
            found = Retention(self._last + 1, self.operator, group, request.hashes, request.label)
            # Blocks that are not cached yet count, too: an operator's pin is never refused later.
            size = sum(len(each.names) * each.group.allocated_bytes for each in (found, *pins.values()))
            if size > quota:
                raise NotPermitted(f"{size} bytes would be pinned: operator_quota allows {quota}")
            if not self._admit(found):
                raise NotPermitted(f"{len(pins)} pins of {self.operator.names} blocks: there is no room for more")
            self._effects.records.append(
                PinMade(found.number, namespace.number, group.number, found.names, request.label)
            )
        self._hold(found)
        return m.Pinned(request.id, found.number, found.held)

    def unpin(self, session: Session, request: m.Unpin) -> m.Unpinned:
        """End a pin, or all. Raises NotPermitted unless an operator requests it, ClientError for an unknown number."""
        _check_operator(session)
        pins = [each for each in self.operator.retentions.values() if request.pin in (0, each.number)]
        if request.pin and not pins:
            raise ClientError(f"no pin {request.pin}: `kvcache-server pins` lists them")
        for each in pins:
            self._end(each, "unpinned")
        return m.Unpinned(request.id, len(pins))

    def restore(self, pins: Mapping[int, PinMade]) -> None:
        """Pin again the chains that the previous daemon's operator had pinned."""
        for number, pin in sorted(pins.items()):
            namespace = self._registry.namespaces.get(pin.namespace)
            if namespace is None or not 0 <= pin.group < len(namespace.groups) or not pin.hashes:
                self._effects.records.append(PinEnded(number))
                continue
            each = Retention(number, self.operator, namespace.groups[pin.group], list(pin.hashes), pin.label)
            self._admit(each)

    # Events elsewhere.

    def clear(self, namespace: int) -> None:
        """End the retentions of engines in that namespace, soon."""
        for each in self.all():
            if each.owner is not self.operator and each.group.namespace == namespace:
                each.until = self._next_end = 0.0

    def tick(self, now: float) -> None:
        """End retentions whose time is over; hold blocks stored since; end retentions that exceed a lowered quota."""
        if now >= self._next_end:
            self._sweeper.add(self._end_some)
        if self.doubted:
            self._sweeper.add(self._examine_some)
        if self.waiting and not self._left:
            self._left.extend(self.waiting.values())
            self._sweeper.add(self._hold_some)
        self._sweeper.add(self._keep_quota)
        for owner in list(self.engines.values()):
            if not owner.retentions and owner.pins.settled:
                del self.engines[owner.engine]

    # In slices.

    def _end_some(self) -> bool:
        over = [each for each in self.all() if each.until <= self._sweeper.now]
        for each in over[:STEP]:
            self._end(each, "expired" if each.until else "cleared")
        if len(over) <= STEP:
            self._next_end = min((each.until for each in self.all()), default=FOR_EVER)
        return len(over) > STEP

    def _examine_some(self) -> bool:
        """Release blocks that were hidden. They may be stored again."""
        changes, let_go = self._invalidation.changes, 0
        for each in self.all():
            if not each.sound:
                self._let_go(each)
                self.waiting[each.number] = each
                let_go += 1
                if let_go == STEP:
                    return True
        self.examined = changes
        return False

    def _hold_some(self) -> bool:
        for _ in range(min(STEP, len(self._left))):
            each = self._left.popleft()
            if self._registry.namespaces.get(each.group.namespace) is None:
                self._end(each, "namespace_gone")
            elif not each.ended and each.held < each.wanted and _may_hold_more(each):
                self._hold(each)
                break
        return bool(self._left)

    def _keep_quota(self) -> bool:
        """End retentions of the engine that holds most while, by the present counts, too much is held: a quota was
        lowered."""
        retaining = [owner for owner in self.engines.values() if owner.retentions]
        most = max(retaining, key=lambda owner: owner.pins.bytes, default=None)
        if most is None or (most.pins.bytes <= self.quota and self.retained_bytes <= self.quota_together):
            return False
        if not self._tighten():
            self._end(next(iter(most.retentions.values())), "quota")
        return True

    def _tighten(self) -> bool:
        """Take some steps towards exact counts of the held bytes; return False if all are exact."""
        inexact = self._inexact()
        if inexact is not None:
            inexact.tighten()
        return inexact is not None

    def _inexact(self) -> Pins | None:
        return next((owner.pins for owner in self.owners() if not owner.pins.exact), None)

    def figures(self, now: float) -> status.Hints:
        """O(retentions): a few milliseconds."""
        owners = [(owner, len(owner.retentions)) for owner in self.engines.values()]
        owners.sort(key=lambda pair: -pair[0].pins.bytes)
        return status.Hints(
            retained_bytes=self.retained_bytes,
            retentions=sum(count for _, count in owners),
            waiting=len(self.waiting),
            quota_bytes=self.quota,
            pinned_bytes=self.operator.pins.bytes,
            pin_quota_bytes=self.operator_quota,
            dropped_blocks=self.dropped,
            refused=dict(self.refused),
            ended=dict(self.ended),
            engines=[
                status.Retainer(
                    engine=owner.engine,
                    retentions=count,
                    bytes=owner.pins.bytes,
                    last_ends_s=round(max(each.until for each in owner.retentions.values()) - now, 1),
                )
                for owner, count in owners[:_MOST_NAMED]
                if count
            ],
            pins=[
                status.Pin(
                    pin=each.number,
                    label=each.label,
                    namespace=self._registry.namespaces[each.group.namespace].id,
                    blocks=each.held,
                    wanted=len(each.names),
                    bytes=each.held * each.group.allocated_bytes,
                )
                for each in self.operator.retentions.values()
                if each.group.namespace in self._registry.namespaces
            ],
        )

    # Beginning and end of a retention.

    def _admit(self, retention: Retention) -> bool:
        """Enter a retention; return False if there are too many."""
        owner, names, owners = retention.owner, len(retention.names), list(self.owners())
        if len(owner.retentions) >= MOST_OF_ONE or owner.names + names > NAMES_OF_ONE:
            return False
        if sum(len(each.retentions) for each in owners) >= MOST or sum(each.names for each in owners) + names > NAMES:
            return False
        self._last = max(self._last, retention.number)
        owner.names += names
        owner.retentions[retention.key] = self.waiting[retention.number] = retention
        self._next_end = min(self._next_end, retention.until)
        return True

    def _hold(self, retention: Retention) -> str:
        """Hold the cached blocks of a retention that fit; return the reason that not all of them are held, "" if they
        are.

        If they may fit once the bytes held already have been counted exactly, they wait for the next tick.
        """
        owner, tightened = retention.owner, 0
        while not retention.ended:
            cached = _cached(retention, retention.wanted)
            if cached.blocks <= retention.held:
                break
            fits = self._fit(owner, cached)
            if fits.blocks < cached.blocks:
                if tightened < _TIGHTENED and self._tighten():
                    tightened += 1
                    continue
                if self._inexact() is not None:
                    break
                if cached.suffixes:
                    fits = self._fit(owner, _cached(retention, fits.blocks))
            if fits.blocks > retention.held:
                self._take(retention, fits)
            if fits.blocks < cached.blocks:
                why = "operator_quota" if owner is self.operator else "quota"
                self._refuse(retention, why, retention.wanted - retention.held)
                retention.wanted = retention.held
                self.waiting.pop(retention.number, None)
                if not retention.held and owner is not self.operator:
                    self._end(retention, "refused")
                return why
        if retention.held == retention.wanted:
            self.waiting.pop(retention.number, None)
        elif not retention.ended:
            self._eviction.learner.want(retention.names[retention.held : retention.wanted][:_MOST_WANTED])
        return ""

    def _fit(self, owner: Owner, cached: _Cached) -> _Cached:
        """Return the part of `cached` that `owner` may hold; with suffix groups, all of it, or less by an unspecified
        amount."""
        pins, room = owner.pins, self._room(owner) - sum(each.account.group.allocated_bytes for each in cached.suffixes)
        if not cached.chain:
            return cached if pins.bytes <= room else cached._replace(blocks=0)
        count, size, cover = pins.fit(cached.chain, room)
        return _Cached(count, cached.chain[:count], cached.suffixes, size, cover)

    def _take(self, retention: Retention, cached: _Cached) -> None:
        block = cached.chain[-1] if cached.chain else None
        # Comes first, so that the covers of the former lease stay.
        lease = retention.owner.pins.hold(block, cached.size, cached.cover, cached.suffixes)
        self._let_go(retention)
        retention.lease, retention.held = lease, cached.blocks
        retention.names[: len(cached.chain)] = [each.hash for each in cached.chain]  # the index's bytes, not copies

    def _let_go(self, retention: Retention) -> None:
        if retention.lease is not None:
            retention.owner.pins.release(retention.lease)
        retention.lease, retention.held = None, 0

    def _end(self, retention: Retention, cause: str) -> None:
        if retention.ended:
            return
        owner = retention.owner
        del owner.retentions[retention.key]
        self.waiting.pop(retention.number, None)
        self._let_go(retention)
        owner.names -= len(retention.names)
        self.ended[cause] += 1
        if owner is self.operator:
            self._effects.records.append(PinEnded(retention.number))

    def _refuse(self, retention: Retention, why: str, blocks: int) -> None:
        self.refused[why] += blocks
        if retention.request:
            engine = retention.owner.engine
            self._effects.changes.append(
                Hinted(self._effects.actor.at, engine, retention.request, f"retain_{why}", blocks)
            )


def _cached(retention: Retention, most: int) -> _Cached:
    """Return the cached blocks among the first `most`, up to where an engine could continue.

    If a block must follow there, it is one of them.
    """
    group, names = retention.group, retention.names
    chain = group.prefix(names[:most]) if group.spec.kind == FULL else []
    if not group.suffixes:
        return _Cached(len(chain), chain, [])
    proof = group.spec.needs_next_block  # blocks after the end that must be cached
    most = len(chain) - proof if group.spec.kind == FULL else most
    end, suffixes = boundary(group.suffixes, names, most, 0)
    end += proof if end else 0
    return _Cached(end, chain[:end], suffixes)


def _may_hold_more(retention: Retention) -> bool:
    """Whether there are cached blocks that a retention does not hold yet."""
    group, names = retention.group, retention.names[retention.held : retention.wanted]
    if retention.held and group.spec.needs_next_block:
        names = retention.names[retention.held - 1 : retention.wanted]
    if not group.suffixes:
        return names[0] in group.visible
    return not all(suffix.visible.keys().isdisjoint(names) for suffix in group.suffixes)


def _check_operator(session: Session) -> None:
    if not session.is_operator:
        raise NotPermitted("only root and the daemon's own user may pin blocks, by `kvcache-server pin`")
