"""The files of the disk tier: segments of equally long records, each with an index that survives the process.

A segment is two files. `N.data` has the data of its records, one after another, at multiples of PAGE. `N.index` has a
page that describes the segment, then for each record an entry with the key and the header of its value. A record's data
is written before its entry, and its entry is cleared before the data is replaced. After a power failure either may be
missing: an entry has a checksum, and headers have those of the data.

The index is read as a whole when a segment is opened, and written entry by entry. It is not mapped: if the disk fails,
an access to a mapped file kills the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from kvcache_tiers.backend import MAX_HEADER, MAX_KEY
from kvcache_tiers.folder import Folder

PAGE = 4096
MOST_BYTES = 256 << 20  # of a segment's data, and of its index, if it has more than LEAST_RECORDS
LEAST_RECORDS = 4  # of a segment
LAST_NUMBER = 10**12 - 1
_NAME = re.compile(r"([0-9]{8,12})\.(data|index)")
_MAGIC = b"kvcache segment 1"
_HEAD = struct.Struct("<20sIIQII")  # magic, key, header, data, records, checksum of all before
_ENTRY = struct.Struct("<I")  # checksum of the rest; 0 if there is no value


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

    @property
    def room(self) -> int:
        """Bytes that a record takes, in the larger of both files."""
        return max(self.stride, self.entry)

    def plausible(self, records: int) -> bool:
        """Return True if a tier may have made a segment of `records` records."""
        if self.key > MAX_KEY or self.header > MAX_HEADER or not self.data:
            return False
        return 0 < records <= max(LEAST_RECORDS, MOST_BYTES // self.room)


class Segment:
    """One segment, open.

    Attributes:
        heat: by record, how often its value was read lately, at most HOTTEST.
        used: a number that grows with time, of the last read or write of any of its values.
        pins: by record, the number of threads that read or write it.
        given_up: records that are free once no thread reads or writes them.
    """

    def __init__(self, folder: Folder, number: int, most: int) -> None:
        """Open the files, of at most `most` bytes. Raises NotPermitted, OSError; EIO also if they are not whole."""
        self.number, self._folder = number, folder
        self.used = 0
        self.pins: dict[int, int] = {}
        self.given_up: set[int] = set()
        data, index = names_of(number)
        self.path = folder.path / data
        self.direct_file = -1
        with contextlib.ExitStack() as undo:
            self.file = folder.open(data, os.O_RDWR)
            undo.callback(os.close, self.file)
            self._index = folder.open(index, os.O_RDWR)
            undo.callback(os.close, self._index)
            self.kind, self.records = self._read_head()
            _require(self.size <= most)
            self._entry_bytes = self.kind.entry
            self._entries = bytearray(self.records * self._entry_bytes)
            _require(os.preadv(self._index, [self._entries], PAGE) == len(self._entries))
            self.heat = bytearray(self.records)
            try:
                self.direct_file = folder.open(data, os.O_RDWR | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a file system without it
                    raise
            undo.pop_all()

    def _read_head(self) -> tuple[Kind, int]:
        """Return the index's kind and number of records, checked against the files' lengths before memory is
        allocated."""
        head = os.pread(self._index, _HEAD.size, 0)
        _require(len(head) == _HEAD.size)
        magic, key, header, data, records, crc = _HEAD.unpack(head)
        kind = Kind(key, header, data)
        _require(magic.rstrip(b"\0") == _MAGIC and crc == zlib.crc32(head[: -_ENTRY.size]))
        _require(kind.plausible(records))
        _require(os.fstat(self.file).st_size >= records * kind.stride)
        _require(os.fstat(self._index).st_size >= PAGE + records * kind.entry)
        return kind, records

    @property
    def size(self) -> int:
        """Bytes of the larger of both files."""
        return self.records * self.kind.room

    @classmethod
    def make(cls, folder: Folder, number: int, kind: Kind, records: int) -> Segment:
        """Create the files. Raises FileExistsError, and OSError; then it leaves no files of its own."""
        data, index = names_of(number)
        with contextlib.ExitStack() as undo:
            for name, size in ((data, records * kind.stride), (index, PAGE + records * kind.entry)):
                file = folder.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                undo.callback(folder.remove, name)
                try:
                    os.posix_fallocate(file, 0, size)
                    if name == index:
                        head = _HEAD.pack(_MAGIC, *kind, records, 0)[: -_ENTRY.size]
                        os.pwrite(file, head + _ENTRY.pack(zlib.crc32(head)), 0)
                finally:
                    os.close(file)
            segment = cls(folder, number, records * kind.room)
            undo.pop_all()
        return segment

    @classmethod
    def open(cls, folder: Folder, number: int, most: int) -> Segment | None:
        """Open an existing segment; None if its files are not whole, too large, or the disk has lost them.

        Raises OSError if they cannot be opened now, NotPermitted if they are not the tier's.
        """
        for name in names_of(number):
            folder.check(name)  # both, before either may be removed
        try:
            return cls(folder, number, most)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EIO):
                return None
            raise

    def entries(self) -> Iterator[tuple[int, bytes]]:
        """Yield the records that have a value, and its key."""
        for record in range(self.records):
            (crc,) = _ENTRY.unpack_from(self._entries, record * self._entry_bytes)
            if crc and crc == (zlib.crc32(text := self._text(record)) or 1):
                yield record, text[: self.kind.key]

    def header(self, record: int) -> bytes:
        return self._text(record)[self.kind.key :]

    def key(self, record: int) -> bytes:
        return self._text(record)[: self.kind.key]

    def _text(self, record: int) -> bytes:
        """Return the key and the header in an entry."""
        at = record * self._entry_bytes + _ENTRY.size
        return bytes(self._entries[at : at + self.kind.key + self.kind.header])

    def enter(self, record: int, key: bytes, header: bytes) -> None:
        """Mark a record as having a value, whose data has been written. Raises OSError."""
        text = key + header
        self._write(record, _ENTRY.pack(zlib.crc32(text) or 1) + text)

    def clear(self, record: int) -> None:
        """Mark a record as having no value. Raises OSError; then it may have one again when the segment is reopened."""
        self._write(record, _ENTRY.pack(0))

    def _write(self, record: int, entry: bytes) -> None:
        at = record * self._entry_bytes
        self._entries[at : at + len(entry)] = entry
        if os.pwrite(self._index, entry, PAGE + at) != len(entry):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def in_place(self) -> bool:
        """Return True if its files are still in the folder."""
        files = zip(names_of(self.number), (self.file, self._index), strict=True)
        return all(self._folder.has(name, file) for name, file in files)

    def close(self) -> None:
        for file in (self.file, self._index, self.direct_file):
            if file >= 0:
                os.close(file)

    def remove(self) -> None:
        """Close the segment and remove its files."""
        self.close()
        for name in reversed(names_of(self.number)):
            self._folder.remove(name)


def _require(whole: bool) -> None:
    """Raise OSError if the files of a segment are not whole, or no tier has written them."""
    if not whole:
        raise OSError(errno.EIO, "the files of a segment are not whole")


def numbers(folder: Folder) -> list[int]:
    """Return the numbers of the segments in a folder, also of those that are not whole."""
    return sorted({int(match[1]) for match in map(_NAME.fullmatch, folder.names()) if match})


def names_of(number: int) -> tuple[str, str]:
    """Return the names of the files of a segment: data and index."""
    return f"{number:08d}.data", f"{number:08d}.index"
