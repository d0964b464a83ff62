"""KV tensors, as numbers, to fragments: every byte of a block once, and nothing else."""

from __future__ import annotations

import pytest

from kvcache_client.devices.layout import Fragment, FragmentRun, Tensor, block_fragments, runs
from kvcache_proto.errors import ConfigError


def dense(shape: tuple[int, ...], item: int = 2) -> tuple[int, ...]:
    strides = [item]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)


def tensor(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, item: int = 2) -> Tensor:
    return Tensor(pointer, shape, strides or dense(shape, item), item)


def bytes_of(fragments: list[Fragment], block: int) -> list[int]:
    """Every address of `block`, in the order in which a slot holds them."""
    return [f.pointer + block * f.stride + i for f in fragments for i in range(f.bytes)]


def test_one_dense_tensor_a_layer() -> None:
    layers = [tensor(1000, (10, 2, 4, 8)), tensor(50_000, (10, 2, 4, 8))]
    assert block_fragments(layers, 10, 256) == [Fragment(1000, 128, 128), Fragment(50_000, 128, 128)]


def test_keys_and_values_apart() -> None:
    found = block_fragments([tensor(0, (2, 10, 4, 8))], 10, 128)
    assert found == [Fragment(0, 64, 64), Fragment(640, 64, 64)]


def test_a_tuple_of_tensors_a_layer_that_begin_inside_a_storage() -> None:
    found = block_fragments([tensor(2 << 20, (10, 4, 8)), tensor(6 << 20, (10, 4, 2))], 10, 64 + 16)
    assert found == [Fragment(2 << 20, 64, 64), Fragment(6 << 20, 16, 16)]


def test_more_rows_than_blocks_are_not_kernel_blocks() -> None:
    assert block_fragments([tensor(0, (13, 4, 8))], 10, 64) == [Fragment(0, 64, 64)]


def test_kernel_blocks_that_halve_a_block() -> None:
    assert block_fragments([tensor(0, (20, 4, 8))], 10, 128) == [Fragment(0, 128, 128)]


def test_kernel_blocks_with_keys_and_values_apart() -> None:
    found = block_fragments([tensor(0, (2, 20, 4, 8))], 10, 256)
    assert found == [Fragment(0, 128, 128), Fragment(1280, 128, 128)]


def test_a_permuted_view_is_read_in_the_order_of_its_addresses() -> None:
    heads_first = tensor(
        0, (10, 4, 2, 8), (128, 16, 64, 2)
    )  # [block, token, head, dim] kept as [block, head, token, dim]
    assert block_fragments([heads_first], 10, 128) == [Fragment(0, 128, 128)]


def test_blocks_outermost_are_one_fragment() -> None:
    layers = [Tensor(layer * 64, (10, 4, 8), (256, 16, 2), 2) for layer in range(4)]
    assert block_fragments(layers, 10, 256) == [Fragment(0, 256, 256)]


def test_neighbours_of_another_block_are_not_joined() -> None:
    """Layers outermost with one block each touch, and yet belong to different blocks."""
    layers = [tensor(0, (1, 32)), tensor(64, (1, 32))]
    found = block_fragments(layers, 1, 128)
    assert bytes_of(found, 0) == list(range(128))


def test_rows_with_gaps_are_several_fragments() -> None:
    padded = Tensor(0, (10, 3, 8), (100, 32, 2), 2)
    found = block_fragments([padded], 10, 48)
    assert found == [Fragment(0, 100, 16), Fragment(32, 100, 16), Fragment(64, 100, 16)]


def test_shared_layers_count_once() -> None:
    layer = tensor(0, (10, 4, 8))
    assert block_fragments([layer, layer, tensor(9000, (10, 4, 8)), layer], 10, 128) == [
        Fragment(0, 64, 64),
        Fragment(9000, 64, 64),
    ]


def test_a_sum_that_differs_is_an_error() -> None:
    with pytest.raises(ConfigError, match="64 bytes per block, the KV cache specification says 65"):
        block_fragments([tensor(0, (10, 4, 8))], 10, 65)
    with pytest.raises(ConfigError, match="no axis for 10 blocks"):
        block_fragments([tensor(0, (2, 3, 8))], 10, 64)


def test_runs_join_what_is_evenly_spaced() -> None:
    layers = [Fragment(1000 * layer, 64, 64) for layer in range(5)]
    assert runs(layers) == [FragmentRun(0, 64, 64, 5, 1000, 0)]


def test_runs_break_where_spacing_size_or_direction_change() -> None:
    fragments = [
        *(Fragment(at, 64, 64) for at in (0, 1000, 2000, 2500)),
        Fragment(4000, 32, 32),
        *(Fragment(at, 64, 64) for at in (9000, 8000)),
    ]
    found = runs(fragments)
    assert found == [
        FragmentRun(0, 64, 64, 3, 1000, 0),
        FragmentRun(2500, 64, 64, 1, 0, 192),
        FragmentRun(4000, 32, 32, 1, 0, 256),
        FragmentRun(9000, 64, 64, 1, 0, 288),
        FragmentRun(8000, 64, 64, 1, 0, 352),
    ]
    assert sum(run.bytes * run.number for run in found) == sum(fragment.bytes for fragment in fragments)
