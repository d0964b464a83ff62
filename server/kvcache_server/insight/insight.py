"""The daemon's knowledge about its work beyond the cache's state, from the changes that the core reports. Pure.

It answers the requests that do not change the cache: Stats, Why, Chain, TraceLookups, ReportMisses and ReportClient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter

from kvcache_proto import messages as m
from kvcache_proto.codec import packed
from kvcache_server.core.cache import Cache
from kvcache_server.core.effects import (
    Actor,
    Change,
    Gone,
    Hinted,
    NamespaceClosed,
    NamespaceOpened,
    Refused,
    SessionGone,
)
from kvcache_server.core.eviction.policy import EVICTED_FOR
from kvcache_server.core.index import TAG_BYTES, Group, namespace_of
from kvcache_server.insight.chains import chain
from kvcache_server.insight.early_evictions import CHOSEN, EarlyEvictions
from kvcache_server.insight.infinite_cache import InfiniteCache
from kvcache_server.insight.lookup_tap import LookupTap
from kvcache_server.insight.miss_causes import Explanations, withheld_blocks
from kvcache_server.insight.miss_log import Below, EngineNote, Lookup, MissLog
from kvcache_server.insight.stats import Report, Residency, Telemetry
from kvcache_server.slices import Steps, begin
from kvcache_server.status import Daemon, Status

Says = Callable[[Group, Sequence[bytes], int, int, float, int], tuple[Below, ...]]

_GROUP = attrgetter("account.group")
_SHORT = ("not_worth_it", "no_space")  # refusals that a larger pool would not have made


class Insight:
    """Follows one cache. `requests` are the types of requests that it answers."""

    requests = frozenset({m.Stats, m.Why, m.Chain, m.TraceLookups, m.ReportMisses, m.ReportClient})

    def __init__(self, cache: Cache, daemon: Callable[[], Daemon]) -> None:
        """`daemon()` returns the figures of the process."""
        self._cache, self._daemon = cache, daemon
        self.misses = MissLog()
        self.tap = LookupTap()
        self.telemetry = Telemetry()
        self.residency = Residency()
        self._infinite: dict[bytes, InfiniteCache] = {}  # by the group's tag
        self._early = EarlyEvictions(self.misses)
        self._short: Actor | None = None  # on whose behalf blocks were last refused for lack of memory
        self._explanations = Explanations(cache, self.misses)
        self._report = Report(cache, self.residency, self._infinite, self._early, self.telemetry)
        for namespace in cache.namespaces.values():
            self.misses.remember_namespace(namespace.number, namespace.spec)

    # Events.

    def follow(self, changes: Iterable[Change]) -> None:
        for change in changes:
            match change:
                case Gone():
                    self._note_gone(change)
                case Refused():
                    self._note_refused(change)
                case Hinted():
                    self.misses.notes.append(
                        EngineNote(change.at, change.engine, change.request, change.cause, change.blocks)
                    )
                case NamespaceOpened():
                    self.misses.remember_namespace(change.namespace.number, change.namespace.spec)
                case NamespaceClosed():
                    for group in change.namespace.groups:
                        self._infinite.pop(group.tag, None)
                case SessionGone():
                    self.telemetry.forget(change.session)
                case _:
                    pass  # shown blocks are of no interest here

    def _note_gone(self, change: Gone) -> None:
        blocks = change.blocks
        if change.cause in CHOSEN:
            self.misses.chosen(blocks, change.cause, change.actor, self._cache.evicts_by_age)
        else:
            for block in blocks:
                self.misses.removed(block.hash + block.account.group.tag, change.cause, change.actor)
        if change.cause in EVICTED_FOR:
            self.residency.evicted(blocks)
            for group, same in groupby(blocks, key=_GROUP):
                if not group.is_suffix:
                    self._infinite_of(group).add([block.hash for block in same])

    def _note_refused(self, change: Refused) -> None:
        self.misses.removed(change.name, change.cause, change.actor)
        if change.cause in _SHORT:
            self._short = change.actor
        if change.actor is self._short and change.cause in (*_SHORT, "no_parent"):
            namespace = self._cache.namespaces.get(namespace_of(change.name))
            if namespace is not None and not namespace.groups[change.name[-1]].is_suffix:
                # It, or a block above it, was refused for lack of room.
                self._infinite_of(namespace.groups[change.name[-1]]).add([change.name[:-TAG_BYTES]])

    def _infinite_of(self, group: Group) -> InfiniteCache:
        found = self._infinite.get(group.tag)
        if found is None:
            slots = self._cache.blocks_of(group.allocated_bytes)
            found = self._infinite[group.tag] = InfiniteCache(slots, self._cache.hasher)
        return found

    def wants(self, request: m.Acquire, reply: m.Acquired) -> bool:
        """Whether `looked_up` must be called for a lookup."""
        return reply.hits < len(request.hashes) or self.tap.on

    def looked_up(
        self, session: int, request: m.Acquire, reply: m.Acquired, frame: bytes, now: float, said: Says | None = None
    ) -> None:
        """Record a lookup that was just answered, for later questions. `frame` is the encoded request.

        `said(group, hashes, hits, pending, now, start)` returns the tiers' reports about the blocks that it missed.
        Call this after the reply was sent, so that no client waits for it.
        """
        cache, asker = self._cache, self._cache.sessions[session]
        _, group = asker.group(request.namespace, request.group)
        if self.tap.on:
            self.tap.note(now, asker.engine.name, request, group.spec.block_tokens, reply.hits)
        if reply.hits >= len(request.hashes) - group.spec.needs_next_block:
            return
        cause, blocks = withheld_blocks(asker, request, reply, cache.limits)
        lost = reply.hits + (0 if cause == "pending" else blocks)
        self._early.missed(request.hashes, max(lost, request.start), group.tag, now)
        infinite = self._infinite.get(group.tag)
        first = asker.engine.lookups_of(request.request, group).lookups <= 1 and (request.pin or not request.request)
        if infinite is not None and first:
            infinite.missed(request.hashes[max(lost + reply.coming, request.start) :])
        if request.request:
            engine, generation = asker.engine.name, cache.generation
            below: tuple[Below, ...] = ()
            if said is not None and cause in ("", "pending"):
                below = said(group, request.hashes, reply.hits, blocks, now, request.start)
            self.misses.missed(
                Lookup(now, engine, request.request, frame, reply.hits, cause, blocks, generation, below)
            )

    def tick(self, now: float) -> None:
        """Call it a few times per second."""
        self.residency.tick(self._cache.generation, now)
        self.tap.tick(now)

    # Requests.

    def begin(self, session: int, request: m.Request, now: float) -> m.Reply | None | Steps[m.Reply | None]:
        """Answer one of `requests` of an open session, or do its first slice, like Cache.begin.

        Raises a ClientError if something is wrong with the request; then nothing has changed.
        """
        asker = self._cache.sessions[session]
        match request:
            case m.Stats():
                return begin(self._stats(request, now))
            case m.Why():
                return begin(self._explanations.answer(request, now))
            case m.Chain():
                return begin(chain(self._cache, self.misses, request))
            case m.TraceLookups():
                return self.tap.since(request, now)
            case m.ReportMisses():
                self._explanations.report_misses(asker, request, now)
                return None
            case m.ReportClient():
                self.telemetry.tell(asker, request)
                return None
        raise TypeError(f"a {type(request).__name__} is the cache's")

    def _stats(self, request: m.Stats, now: float) -> Steps[m.Report]:
        return m.Report(request.id, packed((yield from self.reporting(now))))

    def reporting(self, now: float) -> Steps[Status]:
        return self._report.figures(now, self._daemon)
