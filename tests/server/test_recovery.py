"""A daemon killed between any two stores to the region: what the next one finds there."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest

from kvcache_proto import messages as m
from kvcache_proto.errors import ClientError, KVCacheError, RegionError, UnknownHandle
from kvcache_proto.region import READY, SLOT_ROW, RegionRows, plan_geometry
from kvcache_proto.types import GroupSpec, NamespaceSpec, Outcome, Refusal, SlotRef, Verdict, unpack_refs
from kvcache_server import journal, recovery
from kvcache_server.cache import Cache
from kvcache_server.journal import Book
from kvcache_server.limits import Limits

MIB = 1 << 20
LIMITS = Limits(pin_quota=1.0, write_quota=1.0, supersede_after=2.0, quarantine=10.0, grace=10.0)


class Killed(Exception):
    """The daemon is gone."""


class Dying:
    """A view of the region that dies after so many stores."""

    def __init__(self, view: memoryview, fuse: Fuse) -> None:
        self.view, self.fuse = view, fuse

    def __setitem__(self, key: Any, value: Any) -> None:
        self.fuse.burn()
        self.view[key] = value

    def __getitem__(self, key: Any) -> Any:
        return self.view[key]

    def __len__(self) -> int:
        return len(self.view)


class Fuse:
    def __init__(self) -> None:
        self.left = -1  # does not burn

    def burn(self) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1


class Host:
    """A region and a book that outlive the caches, as files do, and the sessions whose locks are held."""

    def __init__(self, extents: int = 3, extent_bytes: int = 2 * MIB, limits: Limits = LIMITS) -> None:
        self.geometry = plan_geometry(b"r" * 16, extents * extent_bytes, extent_bytes)
        self.buffer = bytearray(self.geometry.region_bytes)
        self.limits = limits
        self.file = bytearray(journal.MAGIC)
        self.fuse = Fuse()
        self.now = 0.0
        self.living: dict[int, str] = {}
        self.note(journal.Began(self.geometry.region_id, 1))
        self.cache = Cache(memoryview(self.buffer), self.geometry, limits, 11, self.note)
        self._arm()

    def note(self, record: journal.Record) -> None:
        self.fuse.burn()
        self.file += journal.pack(record)

    def _arm(self) -> None:
        rows = self.cache.rows
        rows._words, rows.buffer = Dying(rows._words, self.fuse), Dying(rows.buffer, self.fuse)  # type: ignore[assignment]

    def restart(self, gone: tuple[int, ...] = (), fuse: int = -1) -> Cache:
        """Be the next daemon; `gone` are sessions that have ended meanwhile. It dies itself after `fuse` stores."""
        for number in gone:
            self.living.pop(number)
        self.fuse.left = -1
        book = journal.read(bytes(self.file))
        book.life += 1
        self.file = bytearray(journal.MAGIC) + b"".join(map(journal.pack, book.records()))
        self.fuse.left = fuse
        buffer: Any = memoryview(self.buffer)
        living = {number for number in self.living if number in book.sessions}
        if fuse >= 0:
            arm = RegionRows.__init__

            def armed(rows: RegionRows, *args: Any) -> None:
                arm(rows, *args)
                rows._words = Dying(rows._words, self.fuse)  # type: ignore[assignment]

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(RegionRows, "__init__", armed)
                self.cache = recovery.reopen(buffer, self.geometry, self.limits, book, living, self.now, self.note)
        else:
            self.cache = recovery.reopen(buffer, self.geometry, self.limits, book, living, self.now, self.note)
        self.fuse.left = -1
        self._arm()
        return self.cache

    def open(self, engine: str) -> int:
        number = self.cache.open_session(engine, "", self.now)
        self.note(journal.SessionOpened(number, engine, "", b"", ""))
        self.living[number] = engine
        return number


def spec_of(block_bytes: int, shards: int = 1, model: str = "m") -> NamespaceSpec:
    return NamespaceSpec(model, (GroupSpec(16, (block_bytes // shards,) * shards),), {"b": str(block_bytes)}, 8)


def digest(path: str) -> bytes:
    return path.encode().ljust(8, b"\0")


class Client:
    """One session that writes some shards of one namespace."""

    def __init__(self, host: Host, engine: str, spec: NamespaceSpec, shards: tuple[int, ...] = (0,)) -> None:
        self.host, self.engine, self.spec, self.shards = host, engine, spec, shards
        self.session = host.open(engine)
        self.attach()

    def ask(self, request: Any) -> Any:
        return self.host.cache.handle(self.session, request, self.host.now)

    def attach(self) -> None:
        self.namespace = self.ask(m.Attach(1, b"", self.spec, self.shards)).namespace

    def come_back(self, heard: int = 1 << 62, leases: tuple[tuple[int, bytes], ...] = ()) -> list[int]:
        self.host.cache.resume_session(self.session, "", self.host.now)
        self.attach()
        return list(self.ask(m.Restate(1, b"", heard, list(leases))).lost)

    def reserve(self, paths: list[str], parent: str = "") -> m.Reserved:
        run = m.Run([digest(path) for path in paths], digest(parent) if parent else None)
        reply: m.Reserved = self.ask(m.Reserve(1, b"", self.namespace, [run]))
        return reply

    def settle(
        self, number: int, outcome: Outcome = Outcome.COMMITTED, at: tuple[int, ...] = (), shards: Any = None
    ) -> list[Verdict]:
        shards = self.shards if shards is None else shards
        request = m.Settle(1, b"", self.host.geometry.region_id, number, shards, outcome, list(at))
        return [Verdict(verdict) for verdict in self.ask(request).verdicts]

    def store(self, paths: list[str], parent: str = "") -> None:
        number = self.reserve(paths, parent).reservation
        if number:
            self.settle(number)

    def acquire(self, paths: list[str], pin: bool = True) -> m.Acquired:
        reply: m.Acquired = self.ask(m.Acquire(1, b"", self.namespace, [digest(path) for path in paths], pin=pin))
        return reply


def found(cache: Cache) -> dict[bytes, bytes]:
    """Every visible block: its slot's reference by its hash and namespace."""
    return {
        group.namespace.to_bytes(4, "little") + name: block.ref
        for namespace in cache.namespaces.values()
        for group in namespace.groups
        for name, block in group.visible.items()
    }


