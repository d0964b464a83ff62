"""Pure: from an engine's KV tensors, as addresses, to the fragments that make up one of its blocks.

Strides and sizes of a tensor are taken as they are: views that begin inside a storage, padded rows, a leading dimension
longer than the number of blocks, keys and values apart or together, kernel blocks smaller than the engine's.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvcache_client import compression
from kvcache_proto.errors import ConfigError


class Tensor(NamedTuple):
    """The place of a tensor: address of its first element, sizes, and strides in bytes."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int


class Fragment(NamedTuple):
    """`bytes` contiguous bytes of every block: those of block b begin at `pointer + b * stride`."""

    pointer: int
    stride: int
    bytes: int


class Section(NamedTuple):
    """Part of a block that is copied by itself: the KV of some layers, `bytes` of its slot from `begin` on."""

    begin: int
    bytes: int
    fragments: Sequence[Fragment]


def block_fragments(tensors: Iterable[Tensor], num_blocks: int, block_bytes: int) -> list[Fragment]:
    """Return the fragments of a block, in their order in a slot.

    The order is that of the tensors, and inside a tensor that of the addresses, so that it is the same in every engine
    that has the same layers and layout. Tensors that occur twice (layers that share KV) count once.

    Raises ConfigError unless the fragments hold `block_bytes` bytes.
    """
    found = list(dict.fromkeys(each for tensor in tensors for each in _tensor_fragments(tensor, num_blocks)))
    _check_sum(found, block_bytes)
    return _merge(found)


class Parts(NamedTuple):
    """Blocks that are divided into `number` parts of equal size, each copied as a block of its own.

    Part p of block b is block `b * apart + p` for copies.
    """

    number: int
    apart: int

    def blocks(self, num_blocks: int) -> int:
        """Return the number of blocks for copies."""
        return (num_blocks - 1) * self.apart + self.number

    def all(self, blocks: Sequence[int]) -> Sequence[int]:
        """Return all parts of these blocks."""
        if self.number == 1:
            return blocks
        return [block * self.apart + part for block in blocks for part in range(self.number)]


def part_fragments(
    tensors: Iterable[Tensor], num_blocks: int, part_bytes: int, parts: int, by_head: bool
) -> tuple[list[Fragment], Parts]:
    """Return the fragments of a part of a block, in the order of `block_fragments`.

    A part is one of `parts` KV heads, or else has an equal share of each contiguous piece of a block. Raises
    ConfigError unless the fragments hold `part_bytes` bytes, and the parts of a block are evenly spaced.
    """
    of_tensor = _head_fragments if by_head else _stripes
    found = dict.fromkeys(each for tensor in tensors for each in of_tensor(tensor, num_blocks, parts))
    _check_sum([part for part, _ in found], part_bytes)
    apart = {stride / part.stride for part, stride in found}
    if len(apart) > 1 or not min(apart).is_integer():
        raise ConfigError(f"the parts of KV tensors are not evenly spaced over blocks: {apart}")
    return [part for part, _ in found], Parts(parts, int(apart.pop()))


def _check_sum(fragments: Sequence[Fragment], expected: int) -> None:
    total = sum(fragment.bytes for fragment in fragments)
    if total != expected:
        raise ConfigError(f"the KV tensors hold {total} bytes per block, the KV cache specification says {expected}")


