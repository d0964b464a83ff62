"""What a tier is asked: which blocks it has. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice

import msgspec

from kvcache_server.core.index import Group
from kvcache_server.tiering.inquiry import Inquiry

ABSENT_FOR = 5.0  # seconds for which a tier is not asked again for what it did not have: other hosts may store it
MOST_ABSENT = 1 << 16  # blocks of which that is remembered
MOST_LOOKS = 256  # without an answer; a tier that does not keep up is not asked for more
MOST_LOOKED_UP = 1 << 16  # blocks in them
FIRST_LATENCY = 0.005  # seconds, until the first one was measured
LEAST_ETA = 0.001  # seconds
PUT_OFF = 4  # what is late by some time is expected after so small a part of that
_SMOOTH = 0.2  # the weight of a new measurement


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


class Looks:
    """The questions to one tier.

    Attributes:
        waiting: those that it has not been sent.
        sent: those that it has, by number.
        asked: both, by name.
        latency: seconds until it answers, of late.
    """

    def __init__(self, tier: str, counts: Counter[str]) -> None:
        """`tier` is its name, for inquiries."""
        self._tier, self._counts = tier, counts
        self.latency = FIRST_LATENCY
        self.waiting: deque[Looking] = deque()
        self.sent: dict[int, Looking] = {}
        self.asked: dict[bytes, Looking] = {}
        self._blocks = 0  # hashes in both
        self._absent: dict[bytes, float] = {}  # until when

    def __len__(self) -> int:
        return len(self.waiting) + len(self.sent)

    def is_absent(self, tagged: bytes, now: float) -> bool:
        """Whether the tier has said, not long ago, that it does not have a block."""
        return self._absent.get(tagged, 0.0) > now

    def answers_in(self, tagged: bytes, now: float) -> float | None:
        """Return in how many seconds the tier should say whether it has a block; None if it has said that it has not.

        It may have too many questions to be asked now: then it is asked later.
        """
        if self.is_absent(tagged, now):
            return None
        asked = self.asked.get(tagged)
        return eta((now if asked is None else asked.at) + 2 * self.latency, now)

    def ask(self, looking: Looking) -> bool:
        """Ask for blocks of which the tier knows nothing yet; return whether it is not asked for too much already."""
        blocks = len(looking.hashes)
        if len(self) >= MOST_LOOKS or self._blocks + blocks > MOST_LOOKED_UP:
            self._counts["looks_dropped"] += 1
            return False
        self._blocks += blocks
        self.waiting.append(looking)
        self.asked[looking.name] = looking
        looking.inquiry.tier, looking.inquiry.asked = self._tier, blocks
        self._counts["looks"] += 1
        return True

    def ask_jointly(self, joint: Joint, engine: str, parts: Sequence[tuple[Group, list[bytes]]], now: float) -> None:
        """Ask what a lookup in a namespace with tails needs, of each group what it lacks."""
        blocks = sum(len(hashes) for _, hashes in parts)
        if len(self) + len(parts) > MOST_LOOKS or self._blocks + blocks > MOST_LOOKED_UP:
            self._counts["looks_dropped"] += 1
            return
        joint.left = len(parts)
        for group, hashes in parts:
            self.ask(Looking(engine, group, None, hashes, now, joint=joint))

    def forget(self, looking: Looking) -> None:
        """Note that a question, which waits no more, has an answer or needs none."""
        self._blocks -= len(looking.hashes)
        if looking.joint is not None:
            looking.joint.left -= 1
        if looking.joint is None or not looking.joint.left:
            del self.asked[looking.name]

    def answer(self, number: int, flags: bytes, now: float) -> tuple[Looking, int] | None:
        """Take an answer. Return the question, and how many blocks are there before the first that is not; 0 if it is
        part of a joint one, and None for an unknown number."""
        looking = self.sent.pop(number, None)
        if looking is None:
            return None
        self.forget(looking)
        group, hashes, joint = looking.group, looking.hashes, looking.joint
        self.latency += (now - looking.at - self.latency) * _SMOOTH
        self._counts["blocks_looked_up"] += len(hashes)
        if joint is not None:
            there = {name + group.tag for name, flag in zip(hashes, flags, strict=False) if flag}
            self._counts["blocks_found"] += len(there)
            joint.found |= there
            return looking, 0
        blocks = leading(flags, len(hashes))
        self._counts["blocks_found"] += blocks
        if blocks < len(hashes):
            self.lacks(hashes[blocks] + group.tag, now)
        return looking, blocks

    def lacks(self, tagged: bytes, now: float) -> None:
        """Do not ask for this for a while."""
        if len(self._absent) >= MOST_ABSENT:
            for each in list(islice(self._absent, MOST_ABSENT // 2)):
                del self._absent[each]
        self._absent[tagged] = now + ABSENT_FOR

    def has_now(self, tagged: bytes) -> None:
        """Note that the tier has got a block."""
        self._absent.pop(tagged, None)

    def clear(self, why: str) -> None:
        """Drop all questions, because the tier is off."""
        for looking in self.asked.values():
            looking.inquiry.off = why
        for each in (self.waiting, self.sent, self.asked):
            each.clear()
        self._blocks = 0


def eta(due: float, now: float) -> float:
    """Return in how many seconds to ask again for what is expected at `due`: if it is late, again and again, ever more
    rarely. How long to wait is up to who waits."""
    return max(due - now, (now - due) / PUT_OFF, LEAST_ETA)


def leading(flags: bytes, most: int) -> int:
    """Return how many blocks are there before the first one that is not."""
    end = flags.find(0)
    return min(len(flags) if end < 0 else end, most)
