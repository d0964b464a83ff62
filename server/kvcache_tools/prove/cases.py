"""The prompts of `kvcache-server prove`: they end around each boundary at which hits, windows or chunks end. Pure."""

from __future__ import annotations

import random
from typing import NamedTuple

ANSWER_TOKENS = 8
TRUNK, FIRST_TURN = "trunk", "turn 1"


class Sizes(NamedTuple):
    """In tokens; 0: there is none."""

    block: int  # of the engine
    cached: int  # a block in the daemon
    chunk: int  # computed in one step, at most
    window: int = 0
    checkpoint: int = 0  # between the positions at which windows are saved
    top_k: int = 0  # selected by sparse attention


class Case(NamedTuple):
    """A prompt. `turn` is the prompt that it continues, if it contains the answer to that."""

    name: str
    prompt: list[int]
    turn: list[int] | None = None


class Draw:
    """Random tokens of a vocabulary, the same for each `seed`; special tokens are at either end of most."""

    def __init__(self, seed: str, vocabulary: int) -> None:
        self._random = random.Random(seed)
        self._low, self._high = vocabulary // 4, vocabulary - vocabulary // 4

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._low, self._high) for _ in range(count)]

    def others(self, tokens: list[int]) -> list[int]:
        """Return as many tokens, each another one than that in `tokens`."""
        span = self._high - self._low
        return [self._low + (each - self._low + self._random.randrange(1, span)) % span for each in tokens]


def lengths(sizes: Sizes, longest: int) -> tuple[dict[int, str], list[str]]:
    """Return the lengths of prompts up to `longest`, each with its name, and the names of boundaries beyond it."""
    boundaries = {"block": sizes.block, "cached block": sizes.cached, "3 cached blocks": 3 * sizes.cached}
    if sizes.window:
        boundaries |= {"window": sizes.window, "window + cached block": sizes.window + sizes.cached}
    if sizes.checkpoint:
        boundaries |= {"checkpoint + cached block": sizes.checkpoint + sizes.cached}
    if sizes.top_k:  # up to there, all tokens are selected, whatever the indexer's KV is
        boundaries |= {"top-k": sizes.top_k, "2 x top-k": 2 * sizes.top_k}
    boundaries |= {"chunk": sizes.chunk, "chunk + cached block": sizes.chunk + sizes.cached}
    found: dict[int, str] = {}
    for name, at in boundaries.items():
        for length, which in ((at - 1, f"{name} - 1"), (at, name), (at + 1, f"{name} + 1")):
            if 0 < length <= longest:
                found.setdefault(length, which)
    return found, [f"{name} ({at:,} tokens)" for name, at in boundaries.items() if at > longest]


def saved_cases(sizes: Sizes, longest: int, draw: Draw) -> list[Case]:
    """Return the prompts that one engine saves and the next one loads, and those that `later_cases` continues."""
    cases = [Case(name, draw.tokens(length)) for length, name in sorted(lengths(sizes, longest)[0].items())]
    for name, length in ((TRUNK, 4 * sizes.cached + 1), (FIRST_TURN, 3 * sizes.cached - ANSWER_TOKENS // 2)):
        if length + 2 * ANSWER_TOKENS <= longest:
            cases.append(Case(name, draw.tokens(length)))
    return cases


def later_cases(saved: list[Case], answers: list[list[int]], sizes: Sizes, draw: Draw) -> list[Case]:
    """Return the prompts that only the second engine gets, given the `answers` to the saved ones.

    Two leave the trunk within a block: models with windows can continue there for the second one only. One continues
    with an answer, at the end of a cached block that contains some of it.
    """
    cases = []
    for case, answer in zip(saved, answers, strict=True):
        if case.name == TRUNK:
            at = 2 * sizes.cached + sizes.cached // 2
            for name in ("branch", "second branch"):
                cases.append(Case(name, case.prompt[:at] + draw.others(case.prompt[at:])))
        elif case.name == FIRST_TURN:
            cases.append(Case("turn 2", [*case.prompt, *answer, *draw.tokens(ANSWER_TOKENS)], case.prompt))
    return cases


def fills(case: Case, boundary: int, draw: Draw) -> list[list[int]]:
    """Return prompts, the best one first, after each of which an engine's own prefix cache may have hits of `case` that
    end exactly at `boundary`.

    The best ones were computed in the same steps and shapes as the cached blocks, so that the KV is the same to the
    last bit: the previous turn, with its answer, or a prompt of the same length. But of windows and states, an engine
    may keep those at the end of a prompt only.
    """
    begin, others = case.prompt[:boundary], draw.others(case.prompt[boundary:])
    found = [] if case.turn is None else [case.turn]
    return [*found, begin + others, begin + others[:1]]


def loadable(case: Case, sizes: Sizes) -> int:
    """Return the tokens of whole blocks before the last token."""
    return (len(case.prompt) - 1) // sizes.cached * sizes.cached
