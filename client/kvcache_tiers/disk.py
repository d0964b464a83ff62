"""A folder of this host as a tier: `disk:/var/cache/kvcache?size=500GiB`.

Values are kept in segments (segments.py). If the folder is full, the least recently read values give way, first those
of the same lengths, then the least recently used segment of another kind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from kvcache_proto.errors import ConfigError, NotPermitted
from kvcache_proto.sizes import parse_size
from kvcache_tiers.backend import Backend, Failed, Value
from kvcache_tiers.folder import Folder
from kvcache_tiers.segments import LAST_NUMBER, LEAST_RECORDS, MOST_BYTES, PAGE, Kind, Segment, names_of, numbers
from kvcache_tiers.urls import options, shown, split_url

SEGMENT = MOST_BYTES  # of a large tier
SEGMENTS = 16  # that even a small one has, because each kind of values needs its own
HOTTEST = 3  # most times that a value is passed over when room is needed
YIELD = 0.02  # seconds that a write waits at most for reads to end
FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_PAUSE = 1.0  # seconds before a full disk is tried again

Place = tuple[Segment, int]


def open_tier(url: str, region: memoryview) -> DiskTier:
    """Open `disk:FOLDER?size=SIZE`. Raises ConfigError or Failed."""
    split = split_url(url)
    given = options(split, "size", "direct")
    direct = given.get("direct", "on")
    if split.netloc or not split.path.startswith("/") or "size" not in given or direct not in ("on", "off"):
        raise ConfigError(
            f"{shown(split)}: a folder and its size, as in disk:/var/cache/kvcache?size=500GiB; direct is on or off"
        )
    return DiskTier(Path(unquote(split.path)), parse_size(given["size"]), direct == "on")


class DiskTier(Backend):
    """Counters: `counts`, by name."""

    batch_bytes = 8 << 20

    def __init__(self, folder: Path, size: int, direct: bool = True) -> None:
        """Open the folder, and find its values.

        Raises Failed, also if another process has it, ConfigError for a folder with foreign files that are named like a
        tier's, and NotPermitted if another user could change the stored values.
        """
        self.counts: Counter[str] = Counter()
        self._size, self._direct = size, direct
        self._lock = threading.Condition()
        self._places: dict[bytes, Place] = {}
        self._segments: dict[int, Segment] = {}
        self._free: dict[Kind, list[Place]] = {}
        self._hands: dict[Kind, Iterator[Place]] = {}
        self._writing: set[bytes] = set()
        self._reads = 0
        self._now = 0
        self._full_until = 0.0
        self._owner = -1
        self._local = threading.local()
        with contextlib.ExitStack() as undo:
            try:
                self._folder = Folder(folder)
                undo.callback(self.close)
                self._own(folder)
                self._find()
            except OSError as error:
                raise Failed(f"{error.filename or folder}: {error.strerror or error}") from error
            undo.pop_all()

    def __len__(self) -> int:
        return len(self._places)

    # The protocol.

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        places = self._places
        return [key in places for key in keys]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bytes | None]:
        with self._lock:
            self._reads += 1
        try:
            return [self._get(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]
        finally:
            with self._lock:
                self._reads -= 1
                self._lock.notify_all()

    def put(self, keys: Sequence[bytes], values: Sequence[Value]) -> list[bool]:
        return [self._put(key, value) for key, value in zip(keys, values, strict=True)]

    def remove(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._forget(key)

    def lost(self) -> str:
        if self._in_place():
            return ""
        why = f"{self._folder.path}: its files were removed"
        with contextlib.suppress(OSError, NotPermitted):
            os.close(self._folder.open("lock", os.O_RDWR | os.O_CREAT))  # else the rest would count as foreign files
        try:
            Folder(self._folder.path).close()  # which makes it, if needed
        except OSError as error:
            raise Failed(f"{why}, and it cannot be opened again: {error.strerror}") from error
        return why

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        if self._owner >= 0:
            os.close(self._owner)
        self._folder.close()

    # Reads.

    def _get(self, key: bytes, buffer: memoryview) -> bytes | None:
        with self._lock:
            place = self._places.get(key)
            if place is None or place[0].kind.data != buffer.nbytes:
                return None
            segment, record = place
            self._pin(place)
            self._touch(place)
        try:
            self._move(segment, record, buffer, True)
            return segment.header(record)
        except OSError as error:
            self.counts["reads_failed"] += 1
            if error.errno != errno.EIO:
                raise Failed(f"{segment.path}: {error.strerror}") from error
            with self._lock:  # this part of the disk is gone; other parts may not be
                self._forget(key)
            return None
        finally:
            self._unpin(place)

    # Writes.

    def _put(self, key: bytes, value: Value) -> bool:
        kind = Kind(len(key), len(value.header), value.data.nbytes)
        with self._lock:
            if key in self._places:
                return True
            if key in self._writing:
                return False
            free = self._free.setdefault(kind, [])
            if not free and not self._grow(kind):
                self._make_room(kind)
            if not free:
                self.counts["no_room"] += 1
                return False
            place = free.pop()
            self._pin(place)
            self._writing.add(key)
            self._lock.wait_for(lambda: not self._reads, YIELD)  # a request waits for each of them
        segment, record = place
        try:
            self._move(segment, record, value.data, False)
            with self._lock:
                segment.enter(record, key, value.header)
                self._places[key] = place
                self._touch(place, 0)
            return True
        except OSError as error:
            if error.errno not in FULL:
                # This part of the disk may be broken: it is not used again before the folder is opened again.
                self.counts["writes_failed"] += 1
                raise Failed(f"{segment.path}: {error.strerror}") from error
            self.counts["disk_full"] += 1  # a file system that promises more than it has
            with self._lock:
                segment.given_up.add(record)
            return False
        finally:
            with self._lock:
                self._writing.discard(key)
            self._unpin(place)

    def _move(self, segment: Segment, record: int, buffer: memoryview, reads: bool) -> None:
        """Read or write the data of a record, past the page cache if possible. Raises OSError."""
        offset, view = record * segment.kind.stride, buffer.cast("B")
        if self._direct and segment.direct_file >= 0:
            aligned = not view.nbytes % PAGE and not _address(view) % PAGE
            target = view if aligned else self._bounce_buffer(segment.kind.stride)
            try:
                if not (aligned or reads):
                    target[: view.nbytes] = view
                _move_all(segment.direct_file, target, offset, reads)
                if not aligned and reads:
                    view[:] = target[: view.nbytes]
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.counts["direct_refused"] += 1
                self._direct = False
        _move_all(segment.file, view, offset, reads)
        if not reads:
            os.fdatasync(segment.file)  # else its pages cannot be dropped
        os.posix_fadvise(segment.file, offset, segment.kind.stride, os.POSIX_FADV_DONTNEED)

    def _bounce_buffer(self, size: int) -> memoryview:
        """Return a buffer of `size` bytes of this thread, at the beginning of a page."""
        buffer: mmap.mmap | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._local.buffer = mmap.mmap(-1, size)
        return memoryview(buffer)[:size]

    def _grow(self, kind: Kind) -> bool:
        """Make another segment, a small one if the disk has no room for more. Raises Failed."""
        if not kind.plausible(LEAST_RECORDS):  # it would not be found again
            return False
        held = sum(segment.size for segment in self._segments.values())
        usual = max(LEAST_RECORDS, min(SEGMENT, self._size // SEGMENTS) // kind.room)
        records = min(usual, (self._size - held) // kind.room)
        if records < LEAST_RECORDS or time.monotonic() < self._full_until:
            return False
        try:
            disk = os.statvfs(self._folder.fd)
            room = disk.f_bavail * disk.f_frsize - 2 * PAGE
            fitting = min(records, room // (kind.stride + kind.entry))
            number = max(self._segments, default=0) + 1
            while fitting >= LEAST_RECORDS and number <= LAST_NUMBER:
                try:
                    segment = Segment.make(self._folder, number, kind, fitting)
                except FileExistsError:  # it was put there since the folder was opened
                    number += 1
                except OSError as error:
                    if error.errno not in FULL:
                        raise
                    fitting //= 2
                else:
                    self._add(segment, range(fitting))
                    return True
        except OSError as error:
            raise Failed(f"{self._folder.path}: {error.strerror}") from error
        self.counts["disk_full"] += 1
        self._full_until = time.monotonic() + FULL_PAUSE
        return False

    def _make_room(self, kind: Kind) -> None:
        """Free a place: remove a segment of another kind that was used longest ago, or else a value of this kind."""
        if self._size < LEAST_RECORDS * kind.room:
            return
        own = [segment for segment in self._segments.values() if segment.kind == kind]
        least = min((each.used for each in own), default=self._now + 1)
        for oldest in sorted(self._segments.values(), key=lambda each: (each.used, each.number)):
            if oldest.kind == kind or oldest.used >= least:
                break
            if not oldest.pins:
                self._drop(oldest)
                if self._grow(kind):
                    return
        hand = self._hands.setdefault(kind, self._around(kind))
        for segment, record in islice(hand, (HOTTEST + 2) * sum(each.records for each in own)):
            if segment.number not in self._segments or record in segment.pins:
                continue
            if segment.heat[record]:
                segment.heat[record] -= 1
                continue
            key = segment.key(record)
            if self._places.get(key) == (segment, record):
                self._forget(key)
                self.counts["evicted"] += 1
                return

    def _around(self, kind: Kind) -> Iterator[Place]:
        """Yield the places of a kind again and again."""
        while segments := [each for each in self._segments.values() if each.kind == kind]:
            for segment in segments:
                for record in range(segment.records):
                    yield segment, record

    # Records.

    def _in_place(self) -> bool:
        """Return True if all its files are still in the folder, and the folder is in its place."""
        if not (self._folder.in_place() and self._folder.has("lock", self._owner)):
            return False
        with self._lock:
            segments = list(self._segments.values())
        for segment in segments:
            with self._lock:
                if segment.number in self._segments and not segment.in_place():
                    return False
        return True

    def _own(self, folder: Path) -> None:
        """Make sure that no other process uses the folder. Raises OSError, Failed, ConfigError, NotPermitted."""
        if not self._folder.check("lock") and numbers(self._folder):  # files that are not whole would be removed
            raise ConfigError(f"{folder} has files called like a tier's, but no file lock: name another folder")
        self._owner = self._folder.open("lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failed(f"{folder}: another process uses it") from None

    def _find(self) -> None:
        rest = self._size  # it may have been larger when the oldest ones were made
        for number in reversed(numbers(self._folder)):
            segment = Segment.open(self._folder, number, rest)
            if segment is None:
                self.counts["segments_lost"] += 1
                for name in names_of(number):
                    self._folder.remove(name)
            else:
                self._segments[number] = segment
                rest -= segment.size
        for segment in list(self._segments.values()):
            taken = set()
            for record, key in segment.entries():
                if self._places.setdefault(key, (segment, record)) == (segment, record):
                    taken.add(record)
            self._add(segment, [record for record in range(segment.records) if record not in taken])

    def _add(self, segment: Segment, free: Sequence[int]) -> None:
        self._segments[segment.number] = segment
        self._free.setdefault(segment.kind, []).extend((segment, record) for record in reversed(free))

    def _drop(self, segment: Segment) -> None:
        """Give up a segment, with its values."""
        self._full_until = 0.0
        del self._segments[segment.number]
        for record, key in segment.entries():
            if self._places.get(key) == (segment, record):
                del self._places[key]
                self.counts["evicted"] += 1
        free = self._free[segment.kind]
        free[:] = [place for place in free if place[0] is not segment]
        segment.remove()

    def _forget(self, key: bytes) -> None:
        place = self._places.pop(key, None)
        if place is not None:
            segment, record = place
            try:
                segment.clear(record)
            except OSError:  # checksums show that the value is another one, should its entry be found again
                self.counts["writes_failed"] += 1
            if record in segment.pins:
                segment.given_up.add(record)
            else:
                self._free[segment.kind].append(place)

    def _touch(self, place: Place, heat: int = 1) -> None:
        segment, record = place
        self._now += 1
        segment.used = self._now
        segment.heat[record] = min(HOTTEST, segment.heat[record] + heat) if heat else 0

    def _pin(self, place: Place) -> None:
        segment, record = place
        segment.pins[record] = segment.pins.get(record, 0) + 1

    def _unpin(self, place: Place) -> None:
        segment, record = place
        with self._lock:
            segment.pins[record] -= 1
            if not segment.pins[record]:
                del segment.pins[record]
                if record in segment.given_up:
                    segment.given_up.remove(record)
                    self._free[segment.kind].append(place)


def _move_all(file: int, view: memoryview, offset: int, reads: bool) -> None:
    call, done = (os.preadv if reads else os.pwritev), 0
    while done < view.nbytes:
        moved = call(file, [view[done:]], offset + done)
        if not moved:
            raise OSError(errno.EIO, "the file is shorter than it was")
        done += moved


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
