"""vLLM's KV cache groups, as plain values, to groups of a namespace."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache_client.engines.vllm.groups import (
    boundary_tokens,
    group_spec,
    hash_tokens,
    is_plain,
    merged_groups,
    unsupported_groups,
)
from kvcache_client.scheduler.views import Group, Table
from kvcache_proto.errors import ConfigError
from kvcache_proto.types import FULL, SUFFIX, GroupSpec

PAGE = 4096


class Spec:
    prefix_cacheable = True
    prefix_replay_tokens = 0

    def __init__(self, block_size: int = 16, **facts: Any) -> None:
        self.block_size = block_size
        self.real_page_size_bytes = self.page_size_bytes = PAGE * block_size // 16
        self.__dict__.update(facts)


class FullAttentionSpec(Spec): ...


class MLAAttentionSpec(FullAttentionSpec): ...


class SinkFullAttentionSpec(FullAttentionSpec): ...


class SlidingWindowSpec(Spec): ...


class ChunkedLocalAttentionSpec(Spec): ...


class CircularBufferSpec(Spec):
    prefix_cacheable = False


class MambaSpec(Spec):
    mamba_cache_mode = "align"
    shapes = ((4, 8), (16,))
    dtypes = (SimpleNamespace(itemsize=2), SimpleNamespace(itemsize=4))


def config(*groups: tuple[Any, int], **facts: Any) -> Any:
    """As 0.32 makes it: groups of (specification, layers) overlay each other in one allocation."""
    made, tensors = [], []
    for number, (spec, layers) in enumerate(groups):
        names = [f"{number}.{layer}" for layer in range(layers)]
        given = {"layer_names": names, "kv_cache_spec": spec, "host_resident": False, "enable_kv_transfer": True}
        made.append(SimpleNamespace(**(given | facts.pop(f"group{number}", {}))))
        first = getattr(spec, "kv_cache_specs", {None: spec})
        page = next(iter(first.values())).page_size_bytes
        tensors.append(SimpleNamespace(size=1000 * PAGE, layers=names, layer_stride=100 * page, block_stride=page))
    return SimpleNamespace(kv_cache_groups=made, kv_cache_tensors=tensors, num_blocks=100, **facts)


VLLM = SimpleNamespace(speculative_config=None)


def test_groups_of_one_kind_are_one() -> None:
    """Gemma 3's are one of full attention and several of windows; the last one has fewer layers."""
    window = SlidingWindowSpec(sliding_window=1024)
    gemma = config((window, 5), (FullAttentionSpec(), 5), (window, 3))
    assert not is_plain(gemma) and not unsupported_groups(VLLM, gemma)
    full, suffix = merged_groups(gemma, 128)
    assert full.group == Group((Table(1, 16, 8),))
    assert suffix.group == Group((Table(0, 16, 8), Table(2, 16, 8)), window_blocks=8, kept=1023)
    assert [member.layers[0] for member in suffix.members] == ["0.0", "2.0"]
    assert group_spec(full, 128, 1) == GroupSpec(128, 5 * PAGE * 8, FULL)
    assert group_spec(suffix, 128, 2) == GroupSpec(128, (8 * PAGE * 8,) * 2, SUFFIX, 8)
    assert group_spec(full, 128, 1, needs_next_block=True) == GroupSpec(128, 5 * PAGE * 8, FULL, needs_next_block=True)
    assert not group_spec(suffix, 128, 2, needs_next_block=True).needs_next_block


@pytest.mark.parametrize(
    ("window", "window_blocks", "blocks"), [(1, 1, 1), (17, 1, 1), (18, 1, 2), (128, 1, 8), (129, 1, 8), (130, 2, 8)]
)
def test_of_a_window_smaller_than_a_slot_only_the_end_is_kept(window: int, window_blocks: int, blocks: int) -> None:
    _, suffix = merged_groups(config((FullAttentionSpec(), 1), (SlidingWindowSpec(sliding_window=window), 1)), 128)
    expected = blocks if window > 1 else 8
    assert (suffix.group.window_blocks, suffix.group.tables) == (window_blocks, (Table(1, 16, expected),))


def test_windows_of_two_sizes_are_two_suffixes() -> None:
    windows = [(SlidingWindowSpec(sliding_window=size), 1) for size in (512, 1024, 512)]
    assert [len(each.members) for each in merged_groups(config(*windows), 128)] == [2, 1]


def test_tokens_that_are_retained_are_needed_too() -> None:
    (suffix,) = merged_groups(config((SlidingWindowSpec(sliding_window=129, extra_retained_tokens=2), 1)), 128)
    assert (suffix.group.window_blocks, suffix.group.kept) == (2, 130)


