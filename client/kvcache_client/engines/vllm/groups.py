"""Pure: maps vLLM's KV cache groups to the groups that the daemon knows.

vLLM splits layers of one kind into several groups, so that all groups have pages of one size. A namespace has one group
of each kind instead: layers with attention to all tokens, layers with windows of one size, states, and attention to
chunks. A slot contains, for the same tokens, the blocks of all groups of vLLM that are merged in it. All groups have
slots of the same number of tokens: a multiple of every block size, because prefix hits of vLLM end there, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvcache_client import compression
from kvcache_client.engines.vllm import compat
from kvcache_client.scheduler.views import Group, Table
from kvcache_proto.errors import ConfigError
from kvcache_proto.types import FULL, MAX_GROUPS, MAX_WINDOW_BLOCKS, SUFFIX, GroupSpec

# Subclasses of served kinds with other needs, and kinds that do not have blocks for all tokens.
_NOT_SERVED = {"RSWASpec", "SinkFullAttentionSpec", "HiddenStateCacheSpec"}
_KINDS = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MambaSpec")
STATE = "MambaSpec"


class Member(NamedTuple):
    """A group of vLLM."""

    number: int  # its position among vLLM's groups
    kind: str  # name of the class in `_KINDS` that its specification is, or derives from
    spec: Any  # of its first layer: the scheduler sees no other
    block_tokens: int
    block_bytes: int  # that one rank stores per block, without padding
    layers: tuple[str, ...]  # their names
    alike: bool  # whether their pages have one size

    @property
    def kept(self) -> int:
        """The number of tokens before the next one that a window reads, or retains; 0 for other kinds."""
        if self.kind != "SlidingWindowSpec":
            return 0
        return int(self.spec.sliding_window) - 1 + int(getattr(self.spec, "extra_retained_tokens", 0))

    @property
    def chunk(self) -> int:
        return int(self.spec.attention_chunk_size) if self.kind == "ChunkedLocalAttentionSpec" else 0


class Merged(NamedTuple):
    """A group of the namespace, and the members in its slots, in their order."""

    group: Group
    members: tuple[Member, ...]


def is_plain(kv_cache_config: Any) -> bool:
    """Return True if there is one group, of attention to all tokens."""
    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and kind_of(first_spec(groups[0])) == "FullAttentionSpec"


def _unsupported_group(group: Any) -> str:
    kind = kind_of(first_spec(group))
    for spec in layer_specs(group.kv_cache_spec):
        if not getattr(spec, "prefix_cacheable", True) and not getattr(spec, "prefix_replay_tokens", 0):
            continue  # scratch memory of a request, which vLLM does not cache either
        if not kind_of(spec) or kind_of(spec) != kind:
            return f"{type(spec).__name__}: this version does not cache it"
        if getattr(spec, "prefix_replay_tokens", 0):
            return f"{type(spec).__name__} with bounded replay: this version does not cache it"
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        return "KV cache groups in host memory: this version does not cache them"
    return ""


def unsupported_groups(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return the reason that these groups cannot be cached, "" if they can."""
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        return "its model has no KV cache"
    if reason := next(filter(None, map(_unsupported_group, groups)), ""):
        return reason
    if is_plain(kv_cache_config):
        return ""
    if not compat.places_layers(kv_cache_config):
        return (
            f"{names(groups)}: before vLLM 0.32, a load that fails ends an engine with other groups than one of full "
            "attention"
        )
    members = sorted(members_of(kv_cache_config), key=lambda member: member.kind != _KINDS[0])
    if not members:
        return "no KV cache group takes part in vLLM's prefix caching"
    if compat.reads_next_token(vllm_config) and members[0].kind != _KINDS[0]:
        return f"a drafter that reads the next token, beside {names(groups)} without full attention"
    hashed = hash_tokens(kv_cache_config)
    for member in members:
        if member.kind == STATE and str(getattr(member.spec, "mamba_cache_mode", "none")) != "align":
            return "states at block boundaries only exist with --mamba-cache-mode align"
        if member.block_tokens % hashed:
            return f"hashes of {hashed} tokens for blocks of {member.block_tokens}"
        if members[0].kind == STATE and member.block_tokens != hashed:
            return f"states of {member.block_tokens} tokens with hashes of {hashed}, and no full attention"
    return ""


