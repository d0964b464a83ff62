"""The process that kill_instant.py kills. It has a real session and device; its saves wait behind work on the device.

    python kill_victim.py cuda|cpu

It prints lines of JSON: when it has imported everything; when it has read its order and is ready; and, after it has
read another line, when everything is queued. It settles nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import socket
import sys
import time
from typing import Any

import numpy as np
import torch
from kill_observer import FRAGMENT, LAYERS, SAVED, SLOT, clock, keep_stdout

from kvcache_client import GroupSpec, Namespace, NamespaceSpec, Session
from kvcache_client.devices import Device, Job, open_device
from kvcache_client.devices.layout import block_fragments
from kvcache_client.devices.self_test import check_copies
from kvcache_client.worker.kv_layout import describe_tensor


class Cuda:
    """Work that the saves wait for, on the stream that computes."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")  # makes the context
        torch.cuda._sleep(20_000_000)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(200_000_000)
        end.record()
        end.synchronize()
        self.cycles_a_second = 200_000_000 / (begin.elapsed_time(end) / 1000)
        self.name = torch.cuda.get_device_name()

    def prepare(self, device: Device, blocks: Any) -> None:
        torch.cuda.synchronize()

    def delay(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self.cycles_a_second))


class Cpu:
    """Copies into memory that nobody looks at."""

    name = "cpu"

    def prepare(self, device: Device, blocks: Any) -> None:
        self.device, self.blocks = device, blocks
        self.buffer = memoryview(mmap.mmap(-1, len(blocks) * SLOT))
        array = np.frombuffer(self.buffer, np.uint8)
        self.address, self.bytes = int(array.ctypes.data), len(array)
        for _ in range(2):  # the first makes the pages
            begin = time.monotonic()
            self.copy()
            assert device.drain(60)
            self.seconds = time.monotonic() - begin

    def copy(self) -> None:
        self.device.save(Job(self, self.blocks, np.arange(len(self.blocks)) * SLOT, lambda job: None))

    def delay(self, seconds: float) -> None:
        for _ in range(round(seconds / self.seconds)):
            self.copy()


class Caller:
    """The session, and, opened right behind it, what the parent can watch from outside."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.session = Session.connect(order["endpoint"], engine=order["name"], deadline=5.0, connect_timeout=10.0)
        self.twin = socket.socket(socket.AF_UNIX)
        self.twin.connect(order["twin"])
        self.lock = os.open(order["lock"], os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        connection = self.session.daemon.connection
        assert connection is not None
        self.door = connection.door

    def descriptors(self) -> dict[str, Any]:
        """A dying process closes its descriptors in an order that depends on their numbers."""
        device = []
        for each in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if "nvidia" in os.readlink(f"/proc/self/fd/{each}"):
                    device.append(int(each))
        mine = {"door": self.door.connection, "lock": self.door.lock, "twin": self.twin.fileno(), "own lock": self.lock}
        return {**mine, "device": sorted(device)}


def reserve(namespace: Namespace, name: str, count: int) -> Any:
    """Return where in the region the slots are. Waits for room: the slots of victims before are in quarantine."""
    hashes = [hashlib.sha256(f"{name} {number}".encode()).digest() for number in range(count)]
    until = time.monotonic() + 30
    while True:
        reservation = namespace.reserve(hashes)
        if len(reservation.granted) == count:
            assert all(len(slot.views()) == 1 for slot in reservation.slots), "blocks of one size lie in one piece"
            return np.array([slot.ref.offset for slot in reservation.slots], np.int64)
        reservation.abort()
        if time.monotonic() > until:
            raise SystemExit(f"{len(reservation.granted)} of {count} slots: {set(reservation.refused.values())}")
        time.sleep(0.1)


def main() -> None:
    kind, say = sys.argv[1], keep_stdout()
    say(imported=True)
    line = sys.stdin.readline()
    if not line:
        return
    order = json.loads(line)
    # An engine knocks when its model is on the device.
    if order["door_first"]:
        caller, rig = Caller(order), Cuda() if kind == "cuda" else Cpu()
    else:
        rig, caller = Cuda() if kind == "cuda" else Cpu(), Caller(order)
    count, jobs = order["slots"], order["jobs"]
    num_blocks = count * jobs
    tensors = [torch.empty(2, num_blocks, FRAGMENT, dtype=torch.uint8, device=kind) for _ in range(LAYERS)]
    for tensor in tensors:
        for job in range(jobs):
            tensor[:, job * count : (job + 1) * count].fill_(SAVED + job)
    fragments = block_fragments(map(describe_tensor, tensors), num_blocks, SLOT)
    device = open_device(kind, fragments, num_blocks, tensors)
    check_copies(device, fragments, num_blocks)
    session, region = caller.session, caller.session.region
    assert region is not None
    session.on_region(device.register)
    offsets = reserve(session.attach(NamespaceSpec("kill", (GroupSpec(16, SLOT),)), (0,)), order["name"], count)
    until = time.monotonic() + 30
    while not device.registered()[0] and time.monotonic() < until:
        time.sleep(0.001)
    blocks = np.random.default_rng(0).permutation(count).astype(np.int64)
    rig.prepare(device, blocks)
    say(
        session=caller.door.welcome.session,
        offsets=offsets.tolist(),
        descriptors=caller.descriptors(),
        registered=device.registered()[1],
        region=region.bytes,
        name=rig.name,
        torch=torch.__version__,
    )
    if not sys.stdin.readline():
        return
    rig.delay(order["delay"])
    for job in range(jobs):
        device.save(Job(region, blocks + job * count, offsets, lambda job: None))
    say(queued=clock())
    sys.stdin.readline()  # ends with the parent, or never


if __name__ == "__main__":
    main()
