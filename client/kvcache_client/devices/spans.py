"""Pure: lists of (device address, host address, bytes), made fewer where pieces touch and cut where they must be."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]


class Spans(NamedTuple):
    """n pieces: piece i is `sizes[i]` bytes at `device[i]` on the one side and at `host[i]` on the other."""

    device: Addresses
    host: Addresses
    sizes: Addresses


def join(spans: Spans) -> Spans:
    """Return `spans` with pieces made one that follow each other on both sides."""
    device, host, sizes = spans
    if len(sizes) < 2:
        return spans
    touch = (device[:-1] + sizes[:-1] == device[1:]) & (host[:-1] + sizes[:-1] == host[1:])
    if not touch.any():
        return spans
    first = np.flatnonzero(np.concatenate(([True], ~touch)))
    return Spans(device[first], host[first], np.add.reduceat(sizes, first))


def cut(spans: Spans, begin: int, every: int) -> Spans:
    """Return `spans` so that no piece crosses, on the host's side, a multiple of `every` bytes from `begin`."""
    while True:
        device, host, sizes = spans
        room = np.uint64(every) - (host - np.uint64(begin)) % np.uint64(every)
        long = sizes > room
        if not long.any():
            return spans
        head = np.where(long, room, sizes)
        spans = Spans(
            np.concatenate((device, (device + head)[long])),
            np.concatenate((host, (host + head)[long])),
            np.concatenate((head, (sizes - head)[long])),
        )