def chain(name: str, length: int) -> list[str]:
    return [f"{name}{number}" for number in range(length)]


# Plain stories.


def test_blocks_are_found_again_with_their_place_and_evicted_in_the_same_order() -> None:
    host = Host(extents=1)
    engine = Client(host, "one", spec_of(256 << 10))  # seven slots
    for name in "abc":
        engine.store(chain(name, 2))
    engine.acquire(chain("a", 2), pin=False)
    before = found(host.cache)
    host.restart(gone=(engine.session,))
    assert found(host.cache) == before
    assert host.cache.counters["blocks_recovered"] == 6
    host.cache.check_integrity()
    engine = Client(host, "two", spec_of(256 << 10))
    engine.store(chain("d", 3))
    assert [engine.acquire(chain(name, 2), pin=False).hits for name in "abcd"] == [2, 0, 2, 2]
    host.cache.check_integrity()


def test_what_a_gone_child_left_its_parent_survives() -> None:
    host = Host(extents=1)
    engine = Client(host, "one", spec_of(256 << 10))
    engine.store(chain("p", 2))  # the prefix that children keep warm
    engine.store(chain("x", 3))
    engine.store(["q"], "p1")
    engine.store(["y"], "x2")
    engine.acquire([*chain("p", 2), "q"], pin=False)
    engine.acquire([*chain("x", 3), "y"], pin=False)
    engine.store(["z"])  # q goes, and p1 has its last use now
    assert engine.acquire([*chain("p", 2), "q"], pin=False).hits == 2
    host.restart()
    engine.come_back()
    host.cache.tick(0.0)
    assert {block.hash: block.tick for block in host.cache.namespaces[1].groups[0].visible.values()}[digest("p1")] > 0
    host.cache.check_integrity()


def test_a_save_in_flight_is_settled_after_the_restart() -> None:
    host = Host()
    engine = Client(host, "one", spec_of(64 << 10, shards=2), (0, 1))
    reserved = engine.reserve(chain("a", 3))
    assert engine.settle(reserved.reservation, at=(0,)) == [Verdict.VISIBLE]
    assert engine.settle(reserved.reservation, at=(1,), shards=(0,)) == [Verdict.PARTIAL]
    host.restart()
    host.cache.check_integrity()
    engine.come_back(reserved.reservation)
    assert engine.settle(reserved.reservation, at=(0,)) == [Verdict.VISIBLE]  # its answer was lost, it asks again
    assert engine.settle(reserved.reservation, at=(2, 1)) == [Verdict.HIDDEN, Verdict.VISIBLE]
    assert engine.acquire(chain("a", 3)).slots == reserved.slots
    host.cache.check_integrity()


