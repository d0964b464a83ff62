"""KV events of host memory. They describe a block as vLLM's own events describe the same block in device memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvcache_client.engines.vllm import compat
from kvcache_client.scheduler.events import Removed, Stored
from kvcache_client.scheduler.views import RequestView, Table


class HostEvents:
    def __init__(self, kv_cache_config: Any, tables: Sequence[Table], hash_tokens: int) -> None:
        """`tables` are the groups of vLLM whose blocks make up the cached blocks. Each has its own events."""
        self._tables, self._hash_tokens = tables, hash_tokens
        specs = [kv_cache_config.kv_cache_groups[table.number].kv_cache_spec for table in tables]
        self._kinds = [(get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for spec in specs]

    def describe(self, view: RequestView, begin: int, end: int) -> tuple[Any, list[Any]]:
        """Return an event's fields for the request, and the extra keys of the blocks of these tokens, by table."""
        request: Any = view.key

        def keys(size: int) -> list[Any]:
            return [generate_block_hash_extra_keys(request, at, at + size, 0)[0] for at in range(begin, end, size)]

        return compat.event_fields(request), [[keys(table.block_tokens) for table in self._tables]]

    def convert(self, event: Stored | Removed) -> Iterator[Any]:
        """Yield vLLM's events, one for each table."""
        for number, (table, (kind, window)) in enumerate(zip(self._tables, self._kinds, strict=True)):
            step = table.block_tokens // self._hash_tokens
            hashes = [maybe_convert_block_hash(BlockHash(each)) for each in event.hashes[step - 1 :: step]]
            if isinstance(event, Removed):
                yield BlockRemoved(block_hashes=hashes, medium=compat.MEDIUM, group_idx=table.number)
                continue
            parent = event.parent
            yield BlockStored(
                block_hashes=hashes,
                parent_block_hash=maybe_convert_block_hash(BlockHash(parent)) if parent is not None else None,
                token_ids=event.tokens,
                block_size=table.block_tokens,
                medium=compat.MEDIUM,
                extra_keys=compat.event_extra_keys([keys for some in event.blocks for keys in some[number]]),
                group_idx=table.number,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
                **event.request,
            )
