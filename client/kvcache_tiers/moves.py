"""Moves blocks between the region and a backend, and lets no wrong byte through in either direction.

Out: a block whose slot was given to another one while it was being read is removed from the store again. In: a block is
stored in the region only if its header is that of this block, and the checksums of its shards are right.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from kvcache_client.session.checksums import sum_up
from kvcache_client.session.region import Region
from kvcache_proto.types import SUM_BYTES, BlockRef, GroupSpec, NamespaceSpec, unpack_refs
from kvcache_tiers.backend import Backend, Failed, Value
from kvcache_tiers.records import key_prefix, make_header, read_header

RETRY, MOST_RETRY = 0.5, 30.0  # seconds until it is tried again: twice as long after each failure in a row
MOST_WRONG = 1 << 16  # values that are remembered

log = logging.getLogger("kvcache_tiers")


class Pause:
    """The pause of one kind of work; `state` names it in the log, as in "the store is not written to"."""

    def __init__(self, state: str) -> None:
        self._state = state
        self._failures = 0  # in a row
        self._until = 0.0
        self._why = ""

    @property
    def left(self) -> float:
        """Seconds until the work is tried again; 0 if there is no pause."""
        return max(0.0, self._until - time.monotonic())

    @property
    def why(self) -> str:
        """The store's error; "" if there is no pause."""
        return self._why if self.left else ""

    def begin(self, error: Failed) -> bool:
        """Begin a pause; return False if there is one already: the work had begun before it."""
        if self.left:
            return False
        seconds = min(RETRY * 2**self._failures, MOST_RETRY)
        self._failures = min(self._failures + 1, 16)
        self._why, self._until = str(error), time.monotonic() + seconds
        log.warning("%s for %.1f s: %s", self._state, seconds, error)
        return True

    def worked(self) -> None:
        """Note that the store has done such work: the next pause is short."""
        self._failures = 0


