"""Recovery of a region that a client has corrupted: a consistent cache of what is left, or a refusal."""

from __future__ import annotations

import contextlib
import functools
import struct
import zlib
from typing import Any

import msgspec
import pytest
from host import reopen
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcache_proto import messages as m
from kvcache_proto.errors import RegionError
from kvcache_proto.region import CHECKED, CONTINUED, FREE, FREED, ROW, found_geometry, plan_geometry, row_of
from kvcache_proto.types import GroupSpec, NamespaceSpec, Outcome
from kvcache_server.core import journal
from kvcache_server.core.cache import Cache
from kvcache_server.core.integrity import check_integrity
from kvcache_server.core.limits import Limits
from kvcache_server.core.pool import FreeRuns

MIB = 1 << 20
GEOMETRY = plan_geometry(b"r" * 16, 3 * MIB)
SPEC = NamespaceSpec("m", (GroupSpec(16, (8192, 8192)),))
BLOCKS = 24
ROWS = 131  # the first ones, with all blocks, some of them in several runs
HALF = st.integers(0, (1 << 32) - 1) | st.sampled_from([0, 1, 2, 3, 4, 65_535, 65_536, 1 << 31, (1 << 32) - 1])


@functools.lru_cache
def last_life() -> tuple[bytes, bytes]:
    """A region with blocks that are whole, half settled, and hidden, of which some have several runs of pages; and the
    state file beside it."""
    file = bytearray(journal.MAGIC) + journal.pack(journal.Began(GEOMETRY.region_id, 1))

    def note(record: journal.Record) -> None:
        nonlocal file
        file += journal.pack(record)

    buffer = bytearray(GEOMETRY.region_bytes)
    cache = Cache(memoryview(buffer), GEOMETRY, Limits(write_quota=1.0), 11)
    cache.pool.free = FreeRuns()  # as after a long life
    cache.pool.free.add(0, 40)
    for page in range(41, ROWS, 3):
        cache.pool.free.add(page, 2)

    def deliver() -> None:
        for record in cache.effects.take()[0]:
            note(record)

    session = cache.open_session("engine", "", 0.0)
    deliver()
    note(journal.SessionOpened(session, "engine", "", b"", ""))
    namespace = cache.handle(session, m.Attach(1, b"", SPEC, (0, 1)), 0.0).namespace  # type: ignore[union-attr]
    for chain in range(3):
        run = [bytes([chain, number]) * 16 for number in range(BLOCKS // 3)]
        reserved = cache.handle(session, m.Reserve(1, b"", namespace, [m.Run(run)]), 0.0)
        assert isinstance(reserved, m.Reserved)
        for shards, positions in (((0, 1), range(5 - 2 * chain)), ((0,), range(6)), ((0, 1), [7])):
            settle = m.Settle(1, b"", GEOMETRY.region_id, reserved.reservation, shards, Outcome.COMMITTED, [*positions])
            cache.handle(session, settle, 0.0)
    deliver()
    assert cache.pool.locate_if_scattered is not None
    return bytes(buffer), bytes(file)


def reopened(buffer: bytearray, file: bytes, living: bool) -> None:
    book = journal.read(file)
    book.epoch += 1
    alive = set(book.sessions) if living else set()
    cache = reopen(memoryview(buffer), GEOMETRY, Limits(), book, alive, 0.0)
    check_integrity(cache)  # no page has two blocks
    for page, state in enumerate(cache.rows.states()):
        generation = struct.unpack_from("<Q", buffer, row_of(page) + 24)[0]
        assert state != FREE or not generation or generation & FREED, "a reader would take it for a block"
    cache.tick(1000.0)
    for number in alive:
        cache.end_session(number, 1000.0)
    cache.tick(2000.0)
    check_integrity(cache)


def seal(buffer: bytearray, page: int) -> None:
    """Give the row of `page` the right checksum."""
    row = row_of(page)
    checked = buffer[row + CHECKED.start : row + CHECKED.stop]
    if buffer[row] == CONTINUED:
        checked = checked[:8] + buffer[row + 104 : row + 112]
    struct.pack_into("<Q", buffer, row + 120, zlib.crc32(checked))


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, ROW // 4 - 1), HALF), max_size=6),
    st.booleans(),
    st.booleans(),
)
@example([(12, 14, (1 << 32) - 1)], True, True)  # the position of a block that is being written
@example([(4, 12, 3)], True, True)  # two rows with one place in one reservation
@example([(0, 13, 1 << 31), (36, 13, 1 << 31)], True, True)  # reservations of numbers that floats cannot tell apart
def test_rows(changes: list[tuple[int, int, int]], sealed: bool, living: bool) -> None:
    """`sealed`: corrupted rows have correct checksums."""
    was, file = last_life()
    buffer = bytearray(was)
    for page, half, value in changes:
        struct.pack_into("<I", buffer, row_of(page) + 4 * half, value)
        if sealed:
            seal(buffer, page)
    reopened(buffer, file, living)


PAGE = st.integers(0, ROWS + 2) | st.integers(GEOMETRY.pages - 2, GEOMETRY.pages + 2)
COUNT = st.integers(0, 9) | st.sampled_from([GEOMETRY.pages, GEOMETRY.pages + 1, 1 << 31, (1 << 32) - 1])
NEXT = PAGE | st.sampled_from([1 << 31, (1 << 32) - 1])


@st.composite
def forgeries(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """A page, and what its row shall have: the page whose generation is its own, state, pages, next."""
    page = draw(st.integers(0, ROWS + 2))
    like = draw(st.just(page) | st.integers(0, ROWS - 1))
    return page, like, draw(st.integers(0, 5)), draw(COUNT), draw(NEXT)


@settings(deadline=None, max_examples=400)
@given(st.lists(forgeries(), min_size=1, max_size=8), st.booleans())
@example([(0, 0, 2, 4, 0), (1, 0, 2, 4, 0)], True)  # one block in the other
@example([(0, 0, 2, 2, 1)], True)  # a block that continues where it begins
@example([(0, 0, 2, 2, 4), (3, 0, 4, 1, 7), (6, 0, 4, 1, 4)], True)  # a cycle
@example([(0, 0, 1, 2, 4), (3, 0, 4, 1, 7), (6, 0, 4, 1, 4)], True)  # a cycle, in a block that is being written
@example([(0, 0, 1, 2, 4), (3, 0, 4, (1 << 32) - 1, 0)], False)  # all the rest of the region
@example([(0, 0, 1, (1 << 32) - 1, 0)], True)
@example([(0, 0, 3, 2, 4), (6, 6, 3, 2, 4), (3, 6, 4, 2, 0)], True)  # a run of two blocks
@example([(0, 0, 1, 2, GEOMETRY.pages + 1)], True)  # beyond the last page
@example([(0, 0, 0, 0, 0), (0, 110, 1, 512, 0)], False)  # one that claims pages of its own generation
@example([(0, 0, 4, 2, 0), (32, 32, 4, 2, 0)], True)  # blocks that have become further runs, of nothing
def test_forged_runs(forged: list[tuple[int, int, int, int, int]], living: bool) -> None:
    was, file = last_life()
    buffer = bytearray(was)
    for page, like, state, count, following in forged:
        row = row_of(page)
        buffer[row + 24 : row + 32] = was[row_of(like) + 24 : row_of(like) + 32]
        if page != like and state != CONTINUED:  # a copy of the block
            buffer[row + 32 : row + 112] = was[row_of(like) + 32 : row_of(like) + 112]
        struct.pack_into("<Q", buffer, row, state)
        struct.pack_into("<II", buffer, row + 104, count, following)
        seal(buffer, page)
    reopened(buffer, file, living)


def test_without_a_forgery_all_blocks_are_found() -> None:
    was, file = last_life()
    book = journal.read(file)
    book.epoch += 1
    cache = reopen(memoryview(bytearray(was)), GEOMETRY, Limits(), book, set(book.sessions), 0.0)
    assert cache.counters["rows_discarded"] == 0
    assert cache.counters["blocks_recovered"] + cache.counters["blocks_resumed"] == BLOCKS


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4095), st.integers(1, 255)), min_size=1, max_size=5))
def test_headers(changes: list[tuple[int, int]]) -> None:
    header = bytearray(last_life()[0][:4096])
    for at, flip in changes:
        header[at] ^= flip
    with contextlib.suppress(RegionError):
        assert found_geometry(memoryview(header)) in (GEOMETRY, None)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=5),
    st.integers(0, 2000),
    st.binary(max_size=40),
)
def test_state_files(changes: list[tuple[int, int]], cut: int, more: bytes) -> None:
    file = bytearray(last_life()[1])
    for at, value in changes:
        file[at % len(file)] = value
    file[max(len(file) - cut, 0) :] = more
    with contextlib.suppress(RegionError):
        journal.read(bytes(file))


