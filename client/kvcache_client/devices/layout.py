"""Pure: an engine's KV tensors, as addresses, to the fragments that make up one of its blocks.

A tensor's numbers are taken as they are: views that begin inside a storage, rows that are padded, a leading dimension
longer than the number of blocks, keys and values apart or together, kernel blocks smaller than the engine's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvcache_proto.errors import ConfigError


class Tensor(NamedTuple):
    """Where a tensor lies: address of its first element, sizes, and strides in bytes."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int


class Fragment(NamedTuple):
    """`bytes` contiguous bytes of every block: those of block b begin at `pointer + b * stride`."""

    pointer: int
    stride: int
    bytes: int


class FragmentRun(NamedTuple):
    """`number` fragments of one size, `step` bytes apart on the device, contiguous in the slot from `offset` on."""

    pointer: int
    stride: int
    bytes: int
    number: int
    step: int
    offset: int


def block_fragments(tensors: Iterable[Tensor], num_blocks: int, block_bytes: int) -> list[Fragment]:
    """Return the fragments of a block, in the order in which a slot holds them.

    The order is that of the tensors, and inside a tensor that of the addresses, so that it is the same in every engine
    that has the same layers and layout. Tensors that are given twice (layers that share KV) count once.

    Raises ConfigError unless the fragments hold `block_bytes` bytes.
    """
    seen = set()
    found: list[Fragment] = []
    for tensor in tensors:
        for fragment in _tensor_fragments(tensor, num_blocks):
            if fragment not in seen:
                seen.add(fragment)
                found.append(fragment)
    total = sum(fragment.bytes for fragment in found)
    if total != block_bytes:
        raise ConfigError(f"the KV tensors hold {total} bytes per block, the KV cache specification says {block_bytes}")
    return _merge(found)


def _tensor_fragments(tensor: Tensor, num_blocks: int) -> list[Fragment]:
    axis = _block_axis(tensor, num_blocks)
    # A block of the engine may be several kernel blocks in a row.
    size = tensor.shape[axis]
    kernel_blocks = size // num_blocks if size % num_blocks == 0 else 1
    inner = [
        (stride, size)
        for number, (stride, size) in enumerate(zip(tensor.strides, tensor.shape, strict=True))
        if number != axis and size > 1
    ]
    if kernel_blocks > 1:
        inner.append((tensor.strides[axis], kernel_blocks))
    inner.sort()
    run = tensor.item_bytes
    while inner and inner[0][0] == run:
        run *= inner.pop(0)[1]
    steps = [[stride * i for i in range(size)] for stride, size in reversed(inner)]
    stride = tensor.strides[axis] * kernel_blocks
    return [Fragment(tensor.pointer + sum(at), stride, run) for at in itertools.product(*steps)]


def _block_axis(tensor: Tensor, num_blocks: int) -> int:
    """The first axis long enough; keys and values apart make a leading axis of 2."""
    for axis, size in enumerate(tensor.shape[:2]):
        if size >= num_blocks:
            return axis
    raise ConfigError(f"KV tensor of shape {tensor.shape}: no axis for {num_blocks} blocks")


def _merge(fragments: Sequence[Fragment]) -> list[Fragment]:
    """Join fragments that touch, as layers do in a layout that keeps a whole block together."""
    merged: list[Fragment] = []
    for fragment in fragments:
        last = merged[-1] if merged else None
        if last and last.pointer + last.bytes == fragment.pointer and last.stride == fragment.stride != last.bytes:
            merged[-1] = last._replace(bytes=last.bytes + fragment.bytes)
        else:
            merged.append(fragment)
    return merged


def runs(fragments: Sequence[Fragment]) -> list[FragmentRun]:
    """Return the fragments as a few evenly spaced runs: one copy call copies a run."""
    found: list[FragmentRun] = []
    offset = 0
    for fragment in fragments:
        last = found[-1] if found else None
        if last and (last.stride, last.bytes) == (fragment.stride, fragment.bytes):
            step = fragment.pointer - (last.pointer + (last.number - 1) * last.step)
            if step > 0 and (last.number == 1 or step == last.step):
                found[-1] = last._replace(number=last.number + 1, step=step)
                offset += fragment.bytes
                continue
        found.append(FragmentRun(fragment.pointer, fragment.stride, fragment.bytes, 1, 0, offset))
        offset += fragment.bytes
    return found