def test_what_nobody_was_told_of_is_given_back() -> None:
    host = Host()
    engine = Client(host, "one", spec_of(64 << 10))
    heard, unheard = engine.reserve(["a"]), engine.reserve(["b", "c"])
    host.restart()
    engine.come_back(heard.reservation)
    assert host.cache.counters["reservations_unheard"] == 1
    assert engine.settle(heard.reservation) == [Verdict.VISIBLE]
    with pytest.raises(UnknownHandle):
        engine.settle(unheard.reservation)
    assert host.cache.pool.extents[0].used == 1
    host.cache.check_integrity()


@pytest.mark.parametrize("stores", range(7))
def test_a_slot_that_is_being_given_out_does_not_hold_its_former_block_again(stores: int) -> None:
    host = Host()
    engine = Client(host, "one", spec_of(64 << 10))
    engine.settle(engine.reserve(["half"]).reservation, Outcome.FAILED)
    host.fuse.left = stores
    with pytest.raises(Killed):
        engine.reserve(["b"])
    host.restart()
    assert not found(host.cache)
    host.cache.check_integrity()


def test_leases_are_restated_and_nothing_is_evicted_before_or_for_ten_seconds() -> None:
    host = Host(extents=1)
    reader, other = (Client(host, name, spec_of(256 << 10)) for name in ("reader", "other"))
    other.store(chain("a", 7))
    lease = reader.acquire(chain("a", 7))
    host.restart()
    other.come_back()
    assert engine_answers(other, ["b"]) == [Refusal.NO_SPACE]
    with pytest.raises(KVCacheError, match="try again"):
        other.ask(m.Clear(1, b""))
    refs = unpack_refs(lease.slots)
    stale = refs[0]._replace(generation=refs[0].generation + 1).pack()
    assert reader.come_back(0, ((lease.lease, refs[-1].pack()), (7, stale), (8, b"short"))) == [7, 8]
    host.cache.tick(host.now)
    assert engine_answers(other, ["b"]) == [Refusal.NO_SPACE]  # the lease pins all seven
    reader.ask(m.Release(1, b"", [lease.lease]))
    assert engine_answers(other, ["b"]) == [Refusal.GRANTED]
    host.cache.check_integrity()


def engine_answers(client: Client, paths: list[str]) -> list[Refusal]:
    return [Refusal(answer) for answer in client.reserve(paths).answers]


def test_after_the_grace_a_session_that_stays_away_keeps_its_slots_alone_until_it_is_fenced_off() -> None:
    host = Host(extents=1)
    away, other = (Client(host, name, spec_of(256 << 10)) for name in ("away", "other"))
    other.store(chain("a", 5))
    away.acquire(chain("a", 5))
    away.reserve(["w"])
    host.restart()
    other.come_back()
    host.now = 10.0
    host.cache.tick(host.now)
    other.store(chain("b", 6))
    assert other.acquire(chain("b", 6), pin=False).hits == 6
    assert engine_answers(other, ["b0", "b1", "b2", "b3", "b4", "b5", "c"])[-1] == Refusal.NO_SPACE
    host.cache.check_integrity()
    with pytest.raises(ClientError, match="it is attached"):
        other.ask(m.Fence(1, b"", other.session))
    assert other.ask(m.Fence(1, b"", away.session)).reservations == 1
    host.now = 19.9
    host.cache.tick(host.now)
    assert engine_answers(other, ["c"]) == [Refusal.GRANTED]
    assert host.cache.stats(host.now)["pool"]["slots_quarantined"] == 1
    host.now = 20.0
    host.cache.tick(host.now)
    assert host.cache.stats(host.now)["pool"]["slots_quarantined"] == 0
    host.cache.check_integrity()


def test_a_quarantine_begins_anew_with_the_daemon() -> None:
    host = Host(extents=1)
    dead = Client(host, "dead", spec_of(256 << 10))
    dead.reserve(["w"])
    host.cache.end_session(dead.session, host.now)
    host.living.pop(dead.session)
    for life in range(2):
        host.now += 9.0
        host.restart()
        host.cache.tick(host.now)
        assert host.cache.stats(host.now)["pool"]["slots_quarantined"] == 1, life
        host.cache.check_integrity()
    host.now += 10.0
    host.cache.tick(host.now)
    assert host.cache.pool.extents[0].used == 0


