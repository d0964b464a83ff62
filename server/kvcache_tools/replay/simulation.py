"""Runs a trace against daemons of several sizes, shared by all engines and private to each. Pure, except for the clock
that is passed in."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvcache_proto.errors import ConfigError
from kvcache_server.core.eviction.policy import WORTH
from kvcache_tools.plan.room import Room, room
from kvcache_tools.replay.bounds import distinct, optimum
from kvcache_tools.replay.simulated_daemon import SimulatedDaemon, block_hash
from kvcache_tools.replay.trace import TraceRequest

ROUTINGS = ("round-robin", "prefix")


class Setup(msgspec.Struct, frozen=True):
    """A replay with `engines` engines and blocks of `block_bytes` for `block_tokens` tokens.

    `routing` chooses the engine of requests for which the trace does not name it: each in turn, or the one that had the
    request's first block earlier. The shared cache is tried with each of `policies`, the private ones with the first.
    """

    engines: int = 8
    block_bytes: int = 1 << 20
    block_tokens: int = 512
    routing: str = ROUTINGS[0]
    page_bytes: int = 0
    policies: tuple[str, ...] = (WORTH,)


def routes(requests: Sequence[TraceRequest], setup: Setup) -> list[int]:
    """Return the engine of each request."""
    homes: dict[int | str, int] = {}
    named: dict[str, int] = {}
    found = []
    for number, request in enumerate(requests):
        turn = number % setup.engines
        if request.engine:
            turn = named.setdefault(request.engine, len(named)) % setup.engines
        elif setup.routing == "prefix":
            turn = homes.setdefault(request.blocks[0], turn)
        found.append(turn)
    return found


def make_rooms(size: int, setup: Setup) -> tuple[Room, Room]:
    """Return the room in a daemon of `size`, and in one of an engine's share of it.

    Raises ConfigError if one of them cannot hold a block.
    """
    whole = room(size, setup.block_bytes, setup.page_bytes)
    try:
        return whole, room(size // setup.engines, setup.block_bytes, setup.page_bytes)
    except ConfigError as error:
        raise ConfigError(f"{size:,} bytes are not enough for {setup.engines} private caches: {error}") from None


def size_for(blocks: int, setup: Setup) -> int:
    """Return a size at which a daemon holds `blocks` blocks or slightly more, and an engine's share at least one."""
    size = max(blocks, 1) * setup.block_bytes
    while size < 1 << 50:
        with contextlib.suppress(ConfigError):
            if make_rooms(size, setup)[0].blocks >= blocks:
                break
        size += max(size >> 7, setup.block_bytes)
    return size


def replay(
    requests: Sequence[TraceRequest],
    sizes: Sequence[int],
    setup: Setup,
    clock: Callable[[], float],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return the hit ratios for `sizes`, in bytes. Raises ConfigError if a size cannot hold a block."""
    asked = sum(len(request.blocks) for request in requests)
    different = distinct(requests)
    prompts = [[block_hash(block) for block in request.blocks] for request in requests]
    engines = routes(requests, setup)
    rooms = [make_rooms(size, setup) for size in sorted(sizes)]
    rows = []
    for whole, part in rooms:
        say(f"  {whole.blocks:,} blocks")
        found = {}
        for policy in reversed(setup.policies):
            shared = SimulatedDaemon(whole, setup.block_tokens, setup.engines, policy=policy)
            hits, times = play([shared] * setup.engines, requests, prompts, engines, clock)
            found[policy] = hits / asked
        first = setup.policies[0]
        alone = [SimulatedDaemon(part, setup.block_tokens, 1, policy=first) for _ in range(setup.engines)]
        private, _ = play(alone, requests, prompts, engines, clock)
        rows.append(
            {
                "bytes": whole.size,
                "page_bytes": whole.geometry.page_bytes,
                "blocks": whole.blocks,
                "private_blocks": part.blocks,
                "shared": hits / asked,
                "policies": found,
                "private": private / asked,
                "optimum": optimum(requests, whole.blocks) / asked,
                "lookup_p50_us": statistics.median(times) * 1e6,
                "lookup_p99_us": sorted(times)[int(len(times) * 0.99)] * 1e6,
                "evicted": shared.cache.eviction.evictions.total(),
            }
        )
    return {
        "requests": len(requests),
        "blocks": asked,
        "distinct_blocks": different,
        "engines": setup.engines,
        "routing": setup.routing,
        "busiest": _busiest(requests, engines) / asked,
        "block_bytes": setup.block_bytes,
        "block_tokens": setup.block_tokens,
        "unlimited": (asked - different) / asked,
        "rows": rows,
    }


def _busiest(requests: Sequence[TraceRequest], engines: Sequence[int]) -> int:
    """Return the maximum number of blocks that one engine requests."""
    load: Counter[int] = Counter()
    for request, engine in zip(requests, engines, strict=True):
        load[engine] += len(request.blocks)
    return max(load.values())


def play(
    daemons: Sequence[SimulatedDaemon],
    requests: Sequence[TraceRequest],
    prompts: Sequence[list[bytes]],
    engines: Sequence[int],
    clock: Callable[[], float],
) -> tuple[int, list[float]]:
    """Return the hits, and the seconds of each lookup. `daemons[e]` serves engine e; one may serve several."""
    hits, times = 0, []
    for request, prompt, engine in zip(requests, prompts, engines, strict=True):
        daemon = daemons[engine]
        found, seconds = daemon.ask(engine if daemon.engines > 1 else 0, prompt, request.at, clock)
        hits += found
        times.append(seconds)
    return hits, times
