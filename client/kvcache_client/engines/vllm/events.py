"""KV events of host memory. They describe a block as vLLM's own events describe the same block in device memory, but
name no tokens of other blocks, as these do with windows and states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvcache_client.engines.vllm import compat
from kvcache_client.scheduler.events import Removed, Stored
from kvcache_client.scheduler.views import RequestView, Table


class HostEvents:
    def __init__(
        self, kv_cache_config: Any, tables: Sequence[Sequence[Table]], hash_tokens: int, per_slot: int
    ) -> None:
        """`tables` are, by cached group, the groups of vLLM whose blocks make up the cached blocks. Each has its own
        events. There are `per_slot` hashes per cached block, of `hash_tokens` each."""
        self._tables, self._hash_tokens, self._per_slot = tables, hash_tokens, per_slot
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._kinds = [(get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for spec in specs]

    def describe(self, view: RequestView, begin: int, end: int, group: int) -> tuple[Any, list[Any]]:
        """Return an event's fields for the request, and the extra keys of the blocks of these tokens, by table."""
        request: Any = view.key

        def keys(table: Table) -> list[Any]:
            size, unit = table.block_tokens, self._hash_tokens
            runs = self._runs(table, (end - begin) // unit)
            named = [at for first, last in runs for at in range(begin + first * unit, begin + last * unit, size)]
            return [generate_block_hash_extra_keys(request, at, at + size, 0)[0] for at in named]

        return compat.event_fields(request), [[keys(table) for table in self._tables[group]]]

    def convert(self, event: Stored | Removed) -> Iterator[Any]:
        """Yield vLLM's events, one for each table and run of blocks."""
        for number, table in enumerate(self._tables[event.group]):
            runs = list(self._runs(table, len(event.hashes)))
            step = table.block_tokens // self._hash_tokens
            names = [
                [maybe_convert_block_hash(BlockHash(each)) for each in event.hashes[begin:end][step - 1 :: step]]
                for begin, end in runs
            ]
            if isinstance(event, Removed):
                hashes = [each for some in names for each in some]
                yield BlockRemoved(block_hashes=hashes, medium=compat.MEDIUM, group_idx=table.number)
                continue
            kind, window = self._kinds[table.number]
            keys = iter(compat.event_extra_keys([each for some in event.blocks for each in some[number]]))
            for (begin, end), hashes in zip(runs, names, strict=True):
                parent = event.hashes[begin - 1] if begin else event.parent
                yield BlockStored(
                    block_hashes=hashes,
                    parent_block_hash=maybe_convert_block_hash(BlockHash(parent)) if parent is not None else None,
                    token_ids=event.tokens[begin * self._hash_tokens : end * self._hash_tokens],
                    block_size=table.block_tokens,
                    medium=compat.MEDIUM,
                    extra_keys=list(islice(keys, len(hashes))),
                    group_idx=table.number,
                    kv_cache_spec_kind=kind,
                    kv_cache_spec_sliding_window=window,
                    **event.request,
                )

    def _runs(self, table: Table, hashes: int) -> Iterator[tuple[int, int]]:
        """Yield the begin and end of consecutive blocks of a table among the `hashes` of cached blocks."""
        named = table.blocks * table.block_tokens // self._hash_tokens  # at the end of each cached block
        if named == self._per_slot:
            yield 0, hashes
        else:
            yield from ((end - named, end) for end in range(self._per_slot, hashes + 1, self._per_slot))
