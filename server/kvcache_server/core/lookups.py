"""Lookups, and the leases on the blocks that they find. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from kvcache_proto import messages as m
from kvcache_proto.errors import BadArgument
from kvcache_proto.types import FULL, MAX_HASHES, REF_BYTES, SUFFIX, SUM_BYTES, GroupSpec, check_hashes
from kvcache_server.core.checksums import Checksums
from kvcache_server.core.effects import Effects
from kvcache_server.core.eviction.due import SECONDS, Waiting
from kvcache_server.core.eviction.policy import Eviction
from kvcache_server.core.index import Block, Group
from kvcache_server.core.limits import LOOK, Limits
from kvcache_server.core.pool import Pool
from kvcache_server.core.sessions import Namespace, RequestLookups, Session
from kvcache_server.core.tiers import Tiers

MOST_RECLAIMED = 1 << 16  # blocks examined per reclaim: some milliseconds
MOST_TAILS = 16
MOST_NAMED = 1 << 11  # leases and references examined per reclaim, together


class _Match(NamedTuple):
    """The blocks that match a lookup.

    `chain` are blocks of the full group, `suffixes` those that the engine needs to continue after `hits` blocks. See
    Acquired for `pending`, `withheld`, `divergence` and `tail`. `proof` is the block that follows the hits, if there
    must be one: it counts as used, although the engine gets no reference to it.
    """

    chain: list[Block]
    hits: int
    suffixes: Sequence[Block] = ()
    pending: int = 0
    withheld: int = 0
    proof: Block | None = None
    divergence: int = 0
    tail: int = 0

    @property
    def used(self) -> list[Block]:
        return self.chain if self.proof is None else [*self.chain, self.proof]


class Lookups:
    """Answers lookups, and pins the blocks that they found. `last` is the number of the last lease."""

    def __init__(self, pool: Pool, eviction: Eviction, effects: Effects, limits: Limits) -> None:
        self.last = 0
        self.checksums: Checksums | None = None  # set if there is a file for them
        self.tiers: Tiers | None = None  # set while there are any
        self._pool, self._learner = pool, eviction.learner
        self._holders, self._due = eviction.holders, eviction.due
        self._counters, self._refusals = effects.counters, effects.refusals
        self.set_limits(limits)

    def set_limits(self, limits: Limits) -> None:
        self._max_leases = limits.max_leases
        self._quota = int(limits.pin_quota * self._pool.capacity)

    # Lookups.

    def acquire(self, session: Session, request: m.Acquire) -> m.Acquired:
        """Answer with the longest prefix after which the engine can continue, under a lease if `request.pin`.

        Raises UnknownHandle, BadArgument; then nothing has changed.
        """
        namespace, group = session.group(request.namespace, request.group)
        hashes = request.hashes
        if request.group and group.spec.kind == SUFFIX:
            raise BadArgument(f"group {request.group} is a suffix group: a lookup of group 0 is for all groups")
        if len(hashes) > MAX_HASHES:
            raise BadArgument(f"{len(hashes)} hashes in one message: at most {MAX_HASHES}")
        if not hashes and not request.pin:  # the engine takes an announcement back
            self._due.end(session.engine.name, request.request)
            return m.Acquired(request.id, 0, 0, 0, b"")
        found = group.prefix(hashes) if not group.is_suffix else []
        if len(found) < len(hashes):
            check_hashes(hashes[len(found) :], group.hash_bytes)
        if request.start < 0:
            raise BadArgument(f"start {request.start}: 0 or more blocks")
        if not group.suffixes:
            return self._answer(session, request, namespace, group, _Match(found, len(found)))
        if request.tails_per_block < bool(request.tails):
            raise BadArgument(f"tails_per_block {request.tails_per_block}: 1 or more")
        check_hashes(request.tails, group.hash_bytes)
        return self._answer(session, request, namespace, group, self._match(session, request, group, found))

    def _match(self, session: Session, request: m.Acquire, group: Group, chain: list[Block]) -> _Match:
        """Return the match of a lookup in all groups of a namespace with suffix groups; its full group has `chain`."""
        hashes, start, suffixes = request.hashes, request.start, group.suffixes
        most = most_pending = len(hashes)
        divergence = 0
        if group is not suffixes[0]:
            divergence = most = len(chain) - group.spec.needs_next_block
            most_pending = most + group.pending_after(hashes, len(chain))
        else:
            chain = []
        soon = 0
        if group.pending or any(suffix.pending for suffix in suffixes):
            soon = last_end([(suffix.spec, suffix.has_soon) for suffix in suffixes], hashes, most_pending, start)
        end, needed = boundary(suffixes, hashes, most, start)
        pins, whole = session.engine.pins, end
        while end and request.pin:
            beside = _bytes(needed)
            if pins.bytes + len(chain[:end]) * group.allocated_bytes + beside <= self._quota:
                break
            affordable = pins.fit(chain[:end], self._quota - beside)[0] if chain else 0
            if affordable == end:
                break
            end, needed = boundary(suffixes, hashes, affordable, start)
        if request.tails and (found := self._find_tail(session, request, group, chain, max(end, start))):
            number, path, needed = found
            beyond = divergence if divergence >= len(path) else 0
            return _Match(path, len(path), needed, max(soon - len(path), 0), divergence=beyond, tail=number)
        beyond = divergence if divergence > whole else 0
        proof = chain[end] if end and group.spec.needs_next_block else None
        return _Match(chain[:end], end, needed, max(soon - whole, 0), whole - end, proof, beyond)

    def _find_tail(
        self, session: Session, request: m.Acquire, group: Group, chain: list[Block], least: int
    ) -> tuple[int, list[Block], list[Block]] | None:
        """Return the number of the longest tail after which the engine may continue, the blocks of the full group up to
        it, and those of the suffix groups; None if there is none after `least` blocks or more.

        Examines the MOST_TAILS longest ones that are cached: each takes time in proportion to the blocks before it.
        """
        tails, per_block, pins = request.tails, request.tails_per_block, session.engine.pins
        visible, suffixes = group.visible, [suffix.visible for suffix in group.suffixes]
        longest_first = range(min(len(tails), (len(chain) + 1) * per_block) - 1, least * per_block - 1, -1)
        cached = [at for at in longest_first if tails[at] in visible and all(tails[at] in each for each in suffixes)]
        for at in islice(cached, MOST_TAILS):
            tail, count = visible[tails[at]], at // per_block
            path = [*chain[:count], tail]
            if tail.parent is not (chain[count - 1] if count else group.root):
                continue
            needed = _blocks(group.suffixes, [*request.hashes[:count], tail.hash], count + 1, request.start)
            if needed is None or (group.severed and not all(map(_is_reachable, needed))):
                continue
            if not request.pin or pins.bytes + len(path) * group.allocated_bytes + _bytes(needed) <= self._quota:
                return at + 1, path, needed
        return None

    def _answer(
        self, session: Session, request: m.Acquire, namespace: Namespace, group: Group, match: _Match
    ) -> m.Acquired:
        """Answer with the blocks found, as far as the engine may pin them; to an announcement, with none if it is
        refused."""
        engine, chain, hits = session.engine, match.chain, match.hits
        suffixes, withheld = match.suffixes, match.withheld
        waits = bool(request.request) and not request.pin
        if waits and not self._announce(session, request, group, match):
            self._counters["announcements_refused"] += 1
            return m.Acquired(request.id, 0, 0, 0, b"", len(request.hashes))
        # What waits is used once it is scheduled: learning from both would mistake the wait for a rhythm.
        asked = None if waits else self._note_asked(session, request, namespace, group, match)
        if hits and engine.writers[request.namespace] is None:
            # A rank that has not mapped the region could not load the blocks that its scheduler gets.
            self._counters["ranks_missing"] += 1
            return m.Acquired(request.id, 0, 0, 0, b"")
        pending, coming, eta = self._not_here_yet(session, request, group, match)
        lease = size = cover = 0
        if request.pin and hits:
            if len(session.leases) >= self._max_leases:
                self._refusals["leases"] += hits
                return m.Acquired(request.id, 0, 0, 0, b"", hits)
            size, beside = len(chain) * group.allocated_bytes, _bytes(suffixes) if suffixes else 0
            if engine.pins.bytes + size + beside > self._quota:
                affordable, size, cover = engine.pins.fit(chain, self._quota - beside)
                withheld += hits - affordable
                hits = affordable
                del chain[hits:]
        if withheld:
            self._refusals["quota"] += withheld
            pending = coming = eta = 0
        if not hits:
            return m.Acquired(request.id, 0, 0, pending, b"", withheld, b"", coming, eta, match.divergence)
        if request.pin:
            self.last = lease = self.last + 1
            session.pin(lease, chain[-1] if chain else None, size, cover, suffixes)
        if asked is not None:
            self._note_hits(namespace, group, match, hits, asked)
        blocks = [*chain, *suffixes] if suffixes else chain
        slots = b"".join([block.ref for block in blocks])
        sums = b""
        if request.verify and self.checksums and suffixes:
            sums = b"".join([self._sums([block]) for block in blocks])
        elif request.verify and self.checksums:
            sums = self.checksums.read(slots, group.sum_offsets, self._pool.locate_if_scattered)
        return m.Acquired(
            *(request.id, lease, hits, pending, slots, withheld, sums, coming, eta, match.divergence, match.tail)
        )

    def _note_asked(
        self, session: Session, request: m.Acquire, namespace: Namespace, group: Group, match: _Match
    ) -> RequestLookups:
        """Count a lookup. A request's repeated lookups do not show how often blocks are used."""
        if self._due.waiting:
            self._due.end(session.engine.name, request.request)
        asked, share = session.engine.lookups_of(request.request, group), session.engine.shares[namespace.number]
        if not asked.lookups:
            hits = match.hits + (match.proof is not None)
            if self._holders.reports:
                self._holders.requested(share, match.chain[-1] if match.chain else None, request.start > hits)
            self._learner.asked(session.engine, group, request, match.used, hits, match.suffixes)
        asked.lookups += 1
        namespace.lookups += 1
        if share.device:  # the blocks before `start` are not needed from here
            asked.blocks, asked.hits = max(asked.blocks, request.start), max(asked.hits, request.start)
        more = max(len(request.hashes) - group.spec.needs_next_block, match.hits) - asked.blocks
        if more > 0:
            asked.blocks += more
            namespace.requested_blocks += more
            self._counters["blocks_requested"] += more
        return asked

    def _announce(self, session: Session, request: m.Acquire, group: Group, match: _Match) -> bool:
        """Note that a request waits in its engine's queue; return False if too much waits."""
        used = match.used
        blocks = [used[-1] if used else group.root, *match.suffixes]
        waiting = Waiting(session, group, request.hashes, blocks, len(used), self._pool.now + SECONDS)
        return self._due.announce(request.request, waiting)

    def _not_here_yet(self, session: Session, request: m.Acquire, group: Group, match: _Match) -> tuple[int, int, int]:
        """Return the numbers of blocks after the hits that are being written and that come from tiers, and when: see
        Acquired."""
        pending = match.pending if group.suffixes else group.pending_after(request.hashes, match.hits)
        if self.tiers is None or (request.start > match.hits and not group.suffixes):
            return pending, 0, 0  # the engine's device has more than the pool
        now = self._pool.now
        if group.suffixes:
            return pending, *self.tiers.looked_up_with_suffixes(
                session, group, request, match.hits, match.used, match.suffixes, now
            )
        return pending, *self.tiers.looked_up(session, group, request.hashes, match.chain, pending, now)

    def _note_hits(self, namespace: Namespace, group: Group, match: _Match, hits: int, asked: RequestLookups) -> None:
        """Count hits that were not yet counted for this request, and note that their blocks were read."""
        chain, suffixes = match.chain, match.suffixes
        if chain:
            self._pool.touch(match.proof or chain[-1], 1)
        for block in suffixes:
            self._pool.touch(block, 1)
        more = hits - asked.hits
        if more > 0:
            asked.hits += more
            namespace.hit_blocks += more
            self._counters["blocks_hit"] += more
            if chain:
                group.read_blocks += more
            for block in suffixes:
                block.account.group.read_blocks += 1

    def report_device(self, session: Session, request: m.ReportDevice) -> None:
        """Note what the engine's device holds and has evicted; blocks that are not cached are ignored.

        Raises UnknownHandle, BadArgument; then nothing has changed.
        """
        namespace, group = session.group(request.namespace, request.group)
        check_hashes([*request.kept, *request.evicted], group.hash_bytes)
        share = session.engine.shares[namespace.number]
        for name in request.kept:
            if (block := group.visible.get(name)) is not None:
                self._holders.hold(share, block)
        for name in request.evicted:
            if (block := group.visible.get(name)) is not None:
                self._holders.let_go(share, block)

    def lend(self, session: Session, blocks: Sequence[Block]) -> tuple[int, bytes, bytes]:
        """Start a lease on blocks of one group, each by itself; return its number, their references, and checksums."""
        self.last += 1
        session.pin(self.last, None, 0, 0, blocks)
        return self.last, b"".join([block.ref for block in blocks]), self._sums(blocks)

    def _sums(self, blocks: Sequence[Block]) -> bytes:
        """Return the checksums of blocks of one group, 0 for shards that have none."""
        group, sums = blocks[0].account.group, b""
        if self.checksums is not None:
            slots = b"".join([block.ref for block in blocks])
            sums = self.checksums.read(slots, group.sum_offsets, self._pool.locate_if_scattered)
        return sums or bytes(len(blocks) * len(group.spec.shards) * SUM_BYTES)

    def release(self, session: Session, request: m.Release) -> None:
        """End the session's leases named in `request`; count unknown ones."""
        for lease in request.leases:
            if lease in session.leases:
                session.unpin(lease)
            else:
                self._counters["releases_unknown"] += 1

    # After a restart, or a lost connection.

    def reclaim(self, session: Session, request: m.Reclaim, former: Session | None) -> list[int]:
        """Restore the leases that a resumed session reports; return the numbers of those that are lost.

        Leases that it had as `former`, before its connection was lost, are its own again. For others, the limits of new
        leases apply: those beyond `max_leases` or the pin quota are lost, as are leases whose blocks are gone, and
        those for which more than MOST_RECLAIMED blocks or MOST_NAMED references would have to be examined.
        """
        lost, others = [], []
        held = former.leases if former is not None else {}
        for number, refs in request.leases:
            if number in held and refs == b"".join([block.ref for block in held[number].blocks]):
                session.leases[number] = held.pop(number)
                self._counters["leases_reclaimed"] += 1
            else:
                others.append((number, refs))
        pins = session.engine.pins
        pins.uncover(MOST_RECLAIMED)
        ended = sum(lease.bytes + lease.beside for lease in held.values())
        chains = _Chains()
        numbers = {number for number, _ in others}
        taken = set[int]().union(*[numbers & each.leases.keys() for each in session.engine.sessions.values()])
        left = MOST_NAMED
        for number, refs in others:
            left -= 1 + len(refs) // REF_BYTES
            if left < 0:
                lost.append(number)
                self._counters["leases_over_limits"] += 1
                continue
            ends = [self._pool.find(refs, at) for at in range(0, len(refs) // REF_BYTES * REF_BYTES, REF_BYTES)]
            blocks = [block for block in ends if block is not None and block.visible]
            if not blocks or len(blocks) < len(ends) or number in taken or not 0 < number <= self.last:
                lost.append(number)
                continue
            block = blocks.pop(0) if blocks[0].account.group.spec.kind == FULL else None
            room = self._quota - pins.bytes + ended - _bytes(blocks)
            fits = room >= 0 and len(session.leases) < self._max_leases
            fits = fits and all(each.account.group.spec.kind == SUFFIX for each in blocks)
            size = (chains.add(block, room) if block is not None else 0) if fits else None
            if size is None:
                lost.append(number)
                self._counters["leases_over_limits"] += 1
                continue
            session.pin(number, block, size, 0, blocks)
            taken.add(number)
            self._counters["leases_reclaimed"] += 1
        self._counters["leases_lost"] += len(lost)
        return lost


class _Chains:
    """The distinct blocks of chains that are pinned again; MOST_RECLAIMED are examined at most."""

    def __init__(self) -> None:
        self._left = MOST_RECLAIMED
        self._counted: set[int] = set()  # ids: the blocks are pinned meanwhile

    def add(self, end: Block, room: int) -> int | None:
        """Return the bytes of the blocks of the chain with that `end` that were not counted before; None, and count
        none, if there is no `room` for them, or too many would have to be examined."""
        most = min(max(self._left, 0), room // end.account.group.allocated_bytes)
        uncounted = takewhile(lambda block: id(block) not in self._counted, end.ancestors())
        new = [id(block) for block in islice(uncounted, most + 1)]
        self._left -= len(new)
        if len(new) > most:
            return None
        self._counted.update(new)
        return len(new) * end.account.group.allocated_bytes


def _bytes(blocks: Sequence[Block]) -> int:
    return sum([block.account.group.allocated_bytes for block in blocks])


# Where an engine may continue: the longest prefix for which each group has the blocks that it needs.


def boundary(suffixes: Sequence[Group], hashes: Sequence[bytes], most: int, start: int) -> tuple[int, list[Block]]:
    """Return the largest number of blocks, at most `most`, after which an engine may continue, and the suffix groups'
    blocks that it needs for that, suffix group after suffix group in prompt order.

    It has the first `start` blocks itself. Returns 0 and no blocks if there is no number above `start`, or if one of
    the blocks hangs on a hidden one and has not been removed yet.
    """
    while most > start:
        found = _blocks(suffixes, hashes, most, start)
        if found is not None and suffixes[0].above.severed and not all(map(_is_reachable, found)):
            return 0, []
        if found is not None:
            return most, found
        most = last_end([(suffix.spec, suffix.visible.__contains__) for suffix in suffixes], hashes, most, start)
    return 0, []


def _is_reachable(block: Block) -> bool:
    return block.parent is not None and block.account.group.reaches(block.parent)


def _blocks(suffixes: Sequence[Group], hashes: Sequence[bytes], end: int, start: int) -> list[Block] | None:
    """Return the blocks of `suffixes` that an engine needs to continue after `end` blocks, None if one is missing."""
    found: list[Block] = []
    try:
        for suffix in suffixes:
            first = max(start, end - suffix.spec.needed(end))
            found += map(suffix.visible.__getitem__, hashes[first:end])
    except KeyError:
        return None
    return found


def last_end(
    suffixes: Sequence[tuple[GroupSpec, Callable[[bytes], bool]]], hashes: Sequence[bytes], most: int, start: int
) -> int:
    """Return the largest number of blocks, at most `most`, for which `suffixes` have the blocks needed; at least
    `start`.

    Each suffix group is given as its spec and a test for its blocks. Returns `start` if the search takes long because
    the blocks have more gaps than any engine leaves behind.
    """
    have = [bytes(map(has, hashes[start:most])) for _, has in suffixes]
    end, before, looks = most, most + 1, 0
    while end < before:
        before = end
        for (spec, _), flags in zip(suffixes, have, strict=True):
            while (lower := _lower(spec, flags, end, start)) < end:
                end = lower
                looks += 1
                if looks == LOOK:
                    return start
    return end


def _lower(spec: GroupSpec, flags: bytes, end: int, start: int) -> int:
    """Return `end` if one suffix group has the blocks needed to continue after `end` blocks, else a lower number to try
    next.

    `flags[at]` is whether the suffix group has block `start + at`. No number in between would do.
    """
    inside = end - start
    missing = flags.rfind(0, 0, inside)
    if missing < inside - min(spec.needed(end), inside):
        return end
    lower = start + missing
    if missing and spec.needed(lower) and not flags[missing - 1]:
        last = flags.rfind(1, 0, missing)  # skips all missing blocks before it
        lower = max(start + last + 1, lower - lower % spec.chunk_blocks if spec.chunk_blocks else start)
    return lower