def hash_tokens(kv_cache_config: Any) -> int:
    return compat.hash_block_size(kv_cache_config) or math.gcd(*_block_sizes(kv_cache_config))


def boundary_tokens(kv_cache_config: Any) -> int:
    """Return the tokens between two boundaries at which blocks of all groups end."""
    return math.lcm(*_block_sizes(kv_cache_config))


def ends_within_blocks(kv_cache_config: Any) -> bool:
    """Return True if hits may end within a block: if there are full attention and states, of larger blocks than those
    of hashes. vLLM also allows windows, of blocks as small as those of hashes; they are not served so here."""
    sizes = {(member.kind, member.block_tokens) for member in members_of(kv_cache_config)}
    states = {size for kind, size in sizes if kind == STATE}
    boundary = boundary_tokens(kv_cache_config)
    return {kind for kind, _ in sizes} == {_KINDS[0], STATE} and states == {boundary} != {hash_tokens(kv_cache_config)}


def has_states(kv_cache_config: Any) -> bool:
    """Return True if there are states: these exist at few boundaries, and each has to be one of ours."""
    return any(kind_of(first_spec(group)) == STATE for group in kv_cache_config.kv_cache_groups)


def writes_early(kv_cache_config: Any) -> bool:
    """Return True if a runner may write to blocks that a step gives away before it calls any hook of a connector.

    Model Runner V2 does so if new blocks are zeroed, if hits may end within a block, or if there are states.
    """
    if getattr(kv_cache_config, "needs_kv_cache_zeroing", False):
        return True
    sizes = [] if is_plain(kv_cache_config) else _block_sizes(kv_cache_config)
    return any(size != hash_tokens(kv_cache_config) for size in sizes)


def merged_groups(kv_cache_config: Any, slot_tokens: int) -> list[Merged]:
    """Return the groups of the namespace: full attention first, then the suffix groups in the order of vLLM's groups.

    Raises ConfigError for groups that the protocol does not allow.
    """
    found: dict[tuple[str, int, int], list[Member]] = {}
    for member in sorted(members_of(kv_cache_config), key=lambda member: member.kind != _KINDS[0]):
        found.setdefault((member.kind, member.kept, member.chunk), []).append(member)
    if len(found) > MAX_GROUPS:
        raise ConfigError(f"{len(found)} kinds of KV cache groups: at most {MAX_GROUPS}")
    return [_merge(kind, kept, chunk, tuple(members), slot_tokens) for (kind, kept, chunk), members in found.items()]


def group_spec(
    merged: Merged,
    slot_tokens: int,
    shards: int,
    needs_next_block: bool = False,
    parts: int = 1,
    compress: bool = False,
) -> GroupSpec:
    """Return the group with the bytes of its slots; `needs_next_block` applies to a group of full attention.

    Each rank has `parts` of the shards. With `compress`, what can be is stored compressed.

    A drafter that reads the next token has, for the last token of a slot, KV that depends on the next slot. If the next
    slot is cached, the slot's writer had the same next token, unless two writers of the slot differ in the next one:
    then vLLM, too, takes the KV of the first, and its drafts are worse by a token. This holds for every slot of a hit:
    all but the last are followed by slots of the hit. It does not matter which group has the drafter's layers: the
    slots of a window have the hashes of those of full attention. A state has no drafter's KV.
    """
    group = merged.group
    part = sum(
        table.blocks * bytes_in_slot(member, parts, compress)
        for table, member in zip(group.tables, merged.members, strict=True)
    )
    kind = SUFFIX if group.window_blocks else FULL
    sizes = part if shards == 1 else (part,) * shards
    needs_next_block &= kind == FULL
    return GroupSpec(slot_tokens, sizes, kind, group.window_blocks, group.chunk_blocks, needs_next_block)