def test_a_rank_that_is_gone_dooms_what_it_was_writing_and_the_other_one_settles_first() -> None:
    host = Host()
    spec = spec_of(64 << 10, shards=2)
    scheduler, zero, one = Client(host, "e", spec, ()), Client(host, "e", spec, (0,)), Client(host, "e", spec, (1,))
    reserved = scheduler.reserve(["a", "b"])
    zero.settle(reserved.reservation, at=(0,))
    host.restart(gone=(one.session,))
    host.cache.check_integrity()
    scheduler.come_back(reserved.reservation)
    zero.come_back()
    assert zero.settle(reserved.reservation, at=(1,)) == [Verdict.FAILED]
    assert scheduler.acquire(["a"]).hits == 0  # a rank is missing, and the block is doomed, too
    stats = host.cache.stats(host.now)["pool"]
    assert (stats["slots_quarantined"], stats["blocks"], stats["blocks_writing"]) == (2, 0, 0)
    host.cache.check_integrity()


def test_only_who_is_awaited_can_come_back() -> None:
    host = Host()
    engine = Client(host, "one", spec_of(64 << 10))
    host.restart()
    with pytest.raises(UnknownHandle):
        host.cache.resume_session(engine.session + 1, "", 0.0)
    engine.come_back()
    with pytest.raises(UnknownHandle):
        host.cache.resume_session(engine.session, "", 0.0)
    assert Client(host, "two", spec_of(64 << 10)).session > engine.session


def test_numbers_and_generations_never_come_again() -> None:
    host = Host(extents=1)
    seen: set[tuple[str, int]] = set()
    for _ in range(3):
        engine = Client(host, "one", spec_of(256 << 10))
        for name in "ab":
            reserved = engine.reserve(chain(name, 4))
            generations = {("generation", ref.generation) for ref in unpack_refs(reserved.slots)}
            new = {("reservation", reserved.reservation), ("session", engine.session), *generations}
            if reserved.reservation:
                assert not (new - {("session", engine.session)}) & seen
                seen |= new
                engine.settle(reserved.reservation)
        lease = engine.acquire(chain("a", 1)).lease
        assert ("lease", lease) not in seen or not lease
        seen.add(("lease", lease))
        host.restart(gone=(engine.session,))


# Killed anywhere.


SMALL, LARGE, PAIR = spec_of(100 << 10), spec_of(700 << 10), spec_of(160 << 10, 2, "pair")


class Story:
    """Engines of three kinds in a pool too small for them: a seed decides what they do."""

    def __init__(self, host: Host, seed: int) -> None:
        self.host, self.draw = host, random.Random(seed)
        self.clients = [Client(host, "small", SMALL), Client(host, "other", SMALL), Client(host, "large", LARGE)]
        self.scheduler = Client(host, "pair", PAIR, ())
        self.ranks = [Client(host, "pair", PAIR, (rank,)) for rank in (0, 1)]
        self.open: list[tuple[Client, int, int]] = []  # writer, reservation, granted blocks
        self.leases: list[tuple[Client, int, bytes]] = []
        self.heard: dict[int, int] = {}
        self.shown: set[bytes] = set()  # names of blocks that a verdict called visible

    def name(self, client: Client, path: str) -> bytes:
        return int(client.namespace).to_bytes(4, "little") + digest(path)

    def step(self) -> None:
        draw, host = self.draw, self.host
        what = draw.choice(["store", "store", "reserve", "settle", "settle", "acquire", "release", "wait", "end"])
        client = draw.choice([*self.clients, self.scheduler])
        path = draw.choice("abcdef")
        run = [path * length for length in range(1, draw.randint(1, 5) + 1)]
        if what in ("store", "reserve"):
            reserved = client.reserve(run)
            if reserved.reservation:
                granted = len(reserved.slots) // 24
                self.heard[client.session] = reserved.reservation
                writers = self.ranks if client is self.scheduler else [client]
                self.open += [(writer, reserved.reservation, granted) for writer in writers]
                if what == "store":
                    for _ in writers:
                        self.settle(len(self.open) - 1, Outcome.COMMITTED)
        elif what == "settle" and self.open:
            self.settle(draw.randrange(len(self.open)), draw.choice(list(Outcome)))
        elif what == "acquire":
            reply = client.acquire(run)
            if reply.lease:
                self.leases.append((client, reply.lease, reply.slots[-24:]))
        elif what == "release" and self.leases:
            client, lease, _ = self.leases.pop(draw.randrange(len(self.leases)))
            client.ask(m.Release(1, b"", [lease]))
        elif what == "wait":
            host.now += draw.choice([0.1, 2.5, 11.0])
            host.cache.tick(host.now)
        elif what == "end" and draw.random() < 0.2:
            self.end(draw.choice(self.ranks if client is self.scheduler else [client]))

    def settle(self, at: int, outcome: Outcome) -> None:
        writer, number, _ = self.open.pop(at)
        try:
            writer.settle(number, outcome)
        except UnknownHandle:
            assert outcome is not None  # an heir has it, or another rank's failure settled it

    def end(self, client: Client) -> None:
        self.host.living.pop(client.session)
        self.forget(client)
        self.host.cache.end_session(client.session, self.host.now)
        client.session = self.host.open(client.engine)
        client.attach()

    def forget(self, client: Client) -> None:
        self.open = [each for each in self.open if each[0] is not client]
        self.leases = [each for each in self.leases if each[0] is not client]

    def every(self) -> Iterator[Client]:
        yield from (*self.clients, self.scheduler, *self.ranks)

    def come_back(self) -> None:
        """The living resume, one after the other; the dead begin anew."""
        for client in self.draw.sample(list(self.every()), 6):
            if client.session in self.host.living:
                held = tuple((lease, ref) for who, lease, ref in self.leases if who is client)
                lost = client.come_back(self.heard.get(client.session, 0), held)
                assert not lost, "a block under a lease was lost"
            else:
                self.forget(client)
                client.session = self.host.open(client.engine)
                client.attach()
            self.host.cache.check_integrity()


