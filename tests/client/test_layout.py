"""KV tensors, as numbers, to fragments: every byte of a block once, and nothing else."""

from __future__ import annotations

import pytest

from kvcache_client.devices.cpu import FragmentRun, runs
from kvcache_client.devices.layout import Fragment, Tensor, block_fragments, part_fragments
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


HEADS, TOKENS, VALUES = 4, 16, 32  # bytes are counted in items of two
PIECE = TOKENS * VALUES * 2


def heads_of(tensors: list[Tensor], part_bytes: int, block: int) -> list[list[int]]:
    """Every address of each head of `block`, in the order in which a slot holds them."""
    fragments, parts = part_fragments(tensors, 10, part_bytes, HEADS, by_head=True)
    return [bytes_of(fragments, block * parts.apart + head) for head in range(parts.number)]


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC", "BHLNC", "HND", "HND within a block", "kernel blocks"])
def test_heads_in_the_layouts_that_have_them_apart(layout: str) -> None:
    """As many bytes for each head, of all layers, in the same order whatever the layout; together all of the block."""
    layers, item = 3, 2
    token, head = VALUES * item, PIECE
    shape, strides, kinds, step = (10, HEADS, TOKENS, VALUES), (HEADS * head, head, token, item), 1, 10 * HEADS * head
    if layout == "BLHNC":
        strides, step = (layers * HEADS * head, head, token, item), HEADS * head
    elif layout == "BHLNC":
        strides, step = (HEADS * layers * head, layers * head, token, item), head
    elif layout == "HND":  # a view with tokens before heads, keys and values apart
        kinds, step = 2, 2 * 10 * HEADS * head
        shape, strides = (2, 10, TOKENS, HEADS, VALUES), (10 * HEADS * head, HEADS * head, token, head, item)
    elif layout == "HND within a block":
        kinds, step = 2, 2 * 10 * HEADS * head
        shape, strides = (10, 2, TOKENS, HEADS, VALUES), (2 * HEADS * head, HEADS * head, token, head, item)
    elif layout == "kernel blocks":
        kinds, step = 2, 2 * 10 * HEADS * head
        shape, strides = (20, HEADS, TOKENS, VALUES), (HEADS * head, head, token, item)
    tensors = [Tensor(1 << 20 | layer * step, shape, strides, item) for layer in range(layers)]
    for block in (0, 7):
        found = heads_of(tensors, layers * kinds * PIECE, block)
        whole = bytes_of(block_fragments(tensors, 10, layers * kinds * HEADS * PIECE), block)
        assert sorted(at for each in found for at in each) == sorted(whole)
        for each in found:
            pieces = [each[at : at + PIECE] for at in range(0, len(each), PIECE)]
            assert all(piece == list(range(piece[0], piece[0] + PIECE)) for piece in pieces)
            apart = layers if layout in ("BLHNC", "BHLNC") else 1000  # layers of a block, which precede its neighbours
            owners = [(piece[0] - tensors[0].pointer) // step % apart for piece in pieces]
            assert owners == [layer for layer in range(layers) for _ in range(kinds)]


def test_heads_that_are_not_apart_are_an_error() -> None:
    with pytest.raises(ConfigError, match="no axis of 4 heads"):
        part_fragments([tensor(0, (10, 2, TOKENS, HEADS, VALUES))], 10, 2 * PIECE, HEADS, by_head=True)
    outer = Tensor(0, (10, HEADS, TOKENS, VALUES), (PIECE, 10 * PIECE, VALUES * 2, 2), 2)
    with pytest.raises(ConfigError, match="not evenly spaced"):
        part_fragments([outer], 10, PIECE, HEADS, by_head=True)
    with pytest.raises(ConfigError, match="1024 bytes per block, the KV cache specification says 1"):
        part_fragments([tensor(0, (10, HEADS, TOKENS, VALUES))], 10, 1, HEADS, by_head=True)


def test_stripes_divide_each_piece_of_a_block() -> None:
    """As of two layers with MLA, of which one has an indexer beside it."""
    layers = [tensor(0, (10, 64, 36)), tensor(1 << 20, (10, 64, 36)), tensor(2 << 20, (10, 64, 132), item=1)]
    size = 2 * 64 * 36 * 2 + 64 * 132
    fragments, parts = part_fragments(layers, 10, size // 8, 8, by_head=False)
    assert (parts.number, parts.blocks(10)) == (8, 80)
    for block in (0, 9):
        found = [at for part in range(8) for at in bytes_of(fragments, block * parts.apart + part)]
        assert sorted(found) == sorted(bytes_of(block_fragments(layers, 10, size), block))
    with pytest.raises(ConfigError, match="pieces of 36 bytes cannot be divided into 8"):
        part_fragments([tensor(0, (10, 3, 6))], 10, 4, 8, by_head=False)
