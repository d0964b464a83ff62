"""Packs, the objects of an object store with many values each, and the index of the known ones. Pure.

A pack is a head and then the data of its values, one after another. The head is the fixed part below, a row for each
value, and its key and header after each row. All numbers are little-endian.

A pack's name has the time when its writing began, so that names sort by time, and the length of the head, so that one
range request reads exactly that.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import xxhash

from kvcache_tiers.backend import MAX_HEADER, MAX_KEY

FORMAT = 1
_MAGIC = b"kvpack"
_FIXED = struct.Struct("<6sHIIQ")  # magic, format, values, bytes of the head, bytes of the pack
_SUM = struct.Struct("<Q")  # xxh3 of the rest of the head, follows the fixed part
_ROW = struct.Struct("<HHQ")  # bytes of the key, of the header and of the data
LEAST_HEAD, MOST_HEAD = _FIXED.size + _SUM.size, 1 << 20  # bytes
MOST_DATA = 64 << 20  # bytes, of a pack with several values
_NAME = re.compile(r"([0-9]{13})-([0-9a-f]{8})-[0-9a-f]{16}")  # milliseconds since 1970, bytes of the head, random


class Place(NamedTuple):
    """The place of a value's data: `size` bytes at `offset` of a pack."""

    pack: str
    offset: int
    size: int
    header: bytes


K = TypeVar("K")
Run = list[tuple[K, Place]]
"""Names or numbers of the caller's, with places that follow one another in one pack without a gap."""


def make_name(milliseconds: int, head: bytes, random: int) -> str:
    """Return the name of a new pack. `random` has 64 bits."""
    return f"{milliseconds:013d}-{len(head):08x}-{random:016x}"


def head_bytes(name: str) -> int | None:
    """Return the length of the head of the pack `name`, or None if no pack has such a name."""
    match = _NAME.fullmatch(name)
    length = int(match[2], 16) if match else 0
    return length if LEAST_HEAD <= length <= MOST_HEAD else None


def first_name(milliseconds: int) -> str:
    """Return a string that sorts before the name of every pack of that time and later."""
    return f"{max(0, milliseconds):013d}"


def written_at(name: str) -> int:
    """Return the time when the writing of the pack began, in milliseconds since 1970."""
    return int(name[:13])


def row_bytes(key: bytes, header: bytes) -> int:
    """Return the number of bytes that a value takes in a head."""
    return _ROW.size + len(key) + len(header)


def make_head(values: Iterable[tuple[bytes, bytes, int]]) -> bytes:
    """Return the head of a pack with these values: keys, headers and bytes of data."""
    parts: list[bytes] = []
    count = size = 0
    for key, header, length in values:
        parts += (_ROW.pack(len(key), len(header), length), key, header)
        count, size = count + 1, size + length
    rows = b"".join(parts)
    head = _FIXED.size + _SUM.size + len(rows)
    fixed = _FIXED.pack(_MAGIC, FORMAT, count, head, head + size)
    return fixed + _SUM.pack(xxhash.xxh3_64_intdigest(fixed + rows)) + rows


def read_head(name: str, head: bytes, size: int) -> dict[bytes, Place] | None:
    """Return the places of the values of the pack `name`, which has `size` bytes; None if it is not a whole pack."""
    if len(head) < _FIXED.size + _SUM.size:
        return None
    fixed, rows = head[: _FIXED.size], head[_FIXED.size + _SUM.size :]
    magic, version, count, length, total = _FIXED.unpack(fixed)
    (checksum,) = _SUM.unpack_from(head, _FIXED.size)
    is_pack = (magic, version, length, total) == (_MAGIC, FORMAT, len(head), size)
    if not is_pack or (count > 1 and size - length > MOST_DATA) or checksum != xxhash.xxh3_64_intdigest(fixed + rows):
        return None
    places, at, offset = {}, 0, length
    for _ in range(count):
        if at + _ROW.size > len(rows):
            return None
        key_bytes, header_bytes, data_bytes = _ROW.unpack_from(rows, at)
        middle = at + _ROW.size + key_bytes
        at = middle + header_bytes
        if key_bytes > MAX_KEY or header_bytes > MAX_HEADER or at > len(rows) or offset + data_bytes > size:
            return None
        places[rows[middle - key_bytes : middle]] = Place(name, offset, data_bytes, rows[middle:at])
        offset += data_bytes
    return places if (at, offset, len(places)) == (len(rows), size, count) else None


class Index:
    """The known packs, and the places of their values. Two hosts may both have written a value.

    In memory, a value takes about half a KiB.

    Attributes:
        packs: the keys of the values of each pack, by its name.
    """

    def __init__(self) -> None:
        self.packs: dict[str, Sequence[bytes]] = {}
        self._places: dict[bytes, tuple[Place, ...]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def find(self, key: bytes) -> Place | None:
        """Return the last known place of a value."""
        places = self._places.get(key)
        return places[-1] if places else None

    def values(self, pack: str) -> dict[bytes, Place]:
        """Return the places of the values of a pack; none if it is not known."""
        keys = self.packs.get(pack, ())
        return {key: place for key in keys for place in self._places[key] if place.pack == pack}

    def packs_with(self, keys: Iterable[bytes]) -> list[str]:
        """Return the packs that have any of the values."""
        return sorted({place.pack for key in keys for place in self._places.get(key, ())})

    def add(self, pack: str, places: Mapping[bytes, Place]) -> None:
        """Add a pack. A known one stays as it is."""
        if pack not in self.packs:
            self.packs[pack] = tuple(places)
            for key, place in places.items():
                self._places[key] = (*self._places.get(key, ()), place)

    def drop(self, pack: str) -> bool:
        """Forget a pack; return whether it was known."""
        keys = self.packs.pop(pack, None)
        for key in keys or ():
            rest = tuple(place for place in self._places[key] if place.pack != pack)
            if rest:
                self._places[key] = rest
            else:
                del self._places[key]
        return keys is not None


def runs(wanted: Iterable[tuple[K, Place]], longest: int) -> list[Run[K]]:
    """Group places into runs, each of at most `longest` bytes unless it is a single value."""
    found: list[Run[K]] = []
    size = 0
    for name, place in sorted(wanted, key=lambda each: each[1][:2]):
        last = found[-1][-1][1] if found else None
        follows = last is not None and (last.pack, last.offset + last.size) == (place.pack, place.offset)
        if follows and size + place.size <= longest:
            found[-1].append((name, place))
            size += place.size
        else:
            found.append([(name, place)])
            size = place.size
    return found
