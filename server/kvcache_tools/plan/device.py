"""The cache that a device can hold beside a model's weights, in the pages that vLLM makes of the rest. Pure."""

from __future__ import annotations

from typing import NamedTuple

from kvcache_tools.plan.pages import Pages


class Device(NamedTuple):
    """The cache of one rank on its device.

    Attributes:
        kv_bytes: memory left for the cache.
        blocks: blocks in the engine's pool; one of them is never given to a request.
        longest: most tokens of one request, up to the model's own limit.
        at_once: most concurrent requests of `length` tokens.
    """

    kv_bytes: int
    blocks: int
    longest: int
    length: int
    at_once: int


def device(pages: Pages, kv_bytes: int, limit: int, length: int) -> Device:
    """Return the cache in `kv_bytes` of a device, with requests of at most `limit` tokens; 0 if nothing fits."""
    blocks = max(kv_bytes, 0) // pages.block_bytes
    usable = max(blocks - 1, 0)
    longest = pages.longest(usable, limit)
    at_once = usable // pages.blocks_of(length) if length <= longest else 0
    return Device(kv_bytes, blocks, longest, length, at_once)
