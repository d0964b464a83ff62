"""The questions to a tier: which blocks it has. Pure."""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice

import msgspec

from kvcache_server.core.index import Group
from kvcache_server.tiering.reports import Inquiry

ABSENT_FOR = 5.0  # seconds until a tier is asked again for a block that it lacked: other hosts may store it
MOST_ABSENT = 1 << 16  # blocks for which that is remembered
MOST_LOOKS = 256  # questions without an answer; a tier that does not keep up is asked no more
MOST_LOOKED_UP = 1 << 16  # blocks in them
FIRST_LATENCY = 0.005  # seconds, until it has been measured
LEAST_ETA = 0.001  # seconds
PUT_OFF = 4  # a block that is late is expected after its lateness divided by this
_SMOOTH = 0.2  # the weight of a new measurement


class Looking(msgspec.Struct, gc=False):
    """A question to a tier: which of these blocks it has. `at` is the time of the question, in seconds."""

    engine: str
    group: Group
    parent: bytes | None
    hashes: list[bytes]
    at: float
    inquiry: Inquiry = msgspec.field(default_factory=Inquiry)
    joint: Joint | None = None

    @property
    def name(self) -> bytes:
        """The key of the question: a hash and a tag."""
        return self.joint.name if self.joint is not None else self.hashes[0] + self.group.tag


class Joint(msgspec.Struct, gc=False):
    """The questions of one lookup in a namespace with tails, one per group: where could the engine continue?

    It has the first `start` blocks itself. `name` is the last hash, with the first group's tag. `found` has the hashes
    that the tier has, with the groups' tags; `left` questions are not answered yet.
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
        waiting: those not sent yet.
        sent: those sent and not answered, by number.
        asked: both of these, by name.
        latency: recent seconds until it answers.
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
        """Whether the tier has recently reported that it does not have a block."""
        return self._absent.get(tagged, 0.0) > now

    def answers_in(self, tagged: bytes, now: float) -> float | None:
        """Return the seconds until the tier should report whether it has a block; None if it has reported that it has
        not.

        If it has too many questions now, it is asked later.
        """
        if self.is_absent(tagged, now):
            return None
        asked = self.asked.get(tagged)
        return eta((now if asked is None else asked.at) + 2 * self.latency, now)

    def ask(self, *questions: Looking) -> bool:
        """Ask for blocks about which the tier was not asked yet; return False if too many questions are open."""
        blocks = sum(len(each.hashes) for each in questions)
        if len(self) + len(questions) > MOST_LOOKS or self._blocks + blocks > MOST_LOOKED_UP:
            self._counts["looks_dropped"] += 1
            return False
        self._blocks += blocks
        self._counts["looks"] += len(questions)
        self.waiting += questions
        for looking in questions:
            self.asked[looking.name] = looking
            looking.inquiry.tier, looking.inquiry.asked = self._tier, len(looking.hashes)
        return True

    def forget(self, looking: Looking) -> None:
        """Note that a question, no longer waiting, has an answer or needs none."""
        self._blocks -= len(looking.hashes)
        if looking.joint is not None:
            looking.joint.left -= 1
        if looking.joint is None or not looking.joint.left:
            del self.asked[looking.name]

    def answer(self, number: int, flags: bytes, now: float) -> Looking | None:
        """Enter an answer into the question's inquiry or joint question. Return the question; None for an unknown
        number."""
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
            return looking
        blocks = leading(flags, len(hashes))
        self._counts["blocks_found"] += blocks
        if blocks < len(hashes):
            self.lacks(hashes[blocks] + group.tag, now)
        looking.inquiry.answered, looking.inquiry.found, looking.inquiry.at = True, blocks, now
        return looking

    def lacks(self, tagged: bytes, now: float) -> None:
        """Do not ask for this block for a while."""
        if len(self._absent) >= MOST_ABSENT:
            for each in list(islice(self._absent, MOST_ABSENT // 2)):
                del self._absent[each]
        self._absent[tagged] = now + ABSENT_FOR

    def has_now(self, tagged: bytes) -> None:
        """Note that the tier now has a block."""
        self._absent.pop(tagged, None)

    def clear(self, why: str) -> None:
        """Drop all questions, because the tier is off."""
        for looking in self.asked.values():
            looking.inquiry.off = why
        for each in (self.waiting, self.sent, self.asked):
            each.clear()
        self._blocks = 0


def eta(due: float, now: float) -> float:
    """Return the seconds after which to ask again for blocks expected at `due`: if they are late, ever more rarely. How
    long to wait in all is up to the caller."""
    return max(due - now, (now - due) / PUT_OFF, LEAST_ETA)


def leading(flags: bytes, most: int) -> int:
    """Return the number of blocks before the first missing one."""
    end = flags.find(0)
    return min(len(flags) if end < 0 else end, most)
