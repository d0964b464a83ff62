"""One tier, as the daemon sees it: its open questions, and the blocks that it brings and stores. Pure."""

from __future__ import annotations

from collections import Counter

from kvcache_server import status
from kvcache_server.core.index import Group
from kvcache_server.core.sessions import Session
from kvcache_server.tiering.fetches import Fetches
from kvcache_server.tiering.questions import Question, Questions
from kvcache_server.tiering.writes import MOST_WRITES, Writes


class Tier:
    """Attributes:
    name: its name in metrics.
    off: the reason that it gets no jobs; "" while it does.
    writes_off: the reason that it gets nothing to write, though it may be read; "" while it does.
    removals_off: the reason that wrong values stay in its store.
    counts: event counts, by name.
    asked_at, heard_at: when it last asked for work, and when it last reported work done.
    looked_ahead_at: when blocks that are about to be evicted were last looked for.
    """

    def __init__(self, session: Session, name: str, batch_bytes: int, policy: str, counts: Counter[str]) -> None:
        self.session, self.name, self.policy = session, name, policy
        self.batch_bytes, self.counts = batch_bytes, counts
        self.off = self.writes_off = self.removals_off = ""
        self.questions = Questions(name, counts)
        self.fetches = Fetches(counts, self.questions.lacks)
        self.writes = Writes(batch_bytes, counts, self.questions.has_now)
        self.asked_at = self.heard_at = self.looked_ahead_at = 0.0

    @property
    def keeps_up(self) -> bool:
        """Whether it keeps up with the blocks to write."""
        return not self.writes_off and self.writes.waiting <= MOST_WRITES // 2

    @property
    def on(self) -> bool:
        return not self.off and self.session.connected

    @property
    def off_because(self) -> str:
        return "" if self.on else self.off or "disconnected"

    @property
    def works(self) -> bool:
        """Whether it has jobs whose end it has not reported."""
        return bool(self.questions.sent or self.fetches.parts or self.writes.writing)

    @property
    def active_at(self) -> float:
        """Return when the tier was last seen to do its work."""
        return min(self.asked_at, self.heard_at) if self.works else self.asked_at

    def knows(self, group: Group, name: bytes, now: float) -> bool:
        """Whether the tier need not be asked for a block, because the answer is known or on its way."""
        tagged = name + group.tag
        return tagged in self.fetches.coming or tagged in self.questions.asked or self.questions.is_absent(tagged, now)

    def found(self, number: int, flags: bytes, now: float) -> Question | None:
        """Take the answer to a question, and fetch the blocks before the first that is not there, unless it is joint.

        Return the question; None for an unknown number.
        """
        question = self.questions.answer(number, flags, now)
        if question is not None and question.joint is None:
            question.inquiry.writes_off = self.writes_off
            if question.inquiry.found:
                self.fetches.fetch(question, question.hashes[: question.inquiry.found], now)
        return question

    def turn_off(self, why: str) -> list[int]:
        """Drop all its jobs. Return its leases, which the caller ends."""
        self.off = why
        self.questions.clear(why)
        self.fetches.clear(why)
        return self.writes.clear()

    def report(self) -> status.Tier:
        """Return figures for `status`."""
        return status.Tier(
            name=self.name,
            off=self.off_because,
            writes_off=self.writes_off,
            removals_off=self.removals_off,
            writes=self.policy,
            rate=round(self.fetches.rate),
            latency_ms=round(self.questions.latency * 1000, 3),
            to_look_up=len(self.questions),
            to_bring_bytes=self.fetches.backlog,
            to_write_blocks=self.writes.waiting + self.writes.blocks_in_flight,
            **self.counts,
        )