NUMBER = st.sampled_from([-(1 << 63), -1, 0, 1, 1 << 16, 1 << 23, 1 << 32, 1 << 40, 1 << 62, 1 << 63, (1 << 64) - 1])
TEXT = st.sampled_from(["", "../victim", "/etc/passwd", "1-0123abcd/..", "a" * 5000, "\x00"])
RECORDS: list[journal.Record] = [
    journal.NamespaceMade(2, NamespaceSpec("n", (GroupSpec(16, (8192, 8192)),))),
    journal.EngineMade(2, "other"),
    journal.SessionOpened(2, "other", "label", b"t" * 16, "2-01234567", b"f" * 16, "2-89abcdef", 1000),
    journal.WritersNumbered(9, (1, 2)),
    journal.PinMade(1, 1, 0, [b"h" * 32]),
]


def places(value: Any, path: tuple[int | str, ...] = ()) -> list[tuple[int | str, ...]]:
    """Return the path of each number, text and list in `value`."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, each in inside for found in places(each, (*path, key)))]


@settings(deadline=None, max_examples=400)
@given(st.data(), st.booleans())
def test_whole_records_with_odd_values(data: st.DataObject, living: bool) -> None:
    """Each has the right checksum: the region is refused, or a consistent cache starts."""
    buffer, file = last_life()
    chosen = records(file) + [msgspec.msgpack.decode(msgspec.msgpack.encode(each)) for each in RECORDS]
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(chosen) - 1))
        path = data.draw(st.sampled_from(places(chosen[at])[2:] or [(0,)]))
        holder = functools.reduce(lambda value, key: value[key], path[:-1], chosen[at])
        kind = {int: NUMBER, str: TEXT, bytes: st.binary(max_size=80)}.get(type(holder[path[-1]]), st.just([]))
        holder[path[-1]] = data.draw(kind)
    changed = bytearray(journal.MAGIC)
    for each in chosen:
        packed = msgspec.msgpack.encode(each)
        changed += struct.pack("<II", len(packed), zlib.crc32(packed)) + packed
    with contextlib.suppress(RegionError):
        reopened(bytearray(buffer), bytes(changed), living)


def records(file: bytes) -> list[Any]:
    """Return the records of a state file as plain values."""
    found, at = [], len(journal.MAGIC)
    while at < len(file):
        (size,) = struct.unpack_from("<I", file, at)
        found.append(msgspec.msgpack.decode(file[at + 8 : at + 8 + size]))
        at += 8 + size
    return found


@pytest.mark.parametrize("name", ["../victim", "1-0123abcd/../../victim", "/victim"])
def test_names_of_session_files_stay_in_their_folder(name: str) -> None:
    file = last_life()[1] + journal.pack(journal.SessionOpened(7, "engine", "", b"", name))
    with pytest.raises(RegionError, match="file"):
        journal.read(file + journal.pack(journal.SessionEnded(8)))
