"""Compare copies between an engine's CPU tensors and the region with a plain memcpy of the same bytes, alternating.

    python tests/bench/copies.py [--fragment 65536] [--mib 512] [--rounds 9]

The engine has as many layers as 2 MiB per block need; keys and values are separate, and each block has one fragment in
each of them. The plain copy moves as many bytes between the same memories in one piece, on one thread per direction, as
the device does.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import statistics
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from rig import one_daemon

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_client.devices import Job, open_device
from kvcache_client.devices.layout import Tensor, block_fragments

BLOCK = 2 << 20


def copy(begin: Any, session: Session, blocks: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> float:
    """Run one job and return its seconds, from submission to its end."""
    ended = threading.Event()
    assert session.region is not None
    start = time.perf_counter()
    job = Job(session.region, blocks, offsets, lambda job: ended.set())
    begin(job)
    ended.wait()
    assert not job.error, job.error
    return time.perf_counter() - start


def plain(target: int, source: int, size: int) -> float:
    start = time.perf_counter()
    ctypes.memmove(target, source, size)
    return time.perf_counter() - start


def measure(fragment: int, total: int, rounds: int) -> dict[str, dict[str, float]]:
    count = total // BLOCK
    layers = BLOCK // (2 * fragment)
    with (
        one_daemon(size=total + total // 4 + (64 << 20)) as daemon,
        Session.connect(daemon.endpoint, engine="copies", deadline=5.0) as session,
    ):
        namespace = session.attach(NamespaceSpec("copies", (GroupSpec(16, BLOCK),)), shards=(0,))
        hashes = [hashlib.sha256(str(n).encode()).digest() for n in range(count)]
        reservation = namespace.reserve(hashes)
        assert len(reservation.granted) == count, reservation.refused
        assert session.region is not None
        placed = session.region.place(reservation.packed, BLOCK)
        assert placed is not None and placed.runs is None, "blocks of one size lie in one piece"
        offsets = placed.offsets

        storage = np.random.default_rng(0).integers(0, 255, 2 * layers * count * fragment, np.uint8)
        caches = storage.reshape(layers, 2, count, fragment)
        tensors = [Tensor(c.ctypes.data, c.shape, c.strides, c.itemsize) for c in caches]
        fragments = block_fragments(tensors, count, BLOCK)
        device = open_device("cpu", fragments, count, keep=[storage])
        # In an order that the region does not have: an engine's blocks are scattered.
        blocks = np.random.default_rng(1).permutation(count).astype(np.int64)

        here, there = storage.ctypes.data, session.region.address + int(offsets.min())
        seconds: dict[str, list[float]] = {"save": [], "plain save": [], "load": [], "plain load": []}
        for _ in range(rounds + 1):
            seconds["plain save"].append(plain(there, here, total))
            seconds["save"].append(copy(device.save, session, blocks, offsets))
            before = storage.copy() if len(seconds["load"]) == 0 else None
            if before is not None:
                storage[:] = 0
            seconds["load"].append(copy(device.load, session, blocks, offsets))
            if before is not None:
                assert (storage == before).all(), "what came back is not what went"
            seconds["plain load"].append(plain(here, there, total))
            copy(device.load, session, blocks, offsets)  # undo the plain load's order
        device.close()
    figures = {}
    for what in ("save", "load"):
        ours, theirs = (total / statistics.median(seconds[name][1:]) / 1e9 for name in (what, f"plain {what}"))
        figures[what] = {"device_gbs": ours, "memcpy_gbs": theirs, "ratio": ours / theirs}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fragment", type=int, default=65536, help="bytes per fragment")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    figures = measure(options.fragment, options.mib << 20, options.rounds)
    print(f"{options.mib} MiB in fragments of {options.fragment // 1024} KiB, medians of {options.rounds}")
    for what, row in figures.items():
        print(f"  {what}  {row['device_gbs']:5.2f} GB/s, memcpy {row['memcpy_gbs']:5.2f} GB/s: {row['ratio']:.0%}")


if __name__ == "__main__":
    main()
