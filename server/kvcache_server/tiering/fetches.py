"""The blocks that a tier brings into the region. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence

import msgspec

from kvcache_proto.types import MAX_BLOCKS
from kvcache_server.core.index import Group
from kvcache_server.core.limits import LOOK
from kvcache_server.tiering.questions import Question, leading
from kvcache_server.tiering.reports import Inquiry

MOST_COMING = 1 << 16  # blocks to bring
FIRST_RATE = 1e9  # bytes per second, until the rate has been measured
FIRST_SECONDS = 0.05  # the measuring time that FIRST_RATE counts for
RATE_SECONDS = 0.5  # the rate is the average over the last RATE_SECONDS of bringing, or half of that


class Fetch(msgspec.Struct, gc=False, eq=False):
    """Blocks of a chain that a tier has and brings into the region, in parts.

    `due` is when the last one is expected. `sent` hashes are already in parts.
    """

    group: Group
    parent: bytes | None
    hashes: list[bytes]
    inquiry: Inquiry
    due: float
    sent: int = 0


class Part(msgspec.Struct, gc=False):
    """A part of a fetch that is being brought."""

    fetch: Fetch
    begin: int
    end: int
    at: float

    @property
    def bytes(self) -> int:
        return (self.end - self.begin) * self.fetch.group.allocated_bytes


class Fetches:
    """The blocks that one tier brings.

    Attributes:
        coming: the fetch that brings a block, by hash and tag.
        parts: the parts sent to it, by number.
        backlog, in_flight: bytes to bring, and those of them in parts.
    """

    def __init__(self, counts: Counter[str], lacks: Callable[[bytes, float], None]) -> None:
        """`lacks(tagged, now)` is called for a block that does not come, although the tier has reported it."""
        self._counts, self._lacks = counts, lacks
        self._moved, self._busy = FIRST_RATE * FIRST_SECONDS, FIRST_SECONDS  # bytes brought and seconds, fading
        self._queues: OrderedDict[str, deque[Fetch]] = OrderedDict()  # by engine, the next engine first
        self.coming: dict[bytes, Fetch] = {}
        self.parts: dict[int, Part] = {}
        self.backlog = self.in_flight = 0
        self._brought_at = 0.0

    @property
    def has_more(self) -> bool:
        """Whether parts are left to be sent."""
        return bool(self._queues)

    @property
    def rate(self) -> float:
        """Recent rate in bytes per second."""
        return self._moved / max(self._busy, 1e-6)

    def coming_after(self, group: Group, hashes: Sequence[bytes], begin: int) -> int:
        """Return the end of the blocks without a gap that are coming, from block `begin` on; O(LOOK)."""
        end, most = begin + 1, min(len(hashes), begin + LOOK)
        while end < most and hashes[end] + group.tag in self.coming:
            end += 1
        return end

    def fetch(self, question: Question, hashes: list[bytes], now: float) -> Fetch | None:
        """Bring blocks that the tier has; return None if it does not keep up."""
        if len(self.coming) + len(hashes) > MOST_COMING:
            self._counts["blocks_not_brought"] += len(hashes)
            question.inquiry.lost += len(hashes)
            return None
        self.backlog += len(hashes) * question.group.allocated_bytes
        due = now + self.backlog / self.rate
        fetch = Fetch(question.group, question.parent, hashes, question.inquiry, due)
        for name in hashes:
            self.coming.setdefault(name + question.group.tag, fetch)  # an earlier fetch comes first
        self._queues.setdefault(question.engine, deque()).append(fetch)
        return fetch

    def next_part(self, most: int, now: float) -> Part | None:
        """Return the next part to bring, of at most `most` bytes; engines take turns."""
        while self._queues:
            engine, queue = next(iter(self._queues.items()))
            fetch = queue[0]
            blocks = min(max(1, most // fetch.group.allocated_bytes), MAX_BLOCKS)
            part = Part(fetch, fetch.sent, min(fetch.sent + blocks, len(fetch.hashes)), now)
            fetch.sent = part.end
            if fetch.sent == len(fetch.hashes):
                queue.popleft()
            self._queues.move_to_end(engine)
            if not queue:
                del self._queues[engine]
            if part.begin < part.end:
                self.in_flight += part.bytes
                return part
        return None

    def brought(self, number: int, flags: bytes, now: float) -> bool:
        """Note which blocks of a part are cached. Return False if there is no such part."""
        part = self.parts.pop(number, None)
        if part is None:
            return False
        fetch, size = part.fetch, part.bytes
        wanted = part.end - part.begin
        blocks = leading(flags, wanted)
        fetch.inquiry.brought += blocks
        fetch.inquiry.lost += wanted - blocks
        fetch.inquiry.at = now
        self.in_flight -= size
        self.backlog -= size
        self._came(fetch, part.begin, part.end)
        if blocks < wanted:
            self._counts["blocks_not_brought"] += wanted - blocks
            self._give_up(fetch)
            self._lacks(fetch.hashes[part.begin + blocks] + fetch.group.tag, now)
        else:
            # Parts run concurrently, and end in bursts: only sums show the rate.
            self._moved += size
            self._busy += now - max(part.at, self._brought_at)
            if self._busy > RATE_SECONDS:
                self._moved, self._busy = self._moved / 2, self._busy / 2
        self._brought_at = now
        self._counts["blocks_brought"] += blocks
        self._counts["bytes_brought"] += blocks * fetch.group.allocated_bytes
        return True

    def _give_up(self, fetch: Fetch) -> None:
        """Bring no more parts of a fetch: the blocks would have no parent."""
        rest = fetch.hashes[fetch.sent :]
        self.backlog -= len(rest) * fetch.group.allocated_bytes
        self._counts["blocks_not_brought"] += len(rest)
        fetch.inquiry.lost += len(rest)
        self._came(fetch, fetch.sent, len(fetch.hashes))
        fetch.sent = len(fetch.hashes)

    def _came(self, fetch: Fetch, begin: int, end: int) -> None:
        """Note that some blocks of a fetch are no longer on their way."""
        for name in fetch.hashes[begin:end]:
            if self.coming.get(tagged := name + fetch.group.tag) is fetch:
                del self.coming[tagged]

    def clear(self, why: str) -> None:
        """Bring nothing more, because the tier is off."""
        for fetch in self.coming.values():
            fetch.inquiry.off = why
        for each in (self._queues, self.coming, self.parts):
            each.clear()
        self.backlog = self.in_flight = 0