def still_there(host: Host, ref: bytes) -> bool:
    """Whether the region itself says that the slot holds the READY block of this reference."""
    rows = RegionRows(memoryview(host.buffer), host.geometry)
    where = SlotRef.unpack(ref)
    if not rows.is_current(where):
        return False
    extent = (where.offset - host.geometry.data_offset) // host.geometry.extent_bytes
    slot = (where.offset - rows.extent_start(extent)) // rows.extent_row(extent)[0]
    row = rows.read_row(rows.row_offset(extent, slot))
    return row is not None and row.state == READY


@pytest.mark.parametrize("seed", range(300))
def test_killed_after_any_store_the_next_daemon_finds_all_that_was_ready(seed: int) -> None:
    draw = random.Random(seed)
    host = Host()
    story = Story(host, seed)
    for _ in range(4):
        kill_at = draw.randrange(300)
        host.fuse.left = kill_at
        before, leased = found(host.cache), {ref for _, _, ref in story.leases}
        try:
            for _ in range(100):
                before, leased = found(host.cache), {ref for _, _, ref in story.leases}
                story.step()
        except Killed:
            pass
        host.fuse.left = -1
        ready = {name: ref for name, ref in before.items() if still_there(host, ref)}
        assert leased <= set(before.values())
        living = [client.session for client in story.every() if client.session in host.living]
        gone = tuple(session for session in living if draw.random() < 0.25)
        if draw.random() < 0.5:  # killed again, inside the rebuild
            with contextlib.suppress(Killed):
                host.restart(gone, fuse=draw.randrange(12))
            gone = ()
        cache = host.restart(gone)
        cache.check_integrity()
        after = found(cache)
        assert ready.items() <= after.items(), "a READY block was not found"
        story.leases = [each for each in story.leases if each[0].session in host.living]
        story.come_back()
        host.now += 0.25
        cache.tick(host.now)
        cache.check_integrity()


def test_a_torn_or_foreign_book_is_told_apart() -> None:
    host = Host()
    Client(host, "one", SMALL)
    whole = bytes(host.file)
    for cut in range(len(whole) - 30, len(whole)):
        assert journal.read(whole[:cut]).region == host.geometry.region_id
    with pytest.raises(RegionError, match="no state file"):
        journal.read(b"something else")
    for at in range(len(journal.MAGIC), len(whole) - 60, 7):
        torn = bytearray(whole)
        torn[at] ^= 0x55
        with pytest.raises(RegionError, match=r"torn|version"):
            journal.read(bytes(torn))


def test_a_book_written_anew_says_the_same() -> None:
    host = Host()
    story = Story(host, 3)
    for _ in range(60):
        story.step()
    book = journal.read(bytes(host.file))
    again = Book(b"")
    for record in book.records():
        again.apply(record)
    assert vars(again) == vars(book)
    assert SLOT_ROW == 128