def test_a_state_is_one_block_whatever_the_slot_s_tokens() -> None:
    """Its page is padded to that of attention; the padding is left out."""
    granite = config((MambaSpec(528), 9), (FullAttentionSpec(528), 1))
    assert not unsupported_groups(VLLM, granite)
    full, state = merged_groups(granite, 1056)
    assert full.group == Group((Table(1, 528, 2),))
    assert state.group == Group((Table(0, 528, 1),), window_blocks=1, is_state=True)
    assert group_spec(state, 1056, 1).block_bytes == 9 * (32 * 2 + 16 * 4)


def test_chunks_are_whole_slots() -> None:
    chunks = config((FullAttentionSpec(), 1), (ChunkedLocalAttentionSpec(attention_chunk_size=8192), 3))
    _, suffix = merged_groups(chunks, 128)
    assert (suffix.group.window_blocks, suffix.group.chunk_blocks, suffix.group.chunk) == (64, 64, 8192)
    with pytest.raises(ConfigError, match="chunks of 8192 tokens"):
        merged_groups(chunks, 3 * 128)


def test_slots_and_hashes_fit_all_block_sizes() -> None:
    several = config((FullAttentionSpec(32), 1), (SlidingWindowSpec(48, sliding_window=100), 1))
    assert (boundary_tokens(several), hash_tokens(several)) == (96, 16)
    several.hash_block_size = 8
    assert hash_tokens(several) == 8


def test_what_vllm_does_not_cache_is_left_out() -> None:
    several = config((FullAttentionSpec(), 1), (CircularBufferSpec(5), 1))
    assert not unsupported_groups(VLLM, several)
    assert boundary_tokens(several) == 16
    (full,) = merged_groups(several, 128)
    assert full.group == Group((Table(0, 16, 8),))


def test_padding_of_layers_that_are_alike_is_left_out() -> None:
    """Where a group has layers of several sizes, the scheduler knows how far pages are apart, and no more."""
    padded = FullAttentionSpec(real_page_size_bytes=PAGE - 96)
    full, _ = merged_groups(config((padded, 3), (SlidingWindowSpec(sliding_window=100), 1)), 128)
    assert full.members[0].block_bytes == 3 * (PAGE - 96)
    mixed = config((FullAttentionSpec(page_size_bytes=1), 2), (SlidingWindowSpec(sliding_window=100), 1))
    mixed.kv_cache_tensors[0].block_stride, mixed.kv_cache_tensors[0].layer_stride = PAGE, 100 * PAGE
    full, _ = merged_groups(mixed, 128)
    assert full.members[0].block_bytes == 2 * PAGE


def drafting(eagle: bool) -> Any:
    return SimpleNamespace(speculative_config=SimpleNamespace(use_eagle=lambda: eagle))


def test_what_is_declined_is_named() -> None:
    full, window = FullAttentionSpec(), SlidingWindowSpec(sliding_window=100)
    two = (full, 1), (window, 1)
    assert not unsupported_groups(VLLM, config(*two))
    assert not unsupported_groups(drafting(False), config(*two))
    assert not unsupported_groups(drafting(True), config(*two[::-1]))
    assert unsupported_groups(drafting(True), config((window, 1))).startswith("a drafter")
    assert not unsupported_groups(drafting(True), config((full, 2)))
    old = config(*two)
    old.kv_cache_tensors = [SimpleNamespace(size=PAGE, shared_by=["0.0", "1.0"])]
    said = "2 KV cache groups (FullAttentionSpec, SlidingWindowSpec): before vLLM 0.32"
    assert unsupported_groups(VLLM, old).startswith(said)
    assert unsupported_groups(VLLM, config()) == "its model has no KV cache"
    assert unsupported_groups(VLLM, config((SinkFullAttentionSpec(), 1))).startswith("SinkFullAttentionSpec")
    mixed = SimpleNamespace(block_size=16, kv_cache_specs={"a": full, "b": window})
    assert unsupported_groups(VLLM, config((mixed, 2))).startswith("SlidingWindowSpec")
    hosted = config(*two, group0={"host_resident": True})
    assert "host memory" in unsupported_groups(VLLM, hosted)
    derived = config(*two, group0={"enable_kv_transfer": False})
    assert "host memory" in unsupported_groups(VLLM, derived)
    replayed = SlidingWindowSpec(sliding_window=100, prefix_cacheable=False, prefix_replay_tokens=100)
    assert "replay" in unsupported_groups(VLLM, config((full, 1), (replayed, 1)))
    lost = MambaSpec(528, mamba_cache_mode="none")
    assert "--mamba-cache-mode align" in unsupported_groups(VLLM, config((full, 1), (lost, 1)))
    fine = config((MambaSpec(528), 1), (MambaSpec(264), 1), hash_block_size=88)
    assert "no full attention" in unsupported_groups(VLLM, fine)
    odd = config((FullAttentionSpec(48), 1), (SlidingWindowSpec(sliding_window=100), 1), hash_block_size=32)
    assert "hashes of 32 tokens" in unsupported_groups(VLLM, odd)
    assert math.lcm(48, 16) == boundary_tokens(odd)
