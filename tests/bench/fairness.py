"""Measure what an engine that streams prompts used only once costs the hit ratio of another engine, on a real daemon.

    python tests/bench/fairness.py [--trace mooncake.jsonl] [--blocks 20000]

Engine A replays conversations: turns with Zipf-distributed system prompts, or a trace in Mooncake's format
(`hash_ids`). Engine B stores as many new blocks as A requests, and never requests one again. The hits of A are counted
over the second half of its requests, alone and beside B. A simulated plain LRU cache of the same size is shown for
comparison.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
from collections import OrderedDict
from contextlib import ExitStack
from pathlib import Path

from rig import one_daemon, save

from kvcache_client import GroupSpec, Namespace, NamespaceSpec, Session
from kvcache_tools.bench import PAGE, size_for

SLOT = 4096
A_MODEL = NamespaceSpec("a", (GroupSpec(16, SLOT),))
BESIDE = {
    "alone": None,
    "beside B, same namespace": A_MODEL,
    "beside B, other namespace": NamespaceSpec("b", (GroupSpec(16, SLOT),)),
    "beside B, other namespace, blocks 4x": NamespaceSpec("b", (GroupSpec(16, 4 * SLOT),)),
}


def hashed(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=32).digest()


def conversations(seed: int, requests: int) -> list[list[bytes]]:
    """Return prompts of conversations that go on: each turn repeats all before it and adds some blocks."""
    draw = random.Random(seed)
    systems = [[hashed(f"system {s} {i}") for i in range(draw.randrange(8, 48))] for s in range(40)]
    weights = [1 / (rank + 1) for rank in range(len(systems))]
    open_talks: list[list[bytes]] = []
    names = itertools.count()
    prompts = []
    for _ in range(requests):
        if open_talks and draw.random() < 0.6:
            # People answer soon, mostly.
            talk = open_talks.pop(-1 - min(int(draw.expovariate(1 / 150)), len(open_talks) - 1))
        else:
            talk = list(draw.choices(systems, weights)[0])
        talk = [*talk, *(hashed(f"turn {next(names)}") for _ in range(draw.randrange(4, 40)))]
        open_talks.append(talk)
        prompts.append(talk)
    return prompts


def traced(path: str, requests: int) -> list[list[bytes]]:
    with open(path) as lines:
        ids = [json.loads(line)["hash_ids"] for line in itertools.islice(lines, requests)]
    return [[hashed(str(number)) for number in dict.fromkeys(prompt)] for prompt in ids]


def store(namespace: Namespace, prompt: list[bytes]) -> int:
    """Do what an engine does with a prompt: look it up, store the rest; return the hits."""
    with namespace.acquire(prompt) as lease:
        save(namespace, prompt, lease.hits)
        return lease.hits


def ratio(prompts: list[list[bytes]], blocks: int, beside: NamespaceSpec | None) -> float:
    """Return A's hit ratio over the second half of `prompts`."""
    fresh = itertools.count()
    hits = asked = 0
    with ExitStack() as stack:
        endpoint = stack.enter_context(one_daemon(size=size_for(blocks), page_size=PAGE)).endpoint
        a = stack.enter_context(Session.connect(endpoint, engine="a", deadline=1.0)).attach(A_MODEL, shards=(0,))
        b = None
        if beside is not None:
            b = stack.enter_context(Session.connect(endpoint, engine="b", deadline=1.0)).attach(beside, shards=(0,))
        for number, prompt in enumerate(prompts):
            found = store(a, prompt)
            if number >= len(prompts) // 2:
                hits, asked = hits + found, asked + len(prompt)
            if b is not None:
                store(b, [hashed(f"never again {next(fresh)}") for _ in prompt])
    return hits / asked


def plain_lru(prompts: list[list[bytes]], blocks: int, beside: bool) -> float:
    cache: OrderedDict[bytes, None] = OrderedDict()
    fresh = itertools.count()
    hits = asked = 0
    for number, prompt in enumerate(prompts):
        found = next((i for i, block in enumerate(prompt) if block not in cache), len(prompt))
        if number >= len(prompts) // 2:
            hits, asked = hits + found, asked + len(prompt)
        others = (hashed(f"never again {next(fresh)}") for _ in prompt) if beside else ()
        for block in (*prompt, *others):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > blocks:
            cache.popitem(last=False)
    return hits / asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="a file in Mooncake's format")
    parser.add_argument("--blocks", type=int, default=20_000, help="blocks of A that the pool holds")
    parser.add_argument("--requests", type=int, default=4_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    prompts = (
        traced(options.trace, options.requests) if options.trace else conversations(options.seed, options.requests)
    )
    figures = {name: ratio(prompts, options.blocks, beside) for name, beside in BESIDE.items()}
    lru = {"alone": plain_lru(prompts, options.blocks, False), "beside B": plain_lru(prompts, options.blocks, True)}
    print(f"A's hit ratio, {len(prompts):,} prompts, {options.blocks:,} blocks")
    for name, value in figures.items():
        print(f"  {name:<38}{value:7.1%}   {value / figures['alone']:6.1%} of alone")
    for name, value in lru.items():
        print(f"  {'plain LRU ' + name:<38}{value:7.1%}   {value / lru['alone']:6.1%} of alone")
    print(Path(__file__).name, "seed", options.seed)


if __name__ == "__main__":
    main()
