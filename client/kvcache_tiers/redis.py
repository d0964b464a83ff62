"""Redis or Valkey as a tier: `redis://host:6379/0?ttl=86400`; clusters by `?cluster=on`, sentinels by `?sentinel=NAME`.

A value is a string, or several if it is large: PREFIX{KEY}, with the key in hexadecimal, then PREFIX{KEY}.1 and so on.
The braces keep them on one node of a cluster. The first is written last, so that it exists only if the rest did.

Each of them begins with the value's header, so that parts of values with different headers are never mixed. Hosts that
write the same value at once do no harm: a value never changes, so they write the same bytes.

Servers need GETEX: Redis 6.2 or newer, or any Valkey. If a user or a server may only read, GET is used; then values
expire as if they had not been read.
"""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from kvcache_tiers.backend import MAX_HEADER, Backend, Failed, Value
from kvcache_tiers.redis_link import MOVING, NO_ROOM, WRONG_TYPE, Command, Link, Replies, Take
from kvcache_tiers.redis_settings import LEAST_VALUE, Settings, read_url

# Answers to a GETEX, which counts as a write, by servers that may allow a GET.
REFUSED = (b"-NOPERM", b"-READONLY", b"-MISCONF", b"-NOREPLICAS")
PLAIN_READS = 60.0  # seconds until a GETEX is tried again
PARTS_AT_ONCE = 1024  # that one exchange reads
PARTS_REMOVED, MOST_PARTS = 16, 1 << 20  # parts of each value that one exchange removes, and of any value

_START = struct.Struct("<4sHIQ")  # of each part: magic, length of the header, parts, bytes of data in all of them
_MAGIC = b"kvr\1"


def open_tier(url: str, region: memoryview) -> RedisTier:
    """Open a server, a cluster, or the master that sentinels name. Raises ConfigError or Failed."""
    return RedisTier(read_url(url))


class _First(NamedTuple):
    """The first part of a value that has been read."""

    start: bytes  # the beginning of all parts
    parts: int
    size: int  # bytes of data in each part but the last

    @property
    def header(self) -> bytes:
        return self.start[_START.size :]


