"""The layout of a rank's KV in device memory and in the slots of the region."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvcache_client import compression
from kvcache_client.devices.layout import Fragment, Parts, Tensor, block_fragments, layer_ends, part_fragments
from kvcache_client.session.region import Placed, Region
from kvcache_client.worker.places import WHOLE, Column, Places, RankFacts, Shards
from kvcache_proto.errors import ConfigError
from kvcache_proto.types import REF_BYTES, NamespaceSpec


class BlockLayout(NamedTuple):
    """The fragments of a block, or of a part of it, and whether they are stored compressed."""

    fragments: list[Fragment]
    compress: bool = False


class KVLayout:
    """The layout of one rank, in the slots of the namespace `spec`."""

    def __init__(self, spec: NamespaceSpec, facts: RankFacts, shards: Shards, rank: int) -> None:
        self.facts = facts
        self.reads, self.writes = shards.of_rank(rank)
        self.parts = WHOLE  # how these shards divide a block of the engine
        self._by_head = shards.by_head
        part_bytes = facts.block_bytes // len(self.reads)
        # The tables of each group, as `Places` takes them.
        self._columns: list[list[Column]] = []
        if not facts.groups:
            self._columns = [[_column(0, part_bytes, facts.blocks_per_slot, facts.compress)]]
        self.places: list[Places] = []  # of its blocks, by group
        self.follow(spec)

    def follow(self, spec: NamespaceSpec) -> None:
        """Lay out the slots of `spec` from now on."""
        self.spec = spec
        begin, columns = self.reads[0], zip(spec.groups, self._columns, strict=False)
        self.places = [Places(group.shard_offset(begin), each, self.parts) for group, each in columns]

    def read_caches(self, kv_caches: Mapping[str, Any], num_blocks: int) -> list[BlockLayout]:
        """Return each layout of a block in the device's memory, and lay out the slots accordingly.

        Groups that overlay each other have the same layout. Raises ConfigError if the tensors do not match the facts.
        """
        if self.facts.groups:
            return self._read_groups(kv_caches, num_blocks)
        fragments, self.parts = self._fragments(kv_caches.values(), num_blocks, self.facts.block_bytes)
        self.follow(self.spec)
        return [BlockLayout(fragments, self.facts.compress)]

    def _fragments(self, caches: Iterable[Any], num_blocks: int, block_bytes: int) -> tuple[list[Fragment], Parts]:
        """Return the fragments of a part of a block, and how the parts divide it."""
        described, parts = map(describe_tensor, flatten(caches)), len(self.reads)
        if parts == 1:
            return block_fragments(described, num_blocks, block_bytes), WHOLE
        return part_fragments(described, num_blocks, block_bytes // parts, parts, self._by_head)

    def _read_groups(self, kv_caches: Mapping[str, Any], num_blocks: int) -> list[BlockLayout]:
        layouts: list[BlockLayout] = []
        found: set[Parts] = set()
        self._columns = []
        for tables in self.facts.groups:
            columns = []
            for table in tables:
                caches = [kv_caches[name] for name in table.layers]
                fragments, parts = self._fragments(caches, num_blocks, table.block_bytes)
                found.add(parts)
                if (found_here := BlockLayout(fragments, table.compress)) not in layouts:
                    layouts.append(found_here)
                size = table.block_bytes // parts.number
                columns.append(_column(layouts.index(found_here), size, table.blocks, table.compress))
            self._columns.append(columns)
        if len(found) > 1:
            raise ConfigError(f"the parts of KV tensors are not evenly spaced over groups: {found}")
        (self.parts,) = found
        self.follow(self.spec)
        return layouts

    def compressed(self, kv_caches: Mapping[str, Any]) -> Iterable[Any]:
        """Yield the tensors whose blocks are stored compressed."""
        if not self.facts.groups:
            return flatten(kv_caches.values()) if self.facts.compress else ()
        tables = [table for tables in self.facts.groups for table in tables if table.compress]
        return flatten(kv_caches[name] for table in tables for name in table.layers)

    def layer_ends(self, kv_caches: Mapping[str, Any], num_blocks: int) -> dict[str, int]:
        """Return the end of each layer's KV in a block of this rank; {} for an engine with several groups."""
        if self.facts.groups:
            return {}
        layers = [[describe_tensor(tensor) for tensor in flatten([cache])] for cache in kv_caches.values()]
        ends = layer_ends(layers, num_blocks, self.parts.number, self._by_head)
        return dict(zip(kv_caches, ends, strict=True))

    def place(self, region: Region, refs: bytes, blocks: int, group: int = 0) -> Placed | None:
        """Return the places of the blocks of `refs`; None if they have no room for `blocks` blocks of the engine.

        The scheduler has checked them against its own mapping; the addresses are made in this one.
        """
        if len(refs) // REF_BYTES * self.places[group].columns < blocks:
            return None
        return region.place(refs, self.spec.groups[group].block_bytes)


def _column(layout: int, part_bytes: int, blocks: int, compress: bool) -> Column:
    if compress:
        return Column(layout, compression.stored_bytes(part_bytes), blocks, part_bytes)
    return Column(layout, part_bytes, blocks)


def flatten(values: Iterable[Any]) -> Iterable[Any]:
    """Yield the tensors in nested lists and tuples."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from flatten(value)
        else:
            yield value


def dtype_of(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def describe_tensor(tensor: Any) -> Tensor:
    """Return the place of a tensor, with strides in bytes."""
    size = tensor.element_size()
    strides: Sequence[int] = tensor.stride()
    return Tensor(tensor.data_ptr(), tuple(tensor.shape), tuple(stride * size for stride in strides), size)
