"""The tiers of one cache: lookups report hits and misses here, and the tiers' sessions poll for jobs. Pure.

    a lookup misses -> Exists -> the tier has the first blocks -> Fetch, part after part -> it reserves and settles
    a block is found again, or stored -> Store under a lease -> the tier has it

A tier reserves and settles like any other session. When it leaves, its unfinished jobs are dropped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count, dropwhile, islice, takewhile
from secrets import randbits
from typing import Any

from kvcache_proto import messages as m
from kvcache_proto.errors import BadArgument, NotPermitted, Unavailable
from kvcache_proto.types import FULL, REF_BYTES, SUM_BYTES
from kvcache_server import status
from kvcache_server.core.cache import Cache
from kvcache_server.core.effects import Change, SessionGone, Shown
from kvcache_server.core.index import CLASS_MASK, Account, Block, Group
from kvcache_server.core.limits import LOOK
from kvcache_server.core.lookups import last_end
from kvcache_server.core.sessions import Session
from kvcache_server.tiering.fetches import Fetch
from kvcache_server.tiering.questions import Joint, Question, eta
from kvcache_server.tiering.reports import TierReport, absent
from kvcache_server.tiering.tier import Tier
from kvcache_server.tiering.writes import Writing

IN_FLIGHT_DIVISOR = 20  # capacity // IN_FLIGHT_DIVISOR bytes may be in flight from a tier, and as many to it
MOST_TIERS = 8
MOST_NAMES = 64  # names of tiers whose counts continue when they come back
HANGING = 60.0  # seconds without a poll, normally two per second, or without results, after which a tier is turned off
STARTING, STARTING_ETA = 20.0, 0.05  # seconds that a tier may take to start, and until a lookup is repeated meanwhile
MOST_EXISTS = 64  # Exists jobs in one answer
MOST_WRITES = 2048  # blocks to store in one answer, or examined for it
MOST_BLOCKS_OUT = 8192  # blocks being stored in one tier
LONGEST = 1 << 14  # blocks of an Exists job; the rest follows once these are hits
MESSAGE = 1 << 20  # bytes of an answer after which no job is added; a frame may have 4 MiB
MOST_BATCH = 1 << 30  # bytes
AHEAD_EVERY = 0.1  # seconds between two searches for blocks that are about to be evicted
AHEAD_LEAVES = 64  # leaves that a search finds
AHEAD_BLOCKS = 4096  # blocks that a search examines in all
JOB_BYTES = 128  # bytes of a job in a message, besides its hashes, slots and checksums


class Tiering:
    """The tiers, and their jobs. `requests` are the types of the requests that `begin` takes."""

    requests = frozenset({m.PollJobs, m.JobResults})

    def __init__(self, cache: Cache, user: int) -> None:
        """Only sessions of `user` may be tiers."""
        self._cache, self._user = cache, user
        self._tiers: dict[int, Tier] = {}  # by session, in the order in which they are queried
        self._numbers = count(randbits(48))  # so that late results for the last daemon match no job
        self._counts: dict[str, Counter[str]] = {}  # by the tiers' names: they continue when a tier comes back
        self._starting: set[str] = set()  # names of tiers that were never on
        self._starting_until = 0.0

    # Events in the cache.

    def looked_up(
        self, session: Session, group: Group, hashes: Sequence[bytes], chain: Sequence[Block], pending: int, now: float
    ) -> tuple[int, int]:
        """Note a lookup of `hashes` that found `chain`, and return `coming` and `eta_ms` for its answer."""
        if session.id in self._tiers:
            return 0, 0
        if chain:
            self._found_again(chain)
        hits, begin = len(chain), len(chain) + pending
        if hits == len(hashes):
            return 0, 0
        wait = self._starts_in(now) if begin < len(hashes) else 0.0
        for tier in self._tiers.values():
            if not tier.on:
                continue
            for first in {hits: None, begin: None}:  # blocks that other clients write may come from a tier, too
                if first < len(hashes) and (fetch := tier.fetches.coming.get(hashes[first] + group.tag)) is not None:
                    return tier.fetches.coming_after(group, hashes, first) - hits, _milliseconds(eta(fetch.due, now))
            if begin == len(hashes):
                continue  # other clients are writing all missing blocks
            name = hashes[begin]
            if not tier.knows(group, name, now):
                parent = hashes[begin - 1] if begin else None
                missing = list(hashes[begin : begin + LONGEST])
                tier.questions.ask(Question(session.engine.name, group, parent, missing, now))
            if (answer := tier.questions.answers_in(name + group.tag, now)) is not None:
                wait = answer
                break  # the next tier is queried for blocks that this one lacks
        return 0, _milliseconds(wait)

    def looked_up_with_suffixes(
        self,
        session: Session,
        group: Group,
        request: m.Acquire,
        hits: int,
        chain: Sequence[Block],
        suffixes: Sequence[Block],
        now: float,
    ) -> tuple[int, int]:
        """The same in a namespace with suffix groups; an engine also needs their blocks `suffixes` to continue after
        `hits` blocks."""
        if session.id in self._tiers:
            return 0, 0
        if chain:
            self._found_again(chain)
        for tier in self._on():
            if tier.policy != m.AHEAD:
                _store(tier, tier.writes.lacking(suffixes))
        hashes = request.hashes[: _longest(group)]
        if hits >= len(hashes):
            return 0, 0
        end, fetches = self._on_their_way(group, hashes, hits, request.start)
        if fetches:
            return end - hits, _milliseconds(eta(max(fetch.due for _, fetch in fetches), now))
        name, wait = hashes[-1] + group.tag, self._starts_in(now)
        for tier in self._on():
            if (
                name not in tier.questions.asked
                and not tier.questions.is_absent(name, now)
                and not self._ask_jointly(tier, session.engine.name, group, hashes, request.start, now)
            ):
                break  # other clients are writing all missing blocks
            if (answer := tier.questions.answers_in(name, now)) is not None:
                wait = answer
                break  # the next tier is queried for blocks that this one lacks
        return 0, _milliseconds(wait)

    def _on_their_way(
        self, group: Group, hashes: Sequence[bytes], hits: int, start: int
    ) -> tuple[int, list[tuple[Tier, Fetch]]]:
        """Return the number of blocks after which an engine can continue once all fetches have ended, and the fetches
        that this needs; no fetches if the number would not exceed `hits`.

        The engine has the first `start` blocks itself.
        """
        bringing = [tier for tier in self._on() if tier.fetches.coming]
        if not bringing:
            return hits, []
        soon = partial(_here_or_coming, [tier.fetches.coming for tier in bringing])
        end = len(hashes)
        if group is not group.suffixes[0]:
            here = soon(group)
            end = next((at for at in range(hits, end) if not here(hashes[at])), end) - group.spec.needs_next_block
        if end > hits:
            end = last_end([(suffix.spec, soon(suffix)) for suffix in group.suffixes], hashes, end, start)
        if end <= hits:
            return hits, []
        needed = [(suffix, hashes[max(start, end - suffix.spec.needed(end)) : end]) for suffix in group.suffixes]
        if group is not group.suffixes[0]:
            needed.append((group, hashes[hits : end + group.spec.needs_next_block]))
        tagged = [name + each.tag for each, names in needed for name in names]
        found = {id(fetch): (t, fetch) for t in bringing for name in tagged if (fetch := t.fetches.coming.get(name))}
        return end, list(found.values())

    @staticmethod
    def _ask_jointly(tier: Tier, engine: str, group: Group, hashes: list[bytes], start: int, now: float) -> bool:
        """Query a tier for the uncached blocks of all groups; return True if there are any."""
        names = hashes[start:]
        lacking = [(each, [name for name in names if not each.has_soon(name)]) for each in group.suffixes]
        if group is not group.suffixes[0]:
            cached = len(group.prefix(hashes))
            lacking.insert(0, (group, hashes[cached + group.pending_after(hashes, cached) :]))
        joint = Joint(hashes[-1] + group.tag, group, hashes, start, set())
        questions = [Question(engine, each, None, names, now, joint=joint) for each, names in lacking if names]
        joint.left = len(questions)
        if questions:
            tier.questions.ask(*questions)
        return bool(questions)

    def _found_jointly(self, tier: Tier, joint: Joint, engine: str, now: float) -> None:
        """Fetch the blocks that an engine needs to continue as far as possible, and query the next tier for more."""
        group, hashes = joint.group, joint.hashes
        if self._namespace(group) is None:
            return
        suffixes, most, cached, coming = group.suffixes, len(hashes), 0, tier.fetches.coming
        if group is not suffixes[0]:
            cached = len(group.prefix(hashes))
            cached += group.pending_after(hashes, cached)
            most = cached
            while most < len(hashes) and hashes[most] + group.tag in joint.found:
                most += 1
            most -= group.spec.needs_next_block
        has = [(suffix.spec, partial(_has_or_gets, suffix, joint.found)) for suffix in suffixes]
        end = last_end(has, hashes, most, joint.start) if most > joint.start else 0
        if end > joint.start:
            if group is not suffixes[0] and cached < end + group.spec.needs_next_block:
                parent = hashes[cached - 1] if cached else None
                rest = hashes[cached : end + group.spec.needs_next_block]
                tier.fetches.fetch(Question(engine, group, parent, rest, now), rest, now)
            for suffix in suffixes:
                needed = hashes[max(joint.start, end - suffix.spec.needed(end)) : end]
                wanted = [each for each in needed if not suffix.has_soon(each) and each + suffix.tag not in coming]
                if wanted:
                    tier.fetches.fetch(Question(engine, suffix, None, wanted, now), wanted, now)
        if end < len(hashes):
            tier.questions.lacks(joint.name, now)
            if (other := self._next(tier, group, hashes[-1], now)) is not None:
                self._ask_jointly(other, engine, group, hashes, joint.start, now)

    def _next(self, tier: Tier, group: Group, name: bytes, now: float) -> Tier | None:
        """Return the tier to query for blocks that `tier` lacks."""
        tiers = list(self._tiers.values())
        after = tiers[tiers.index(tier) + 1 :]
        return next((each for each in after if each.on and not each.knows(group, name, now)), None)

    def _on(self) -> list[Tier]:
        return [tier for tier in self._tiers.values() if tier.on]

    def _found_again(self, chain: Sequence[Block]) -> None:
        for tier in self._tiers.values():
            if tier.on and tier.policy != m.AHEAD and not tier.writes.has(chain[-1]):
                # Store the first blocks that it lacks: later ones are useless without them.
                begin = bisect_left(chain, True, key=lambda block: not tier.writes.has(block))
                tier.writes.store(tier.writes.lacking(chain[begin : begin + LOOK]))

    def _starts_in(self, now: float) -> float:
        """Return the seconds until tiers that are starting may have missing blocks; 0 if no tier is starting."""
        return STARTING_ETA if self._starting and now < self._starting_until else 0.0

    def explain_misses(
        self, group: Group, hashes: Sequence[bytes], hits: int, pending: int, now: float, start: int = 0
    ) -> tuple[TierReport, ...]:
        """Return the reports of tiers about the blocks that a lookup has just missed. O(misses)."""
        if group.suffixes:
            found = self._reports_jointly(group, hashes, hits, now, start)
        else:
            found = self._reports(group, hashes, hits, pending, now)
        if self._starts_in(now):
            found += [TierReport(name, "starting", hits, len(hashes) - hits) for name in sorted(self._starting)]
        return tuple(found)

    def _reports(self, group: Group, hashes: Sequence[bytes], hits: int, pending: int, now: float) -> list[TierReport]:
        found: list[TierReport] = []
        begin = hits
        for tier in self._tiers.values():
            if not tier.on:
                found.append(TierReport(tier.name, "off", begin, len(hashes) - begin, tier.off_because))
                continue
            fetch = tier.fetches.coming.get(hashes[begin] + group.tag)
            if fetch is not None:
                end = tier.fetches.coming_after(group, hashes, begin)
                found.append(TierReport(tier.name, "coming", begin, end - begin, "", fetch.inquiry))
                begin = end
            elif begin == hits:
                begin += pending  # other clients are writing these
            if begin == len(hashes):
                break
            name = hashes[begin] + group.tag
            asked = tier.questions.asked.get(name)
            if asked is not None:
                count = _common(asked.hashes, hashes, begin)
                found.append(TierReport(tier.name, "asked", begin, count, "", asked.inquiry))
                if count == LONGEST and begin + count < len(hashes):
                    found.append(TierReport(tier.name, "beyond", begin + count, len(hashes) - begin - count))
                break  # the next tier is queried for blocks that this one lacks
            if tier.questions.is_absent(name, now):
                reason = tier.writes_off
                found.append(TierReport(tier.name, absent(reason), begin, len(hashes) - begin, reason))
            elif fetch is None:
                found.append(TierReport(tier.name, "not_asked", begin, len(hashes) - begin))
        return found

    def _reports_jointly(
        self, group: Group, hashes: Sequence[bytes], hits: int, now: float, start: int
    ) -> list[TierReport]:
        """The same in a namespace with suffix groups: a question is for all groups, and later answers change no
        report."""
        hashes = hashes[: _longest(group)]
        found: list[TierReport] = []
        if hits >= len(hashes):
            return found
        name, missed = hashes[-1] + group.tag, len(hashes) - hits
        end, fetches = self._on_their_way(group, hashes, hits, start)
        for tier in self._tiers.values():
            if not tier.on:
                found.append(TierReport(tier.name, "off", hits, missed, tier.off_because))
            elif any(each is tier for each, _ in fetches):
                found.append(TierReport(tier.name, "coming", hits, end - hits))
            elif fetches:
                continue  # no tier is queried before these have ended
            elif name in tier.questions.asked:
                found.append(TierReport(tier.name, "asked", hits, missed))
                break  # the next tier is queried for blocks that this one lacks
            else:
                known = tier.questions.is_absent(name, now)
                cause, reason = (absent(tier.writes_off), tier.writes_off) if known else ("not_asked", "")
                found.append(TierReport(tier.name, cause, hits, missed, reason))
        return found

    def follow(self, changes: Iterable[Change]) -> None:
        """Process the changes that the core has reported."""
        if not self._tiers:
            return
        for change in changes:
            if isinstance(change, Shown):
                self._stored(change.blocks)
            elif isinstance(change, SessionGone) and change.session in self._tiers:
                tier = self._tiers.pop(change.session)
                self._turn_off(tier, "gone")
                self._cache.sweeper.add(tier.writes.forget_marks)
                self._listen()

    def _stored(self, blocks: Sequence[Block]) -> None:
        for tier in self._tiers.values():
            name = tier.session.engine.name
            for block in blocks:
                if block.account.engine == name:
                    tier.writes.mark(block)
            if tier.policy != m.AHEAD and tier.on:
                lacking = [block for block in tier.writes.lacking(blocks) if block.parent is not None]
                if tier.policy == m.SECOND:  # only blocks that were computed again, or are likely to be requested again
                    lacking = [each for each in lacking if each.tick & CLASS_MASK or self._likely(each.account)]
                _store(tier, _with_ancestors(tier, lacking))

    def will_store(self, account: Account, cls: int) -> bool:
        """Whether a tier gets a block of class `cls` that an account stores, even if it is not requested again."""
        policies = {tier.policy for tier in self._tiers.values() if tier.on and tier.keeps_up}
        return m.THROUGH in policies or (m.SECOND in policies and (cls > 0 or self._likely(account)))

    def _likely(self, account: Account) -> bool:
        return self._cache.is_likely_to_return(account)

    # Requests.

    def expect(self, names: Iterable[str], now: float) -> None:
        """Let requests wait for the tiers with these names, which are starting."""
        self._starting, self._starting_until = {*names}, now + STARTING
        self._listen()

    def expect_no_more(self, name: str) -> None:
        """Note that a tier has started, or failed to start."""
        self._starting.discard(name)
        self._listen()

    def begin(self, session: int, request: Any, now: float) -> None:
        """Handle a request of a session. Raises NotPermitted, BadArgument, Unavailable; then nothing has changed."""
        if isinstance(request, m.PollJobs):
            self._enlist(self._cache.sessions[session], request, now)
        elif session in self._tiers:
            self._take_results(self._tiers[session], request, now)
        else:
            self._cache.counters["jobs_unknown"] += 1
            if request.off:  # its store cannot be opened
                self.expect_no_more(self._cache.sessions[session].engine.name.removeprefix("tier "))

    def _enlist(self, session: Session, request: m.PollJobs, now: float) -> None:
        if session.user != self._user:
            raise NotPermitted(f"a tier's process must run as the daemon's user, {self._user}, not as {session.user}")
        if request.writes not in m.WRITE_POLICIES:
            raise BadArgument(f"writes {request.writes!r}: one of {', '.join(m.WRITE_POLICIES)}")
        if not 0 < request.batch_bytes <= MOST_BATCH:
            raise BadArgument(f"batch_bytes {request.batch_bytes}: 1 to {MOST_BATCH}")
        tier = self._tiers.get(session.id)
        if tier is None or tier.session is not session:
            for each in self._tiers.values():
                if each.name == request.tier and each.session.connected and each.session.id != session.id:
                    raise Unavailable(f"another tier is called {each.name!r}")
            former = tier
            if former is not None:  # it has resumed: its former jobs are void
                self._turn_off(former, "resumed")
            if len(self._tiers) - (former is not None) >= MOST_TIERS:
                raise NotPermitted(f"there are {MOST_TIERS} tiers already, the maximum")
            counts = Counter[str]()
            if len(self._counts) < MOST_NAMES:
                counts = self._counts.setdefault(request.tier, counts)
            tier = Tier(session, request.tier, request.batch_bytes, request.writes, counts)
            self._tiers[session.id] = tier
            session.engine.is_tier = True
            self.expect_no_more(tier.name)
        tier.off, tier.asked_at = "", now
        tier.writes_off, tier.removals_off = request.writes_off, request.removals_off

    def _take_results(self, tier: Tier, request: m.JobResults, now: float) -> None:
        unknown = 0
        tier.heard_at = now
        for number, flags in request.exists:
            question = tier.found(number, flags, now)
            if question is None:
                unknown += 1
            elif question.joint is None:
                self._ask_next(tier, question, now)
            elif not question.joint.left:
                self._found_jointly(tier, question.joint, question.engine, now)
        for number, flags in request.fetched:
            unknown += not tier.fetches.brought(number, flags, now)
        failed: list[Block] = []
        for number, flags in request.stored:
            writing = tier.writes.writing.pop(number, None)
            if writing is None:
                unknown += 1
                continue
            failed += tier.writes.stored(writing, flags)
            self._end_lease(tier, writing.lease)
        tier.writes.unmark(failed)
        self._cache.counters["jobs_unknown"] += unknown
        tier.writes_off = request.writes_off or tier.writes_off
        if request.off:
            self._turn_off(tier, request.off)

    def _ask_next(self, tier: Tier, question: Question, now: float) -> None:
        """Query the next tier for the blocks that this one lacks."""
        found = question.inquiry.found
        rest, parent = question.hashes[found:], question.hashes[found - 1] if found else question.parent
        if rest and (other := self._next(tier, question.group, rest[0], now)) is not None:
            following = Question(question.engine, question.group, parent, rest, now)
            if other.questions.ask(following):
                question.inquiry.then = following.inquiry

    # Jobs.

    def jobs(self, session: int, number: int, now: float) -> m.Jobs | None:
        """Return jobs for a waiting tier, as the answer to its request `number`; None if there are none."""
        tier = self._tiers.get(session)
        if tier is None or not tier.on:
            return None
        if tier.policy == m.AHEAD and self._cache.is_nearly_full and now >= tier.looked_ahead_at + AHEAD_EVERY:
            tier.looked_ahead_at = now
            self._look_ahead(tier)
        to_write = tier.writes.queue if not tier.writes_off else ()
        if not (tier.questions.waiting or tier.fetches.has_more or to_write):
            return None
        if not tier.works:
            tier.heard_at = now
        jobs = m.Jobs(number)
        specs: dict[int, Any] = {}
        room = MESSAGE
        while tier.questions.waiting and len(jobs.exists) < MOST_EXISTS and room > 0:
            question = tier.questions.waiting.popleft()
            namespace = self._namespace(question.group)
            if namespace is None:
                tier.questions.forget(question)
                continue
            job = next(self._numbers)
            tier.questions.sent[job] = question
            specs[namespace.number] = namespace
            room -= _hash_bytes(question.group) * len(question.hashes)
            jobs.exists.append(m.Exists(job, namespace.id, question.group.number, question.hashes))
        budget = max(self._cache.capacity // IN_FLIGHT_DIVISOR, tier.batch_bytes)
        while (
            tier.fetches.in_flight < budget
            and room > 0
            and (part := tier.fetches.next_part(tier.batch_bytes, now)) is not None
        ):
            fetch = part.fetch
            job = next(self._numbers)
            tier.fetches.parts[job] = part
            namespace = self._namespace(fetch.group)
            if namespace is None:
                tier.fetches.brought(job, b"", now)
                continue
            specs[namespace.number] = namespace
            parent = fetch.hashes[part.begin - 1] if part.begin and fetch.group.spec.kind == FULL else fetch.parent
            hashes = fetch.hashes[part.begin : part.end]
            room -= _hash_bytes(fetch.group) * (len(hashes) + 1) + JOB_BYTES
            jobs.fetches.append(m.Fetch(job, namespace.id, fetch.group.number, parent, hashes))
        most = MOST_WRITES
        while to_write and tier.writes.bytes_in_flight < budget and tier.writes.blocks_in_flight < MOST_BLOCKS_OUT:
            group = to_write[0][0].account.group
            entry_bytes = _hash_bytes(group) + REF_BYTES + len(group.spec.shards) * SUM_BYTES
            if (limit := min(most, room // entry_bytes)) <= 0:
                break
            waiting = tier.writes.waiting
            if (store := self._next_store(tier, specs, limit)) is not None:
                room -= entry_bytes * len(store.hashes) + JOB_BYTES
                jobs.stores.append(store)
            most -= waiting - tier.writes.waiting
        if not (jobs.exists or jobs.fetches or jobs.stores):
            return None
        jobs.specs = [each.spec for number, each in specs.items() if number not in tier.session.attached]
        return jobs

    def _next_store(self, tier: Tier, specs: dict[int, Any], most: int) -> m.Store | None:
        batch = tier.writes.next_batch(most)
        if not batch:
            return None
        group = batch[0].account.group
        namespace = self._namespace(group)
        if namespace is None:
            return None
        specs[namespace.number] = namespace
        job = next(self._numbers)
        lease, slots, sums = self._cache.lend(tier.session, batch)
        tier.writes.begin(job, Writing(lease, batch))
        return m.Store(job, namespace.id, group.number, [block.hash for block in batch], slots, sums)

    def _look_ahead(self, tier: Tier) -> None:
        """Let the tier store blocks that are about to be evicted, if lookups ever found them."""
        left = AHEAD_BLOCKS
        for leaf in self._cache.next_evictable(AHEAD_LEAVES):
            upwards = takewhile(lambda block: not tier.writes.has(block), leaf.ancestors())
            new = list(islice(upwards, left))
            left -= len(new)
            _store(tier, list(dropwhile(lambda block: not block.tick & CLASS_MASK, new))[::-1])

    def turn_off_hanging(self, now: float) -> list[str]:
        """Turn off connected tiers that no longer poll, or finish no jobs, and return their names."""
        found = [tier for tier in self._on() if now - tier.active_at > HANGING]
        for tier in found:
            self._turn_off(tier, "hanging")
        return [tier.name for tier in found]

    def take_back_jobs(self, session: int) -> None:
        """Take back all jobs of a tier: an answer with jobs could not be sent."""
        tier = self._tiers.get(session)
        if tier is not None:
            self._turn_off(tier, "disconnected")

    def _namespace(self, group: Group) -> Any:
        namespace = self._cache.namespaces.get(group.namespace)
        return namespace if namespace is not None and namespace.groups[group.number] is group else None

    def _turn_off(self, tier: Tier, reason: str) -> None:
        for lease in tier.turn_off(reason):
            self._end_lease(tier, lease)

    @staticmethod
    def _end_lease(tier: Tier, lease: int) -> None:
        if lease in tier.session.leases:  # otherwise, its session has ended or resumed
            tier.session.unpin(lease)

    def _listen(self) -> None:
        self._cache.use_tiers(self if self._tiers or self._starting else None)

    def report(self) -> list[status.Tier]:
        """Return figures of each tier for `status`."""
        return [tier.report() for tier in self._tiers.values()]


def _longest(group: Group) -> int:
    """Return the number of blocks of a chain to ask for with suffix groups: all groups are examined in one turn."""
    return 2 * LOOK // (1 + len(group.suffixes))


def _here_or_coming(coming: Sequence[Mapping[bytes, Fetch]], group: Group) -> Callable[[bytes], bool]:
    """Return a predicate: True for a block that is cached, being written, or being fetched from a tier."""
    visible, pending, tag = group.visible, group.pending, group.tag

    def is_here(name: bytes) -> bool:  # called for thousands of blocks
        if name in visible or name in pending:
            return True
        tagged = name + tag
        for each in coming:  # noqa: SIM110 - any() takes twice as long
            if tagged in each:
                return True
        return False

    return is_here


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000)) if seconds else 0


def _has_or_gets(group: Group, found: set[bytes], name: bytes) -> bool:
    return name + group.tag in found or group.has_soon(name)


def _with_ancestors(tier: Tier, blocks: Sequence[Block]) -> Sequence[Block]:
    """Return `blocks`, each after its ancestors that the tier lacks, without which it is useless."""
    found: dict[int, Block] = {}
    most = len(blocks) + LOOK
    for block in blocks:
        above = takewhile(lambda each: id(each) not in found and not tier.writes.has(each), block.ancestors())
        found.update((id(each), each) for each in list(islice(above, most - len(found)))[::-1])
    return list(found.values())


def _store(tier: Tier, blocks: Sequence[Block]) -> None:
    """Let the tier store blocks, which may be of several groups."""
    for group in dict.fromkeys(block.account.group for block in blocks):
        tier.writes.store([block for block in blocks if block.account.group is group])


def _hash_bytes(group: Group) -> int:
    """Return the size of a hash in a message, in bytes."""
    return group.hash_bytes + 2


def _common(asked: Sequence[bytes], hashes: Sequence[bytes], begin: int) -> int:
    """Return the length of the common prefix of `asked` and of `hashes` from `begin` on."""
    pairs = zip(asked, islice(hashes, begin, None), strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(asked), len(hashes) - begin))