def _tensor_fragments(tensor: Tensor, num_blocks: int, without: int | None = None) -> list[Fragment]:
    """Return the fragments of a block, or those at index 0 of the axis `without`."""
    axis = _block_axis(tensor, num_blocks)
    # A block of the engine may be several kernel blocks in a row.
    size = tensor.shape[axis]
    kernel_blocks = size // num_blocks if size % num_blocks == 0 else 1
    inner = [
        (stride, size)
        for number, (stride, size) in enumerate(zip(tensor.strides, tensor.shape, strict=True))
        if number not in (axis, without) and size > 1
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


def _head_fragments(tensor: Tensor, num_blocks: int, heads: int) -> list[tuple[Fragment, int]]:
    """Return the fragments of a block's first head, their stride being that of heads; with each, that of blocks.

    The axes are those of blocks and, in five dimensions, of keys and values; then those of heads and tokens, in any
    order; then that of values. In memory, heads come before tokens.
    """
    block = _block_axis(tensor, num_blocks)
    axes = [axis for axis in range(len(tensor.shape)) if axis != block and (axis > 1 or len(tensor.shape) < 5)]
    axis = max(axes[:-1], key=lambda axis: tensor.strides[axis], default=block)
    if len(axes) != 3 or tensor.shape[axis] != heads:
        raise ConfigError(f"KV tensor of shape {tensor.shape} and strides {tensor.strides}: no axis of {heads} heads")
    fragments = _tensor_fragments(tensor, num_blocks, without=axis)
    return [(fragment._replace(stride=tensor.strides[axis]), fragment.stride) for fragment in fragments]


def _stripes(tensor: Tensor, num_blocks: int, stripes: int) -> list[tuple[Fragment, int]]:
    """Return the fragments of a block's first stripe, their stride being that of stripes; with each, that of blocks."""
    found = []
    for fragment in _tensor_fragments(tensor, num_blocks):
        if fragment.bytes % stripes:
            raise ConfigError(f"pieces of {fragment.bytes} bytes cannot be divided into {stripes}")
        size = fragment.bytes // stripes
        found.append((fragment._replace(stride=size, bytes=size), fragment.stride))
    return found


def _block_axis(tensor: Tensor, num_blocks: int) -> int:
    """The first axis long enough; keys and values apart make a leading axis of 2."""
    for axis, size in enumerate(tensor.shape[:2]):
        if size >= num_blocks:
            return axis
    raise ConfigError(f"KV tensor of shape {tensor.shape}: no axis for {num_blocks} blocks")


def _merge(fragments: Sequence[Fragment]) -> list[Fragment]:
    """Join adjacent fragments, such as layers in a layout that keeps a whole block together."""
    merged: list[Fragment] = []
    for fragment in fragments:
        last = merged[-1] if merged else None
        if last and last.pointer + last.bytes == fragment.pointer and last.stride == fragment.stride != last.bytes:
            merged[-1] = last._replace(bytes=last.bytes + fragment.bytes)
        else:
            merged.append(fragment)
    return merged


def layer_ends(layers: Iterable[Iterable[Tensor]], num_blocks: int, parts: int = 1, by_head: bool = False) -> list[int]:
    """Return the end of each layer's KV in a block, or in one of its `parts`, in the order of `block_fragments`."""

    def fragments_of(tensor: Tensor) -> Iterable[Fragment]:
        if parts == 1:
            return _tensor_fragments(tensor, num_blocks)
        return [part for part, _ in (_head_fragments if by_head else _stripes)(tensor, num_blocks, parts)]

    seen: set[Fragment] = set()
    ends, end = [], 0
    for tensors in layers:
        new = {each for tensor in tensors for each in fragments_of(tensor)} - seen
        seen |= new
        end += sum(fragment.bytes for fragment in new)
        ends.append(end)
    return ends


def sections(fragments: Sequence[Fragment], ends: Sequence[int], compress: bool = False) -> list[Section]:
    """Return the whole block as a section, and then its parts: each up to one of `ends`, in raw bytes.

    With `compress`, `ends` are those of pieces, and sections have the places and sizes of stored blocks.
    """
    found = [Section(0, sum(fragment.bytes for fragment in fragments), fragments)]
    left, at, begin = deque(fragments), 0, 0
    for end in ends:
        inside: list[Fragment] = []
        while at < end:
            first = left.popleft()
            size = min(first.bytes, end - at)
            inside.append(first._replace(bytes=size))
            if size < first.bytes:
                left.appendleft(first._replace(pointer=first.pointer + size, bytes=first.bytes - size))
            at += size
        found.append(Section(begin, end - begin, inside))
        begin = end
    return [_stored(section, found[0].bytes) for section in found] if compress else found


def _stored(section: Section, raw_bytes: int) -> Section:
    """Return the section of a stored block; the first ones begin with its header."""
    begin = compression.place(raw_bytes, section.begin) if section.begin else 0
    return Section(begin, compression.place(raw_bytes, section.begin + section.bytes) - begin, section.fragments)
