"""What a device holds of a model beside its weights: by the pages that vLLM makes of what is left. Pure."""

from __future__ import annotations

from typing import NamedTuple

from kvcache_server.capacity.pages import Pages


class Device(NamedTuple):
    """One rank's share of a model on a device.

    Attributes:
        kv_bytes: what is left for the cache.
        blocks: of the engine's pool; one of them is never given to a request.
        longest: most tokens of one request, up to the model's own limit.
        at_once: requests of `length` tokens that run together.
    """

    kv_bytes: int
    blocks: int
    longest: int
    length: int
    at_once: int


def device(pages: Pages, kv_bytes: int, limit: int, length: int) -> Device:
    """Return what `kv_bytes` of a device hold, with requests of at most `limit` tokens; 0 where nothing fits."""
    blocks = max(kv_bytes, 0) // pages.block_bytes
    usable = max(blocks - 1, 0)
    longest = pages.longest(usable, limit)
    at_once = usable // pages.blocks_of(length) if length <= longest else 0
    return Device(kv_bytes, blocks, longest, length, at_once)
