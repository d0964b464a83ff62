"""The questions to a tier: which blocks it has. Pure."""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice

import msgspec

from kvcache_server.core.index import Group
from kvcache_server.tiering.reports import Inquiry

ABSENT_FOR = 5.0  # seconds until a tier is asked again for a block that it lacked: other hosts may store it
MOST_ABSENT = 1 << 16  # blocks for which that is remembered
MOST_QUESTIONS = 256  # questions without an answer; a tier that does not keep up is asked no more
MOST_LOOKED_UP = 1 << 16  # blocks in them
FIRST_LATENCY = 0.005  # seconds, until it has been measured
LEAST_ETA = 0.001  # seconds
PUT_OFF = 4  # a block that is late is expected after its lateness divided by this
_SMOOTH = 0.2  # the weight of a new measurement


class Question(msgspec.Struct, gc=False):
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
    """The questions of one lookup in a namespace with suffix groups, one per group: where could the engine continue?

    It has the first `start` blocks itself. `name` is the last hash, with the first group's tag. `found` has the hashes
    that the tier has, with the groups' tags; `left` questions are not answered yet.
    """

    name: bytes
    group: Group
    hashes: list[bytes]
    start: int
    found: set[bytes]
    left: int = 0


class Questions:
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
        self.waiting: deque[Question] = deque()
        self.sent: dict[int, Question] = {}
        self.asked: dict[bytes, Question] = {}
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

    def ask(self, *questions: Question) -> bool:
        """Ask for blocks about which the tier was not asked yet; return False if too many questions are open."""
        blocks = sum(len(each.hashes) for each in questions)
        if len(self) + len(questions) > MOST_QUESTIONS or self._blocks + blocks > MOST_LOOKED_UP:
            self._counts["looks_dropped"] += 1
            return False
        self._blocks += blocks
        self._counts["looks"] += len(questions)
        self.waiting += questions
        for question in questions:
            self.asked[question.name] = question
            question.inquiry.tier, question.inquiry.asked = self._tier, len(question.hashes)
        return True

    def forget(self, question: Question) -> None:
        """Note that a question, no longer waiting, has an answer or needs none."""
        self._blocks -= len(question.hashes)
        if question.joint is not None:
            question.joint.left -= 1
        if question.joint is None or not question.joint.left:
            del self.asked[question.name]

    def answer(self, number: int, flags: bytes, now: float) -> Question | None:
        """Enter an answer into the question's inquiry or joint question. Return the question; None for an unknown
        number."""
        question = self.sent.pop(number, None)
        if question is None:
            return None
        self.forget(question)
        group, hashes, joint = question.group, question.hashes, question.joint
        self.latency += (now - question.at - self.latency) * _SMOOTH
        self._counts["blocks_looked_up"] += len(hashes)
        if joint is not None:
            there = {name + group.tag for name, flag in zip(hashes, flags, strict=False) if flag}
            self._counts["blocks_found"] += len(there)
            joint.found |= there
            return question
        blocks = leading(flags, len(hashes))
        self._counts["blocks_found"] += blocks
        if blocks < len(hashes):
            self.lacks(hashes[blocks] + group.tag, now)
        question.inquiry.answered, question.inquiry.found, question.inquiry.at = True, blocks, now
        return question

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
        for question in self.asked.values():
            question.inquiry.off = why
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
