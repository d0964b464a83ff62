"""Before the first block: known bytes make the round trip through a device, as every block will."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvcache_client.devices import CopyError, Device, Job, Scratch
from kvcache_client.devices.layout import FragmentRun

_GUARD = 4096  # bytes before and behind each slot that a copy must leave alone
_SECONDS = 30.0


def check_copies(device: Device, runs: Sequence[FragmentRun], num_blocks: int, ends: Sequence[int] = ()) -> None:
    """Save two blocks of known bytes and load two others, before the engine uses its cache; then restore them.

    Two more are loaded section by section, if a block has sections: `ends` as in `open_device`.

    Raises CopyError, with the fault, unless every byte arrives and no byte beside them changes.
    """
    slot = sum(run.bytes * run.number for run in runs)
    blocks = [0, num_blocks - 1] if num_blocks > 1 else [0]
    pitch = -(-slot // mmap.PAGESIZE) * mmap.PAGESIZE + 2 * _GUARD
    scratch = Scratch(pitch * len(blocks))
    scratch.words[:] = np.frombuffer(os.urandom(_GUARD), np.uint8).repeat(-(-scratch.bytes // _GUARD))[: scratch.bytes]
    offsets = [_GUARD + pitch * number for number in reversed(range(len(blocks)))]
    device.register(scratch)
    _wait_registered(device)
    with _kept(device, runs, blocks):
        out = [os.urandom(slot) for _ in blocks]
        for block, data in zip(blocks, out, strict=True):
            _write(device, runs, block, data)
        expected = scratch.words.copy()
        for offset, data in zip(offsets, out, strict=True):
            expected[offset : offset + slot] = np.frombuffer(data, np.uint8)
        _copy(device, True, scratch, blocks, offsets)
        if not np.array_equal(scratch.words, expected):
            raise CopyError(f"self-test: {int((scratch.words != expected).sum())} wrong bytes after a save")
        back = [os.urandom(slot) for _ in blocks]
        for offset, data in zip(offsets, back, strict=True):
            scratch.words[offset : offset + slot] = np.frombuffer(data, np.uint8)
        _copy(device, False, scratch, blocks, offsets)
        for block, data in zip(blocks, back, strict=True):
            if _read(device, runs, block) != data:
                raise CopyError(f"self-test: block {block} has wrong bytes after a load")
        parts = [os.urandom(slot) for _ in blocks]
        for offset, data in zip(offsets, parts, strict=True):
            scratch.words[offset : offset + slot] = np.frombuffer(data, np.uint8)
        for section, end in enumerate(ends, 1):
            _copy(device, False, scratch, blocks, offsets, section)
            for block, data, before in zip(blocks, parts, back, strict=True):
                if _read(device, runs, block) != data[:end] + before[end:]:
                    raise CopyError(f"self-test: block {block} has wrong bytes after section {section} was loaded")


def _copy(
    device: Device, saves: bool, scratch: Scratch, blocks: list[int], offsets: list[int], section: int = 0
) -> None:
    ended = threading.Event()
    numbers, places = np.array(blocks, np.int64), np.array(offsets, np.int64)
    job = Job(scratch, numbers, places, lambda job: ended.set(), section=section)
    (device.save if saves else device.load)(job)
    if not ended.wait(_SECONDS):
        raise CopyError(f"self-test: a {'save' if saves else 'load'} has not ended after {_SECONDS:.0f} s")
    if job.error:
        raise CopyError(f"self-test: a {'save' if saves else 'load'} failed: {job.error}")


def _wait_registered(device: Device) -> None:
    """Give the direct way a chance; if it is refused, the other one is checked."""
    pause = threading.Event()
    for _ in range(2000):
        if device.registered()[0]:
            return
        pause.wait(0.001)


@contextmanager
def _kept(device: Device, runs: Sequence[FragmentRun], blocks: Sequence[int]) -> Iterator[None]:
    before = [_read(device, runs, block) for block in blocks]
    try:
        yield
    finally:
        for block, data in zip(blocks, before, strict=True):
            _write(device, runs, block, data)


def _read(device: Device, runs: Sequence[FragmentRun], block: int) -> bytes:
    return b"".join(device.peek(address, size) for address, size in _places(runs, block))


def _write(device: Device, runs: Sequence[FragmentRun], block: int, data: bytes) -> None:
    at = 0
    for address, size in _places(runs, block):
        device.poke(address, data[at : at + size])
        at += size


def _places(runs: Sequence[FragmentRun], block: int) -> Iterator[tuple[int, int]]:
    for run in runs:
        for number in range(run.number):
            yield run.pointer + block * run.stride + number * run.step, run.bytes
