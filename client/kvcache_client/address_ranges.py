"""Pure: lists of (device address, host address, bytes), whose pieces are joined if they touch, and cut if required."""

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
    """Return `spans` with pieces joined that are consecutive on both sides."""
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
        room = np.uint64(every) - (spans.host - np.uint64(begin)) % np.uint64(every)
        if not (spans.sizes > room).any():
            return spans
        spans = _cut_once(spans, room)


def _cut_once(spans: Spans, room: Addresses) -> Spans:
    """Return `spans` with piece i cut after `room[i]` bytes if it is longer; the rests follow all other pieces."""
    device, host, sizes = spans
    long = sizes > room
    head = np.where(long, room, sizes)
    return Spans(
        np.concatenate((device, (device + head)[long])),
        np.concatenate((host, (host + head)[long])),
        np.concatenate((head, (sizes - head)[long])),
    )


class Runs(NamedTuple):
    """Blocks that lie in several runs of pages, as if each were one: the `sizes[i]` bytes from offset `begins[i]` on
    are those at offset `offsets[i]` of the region. `begins` rise and are beyond the region."""

    begins: Addresses
    offsets: Addresses
    sizes: Addresses

    def locate(self, inside: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the offsets in the region of bytes at the offsets `inside`."""
        run = np.searchsorted(self.begins, inside, side="right") - 1
        return np.where(run < 0, inside, (self.offsets - self.begins).astype(np.int64)[run] + inside)

    def translate(self, spans: Spans, base: int) -> Spans:
        """Return `spans` so that each piece lies in the region, whose first byte is at address `base` of the host."""
        while True:
            device, host, sizes = spans
            inside = host - np.uint64(base)
            run = np.searchsorted(self.begins, inside, side="right") - 1  # -1: it already lies in the region
            room = np.where(run < 0, sizes, self.begins[run] + self.sizes[run] - inside)
            if not (sizes > room).any():
                moved = np.where(run < 0, inside, self.offsets[run] + inside - self.begins[run])
                return Spans(device, moved + np.uint64(base), sizes)
            spans = _cut_once(spans, room)

    def pieces(self, begin: int, size: int) -> list[tuple[int, int]]:
        """Return the places of `size` bytes from offset `begin` on, in order: offsets in the region, and sizes."""
        found, run = [], int(np.searchsorted(self.begins, begin, side="right")) - 1
        if run < 0:  # it already lies in the region
            return [(begin, size)]
        while size > 0:
            inside = begin - int(self.begins[run])
            part = min(size, int(self.sizes[run]) - inside)
            found.append((int(self.offsets[run]) + inside, part))
            begin, size, run = begin + part, size - part, run + 1
        return found