class Moves:
    """The moves of one backend; thread-safe. A store that refuses writes or removals is still read.

    Attributes:
        counts: events, by name.
        writing, removing: the pauses after refused work.
    """

    def __init__(self, backend: Backend, counts: Counter[str]) -> None:
        self._backend, self.counts = backend, counts
        self.writing = Pause("the store is not written to")
        self.removing = Pause("wrong values are not removed from the store")
        self._wrong: set[bytes] = set()  # keys of values that could not be removed; they count as missing

    def look(self, spec: NamespaceSpec, group: int, hashes: Sequence[bytes]) -> bytes:
        """Return a byte for each block, 1 if it is there. Raises Failed."""
        return bytes(self._contains(_keys(spec, group, hashes)))

    def bring(
        self, spec: NamespaceSpec, group: int, hashes: Sequence[bytes], refs: Sequence[BlockRef], region: Region
    ) -> list[bytes | None]:
        """Copy blocks into the slots `refs`; return the checksums of each one's shards, None if it is missing.

        Raises Failed; then the slots may have been written to.
        """
        of, keys = spec.groups[group], _keys(spec, group, hashes)
        places = [_views(region, ref, of) for ref in refs]
        # A store fills one buffer per block.
        buffers = [views[0] if len(views) == 1 else memoryview(bytearray(of.block_bytes)) for views in places]
        headers = self._backend.get(keys, buffers)
        for views, buffer in zip(places, buffers, strict=True):
            _scatter(views, buffer)
        found: list[bytes | None] = []
        wrong: list[bytes] = []
        for key, header, ref in zip(keys, headers, refs, strict=True):
            sums = read_header(header, key, of.shards) if header is not None else None
            if header is not None and sums is None:
                self.counts["headers_wrong"] += 1
                wrong.append(key)
            elif sums is not None and sums != _sums(region, ref, of):
                self.counts["checksums_wrong"] += 1
                wrong.append(key)
                sums = None
            found.append(sums)
        absent = [key for key, header in zip(keys, headers, strict=True) if header is None]
        if absent:  # a wrong value under these keys would never be replaced
            unread = [key for key, has in zip(absent, self._backend.contains(absent), strict=True) if has]
            self.counts["headers_wrong"] += len(unread)
            wrong += unread
        self._remove(wrong)
        return found

    def write_out(
        self, spec: NamespaceSpec, group: int, hashes: Sequence[bytes], packed: bytes, sums: bytes, region: Region
    ) -> bytes:
        """Store the blocks in the slots `packed`, whose shards have the checksums `sums`; 0 is an unknown one.

        Return a byte for each block, 1 if it is there. Raises Failed if the store cannot be read.
        """
        of, keys, refs = spec.groups[group], _keys(spec, group, hashes), unpack_refs(packed)
        there = self._contains(keys)
        missing = [at for at, has in enumerate(there) if not has]
        current = region.current(packed)
        missing = [at for at in missing if current[at]]
        width = len(of.shards) * SUM_BYTES
        values = []
        for at in missing:
            known = sums[at * width : at * width + width]
            if not all(np.frombuffer(known, "<u8")):
                known = _sums(region, refs[at], of)
            views = _views(region, refs[at], of)
            data = views[0] if len(views) == 1 else memoryview(b"".join(views))
            values.append(Value(make_header(keys[at], of.shards, known), data))
        new = [keys[at] for at in missing]
        stored: list[bool] = []
        self._try(self.writing, "writes_refused", len(new), lambda: stored.extend(self._backend.put(new, values)))
        self._wrong.difference_update(key for key, done in zip(new, stored, strict=False) if done)
        # The leases are gone if the daemon was restarted meanwhile.
        current = region.current(packed)
        flags = bytearray(there)
        stale = []
        for at, done in zip(missing, stored, strict=False):
            flags[at] = done and bool(current[at])
            if done and not current[at]:
                stale.append(keys[at])
        self.counts["writes_overtaken"] += len(stale)
        self._remove(stale)
        return bytes(flags)

    def _contains(self, keys: Sequence[bytes]) -> list[bool]:
        there = self._backend.contains(keys)
        if self._wrong and not self.removing.left:
            self._wrong.clear()  # they are read, and removed, once more
        return [has and key not in self._wrong for key, has in zip(keys, there, strict=True)]

    def _remove(self, keys: Sequence[bytes]) -> None:
        """Remove wrong values, or count them as missing as long as they cannot be removed."""
        removed = self._try(self.removing, "removals_refused", len(keys), lambda: self._backend.remove(keys))
        if not removed and len(self._wrong) < MOST_WRONG:
            self._wrong.update(keys)

    def _try(self, pause: Pause, refused: str, number: int, work: Callable[[], None]) -> bool:
        """Do work that the store may refuse and still be read, unless there is a pause; return whether it was done.

        If not, `number` is counted as `refused`.
        """
        if number and not pause.left:
            try:
                work()
            except Failed as error:
                pause.begin(error)
            else:
                pause.worked()
                return True
        self.counts[refused] += number
        return not number


def _keys(spec: NamespaceSpec, group: int, hashes: Sequence[bytes]) -> list[bytes]:
    prefix = key_prefix(spec, group)
    return [prefix + each for each in hashes]


def _views(region: Region, ref: BlockRef, group: GroupSpec) -> list[memoryview]:
    return region.rows.views(ref, group.block_bytes, 0, group.block_bytes)


def _scatter(views: list[memoryview], buffer: memoryview) -> None:
    """Copy a buffer to the places of a block that lies in several pieces."""
    at = 0
    for view in views if len(views) > 1 else ():
        view[:] = buffer[at : at + len(view)]
        at += len(view)


def _sums(region: Region, ref: BlockRef, group: GroupSpec) -> bytes:
    sizes = enumerate(group.shards)
    shards = [region.rows.views(ref, group.block_bytes, group.shard_offset(shard), size) for shard, size in sizes]
    return sum_up(shards).astype("<u8").tobytes()
