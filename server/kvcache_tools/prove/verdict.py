"""Compares the answers of `kvcache-server prove`, and says what they prove. Pure.

Where a chunk begins and how long it is changes the last bits of a result. So the fair reference of a hit is the answer
of an engine without the connector whose own prefix cache has hits that end at the same token: both compute the same
rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

EQUAL, DIFFERS, UNPROVEN = 0, 1, 8  # exit codes
LEAST_NOISE = 1e-4  # of log-probabilities, in float32
CLEARLY = 10  # times as much


@dataclass(frozen=True)
class Answer:
    """`logprobs` are those of the tokens; `cached` of the prompt's tokens were not computed. `second` has, for each
    token, the one that was the next likely."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    second: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True)
class Result:
    """The answers to a prompt of `length` tokens, of which `loadable` could be loaded."""

    name: str
    length: int
    loadable: int
    saved: Answer | None  # of an engine that saved the prompt, and loaded nothing
    loaded: Answer  # of an engine that loads what is cached
    computed: Answer  # without the connector
    device: Answer | None  # without the connector, with hits of the engine's own that end where those of `loaded` do
    other: Answer | None  # the same with other tokens in place of those that `loaded` has loaded
    more: Sequence[Answer] = ()  # further answers without the connector

    @property
    def expected(self) -> Answer:
        """The answer that `loaded` has to equal."""
        return self.computed if self.device is None else self.device

    @property
    def own(self) -> list[Answer]:
        """All answers to this prompt without the connector."""
        return [each for each in (self.device, self.computed, *self.more) if each is not None]

    @property
    def noise(self) -> float:
        """The change of log-probabilities from one answer without the connector to another, whose chunks may differ."""
        return max(LEAST_NOISE, *(largest_gap(self.expected, each) for each in self.own))

    @property
    def effect(self) -> float:
        """The change of log-probabilities that other KV in place of what was loaded causes."""
        if self.other is None:
            return 0.0
        return math.inf if self.other.tokens != self.expected.tokens else largest_gap(self.other, self.expected)

    @property
    def matters(self) -> bool:
        """Whether wrong KV would show: otherwise, equal answers prove nothing."""
        return self.effect > CLEARLY * self.noise


def first_difference(one: Answer, other: Answer) -> int | None:
    """Return the first position at which tokens differ, None if there is none."""
    pairs = zip(one.tokens, other.tokens, strict=False)
    differing = (at for at, (mine, theirs) in enumerate(pairs) if mine != theirs)
    shorter = min(len(one.tokens), len(other.tokens))
    return next(differing, None if len(one.tokens) == len(other.tokens) else shorter)


def largest_gap(one: Answer, other: Answer) -> float:
    """Return the largest difference of log-probabilities up to the first token that differs."""
    end = first_difference(one, other)
    pairs = zip(one.logprobs[:end], other.logprobs, strict=False)
    return max((abs(mine - theirs) for mine, theirs in pairs), default=0.0)


def is_tie(answer: Answer, expected: Answer, at: int, noise: float) -> bool:
    """Whether the token of `answer` at position `at` is the second one of `expected`, as likely but for `noise`."""
    if at >= min(len(answer.tokens), len(expected.second)):
        return False
    token, logprob = expected.second[at]
    return token == answer.tokens[at] and expected.logprobs[at] - logprob <= noise


def compared(answer: Answer, expected: Answer, own: Sequence[Answer], noise: float) -> str:
    """Return `equal`, where it `DIFFERS`, or `noise`: the engine itself has also given this answer, or would have given
    it if the last bits were others."""
    at = first_difference(answer, expected)
    if at is None:
        return "equal"
    if any(answer.tokens == each.tokens for each in own) or is_tie(answer, expected, at, noise):
        return "noise"
    return f"DIFFERS at {at}"


def verdicts(result: Result) -> tuple[str, str]:
    """Compare the answers of the engines that saved and that loaded the prompt."""
    saved = "" if result.saved is None else compared(result.saved, result.computed, result.own, result.noise)
    loaded = compared(result.loaded, result.expected, result.own, result.noise)
    gap = largest_gap(result.loaded, result.expected)
    if loaded == "equal" and gap > CLEARLY * result.noise and gap > result.effect / CLEARLY:
        loaded = "DIFFERS in logprobs"  # though no other token is the most likely one
    return saved, loaded


def differs(result: Result) -> bool:
    return any(each.startswith("DIFFERS") for each in verdicts(result))


HEAD = (
    *("prompt", "tokens", "loaded", "when saved", "when loaded"),
    *("logprobs: loaded - device hit", "device hit - computed", "other KV - device hit"),
)


def row(result: Result) -> tuple[str, ...]:
    """Return the cells of the table."""
    saved, loaded = verdicts(result)
    hit, device = result.loaded.cached, result.device
    gaps = ("", "")
    if device is not None:
        gaps = (f"{largest_gap(result.loaded, device):.1g}", f"{largest_gap(device, result.computed):.1g}")
    elif hit:
        gaps = (f"{largest_gap(result.loaded, result.computed):.1g} (computed)", "")
    return (
        result.name,
        f"{result.length:,}",
        f"{hit:,} of {result.loadable:,}",
        saved or "-",
        loaded,
        *gaps,
        ("yes" if math.isinf(result.effect) else f"{result.effect:.1g}") if hit else "",
    )


def summary(results: Sequence[Result]) -> tuple[int, str]:
    """Return the exit code, and a sentence about it."""
    hits = [result for result in results if result.loaded.cached]
    wrong = [result.name for result in results if differs(result)]
    if wrong:
        return DIFFERS, f"{len(wrong)} of {len(results)} prompts have other answers with the cache: {', '.join(wrong)}"
    if not hits:
        return UNPROVEN, "nothing was loaded, so nothing is proved"
    proving = [result for result in hits if result.matters]
    if not proving:
        return UNPROVEN, "no answer depends on what was loaded, so equal ones prove nothing: other weights would help"
    share = max(result.loaded.cached / result.length for result in hits)
    noise = sum("noise" in verdicts(result) for result in results)
    within = f", {noise} within the engine's own noise" if noise else ""
    exact = sum(result.device is not None and result.loaded.logprobs == result.device.logprobs for result in hits)
    return EQUAL, (
        f"{len(results)} prompts have equal answers{within}. {len(hits)} loaded up to {share:.1%} of their tokens: "
        f"{len(proving)} of these answers depend on that, and {exact} equal a device hit's to the last bit"
    )
