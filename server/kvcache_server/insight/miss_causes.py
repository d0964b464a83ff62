"""Explains why a request had no hit, from the records of miss_log.py. Pure.

An explanation is a list of runs of blocks; each has one cause, and its facts. Removed and refused blocks are remembered
by name. A block without a record was never stored here, as far as the records go back. It is searched for in other
namespaces, whose identities show the difference. If it is not there, the last hit shows where the tokens diverge from
the cached ones.
"""

from __future__ import annotations

import re
from heapq import nsmallest
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

import msgspec

from kvcache_proto.codec import decode_request, packed
from kvcache_proto.errors import BadArgument, ClientError
from kvcache_proto.messages import Acquire, Acquired, Explained, ReportMisses, Why
from kvcache_proto.types import MAX_HASHES, NamespaceSpec, check_hashes
from kvcache_server.core.cache import Cache
from kvcache_server.core.effects import Actor
from kvcache_server.core.eviction.policy import EVICTED_FOR
from kvcache_server.core.index import TAG_BYTES, Group, namespace_of, tag
from kvcache_server.core.limits import LOOK, STEP, Limits
from kvcache_server.core.sessions import Session
from kvcache_server.insight.miss_log import EngineNote, Lookup, MissLog
from kvcache_server.miss_report import Answer, Difference, Explanation, Note, Remembered, Retained, Run, differences
from kvcache_server.slices import Steps

MOST_BLOCKS = 8192  # blocks examined per lookup, from the first miss on
MOST_RUNS = 512  # with this many runs, no further block is examined
EXAMINED = 16  # blocks examined per slice: each may be searched for in all groups of MOST_OTHERS namespaces
FEW_BLOCKS = 256  # up to this many blocks are searched for in each namespace, without a table
MOST_OTHERS = 16  # namespaces that are searched, the most similar ones first
LATEST = 10  # requests listed in an answer, and engines explained in it
EMPTY_START_SECONDS = 3600.0  # after an empty start, for which misses are attributed to it
ASKED = ("once", "twice", "more")  # by class: how often evicted blocks had been requested
HASHING = ("seed", "hash", "vllm", "block")  # identity fields that change the hashes of equal tokens
_WORD = re.compile(r"[a-z_]{1,64}")
_MAX_AGE_MS = 1 << 53  # of a note


