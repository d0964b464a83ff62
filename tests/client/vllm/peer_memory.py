"""Ranks in one process that read each other's device memory by its address. How GPUs do it is tested with them."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import msgspec

from kvcache_client.devices import CopyError
from kvcache_client.devices.cpu import CpuDevice
from kvcache_client.worker import exchange, loads


class Memory:
    """What devices can read of each other. A test sets `fault`, or clears `open` to make them wait."""

    def __init__(self) -> None:
        self.fault, self.open, self.taken, self.pause = "", threading.Event(), 0, 0.0
        self.open.set()

    def share(self, device: Any, most: int) -> list[bytes]:
        return [msgspec.msgpack.encode(device._stored[0].fragments)]

    def connect(self, device: Any, shared: Any) -> None:
        device.others = {rank: msgspec.msgpack.decode(only) for rank, (only,) in shared.items()}

    def pull(self, device: Any, rank: int, layout: int, blocks: Any) -> float:
        self.open.wait()
        time.sleep(self.pause)  # a bus that others use
        if self.fault:
            raise CopyError(self.fault)
        for mine, (theirs, *_) in zip(device._stored[0].fragments, device.others[rank], strict=True):
            for block in blocks.tolist():
                ctypes.memmove(mine.pointer + block * mine.stride, theirs + block * mine.stride, mine.bytes)
                self.taken += mine.bytes
        return 1e-6 + 20 * self.pause  # slower than any copy beside much load on this host


def use(monkeypatch: Any) -> Memory:
    """Let all loads be shared, in small chunks, with little patience."""
    made = Memory()
    monkeypatch.setattr(CpuDevice, "share", lambda self, most: made.share(self, most))
    monkeypatch.setattr(CpuDevice, "connect", lambda self, shared: made.connect(self, shared))
    monkeypatch.setattr(CpuDevice, "pull", lambda self, *what: made.pull(self, *what))
    monkeypatch.setattr(loads, "SHARED_BYTES", 1)
    monkeypatch.setattr(loads, "CHUNK_BYTES", 20 << 10)
    monkeypatch.setattr(exchange, "PATIENCE", 0.2)
    return made


def wait_met(engine: Any) -> None:
    """Wait until its ranks can share loads."""
    until = time.monotonic() + 30
    while not all(worker.loads.peers.ready for worker in engine.workers):
        assert time.monotonic() < until, "the ranks have not found each other"
        time.sleep(0.005)
