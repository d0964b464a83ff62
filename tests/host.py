"""A host without a process: a region and a state file that outlive the caches over it, and engines that use them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Set
from typing import Any

import pytest

from kvcache_proto import messages as m
from kvcache_proto.errors import UnknownHandle
from kvcache_proto.region import ALIGN, HEADER, ROW, RegionRows
from kvcache_proto.types import REF_BYTES, SUFFIX, GroupSpec, NamespaceSpec, Outcome, PoolGeometry, Verdict
from kvcache_server.core import journal
from kvcache_server.core.cache import Cache
from kvcache_server.core.effects import Change
from kvcache_server.core.integrity import check_integrity
from kvcache_server.core.limits import Limits
from kvcache_server.core.recovery.read_rows import Snapshot

KIB = 1 << 10
LIMITS = Limits(pin_quota=1.0, write_quota=1.0, supersede_after=2.0, quarantine=10.0, grace=10.0)


def geometry_of(blocks: int, page_bytes: int = 4 * KIB) -> PoolGeometry:
    """Return the geometry of a region with room for so many blocks of 64 KiB."""
    pages = blocks * 64 * KIB // page_bytes
    begin = -(-(HEADER + pages * ROW) // ALIGN) * ALIGN
    return PoolGeometry(b"r" * 16, begin + pages * page_bytes, page_bytes, pages, begin)


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


def reopen(
    buffer: Any, geometry: PoolGeometry, limits: Limits, manifest: journal.Manifest, living: Set[int], now: float
) -> Cache:
    """Return the cache that the last daemon left in the region."""
    cache = Cache(buffer, geometry, limits, epoch=manifest.epoch)
    cache.restore(Snapshot(cache.rows, manifest, living), now)
    return cache


class Host:
    """A region and a state file that outlive the caches, as files do, and the sessions whose locks are held."""

    def __init__(self, blocks: int = 93, limits: Limits = LIMITS) -> None:
        """The region has room for so many blocks of 64 KiB."""
        self.geometry = geometry_of(blocks)
        self.buffer = bytearray(self.geometry.region_bytes)
        self.limits = limits
        self.file = bytearray(journal.MAGIC)
        self.fuse = Fuse()
        self.now = 0.0
        self.living: dict[int, str] = {}
        self.note(journal.Began(self.geometry.region_id, 1))
        self.cache = Cache(memoryview(self.buffer), self.geometry, limits, 11)
        self.followers: list[Callable[[list[Change]], None]] = []
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
        manifest = journal.read(bytes(self.file))
        manifest.epoch += 1
        self.file = bytearray(journal.MAGIC) + b"".join(map(journal.pack, manifest.records()))
        self.fuse.left = fuse
        buffer: Any = memoryview(self.buffer)
        living = {number for number in self.living if number in manifest.sessions}
        if fuse >= 0:
            arm = RegionRows.__init__

            def armed(rows: RegionRows, *args: Any) -> None:
                arm(rows, *args)
                rows._words = Dying(rows._words, self.fuse)  # type: ignore[assignment]

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(RegionRows, "__init__", armed)
                self.cache = reopen(buffer, self.geometry, self.limits, manifest, living, self.now)
        else:
            self.cache = reopen(buffer, self.geometry, self.limits, manifest, living, self.now)
        self.deliver()
        self.fuse.left = -1
        self._arm()
        return self.cache

    def deliver(self) -> None:
        """Note what the core has reported, as the daemon does before it replies."""
        records, changes = self.cache.effects.take()
        for record in records:
            self.note(record)
        for follow in self.followers:
            follow(changes)

    def tick(self) -> None:
        self.cache.tick(self.now)
        self.deliver()

    def end(self, session: int) -> None:
        self.cache.end_session(session, self.now)
        self.deliver()

    def handle(self, session: int, request: Any) -> Any:
        reply = self.cache.answer(session, request, self.now)
        self.deliver()
        return reply

    def open(self, engine: str) -> int:
        number = self.cache.open_session(engine, "", self.now)
        self.deliver()
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
        return self.host.handle(self.session, request)

    def attach(self) -> None:
        self.namespace = self.ask(m.Attach(1, b"", self.spec, self.shards)).namespace

    def come_back(self, heard: int = 1 << 62, leases: tuple[tuple[int, bytes], ...] = ()) -> list[int]:
        self.host.cache.resume_session(self.session, "", self.host.now)
        self.attach()
        return list(self.ask(m.Reclaim(1, b"", heard, list(leases))).lost)

    def reserve(self, paths: list[str], parent: str = "") -> m.Reserved:
        """Reserve blocks, and for a whole chain also what suffix groups need after it."""
        names = [digest(path) for path in paths]
        runs = [m.Run(names, digest(parent) if parent else None)]
        for number, group in enumerate(self.spec.groups):
            if group.kind == SUFFIX and not parent:
                runs.append(m.Run(names[-group.needed(len(names)) :], None, number))
        reply: m.Reserved = self.ask(m.Reserve(1, b"", self.namespace, runs))
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
    """Every visible block: its reference by its hash, namespace and group."""
    return {
        group.namespace.to_bytes(4, "little") + name + bytes([group.number] if group.number else []): block.ref
        for namespace in cache.namespaces.values()
        for group in namespace.groups
        for name, block in group.visible.items()
    }


def chain(name: str, length: int) -> list[str]:
    return [f"{name}{number}" for number in range(length)]


def held(reply: m.Acquired) -> bytes:
    """Return the references by which a session states that it holds the lease."""
    return reply.slots[(reply.hits - 1) * REF_BYTES :]


def refs_of(leases: list[tuple[Client, int, bytes]]) -> set[bytes]:
    return {refs[at : at + REF_BYTES] for _, _, refs in leases for at in range(0, len(refs), REF_BYTES)}


SMALL, LARGE, PAIR = spec_of(100 << 10), spec_of(700 << 10), spec_of(160 << 10, 2, "pair")
HYBRID = NamespaceSpec(
    "hybrid", (GroupSpec(16, 100 << 10), GroupSpec(16, 60 << 10, SUFFIX, 2), GroupSpec(16, 300 << 10, SUFFIX, 1)), {}, 8
)


class Story:
    """Engines of four kinds in a pool too small for them: a seed decides what they do."""

    def __init__(self, host: Host, seed: int) -> None:
        self.host, self.draw = host, random.Random(seed)
        self.clients = [Client(host, "small", SMALL), Client(host, "other", SMALL), Client(host, "large", LARGE)]
        self.clients.append(Client(host, "hybrid", HYBRID))
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
                granted = len(reserved.slots) // REF_BYTES
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
                self.leases.append((client, reply.lease, held(reply)))
        elif what == "release" and self.leases:
            client, lease, _ = self.leases.pop(draw.randrange(len(self.leases)))
            client.ask(m.Release(1, b"", [lease]))
        elif what == "wait":
            host.now += draw.choice([0.1, 2.5, 11.0])
            host.tick()
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
        self.host.end(client.session)
        client.session = self.host.open(client.engine)
        client.attach()

    def forget(self, client: Client) -> None:
        self.open = [each for each in self.open if each[0] is not client]
        self.leases = [each for each in self.leases if each[0] is not client]

    def every(self) -> Iterator[Client]:
        yield from (*self.clients, self.scheduler, *self.ranks)

    def come_back(self) -> None:
        """The living resume, one after the other; the dead begin anew."""
        for client in self.draw.sample(list(self.every()), len(list(self.every()))):
            if client.session in self.host.living:
                held = tuple((lease, ref) for who, lease, ref in self.leases if who is client)
                lost = client.come_back(self.heard.get(client.session, 0), held)
                assert not lost, "a block under a lease was lost"
            else:
                self.forget(client)
                client.session = self.host.open(client.engine)
                client.attach()
            check_integrity(self.host.cache)