class Explanations:
    """Takes engines' notes, and answers Why requests."""

    def __init__(self, cache: Cache, misses: MissLog) -> None:
        self._cache, self._misses = cache, misses

    def report_misses(self, session: Session, request: ReportMisses, now: float) -> None:
        """Store an engine's notes. Invalid ones are only counted, because the request has no reply."""
        try:
            namespace, group = session.group(request.namespace, request.group)
            if sum(len(note.hashes) for note in request.notes) > MAX_HASHES:
                raise BadArgument(f"more than {MAX_HASHES} hashes in one message")
            for note in request.notes:
                check_hashes(note.hashes, group.hash_bytes)
                if not (_WORD.fullmatch(note.cause) and 0 <= note.age_ms < _MAX_AGE_MS):
                    raise BadArgument("invalid note: the cause must be a lower-case word, the age not negative")
        except ClientError:
            self._cache.counters["notes_refused"] += len(request.notes)
            return
        for note in request.notes:
            at = now - note.age_ms / 1000
            actor = Actor(at, session.engine.name, namespace.number)
            for each in note.hashes:
                self._misses.removed(each + group.tag, note.cause, actor)
            self._misses.notes.append(EngineNote(at, session.engine.name, note.request, note.cause, len(note.hashes)))

    def answer(self, request: Why, now: float) -> Steps[Explained]:
        """Explain the misses of the one request whose name is, or contains, the given text. O(its hashes)."""
        misses, text = self._misses, request.request
        lookups, notes = list(misses.lookups), list(misses.notes)  # copies: both may grow between slices
        records: list[Lookup | EngineNote] = [*lookups, *notes]
        records.sort(key=attrgetter("at"))
        yield
        known = dict.fromkeys(map(attrgetter("request"), records))  # in order of their first record
        yield
        found = [text] if text in known else [each for each in known if text and text in each]
        answer = Answer(
            asked=text,
            matches=found[-LATEST:],
            matched=len(found),
            latest=list(known)[-LATEST:][::-1],
            remembered=Remembered(
                lookups=len(lookups),
                lookups_since_s=round(now - lookups[0].at, 1) if lookups else 0.0,
                departures=misses.departures,
                departures_since_s=round(now - misses.since, 1),
                began_s=round(now - misses.started_at, 1),
                began_empty=misses.empty_reason,
            ),
        )
        if len(found) == 1:
            yield
            lookups = [each for each in lookups if each.request == found[0]]
            notes = [each for each in notes if each.request == found[0]]
            engines = list(dict.fromkeys([*(each.engine for each in lookups), *(each.engine for each in notes)]))
            answer.engines = len(engines)
            for engine in engines[-LATEST:]:
                yield
                of_engine = (
                    [each for each in lookups if each.engine == engine],
                    [each for each in notes if each.engine == engine],
                )
                answer.explained.append((yield from self._explain(engine, found[0], *of_engine, now)))
        return Explained(request.id, packed(answer))

    def _explain(
        self, engine: str, name: str, lookups: list[Lookup], notes: list[EngineNote], now: float
    ) -> Steps[Explanation]:
        """Return the explanation of the last lookup of an engine's request, with the engine's notes."""
        explanation = Explanation(
            request=name,
            engine=engine,
            notes=[Note(note.cause, round(now - note.at, 3), note.blocks) for note in notes],
            retained=[
                Retained(each.held, len(each.names), round(each.until - now, 1))
                for each in self._cache.retained_for(engine, name)
            ],
            lookups=len(lookups),
        )
        if not lookups:
            return explanation
        last = lookups[-1]
        acquire = decode_request(last.frame)
        assert isinstance(acquire, Acquire)
        yield
        spec = self._misses.spaces.get(acquire.namespace)
        explanation.age_s = round(now - last.at, 3)
        if spec:
            explanation.namespace, explanation.model = spec.id, spec.model
            explanation.block_tokens = spec.groups[acquire.group].block_tokens
        explanation.tokens, explanation.blocks, explanation.hits = acquire.tokens, len(acquire.hashes), last.hits
        explanation.runs = yield from _Walk(self._cache, self._misses, last, acquire).runs()
        explanation.tiers = [run for each in last.below for run in each.tier_runs(last.at)]
        return explanation


def withheld_blocks(session: Session, request: Acquire, reply: Acquired, limits: Limits) -> tuple[str, int]:
    """Return the cause and the number of cached blocks that a lookup has withheld; ("", 0) if there are none."""
    if reply.pending:
        return "pending", reply.pending
    if reply.withheld:
        return ("leases" if len(session.leases) >= limits.max_leases else "quota"), reply.withheld
    _, group = session.group(request.namespace, request.group)
    if not reply.hits and session.engine.writers[request.namespace] is None:
        return "ranks_missing", len(group.prefix(request.hashes))
    if any(suffix.is_suffix for suffix in group.suffixes):
        beyond = max(0, len(group.prefix(request.hashes)) - reply.hits)  # a tail is one more hit
        return ("no_suffix" if beyond > group.spec.needs_next_block else "no_next_block", beyond) if beyond else ("", 0)
    return "", 0


class _Other(NamedTuple):
    """Another namespace, and the facts in which it differs."""

    number: int
    spec: NamespaceSpec
    differences: list[Difference]


