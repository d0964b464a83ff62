"""Traces on which eviction policies differ. Each is made for a cache of a given number of prompts.

Equal arguments give equal traces.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator

from kvcache_tools.replay.trace import TraceRequest

SHORTEST, LONGEST = 4, 16  # blocks of a prompt
PROMPT = (SHORTEST + LONGEST) // 2  # blocks on average
GAP = 0.5  # seconds between two requests, on average
HOUR = 3600.0

Key = tuple[object, ...] | int


def prompt(kind: str, key: Key) -> tuple[str, ...]:
    """Return the blocks of a prompt; its length follows from its name."""
    name = f"{kind} {key}"
    return tuple(f"{name} {depth}" for depth in range(random.Random(name).randrange(SHORTEST, LONGEST + 1)))


def _timed(prompts: Iterable[tuple[str, ...]], draw: random.Random) -> list[TraceRequest]:
    now, found = 0.0, []
    for blocks in prompts:
        found.append(TraceRequest(now, blocks))
        now += draw.expovariate(1 / GAP)
    return found


def loop(prompts: int, draw: random.Random) -> list[TraceRequest]:
    """As many prompts as just do not fit, over and over. LRU never hits."""
    size = int(prompts * 1.15)
    return _timed((prompt("loop", number % size) for number in range(14 * size)), draw)


def scan(prompts: int, draw: random.Random) -> list[TraceRequest]:
    """A hot set of nearly half the cache, beside as many prompts that are asked for once."""
    keys = (draw.randrange(int(prompts * 0.45)) if draw.random() < 0.5 else ("new", n) for n in range(30 * prompts))
    return _timed((prompt("scan", key) for key in keys), draw)


def zipf(prompts: int, draw: random.Random) -> list[TraceRequest]:
    """Independent requests for eight times what fits, by Zipf's law."""
    weights = [1 / (rank + 1) ** 0.9 for rank in range(8 * prompts)]
    return _timed((prompt("zipf", key) for key in draw.choices(range(len(weights)), weights, k=30 * prompts)), draw)


def stack(prompts: int, draw: random.Random) -> list[TraceRequest]:
    """Prompts return at stack distances that are distributed geometrically. Nothing is better than LRU."""
    return _timed((prompt("stack", key) for key in _stack_keys(prompts, draw, 30 * prompts)), draw)


def _stack_keys(prompts: int, draw: random.Random, count: int) -> Iterator[int]:
    recent: list[int] = []
    new = itertools.count()
    for _ in range(count):
        if recent and draw.random() < 0.8:
            key = recent.pop(-1 - min(int(draw.expovariate(1 / (0.6 * prompts))), len(recent) - 1))
        else:
            key = next(new)
        recent.append(key)
        yield key


def mass_death(prompts: int, draw: random.Random) -> list[TraceRequest]:
    """A set of popular prompts is asked for often, and then never again; another one replaces it. Six times."""
    size = int(1.5 * prompts)
    keys = ((phase, min(int(draw.expovariate(3 / size)), size - 1)) for phase in range(6) for _ in range(8 * prompts))
    return _timed((prompt("death", key) for key in keys), draw)


def flip(prompts: int, draw: random.Random) -> list[TraceRequest]:
    """In one phase, what was asked for twice returns soon; in the next it never does, but what was asked for once does.

    Eight phases.
    """

    def keys() -> Iterator[Key]:
        new = itertools.count()
        for phase in range(8):
            once: list[Key] = []
            for _ in range(6 * prompts):
                if phase % 2 == 0:
                    yield (phase, draw.randrange(int(0.7 * prompts))) if draw.random() < 0.5 else next(new)
                elif len(once) > 0.4 * prompts:
                    yield once.pop(0)
                else:
                    once.append(next(new))
                    yield once[-1]

    return _timed((prompt("flip", key) for key in keys()), draw)


def swap(prompts: int, draw: random.Random) -> list[TraceRequest]:
    """One engine reads a stream, each prompt once, and the other one its own prompts again and again. Then they swap
    roles, seven times."""
    new = itertools.count()
    keys, readers = [], []
    for phase in range(8):
        for number in range(8 * prompts):
            reads = number % 2 == 0
            keys.append((phase, draw.randrange(int(0.7 * prompts))) if reads else next(new))
            readers.append((phase + reads) % 2)
    asked = _timed((prompt("swap", key) for key in keys), draw)
    return [each._replace(engine=f"engine {engine}") for each, engine in zip(asked, readers, strict=True)]


def idle(prompts: int, draw: random.Random) -> list[TraceRequest]:
    """The stack in five bursts, with six idle hours after each."""
    whole = stack(prompts, draw)
    burst = len(whole) // 5
    return [each._replace(at=each.at + number // burst * 6 * HOUR) for number, each in enumerate(whole)]


def four(prompts: int, draw: random.Random) -> list[TraceRequest]:
    """Four applications in turn, three times: the loop, zipf, the stack and mass death."""
    parts = [[each.blocks for each in make(prompts, draw)] for make in (loop, zipf, stack, mass_death)]
    turn = 4 * prompts
    turns = (part[at * turn : (at + 1) * turn] for at in range(3) for part in parts)
    return _timed(itertools.chain.from_iterable(turns), draw)


STRESS: dict[str, Callable[[int, random.Random], list[TraceRequest]]] = {
    each.__name__: each for each in (loop, scan, zipf, stack, mass_death, flip, swap, idle, four)
}
