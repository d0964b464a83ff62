"""Blocks of several layouts in the memory of one device: a device for each layout, and one that represents them all."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache_client.devices import Device, Job, Memory


class HybridDevice(Device):
    """Passes each job to the device of its layout. `devices` are those, by the number of the layout."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = devices
        self._share()

    def register(self, region: Memory) -> None:
        for device in self.devices:
            device.register(region)

    def adopt(self, registration: Any, owned: bool = True) -> None:
        self.devices[0].adopt(registration, owned)
        self._share()

    def _share(self) -> None:
        for device in self.devices[1:]:
            device.adopt(self.devices[0].registration, owned=False)

    def registered(self) -> tuple[bool, int]:
        return self.devices[0].registered()

    def save(self, job: Job) -> None:
        self.devices[job.layout].save(job)

    def load(self, job: Job) -> None:
        self.devices[job.layout].load(job)

    def start(self, job: Job) -> None:
        self.devices[job.layout].start(job)

    def hold(self, job: Job) -> None:
        self.devices[job.layout].hold(job)

    def fence(self, blocks: Collection[int]) -> None:
        for device in self.devices:
            device.fence(blocks)

    def enter_step(self) -> None:
        for device in self.devices:
            device.enter_step()

    def leave_step(self) -> None:
        for device in self.devices:
            device.leave_step()

    def poll(self) -> None:
        for device in self.devices:
            device.poll()

    def linger(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for device in self.devices:
            device.linger(max(0.0, until - time.monotonic()))

    def share(self, most: int) -> list[bytes]:
        shared = [device.share(most) for device in self.devices]
        return [only for each in shared for only in each] if all(shared) else []

    def connect(self, peers: Mapping[int, Sequence[bytes]]) -> None:
        for number, device in enumerate(self.devices):
            device.connect({rank: shared[number : number + 1] for rank, shared in peers.items()})

    def pull(self, rank: int, layout: int, blocks: npt.NDArray[np.int64]) -> float:
        return self.devices[layout].pull(rank, 0, blocks)

    def peek(self, address: int, size: int) -> bytes:
        return self.devices[0].peek(address, size)

    def poke(self, address: int, data: bytes) -> None:
        self.devices[0].poke(address, data)

    def drain(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        return all(device.drain(max(0.0, until - time.monotonic())) for device in self.devices)

    def close(self) -> None:
        for device in reversed(self.devices):  # all devices use the first one's page-locked memory
            device.close()