class _Walk:
    """Examines the blocks of one lookup in order. Between two slices, the state of the cache may change."""

    def __init__(self, cache: Cache, misses: MissLog, lookup: Lookup, asked: Acquire) -> None:
        self._cache, self._misses = cache, misses
        self._lookup, self._asked, self._at, self._generation = lookup, asked, lookup.at, lookup.generation
        self._tag = tag(asked.namespace, asked.group)
        self._spaces = dict(misses.spaces)
        self._runs: list[Run] = []
        self._others: list[_Other] = []
        self._places: dict[bytes, set[int]] | None = None

    @property
    def _group(self) -> Group | None:
        """The requested group; None if it has been removed."""
        space = self._cache.namespaces.get(self._asked.namespace)
        return space.groups[self._asked.group] if space else None

    def runs(self) -> Steps[list[Run]]:
        hashes = self._asked.hashes
        self._others = yield from self._similar()
        looked_for = hashes[self._lookup.hits :][: MOST_BLOCKS + self._lookup.blocks]
        if self._others and len(looked_for) > FEW_BLOCKS:
            self._places = yield from self._known_places(looked_for)
        at, cause, blocks = self._lookup.hits, self._lookup.cause, self._lookup.blocks
        self._add(Run(0, at - 1, "hit"))
        self._add(Run(at, at + blocks - 1, cause, self._writer(at) if cause == "pending" else ""))
        at += blocks
        end = min(len(hashes), at + MOST_BLOCKS)
        missed: list[Run | None] = []
        for place in range(at, end):
            if place % EXAMINED == 0:
                yield
            missed.append(self._missed(place, hashes[place]))
        self._bridge(missed)
        for place, known in enumerate(missed, at):
            if place % EXAMINED == 0:
                yield
            if len(self._runs) >= MOST_RUNS:
                end = place
                break
            self._add(known or self._unknown(place))
        self._add(Run(end, len(hashes) - 1, "unexamined"))
        yield
        for run in self._runs:
            if run.cause != "hit" and self._group is not None:
                run.cached_now = yield from self._cached(run.first, run.last + 1)
        return self._runs

    def _cached(self, begin: int, end: int) -> Steps[int]:
        """Return the number of blocks of the lookup from `begin` to `end` that are cached now."""
        count = 0
        for at in range(begin, end, LOOK):
            if at > begin:
                yield
            if (group := self._group) is not None:
                count += sum(map(group.visible.__contains__, self._asked.hashes[at : min(at + LOOK, end)]))
        return count

    def _add(self, run: Run) -> None:
        """Add a run unless it is empty, or extend the last one if both have the same cause and facts."""
        if run.first <= run.last and not (self._runs and self._runs[-1].extend(run)):
            self._runs.append(run)

    def _missed(self, place: int, block: bytes) -> Run | None:
        """Return a run of one missed block, with its cause; None if the cause is unknown."""
        occasion = self._misses.find(block + self._tag, self._at)
        if occasion is not None:
            age = round(self._at - occasion.at, 3)
            run = Run(place, place, occasion.cause, occasion.engine, (age, age))
            if occasion.asked:
                run.asked, run.by_age = ASKED[occasion.asked - 1], occasion.by_age
                run.unused_s = (occasion.unused, occasion.unused)
            spec = self._spaces.get(occasion.namespace)
            if spec is not None and occasion.namespace != self._asked.namespace:
                run.namespace, run.model = spec.id, spec.model
            return run
        for other in self._others:
            may_have = self._places is None or other.number in self._places.get(block, ())
            if may_have and self._had_block(other.number, block):
                return self._run_elsewhere(place, "elsewhere", other)
        return None

    @staticmethod
    def _run_elsewhere(place: int, cause: str, other: _Other) -> Run:
        return Run(place, place, cause, namespace=other.spec.id, model=other.spec.model, fields=other.differences)

    def _known_places(self, hashes: list[bytes]) -> Steps[dict[bytes, set[int]]]:
        """Return, by block, the namespaces with a record of it. O(removed blocks), which is too slow for few hashes."""
        places: dict[bytes, set[int]] = {}
        asked = set(hashes)
        yield
        for names in self._misses.names():
            for at, name in enumerate(names):
                if at % LOOK == 0:
                    yield
                if (block := name[:-TAG_BYTES]) in asked:
                    places.setdefault(block, set()).add(namespace_of(name))
        for other in self._others:
            yield
            space = self._cache.namespaces.get(other.number)
            for group in space.groups if space else ():
                for block in group.visible.keys() & asked:
                    places.setdefault(block, set()).add(other.number)
        return places

    def _had_block(self, number: int, block: bytes) -> bool:
        """Return True if another namespace had the block at the time of the lookup, or before."""
        for at in range(len(self._spaces[number].groups)):
            space = self._cache.namespaces.get(number)
            there = space.groups[at].visible.get(block) if space else None
            if there is not None and there.generation <= self._generation:
                return True
            occasion = self._misses.find(block + tag(number, at), self._at)
            if occasion is not None and occasion.cause in _WAS_CACHED:
                return True
        return False

    def _bridge(self, missed: list[Run | None]) -> None:
        """Explain a block of unknown cause like the next one, if that was found in a namespace with another block size:
        only some hashes are equal there."""
        following: Run | None = None
        for at in range(len(missed) - 1, -1, -1):
            known = missed[at]
            if known is None and following is not None:
                place = following.first - 1
                missed[at] = following = msgspec.structs.replace(following, first=place, last=place)
            else:
                block = known is not None and any(field == "block" for field, _, _ in known.fields)
                following = known if block else None

    def _unknown(self, place: int) -> Run:
        """Return a run of one block that, as far as is known, was never stored."""
        last = self._runs[-1] if self._runs else None
        if last is not None and last.cause in UNKNOWN:
            return msgspec.structs.replace(last, first=place, last=place)
        if last is not None and last.cause != "hit":
            return Run(place, place, "new")
        if place == 0:
            if self._asked.salted:
                return Run(place, place, "salted")
            for other in self._others:
                if self._has_model(other.number) and any(field in HASHING for field, _, _ in other.differences):
                    return self._run_elsewhere(place, "other_hashes", other)
        if self._had_sibling(place):
            return Run(place, place, "diverged")
        if self._misses.empty_reason not in ("", "first") and self._at - self._misses.started_at < EMPTY_START_SECONDS:
            return Run(place, place, "began_empty")
        return Run(place, place, "new")

    def _had_sibling(self, place: int) -> bool:
        """Return True if the block's parent had another child at the time of the lookup."""
        if (group := self._group) is None:
            return False
        above = group.root if not place else group.visible.get(self._asked.hashes[place - 1])
        mine = self._asked.hashes[place]
        return above is not None and any(
            child.visible and child.hash != mine and child.generation <= self._generation
            for child in islice(above.children(), 2 * LOOK)  # latest first
        )

    def _similar(self) -> Steps[list[_Other]]:
        """Return the other namespaces and their differences, those with the fewest differences first."""
        mine = self._spaces.get(self._asked.namespace)
        if mine is None:
            return []
        ours = _facts(mine).items()
        # There may be a thousand namespaces: only the differences to the most similar ones are listed.
        others = []
        for count, (number, spec) in enumerate(self._spaces.items()):
            if count % STEP == 0:
                yield
            if number != self._asked.namespace and spec.hash_bytes == mine.hash_bytes:
                others.append((len(ours ^ _facts(spec).items()), -number, spec))
        return [
            _Other(-number, spec, differences(_facts(mine), _facts(spec)))
            for _, number, spec in nsmallest(MOST_OTHERS, others, key=lambda each: each[:2])
        ]

    def _has_model(self, number: int) -> bool:
        """Return True if another namespace has blocks of the same model."""
        mine, other = self._spaces[self._asked.namespace], self._cache.namespaces.get(number)
        return other is not None and other.spec.model == mine.model and any(group.visible for group in other.groups)

    def _writer(self, place: int) -> str:
        """Return the engine that was writing the block; "" if it is not known any more."""
        if (group := self._group) is None:
            return ""
        name = self._asked.hashes[place]
        grant, block = group.pending.get(name), group.visible.get(name)
        account = grant.block.account if grant is not None else block.account if block is not None else None
        return account.engine if account is not None else ""


# Causes of misses of blocks that were once cached.
_WAS_CACHED = {*EVICTED_FOR, "cleared", "corrupt", "different"}
UNKNOWN = {"new", "diverged", "salted", "other_hashes", "began_empty"}


def _facts(spec: NamespaceSpec) -> dict[str, str]:
    return {"model": spec.model, **spec.identity}
