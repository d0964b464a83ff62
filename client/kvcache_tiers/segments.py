"""The files of the disk tier: segments of equally long records, each with an index that survives the process.

A segment is two files. `N.data` has the data of its records, one after the other, at multiples of PAGE. `N.index` has a
page that describes the segment, then for each record an entry with the key and the header of the value that is there.
A record's data is written before its entry, and its entry is cleared before the data is replaced. After a power failure
either may be missing: an entry has a checksum, and headers have those of the data.

The index is read as a whole when a segment is opened, and written entry by entry. It is not mapped: where the disk
fails, an access to a mapped file ends the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PAGE = 4096
_MAGIC = b"kvcache segment 1"
_HEAD = struct.Struct("<20sIIQII")  # magic, key, header, data, records, checksum of all before
_ENTRY = struct.Struct("<I")  # checksum of what follows; 0 where there is no value


class Kind(NamedTuple):
    """The lengths of the values of a segment, in bytes: of the key, the header and the data."""

    key: int
    header: int
    data: int

    @property
    def stride(self) -> int:
        return -(-self.data // PAGE) * PAGE

    @property
    def entry(self) -> int:
        return -(-(_ENTRY.size + self.key + self.header) // 8) * 8


class Segment:
    """One segment, open.

    Attributes:
        heat: by record, how often its value was read lately, at most HOTTEST.
        used: a number that grows with time, of the last time that any value of it was read or written.
        pins: by record, how many threads read or write it.
        given_up: records that are free once nobody reads or writes them.
    """

    def __init__(self, folder: Path, number: int, kind: Kind, records: int) -> None:
        """Open the files, which exist and are whole. Raises OSError."""
        self.number, self.kind, self.records = number, kind, records
        self.heat = bytearray(records)
        self.used = 0
        self.pins: dict[int, int] = {}
        self.given_up: set[int] = set()
        self.path, self._index_path = _paths(folder, number)
        self._entries = bytearray(self._index_path.read_bytes()[PAGE : PAGE + records * kind.entry])
        self.direct_file = -1
        with contextlib.ExitStack() as undo:
            self.file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            undo.callback(os.close, self.file)
            self._index = os.open(self._index_path, os.O_RDWR | os.O_CLOEXEC)
            undo.callback(os.close, self._index)
            try:
                self.direct_file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:  # of a file system without it
                    raise
            undo.pop_all()

    @property
    def size(self) -> int:
        return self.records * self.kind.stride

    @classmethod
    def make(cls, folder: Path, number: int, kind: Kind, records: int) -> Segment:
        """Create the files. Raises OSError, and leaves none then."""
        data, index = _paths(folder, number)
        try:
            for path, size in ((data, records * kind.stride), (index, PAGE + records * kind.entry)):
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                try:
                    os.posix_fallocate(file, 0, size)
                    if path == index:
                        head = _HEAD.pack(_MAGIC, *kind, records, 0)[: -_ENTRY.size]
                        os.pwrite(file, head + _ENTRY.pack(zlib.crc32(head)), 0)
                finally:
                    os.close(file)
            return cls(folder, number, kind, records)
        except OSError:
            data.unlink(missing_ok=True)
            index.unlink(missing_ok=True)
            raise

    @classmethod
    def open(cls, folder: Path, number: int) -> Segment | None:
        """Open a segment that is there; None where its files are not whole, or the disk has lost them.

        Raises OSError where they cannot be opened now.
        """
        data, index = _paths(folder, number)
        try:
            head = _first_page(index)
            magic, key, header, size, records, crc = _HEAD.unpack(head[: _HEAD.size])
            kind = Kind(key, header, size)
            whole = magic.rstrip(b"\0") == _MAGIC and crc == zlib.crc32(head[: _HEAD.size - _ENTRY.size])
            if not whole or data.stat().st_size < records * kind.stride:
                return None
            if index.stat().st_size < PAGE + records * kind.entry:
                return None
            return cls(folder, number, kind, records)
        except struct.error:
            return None
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EIO):
                return None
            raise

    def entries(self) -> Iterator[tuple[int, bytes]]:
        """Yield the records that have a value, and its key."""
        kind, view = self.kind, self._entries
        length = kind.key + kind.header
        for record in range(self.records):
            at = record * kind.entry
            (crc,) = _ENTRY.unpack_from(view, at)
            if crc:
                text = bytes(view[at + _ENTRY.size : at + _ENTRY.size + length])
                if crc == (zlib.crc32(text) or 1):
                    yield record, text[: kind.key]

    def header(self, record: int) -> bytes:
        at = record * self.kind.entry + _ENTRY.size + self.kind.key
        return bytes(self._entries[at : at + self.kind.header])

    def key(self, record: int) -> bytes:
        at = record * self.kind.entry + _ENTRY.size
        return bytes(self._entries[at : at + self.kind.key])

    def enter(self, record: int, key: bytes, header: bytes) -> None:
        """Say that a record has a value, whose data has been written. Raises OSError."""
        text = key + header
        self._write(record, _ENTRY.pack(zlib.crc32(text) or 1) + text)

    def clear(self, record: int) -> None:
        """Say that a record has no value. Raises OSError; then it may have one again when it is opened again."""
        self._write(record, _ENTRY.pack(0))

    def _write(self, record: int, entry: bytes) -> None:
        at = record * self.kind.entry
        self._entries[at : at + len(entry)] = entry
        if os.pwrite(self._index, entry, PAGE + at) != len(entry):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        for file in (self.file, self._index, self.direct_file):
            if file >= 0:
                os.close(file)

    def remove(self) -> None:
        """Close the segment and remove its files."""
        self.close()
        self._index_path.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)


def numbers(folder: Path) -> list[int]:
    """Return the numbers of the segments in a folder, also of those that are not whole."""
    files = (*folder.glob("*.index"), *folder.glob("*.data"))
    return sorted({int(path.stem) for path in files if path.stem.isdecimal()})


def _paths(folder: Path, number: int) -> tuple[Path, Path]:
    return folder / f"{number:08d}.data", folder / f"{number:08d}.index"


def _first_page(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(PAGE)
