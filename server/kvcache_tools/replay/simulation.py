"""Runs a trace against daemons of several sizes, shared by all engines and private to each; and upper bounds for any
cache. Pure, except for the clock that is passed in."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvcache_proto.errors import ConfigError
from kvcache_server.core.eviction.policy import WORTH
from kvcache_server.insight.optimum import best_hits
from kvcache_server.slices import finish
from kvcache_tools.plan.room import Room, room
from kvcache_tools.replay.device_cache import DeviceCache
from kvcache_tools.replay.simulated_daemon import SimulatedDaemon, block_hash
from kvcache_tools.replay.trace import TraceRequest

ROUTINGS = ("round-robin", "prefix")


class Setup(msgspec.Struct, frozen=True):
    """A replay with `engines` engines and blocks of `block_bytes` for `block_tokens` tokens.

    `routing` chooses the engine of requests for which the trace does not name it: each in turn, or the one that had the
    request's first block earlier. The shared cache is tried with each of `policies`, the private ones with the first.
    Each engine has a device cache of `device_blocks` blocks, and reports those that it evicts if it is `device_aware`.
    """

    engines: int = 8
    block_bytes: int = 1 << 20
    block_tokens: int = 512
    routing: str = ROUTINGS[0]
    page_bytes: int = 0
    policies: tuple[str, ...] = (WORTH,)
    device_blocks: int = 0
    device_aware: bool = True

    @property
    def reports(self) -> bool:
        return self.device_aware and self.device_blocks > 0

    def daemon(self, room: Room, engines: int, policy: str) -> SimulatedDaemon:
        """Return an empty daemon for that number of engines."""
        made = SimulatedDaemon(room, self.block_tokens, engines, policy=policy)
        if self.reports:
            made.report_devices()
        return made

    def devices(self) -> list[DeviceCache]:
        """Return an empty device cache for each engine."""
        return [DeviceCache(self.device_blocks, self.reports) for _ in range(self.engines)]


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
    load: Counter[int] = Counter()  # blocks that each engine requests
    for request, engine in zip(requests, engines, strict=True):
        load[engine] += len(request.blocks)
    rooms = [make_rooms(size, setup) for size in sorted(sizes)]
    rows = []
    for whole, part in rooms:
        say(f"  {whole.blocks:,} blocks")
        found = {}
        for policy in reversed(setup.policies):
            shared = setup.daemon(whole, setup.engines, policy)
            devices = setup.devices()
            hits, times = play([shared] * setup.engines, requests, prompts, engines, clock, devices)
            found[policy] = hits / asked
        first = setup.policies[0]
        alone = [setup.daemon(part, 1, first) for _ in range(setup.engines)]
        private, _ = play(alone, requests, prompts, engines, clock, setup.devices())
        by_devices = sum(device.hits for device in devices)
        rows.append(
            {
                "bytes": whole.size,
                "page_bytes": whole.geometry.page_bytes,
                "blocks": whole.blocks,
                "private_blocks": part.blocks,
                "shared": hits / asked,
                "device": by_devices / asked,
                "host": (hits - by_devices) / asked,
                "misses": (asked - hits) / asked,
                "policies": found,
                "private": private / asked,
                "optimum": optimum(requests, whole.blocks + setup.engines * setup.device_blocks) / asked,
                "lookup_p50_us": statistics.median(times) * 1e6,
                "lookup_p99_us": sorted(times)[int(len(times) * 0.99)] * 1e6,
                "evicted": shared.cache.evictions.total(),
            }
        )
    return {
        "requests": len(requests),
        "blocks": asked,
        "distinct_blocks": different,
        "engines": setup.engines,
        "routing": setup.routing,
        "busiest": max(load.values()) / asked,
        "block_bytes": setup.block_bytes,
        "block_tokens": setup.block_tokens,
        "device_blocks": setup.device_blocks,
        "device_aware": setup.device_aware,
        "unlimited": (asked - different) / asked,
        "rows": rows,
    }


def play(
    daemons: Sequence[SimulatedDaemon],
    requests: Sequence[TraceRequest],
    prompts: Sequence[list[bytes]],
    engines: Sequence[int],
    clock: Callable[[], float],
    devices: Sequence[DeviceCache] = (),
) -> tuple[int, list[float]]:
    """Return the hits, and the seconds of each lookup. `daemons[e]` serves engine e; one may serve several.

    `devices[e]` is the device cache of engine e, whose hits count, too; empty: there are none.
    """
    hits, times = 0, []
    for request, prompt, engine in zip(requests, prompts, engines, strict=True):
        daemon, device = daemons[engine], devices[engine] if devices else None
        found, seconds = daemon.ask(engine if daemon.engines > 1 else 0, prompt, request.at, clock, device)
        hits += found
        times.append(seconds)
    return hits, times


# Upper bounds: unlimited memory, and an optimal eviction policy.


def distinct(requests: Sequence[TraceRequest]) -> int:
    """Return the number of distinct blocks: with unlimited memory, each misses once."""
    return len({block for request in requests for block in request.blocks})


def optimum(requests: Sequence[TraceRequest], blocks: int) -> int:
    """Return the maximum number of hits of a cache of `blocks` blocks if the whole trace is known beforehand."""
    return finish(best_hits([request.blocks for request in requests], blocks))