def uncompressed_reason(member: Member, parts: int) -> str:
    """Return the reason that blocks of these layers, in so many parts, are not compressed, "" if they can be.

    The scheduler sees the type of the first layer only. Pages of another size may have values of another type: beside
    the latent vectors of DeepSeek V3.2 lie the bytes of an indexer.
    """
    if member.kind == STATE:
        return "states are not compressed"
    if not member.alike:
        return "KV of layers with pages of several sizes is not compressed"
    dtype = str(member.spec.dtype).removeprefix("torch.")
    if dtype != "bfloat16":
        return f"KV of {dtype} is not compressed"
    return compression.unsupported_reason(member.block_bytes // parts)


def bytes_in_slot(member: Member, parts: int, compress: bool) -> int:
    """Return the bytes in a slot of one of the parts of a block."""
    part_bytes = member.block_bytes // parts
    if compress and not uncompressed_reason(member, parts):
        return compression.stored_bytes(part_bytes)
    return part_bytes


def kind_of(spec: Any) -> str:
    """Return the served kind that a layer's specification has, "" if none."""
    names = {cls.__name__ for cls in type(spec).__mro__}
    return "" if names & _NOT_SERVED else next((kind for kind in _KINDS if kind in names), "")


def layer_specs(spec: Any) -> Iterator[Any]:
    """Yield the specifications of a group's layers that are known here."""
    inner = getattr(spec, "kv_cache_specs", None)
    yield from [spec] if inner is None else inner.values()


def first_spec(group: Any) -> Any:
    return next(layer_specs(group.kv_cache_spec))


def _merge(kind: str, kept: int, chunk: int, members: tuple[Member, ...], slot_tokens: int) -> Merged:
    window_blocks = chunk_blocks = 0
    if kind == "SlidingWindowSpec":
        window_blocks = max(1, -(-kept // slot_tokens))
    elif kind == STATE:
        window_blocks = 1
    elif chunk:
        if chunk % slot_tokens:
            raise ConfigError(
                f"attention to chunks of {chunk} tokens, which is no multiple of block_size {slot_tokens}"
            )
        window_blocks = chunk_blocks = chunk // slot_tokens
    if window_blocks > MAX_WINDOW_BLOCKS:
        raise ConfigError(f"a window of {window_blocks} blocks: at most {MAX_WINDOW_BLOCKS}; use a larger block_size")
    tables = []
    for member in members:
        blocks = slot_tokens // member.block_tokens
        if kind == STATE:
            blocks = 1
        elif kept and window_blocks == 1:  # only the end of a slot is ever read
            blocks = min(blocks, -(-kept // member.block_tokens))
        tables.append(Table(member.number, member.block_tokens, blocks))
    return Merged(Group(tuple(tables), window_blocks, chunk_blocks, kept, chunk, kind == STATE), members)


def members_of(kv_cache_config: Any) -> Iterator[Member]:
    """Yield the groups that take part in vLLM's prefix caching."""
    pages = compat.page_bytes(kv_cache_config)
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        if not getattr(group.kv_cache_spec, "prefix_cacheable", True) or not group.layer_names:
            continue
        spec = first_spec(group)
        layers = tuple(group.layer_names)
        alike = len({pages.get(name) for name in layers}) == 1
        yield Member(
            number, kind_of(spec), spec, int(spec.block_size), _block_bytes(spec, layers, pages), layers, alike
        )


def _block_bytes(spec: Any, layers: tuple[str, ...], pages: dict[str, int]) -> int:
    """Return the bytes of all layers in one block. Pages may be padded, if the layers are alike; that is left out."""
    if hasattr(spec, "shapes"):
        states = zip(spec.shapes, spec.dtypes, strict=True)
        return len(layers) * sum(int(math.prod(shape)) * int(dtype.itemsize) for shape, dtype in states)
    sizes = [pages[name] for name in layers]
    if set(sizes) == {int(spec.page_size_bytes)}:
        return len(layers) * int(spec.real_page_size_bytes)
    return sum(sizes)


def _block_sizes(kv_cache_config: Any) -> list[int]:
    groups = kv_cache_config.kv_cache_groups
    some = [each for each in groups if getattr(each.kv_cache_spec, "prefix_cacheable", True)]
    return [int(first_spec(group).block_size) for group in some or groups]


def names(groups: Any) -> str:
    kinds = ", ".join(dict.fromkeys(type(first_spec(group)).__name__ for group in groups))
    return f"{len(groups)} KV cache groups ({kinds})" if len(groups) > 1 else kinds
