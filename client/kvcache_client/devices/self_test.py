"""Before the first block: known bytes make the round trip through a device, as every block will."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcache_client import compression
from kvcache_client.devices import CopyError, Device, Job, Scratch
from kvcache_client.devices.layout import Fragment

_GUARD = 4096  # bytes before and behind each slot that a copy must leave alone
_SECONDS = 30.0


def check_copies(
    device: Device,
    fragments: Sequence[Fragment],
    num_blocks: int,
    ends: Sequence[int] = (),
    compress: bool = False,
) -> None:
    """Save two blocks of known bytes and load two others, before the engine uses its cache; then restore them.

    Two more are loaded section by section, if a block has sections: `ends` and `compress` as in `open_device`.

    Raises CopyError, with the fault, unless every byte arrives and no byte beside them changes.
    """
    raw = sum(fragment.bytes for fragment in fragments)
    slot = compression.stored_bytes(raw) if compress else raw
    blocks = [0, num_blocks - 1] if num_blocks > 1 else [0]
    pitch = -(-slot // mmap.PAGESIZE) * mmap.PAGESIZE + 2 * _GUARD
    scratch = Scratch(pitch * len(blocks))
    scratch.words[:] = np.frombuffer(os.urandom(_GUARD), np.uint8).repeat(-(-scratch.bytes // _GUARD))[: scratch.bytes]
    offsets = [_GUARD + pitch * number for number in reversed(range(len(blocks)))]
    device.register(scratch)
    _wait_registered(device)

    def copy(saves: bool, section: int = 0) -> None:
        ended = threading.Event()
        numbers, places = np.array(blocks, np.int64), np.array(offsets, np.int64)
        job = Job(scratch, numbers, places, lambda job: ended.set(), section=section)
        (device.save if saves else device.load)(job)
        if not ended.wait(_SECONDS):
            raise CopyError(f"self-test: a {'save' if saves else 'load'} has not ended after {_SECONDS:.0f} s")
        if job.error:
            raise CopyError(f"self-test: a {'save' if saves else 'load'} failed: {job.error}")

    def fill(words: npt.NDArray[np.uint8]) -> list[bytes]:
        """Fill the slots with new blocks, and return these."""
        new = np.frombuffer(os.urandom(raw * len(blocks)), np.uint8).reshape(-1, raw)
        if compress:
            new = new.copy()
            high, escape = new[:, 1::2], new[:, 1::256].copy()
            high[:] = high & 0x83 | 0x3C  # values between 2 ** -7 and 2
            high[:, ::128] = escape
        for offset, data in zip(offsets, compression.compress(new) if compress else new, strict=True):
            words[offset : offset + slot] = data
        return [data.tobytes() for data in new]

    before = _read(device, fragments, blocks)
    try:
        expected = scratch.words.copy()
        _write(device, fragments, blocks, fill(expected))
        copy(saves=True)
        if not np.array_equal(scratch.words, expected):
            raise CopyError(f"self-test: {int((scratch.words != expected).sum())} wrong bytes after a save")
        loaded = fill(scratch.words)
        copy(saves=False)
        for block, found, data in zip(blocks, _read(device, fragments, blocks), loaded, strict=True):
            if found != data:
                raise CopyError(f"self-test: block {block} has wrong bytes after a load")
        parts = fill(scratch.words)
        for section, end in enumerate(ends, 1):
            copy(saves=False, section=section)
            for block, found, data, old in zip(blocks, _read(device, fragments, blocks), parts, loaded, strict=True):
                if found != data[:end] + old[end:]:
                    raise CopyError(f"self-test: block {block} has wrong bytes after section {section} was loaded")
    finally:
        _write(device, fragments, blocks, before)


def _wait_registered(device: Device) -> None:
    """Give the direct way a chance; if it is refused, the other one is checked."""
    pause = threading.Event()
    for _ in range(2000):
        if device.registered()[0]:
            return
        pause.wait(0.001)


def _read(device: Device, fragments: Sequence[Fragment], blocks: Sequence[int]) -> list[bytes]:
    return [b"".join(device.peek(at + block * stride, size) for at, stride, size in fragments) for block in blocks]


def _write(device: Device, fragments: Sequence[Fragment], blocks: Sequence[int], contents: Sequence[bytes]) -> None:
    for block, data in zip(blocks, contents, strict=True):
        begin = 0
        for pointer, stride, size in fragments:
            device.poke(pointer + block * stride, data[begin : begin + size])
            begin += size
