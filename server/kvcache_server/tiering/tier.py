"""One tier, as the daemon sees it: what it was asked for, what it brings, and what it stores. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import chain, islice

import msgspec

from kvcache_proto.types import MAX_BLOCKS
from kvcache_server.core.index import Block, Group
from kvcache_server.core.limits import LOOK
from kvcache_server.core.sessions import Session
from kvcache_server.tiering.inquiry import Inquiry

ABSENT_FOR = 5.0  # seconds for which a tier is not asked again for what it did not have: other hosts may store it
SLOT = 8  # bytes of a reference that name the slot; the others say which block it is that has been there
MOST_ABSENT = 1 << 16  # blocks of which that is remembered
MOST_LOOKS = 256  # without an answer; a tier that does not keep up is not asked for more
MOST_LOOKED_UP = 1 << 16  # blocks in them
MOST_COMING = 1 << 16  # blocks to bring
MOST_WRITES = 1 << 16  # blocks that wait to be written
FIRST_RATE, FIRST_LATENCY = 1e9, 0.005  # bytes per second and seconds, until the first ones were measured
FIRST_SECONDS = 0.05  # what FIRST_RATE counts as having been measured for
RATE_SECONDS = 0.5  # of bringing that the rate is an average of, or half as many
LEAST_ETA = 0.001  # seconds
PUT_OFF = 4  # what is late by some time is expected after so small a part of that
_SMOOTH = 0.2  # the weight of a new measurement


class Fetch:
    """Blocks of a chain that a tier has and that are brought into the region, in parts.

    `due` is when the last one is expected.
    """

    __slots__ = ("due", "engine", "group", "hashes", "inquiry", "parent", "sent")

    def __init__(self, looking: Looking, hashes: list[bytes], now: float, seconds: float) -> None:
        """It is expected to take `seconds`."""
        self.engine, self.group, self.parent = looking.engine, looking.group, looking.parent
        self.hashes, self.inquiry = hashes, looking.inquiry
        self.due = now + seconds
        self.sent = 0  # hashes of which parts were made


class Looking(msgspec.Struct, gc=False):
    """A question to a tier: which of these it has. `at` is when it was asked, in seconds."""

    engine: str
    group: Group
    parent: bytes | None
    hashes: list[bytes]
    at: float
    inquiry: Inquiry = msgspec.field(default_factory=Inquiry)
    joint: Joint | None = None

    @property
    def name(self) -> bytes:
        """By what it is known that this was asked: a hash and a tag."""
        return self.joint.name if self.joint is not None else self.hashes[0] + self.group.tag


class Joint(msgspec.Struct, gc=False):
    """The questions of one lookup in a namespace with tails, one per group: where could the engine continue?

    It has the first `start` blocks itself. `name` is the last hash, with the first group's tag. `found` has what the
    tier has, with the groups' tags; `left` questions are not answered yet.
    """

    name: bytes
    group: Group
    hashes: list[bytes]
    start: int
    found: set[bytes]
    left: int = 0


class Part(msgspec.Struct, gc=False):
    """A part of a fetch that is being brought."""

    fetch: Fetch
    begin: int
    end: int
    at: float


class Writing(msgspec.Struct, gc=False):
    """Blocks that are being written to the tier, under a lease of its session."""

    lease: int
    blocks: list[Block]


class Tier:
    """Attributes:
    name: what metrics call it.
    off: why it gets no jobs; "" while it does.
    writes_off: why it gets nothing to write, though it may be read; "" while it does.
    removals_off: why wrong values stay in its store.
    counts: what happened, by name.
    """

    def __init__(self, session: Session, name: str, batch_bytes: int, policy: str) -> None:
        self.session, self.name, self.policy = session, name, policy
        self.batch_bytes = batch_bytes
        self.off = self.writes_off = self.removals_off = ""
        self.counts: Counter[str] = Counter()
        self.latency = FIRST_LATENCY
        self._moved, self._busy = FIRST_RATE * FIRST_SECONDS, FIRST_SECONDS  # bytes brought and seconds, fading
        self.looks: deque[Looking] = deque()  # that wait
        self.looking: dict[int, Looking] = {}  # that the tier has, by number
        self.looked_up = 0  # hashes in both
        self.asked: dict[bytes, Looking] = {}  # both, by name
        self.absent: dict[bytes, float] = {}  # until when
        self.fetches: OrderedDict[str, deque[Fetch]] = OrderedDict()  # by engine; the next one's first
        self.coming: dict[bytes, Fetch] = {}  # by hash and tag
        self.parts: dict[int, Part] = {}
        self.backlog = self.in_flight = 0  # bytes to bring, and of those the ones in parts
        # References of blocks that it has, and of those that wait or are being written, by the part for the slot.
        self._has: dict[bytes, bytes] = {}
        self._soon: dict[bytes, bytes] = {}
        self.writes: deque[list[Block]] = deque()
        self.waiting = 0  # blocks in it
        self.writing: dict[int, Writing] = {}
        self.blocks_in_flight = self.written_in_flight = 0  # blocks, and bytes
        self.asked_at = self.heard_at = self._brought_at = 0.0  # of requests for work, and of reports
        self.looked_ahead_at = 0.0
        self.next_ahead = 0  # the account at which the next look begins

    @property
    def keeps_up(self) -> bool:
        """Whether it writes about as fast as it is asked to."""
        return not self.writes_off and self.waiting <= MOST_WRITES // 2

    @property
    def rate(self) -> float:
        """Bytes per second that it brings, of late."""
        return self._moved / max(self._busy, 1e-6)

    @property
    def on(self) -> bool:
        return not self.off and self.session.connected

    @property
    def works(self) -> bool:
        """Whether it has jobs of which it has not reported the end."""
        return bool(self.looking or self.parts or self.writing)

    @property
    def active_at(self) -> float:
        """Return when the tier was seen to do what it has to."""
        return min(self.asked_at, self.heard_at) if self.works else self.asked_at

    # Blocks that lookups missed.

    def knows(self, group: Group, name: bytes, now: float) -> bool:
        """Whether the tier need not be asked for a block, because the answer is known or on its way."""
        tagged = name + group.tag
        return tagged in self.coming or tagged in self.asked or self.absent.get(tagged, 0.0) > now

    def answers_in(self, tagged: bytes, now: float) -> float | None:
        """Return in how many seconds the tier should say whether it has a block; None if it has said that it has not.

        It may have too many questions to be asked now: then it is asked later.
        """
        if self.absent.get(tagged, 0.0) > now:
            return None
        asked = self.asked.get(tagged)
        return eta((now if asked is None else asked.at) + 2 * self.latency, now)

    def coming_after(self, group: Group, hashes: Sequence[bytes], begin: int) -> int:
        """Return before which block the tier stops that is bringing block `begin`; O(LOOK)."""
        end, most = begin + 1, min(len(hashes), begin + LOOK)
        while end < most and hashes[end] + group.tag in self.coming:
            end += 1
        return end

    def ask(self, looking: Looking) -> bool:
        """Ask for blocks of which the tier knows nothing yet; return whether it is not asked for too much already."""
        blocks = len(looking.hashes)
        if len(self.looks) + len(self.looking) >= MOST_LOOKS or self.looked_up + blocks > MOST_LOOKED_UP:
            self.counts["looks_dropped"] += 1
            return False
        self.looked_up += blocks
        self.looks.append(looking)
        self.asked[looking.name] = looking
        looking.inquiry.tier, looking.inquiry.asked = self.name, len(looking.hashes)
        self.counts["looks"] += 1
        return True

    def ask_jointly(self, joint: Joint, engine: str, parts: Sequence[tuple[Group, list[bytes]]], now: float) -> None:
        """Ask what a lookup in a namespace with tails needs, of each group what it lacks."""
        blocks = sum(len(hashes) for _, hashes in parts)
        if len(self.looks) + len(self.looking) + len(parts) > MOST_LOOKS or self.looked_up + blocks > MOST_LOOKED_UP:
            self.counts["looks_dropped"] += 1
            return
        joint.left = len(parts)
        for group, hashes in parts:
            self.ask(Looking(engine, group, None, hashes, now, joint=joint))

    def forget_look(self, looking: Looking) -> None:
        """Note that a look, which waits no more, has an answer or needs none."""
        self.looked_up -= len(looking.hashes)
        if looking.joint is not None:
            looking.joint.left -= 1
        if looking.joint is None or not looking.joint.left:
            del self.asked[looking.name]

    def found(self, number: int, flags: bytes, now: float) -> tuple[Looking, int] | None:
        """Take the answer to a look: fetch the blocks before the first that is not there.

        Return the look and how many those are; None for an unknown number.
        """
        looking = self.looking.pop(number, None)
        if looking is None:
            return None
        self.forget_look(looking)
        group, hashes, joint, inquiry = looking.group, looking.hashes, looking.joint, looking.inquiry
        self.latency += (now - looking.at - self.latency) * _SMOOTH
        self.counts["blocks_looked_up"] += len(hashes)
        if joint is not None:
            there = {name + group.tag for name, flag in zip(hashes, flags, strict=False) if flag}
            self.counts["blocks_found"] += len(there)
            joint.found |= there
            return looking, 0
        blocks = _leading(flags, len(hashes))
        self.counts["blocks_found"] += blocks
        inquiry.answered, inquiry.found, inquiry.at, inquiry.writes_off = True, blocks, now, self.writes_off
        if blocks < len(hashes):
            self.lacks(hashes[blocks] + group.tag, now)
        if blocks:
            self.fetch(looking, hashes[:blocks], now)
        return looking, blocks

    def fetch(self, looking: Looking, hashes: list[bytes], now: float) -> Fetch | None:
        """Have blocks brought that the tier has, unless it does not keep up."""
        if len(self.coming) + len(hashes) > MOST_COMING:
            self.counts["blocks_not_brought"] += len(hashes)
            looking.inquiry.lost += len(hashes)
            return None
        self.backlog += len(hashes) * looking.group.allocated_bytes
        fetch = Fetch(looking, hashes, now, self.backlog / self.rate)
        for name in hashes:
            self.coming.setdefault(name + looking.group.tag, fetch)  # what comes already comes first
        self.fetches.setdefault(looking.engine, deque()).append(fetch)
        return fetch

    def next_part(self, most: int, now: float) -> Part | None:
        """Return the next part to bring, of at most `most` bytes, of engines in turn."""
        while self.fetches:
            engine, queue = next(iter(self.fetches.items()))
            fetch = queue[0]
            blocks = min(max(1, most // fetch.group.allocated_bytes), MAX_BLOCKS)
            part = Part(fetch, fetch.sent, min(fetch.sent + blocks, len(fetch.hashes)), now)
            fetch.sent = part.end
            if fetch.sent == len(fetch.hashes):
                queue.popleft()
            self.fetches.move_to_end(engine)
            if not queue:
                del self.fetches[engine]
            if part.begin < part.end:
                self.in_flight += self._bytes(part)
                return part
        return None

    def brought(self, number: int, flags: bytes, now: float) -> bool:
        """Note which blocks of a part are cached. Return whether there is such a part."""
        part = self.parts.pop(number, None)
        if part is None:
            return False
        fetch, size = part.fetch, self._bytes(part)
        tag = fetch.group.tag
        wanted = part.end - part.begin
        blocks = _leading(flags, wanted)
        fetch.inquiry.brought += blocks
        fetch.inquiry.lost += wanted - blocks
        fetch.inquiry.at = now
        self.in_flight -= size
        self.backlog -= size
        self._came(fetch, part.begin, part.end)
        if blocks < wanted:
            self.counts["blocks_not_brought"] += wanted - blocks
            self._give_up(fetch)
            self.lacks(fetch.hashes[part.begin + blocks] + tag, now)
        else:
            # Parts run beside each other, and end in bursts: only the sums say how fast they come.
            self._moved += size
            self._busy += now - max(part.at, self._brought_at)
            if self._busy > RATE_SECONDS:
                self._moved, self._busy = self._moved / 2, self._busy / 2
        self._brought_at = now
        self.counts["blocks_brought"] += blocks
        self.counts["bytes_brought"] += blocks * fetch.group.allocated_bytes
        return True

    def _give_up(self, fetch: Fetch) -> None:
        """Bring no more parts of a fetch: the blocks would have no parent."""
        rest = fetch.hashes[fetch.sent :]
        self.backlog -= len(rest) * fetch.group.allocated_bytes
        self.counts["blocks_not_brought"] += len(rest)
        fetch.inquiry.lost += len(rest)
        self._came(fetch, fetch.sent, len(fetch.hashes))
        fetch.sent = len(fetch.hashes)

    def _came(self, fetch: Fetch, begin: int, end: int) -> None:
        """Note that some blocks of a fetch are not on their way any more."""
        for name in fetch.hashes[begin:end]:
            if self.coming.get(tagged := name + fetch.group.tag) is fetch:
                del self.coming[tagged]

    def lacks(self, tagged: bytes, now: float) -> None:
        """Do not ask for this for a while."""
        if len(self.absent) >= MOST_ABSENT:
            for each in list(islice(self.absent, MOST_ABSENT // 2)):
                del self.absent[each]
        self.absent[tagged] = now + ABSENT_FOR

    @staticmethod
    def _bytes(part: Part) -> int:
        return (part.end - part.begin) * part.fetch.group.allocated_bytes

    # Blocks to store.

    def has(self, block: Block) -> bool:
        """Whether the tier has a block or soon will, as far as is known."""
        ref = block.ref
        return self._has.get(ref[:SLOT]) == ref or self._soon.get(ref[:SLOT]) == ref

    def mark(self, block: Block) -> None:
        """Note that the tier has a block."""
        self._has[block.ref[:SLOT]] = block.ref

    def store(self, blocks: list[Block]) -> None:
        """Have `blocks` written, parents before children, unless too many wait."""
        if self.waiting + len(blocks) > MOST_WRITES:
            self.counts["writes_dropped"] += len(blocks)
            return
        for block in blocks:
            self._soon[block.ref[:SLOT]] = block.ref
        self.writes.append(blocks)
        self.waiting += len(blocks)

    def next_batch(self, most: int) -> list[Block]:
        """Return blocks of one group to write, of about `batch_bytes`, after a look at `most` blocks at most."""
        batch: list[Block] = []
        size = 0
        while self.writes and size < self.batch_bytes and most > 0:
            blocks = self.writes[0]
            group = batch[0].account.group if batch else blocks[0].account.group
            if blocks[0].account.group is not group:
                break
            taken = blocks[: min(most, max(1, (self.batch_bytes - size) // group.allocated_bytes))]
            if len(taken) < len(blocks):
                self.writes[0] = blocks[len(taken) :]
            else:
                self.writes.popleft()
            most -= len(taken)
            self.waiting -= len(taken)
            there = [block for block in taken if block.visible and group.trusts(block)]
            self.counts["writes_too_late"] += len(taken) - len(there)
            batch += there
            size += len(there) * group.allocated_bytes
        return batch

    def begin_to_write(self, job: int, writing: Writing) -> None:
        self.writing[job] = writing
        self.blocks_in_flight += len(writing.blocks)
        self.written_in_flight += len(writing.blocks) * writing.blocks[0].account.group.allocated_bytes

    def stored(self, writing: Writing, flags: bytes) -> list[Block]:
        """Note which of the blocks of a batch the tier has now. Return the others, for `unmark`."""
        size, tag = writing.blocks[0].account.group.allocated_bytes, writing.blocks[0].account.group.tag
        self.blocks_in_flight -= len(writing.blocks)
        self.written_in_flight -= len(writing.blocks) * size
        failed = []
        for block, flag in zip(writing.blocks, flags.ljust(len(writing.blocks), b"\0"), strict=False):
            if self._soon.get(block.ref[:SLOT]) == block.ref:
                del self._soon[block.ref[:SLOT]]
            if flag:
                self.mark(block)
                self.absent.pop(block.hash + tag, None)
            else:
                failed.append(block)
        stored = len(writing.blocks) - len(failed)
        self.counts["blocks_written"] += stored
        self.counts["bytes_written"] += stored * size
        self.counts["blocks_not_written"] += len(failed)
        return failed

    def unmark(self, blocks: Iterable[Block]) -> None:
        """Let blocks that were not stored, and those below them, be stored later: they are of no use without them."""
        below = list(blocks)
        most = len(below) + LOOK
        for block in below:  # which grows
            slot = block.ref[:SLOT]
            for marks in (self._has, self._soon):
                if marks.get(slot) == block.ref:
                    del marks[slot]
            below.extend(islice(block.children(), most - len(below)))

    # Its end.

    def turn_off(self, why: str) -> Sequence[int]:
        """Drop all that was asked of it. Return its leases, which the caller ends."""
        self.off = why
        for looking in self.asked.values():
            looking.inquiry.off = why
        for fetch in self.coming.values():
            fetch.inquiry.off = why
        self.unmark(chain.from_iterable([self.stored(writing, b"") for writing in self.writing.values()]))
        self._soon = {}
        leases = [writing.lease for writing in self.writing.values()]
        for each in (self.looks, self.looking, self.asked, self.fetches, self.coming, self.parts, self.writes):
            each.clear()
        self.writing.clear()
        self.looked_up = self.backlog = self.in_flight = self.waiting = 0
        return leases

    def forget_marks(self) -> bool:
        """Free some of the memory for what the tier has; return whether more is left."""
        for _ in range(min(LOOK, len(self._has))):
            self._has.popitem()
        return bool(self._has)

    def report(self) -> dict[str, object]:
        """Return figures for `status`."""
        return {
            "name": self.name,
            "off": self.off or ("" if self.session.connected else "disconnected"),
            "writes_off": self.writes_off,
            "removals_off": self.removals_off,
            "writes": self.policy,
            "rate": round(self.rate),
            "latency_ms": round(self.latency * 1000, 3),
            "to_look_up": len(self.looks) + len(self.looking),
            "to_bring_bytes": self.backlog,
            "to_write_blocks": self.waiting + self.blocks_in_flight,
            **self.counts,
        }


def eta(due: float, now: float) -> float:
    """Return in how many seconds to ask again for what is expected at `due`: if it is late, again and again, ever more
    rarely. How long to wait is up to who waits."""
    return max(due - now, (now - due) / PUT_OFF, LEAST_ETA)


def _leading(flags: bytes, most: int) -> int:
    """Return how many blocks are there before the first one that is not."""
    end = flags.find(0)
    return min(len(flags) if end < 0 else end, most)