class RedisTier(Backend):
    """Counters: `counts`, by name."""

    batch_bytes = 8 << 20

    def __init__(self, settings: Settings) -> None:
        """Connect, and find out whether the server allows the commands that reads need. Raises Failed."""
        self.counts: Counter[str] = Counter()
        self._settings = settings
        self._prefix = settings.prefix.encode()
        self._expiry = [b"EX", b"%d" % settings.ttl] if settings.ttl else []
        self._plain_until = 0.0
        self._link = Link(settings)
        try:
            self._read([self._name(b"")])
        except Failed:
            self._link.close()
            raise

    # The protocol.

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [line == b":1" for line in self._run([(b"EXISTS", self._name(key)) for key in keys])]

    def put(self, keys: Sequence[bytes], values: Sequence[Value]) -> list[bool]:
        writes = [self._writes(key, value) for key, value in zip(keys, values, strict=True)]
        lines = iter(self._run([write for each in writes for write in each]))
        stored: list[bool] = []
        torn: list[Command] = []
        for each in writes:
            answers = list(islice(lines, len(each)))
            stored.append(all(line == b"+OK" for line in answers))
            if any(line.startswith(NO_ROOM) for line in answers):
                self.counts["no_room"] += 1
                if len(each) > 1:
                    torn += [(b"UNLINK", write[1]) for write in reversed(each)]  # the first part first
        self._run(torn)
        return stored

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bytes | None]:
        views = [buffer.cast("B") for buffer in buffers]
        firsts: list[_First | None] = [None] * len(keys)

        def take(number: int, replies: Replies) -> None:
            firsts[number] = self._take_first(replies, views[number])

        self._read([self._name(key) for key in keys], take)
        missing = self._get_rest(keys, firsts, views)
        if missing:
            self.counts["lost_parts"] += len(missing)
            try:  # else `contains` would find them, and no tier would put them again
                self.remove([keys[number] for number in missing])
            except Failed:
                self.counts["parts_left"] += len(missing)
        return [first.header if first and at not in missing else None for at, first in enumerate(firsts)]

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove all parts, the first one first: a value that is not whole should not seem to exist."""
        self._run([(b"UNLINK", self._name(key)) for key in keys])
        for begin in range(1, MOST_PARTS, PARTS_REMOVED):
            parts = [(key, self._name(key, part)) for key in keys for part in range(begin, begin + PARTS_REMOVED)]
            lines = self._run([(b"UNLINK", name) for _, name in parts])
            keys = list({key for (key, _), line in zip(parts, lines, strict=True) if line == b":1"})
            if not keys:
                return

    def close(self) -> None:
        self._link.close()

    # Reads.

    def _take_first(self, replies: Replies, view: memoryview) -> _First | None:
        """Read the first part of a value, if the value has the size of its buffer."""
        start = replies.read(_START.size)
        if len(start) < _START.size or not start.startswith(_MAGIC):
            self.counts["unknown"] += 1
            return None
        _, length, parts, total = _START.unpack(start)
        if total != len(view) or length > MAX_HEADER:
            return None
        start += replies.read(length)
        size = replies.left
        if parts != _parts(total, size) or (parts > 1 and size < LEAST_VALUE):
            return None
        replies.read_into(view[:size])
        return _First(start, parts, size)

    def _get_rest(
        self, keys: Sequence[bytes], firsts: Sequence[_First | None], views: Sequence[memoryview]
    ) -> set[int]:
        """Read the other parts of values; return the numbers of those that lack one."""
        rest = ((number, first, part) for number, first in enumerate(firsts) if first for part in range(1, first.parts))
        missing: set[int] = set()
        while some := list(islice((each for each in rest if each[0] not in missing), PARTS_AT_ONCE)):
            missing |= self._get_parts(keys, some, views)
        return missing

    def _get_parts(
        self, keys: Sequence[bytes], some: Sequence[tuple[int, _First, int]], views: Sequence[memoryview]
    ) -> set[int]:
        missing = set(some)

        def take(index: int, replies: Replies) -> None:
            number, first, part = some[index]
            here = views[number][part * first.size : (part + 1) * first.size]
            if replies.left == len(first.start) + len(here) and replies.read(len(first.start)) == first.start:
                replies.read_into(here)
                missing.discard(some[index])

        self._read([self._name(keys[number], part) for number, _, part in some], take)
        return {number for number, _, _ in missing}

    def _read(self, names: Sequence[bytes], take: Take | None = None) -> None:
        """Read values. They stay for another lifetime, if the server allows it: values in use should not expire."""
        rest: Sequence[int] = range(len(names))
        if self._expiry and time.monotonic() >= self._plain_until:
            lines = self._run([(b"GETEX", name, *self._expiry) for name in names], take, REFUSED)
            rest = [number for number in rest if lines[number].startswith(REFUSED)]
            if rest:
                self.counts["reads_without_expiry"] += 1
                self._plain_until = time.monotonic() + PLAIN_READS
        plain = None if take is None else lambda at, replies: take(rest[at], replies)
        self._run([(b"GET", names[number]) for number in rest], plain)

    # Writes.

    def _writes(self, key: bytes, value: Value) -> list[Command]:
        data, size = value.data.cast("B"), self._settings.max_value
        parts = _parts(len(data), size)
        start = _START.pack(_MAGIC, len(value.header), parts, len(data)) + value.header
        return [
            (b"SET", self._name(key, part), [start, data[part * size : (part + 1) * size]], *self._expiry)
            for part in reversed(range(parts))
        ]

    def _name(self, key: bytes, part: int = 0) -> bytes:
        return b"%b{%b}" % (self._prefix, key.hex().encode()) + (b".%d" % part if part else b"")

    def _run(
        self, commands: Sequence[Command], take: Take | None = None, expected: tuple[bytes, ...] = ()
    ) -> list[bytes]:
        """Return the first lines of the replies. Raises Failed for errors other than those `expected`."""
        if not commands:
            return []
        try:
            lines = self._link.run(commands, take, expected)
        except Failed:
            self.counts["failures"] += 1
            raise
        self.counts["unknown"] += sum(line.startswith(WRONG_TYPE) for line in lines)
        self.counts["moving"] += sum(line.startswith(MOVING) for line in lines)
        return lines


def _parts(total: int, size: int) -> int:
    return max(1, -(-total // size)) if size else int(not total)
