"""The kernels that copy bytes as they are, run on a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cuda_on_cpu import Kernels, pull

from kvcache_client.devices import CopyError
from kvcache_client.devices.cuda_kernels import PIECE, Copying
from kvcache_client.devices.cuda_peers import pieces_of
from kvcache_client.devices.layout import Fragment, sections

BLOCKS = 5
SIZES = [(48, 4608), (PIECE + 16, 2 * PIECE), (34, 70)]  # the last ones begin and end at multiples of 2


def cache(sizes: tuple[int, ...], seed: int) -> tuple[list[np.ndarray], list[Fragment]]:
    draw = np.random.default_rng(seed)
    memories = [draw.integers(0, 256, (BLOCKS, size + 64), np.uint8) for size in sizes]
    return memories, [
        Fragment(each.ctypes.data, each.strides[0], size) for each, size in zip(memories, sizes, strict=True)
    ]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_blocks_are_gathered_and_scattered(sizes: tuple[int, ...], tmp_path: Path) -> None:
    memories, fragments = cache(sizes, 1)
    kernels = Kernels(Copying(sections(fragments, [])), tmp_path)
    whole = np.concatenate([each[:, :size] for each, size in zip(memories, sizes, strict=True)], axis=1)
    slots = np.zeros((3, sum(sizes)), np.uint8)
    kernels.launch(True, [4, 0, 2], slots)
    assert np.array_equal(slots, whole[[4, 0, 2]])
    before = [each.copy() for each in memories]
    kernels.launch(False, [1, 3, 0], slots)
    for memory, old, size, end in zip(memories, before, sizes, np.cumsum(sizes), strict=True):
        old[[1, 3, 0], :size] = slots[:, end - size : end]
        assert np.array_equal(memory, old), "beside the blocks, nothing changes"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_blocks_are_taken_from_another_rank(sizes: tuple[int, ...], tmp_path: Path) -> None:
    memories, fragments = cache(sizes, 1)
    others, theirs = cache(sizes, 2)
    before = [each.copy() for each in memories]
    pull(fragments, [fragment.pointer for fragment in theirs], [3, 1], tmp_path)
    for memory, old, other, size in zip(memories, before, others, sizes, strict=True):
        old[[3, 1], :size] = other[[3, 1], :size]
        assert np.array_equal(memory, old), "beside the blocks, nothing changes"


def test_another_alignment_is_refused() -> None:
    _, fragments = cache((48,), 1)
    with pytest.raises(CopyError, match="aligned otherwise"):
        pieces_of([fragments[0].pointer + 8], fragments)
