"""A small cache without a daemon, and engines that talk to it."""

from __future__ import annotations

from host import geometry_of
from insights import answer, finish

from kvcache_proto import messages as m
from kvcache_proto.types import MAX_BLOCKS, GroupSpec, NamespaceSpec, Outcome, Refusal, Verdict
from kvcache_server.core import integrity
from kvcache_server.core.cache import Cache
from kvcache_server.core.eviction.policy import WORTH
from kvcache_server.core.index import Group
from kvcache_server.core.limits import Limits

KIB, MIB = 1 << 10, 1 << 20


class Engine:
    """One engine with one session that writes every shard, as a user of the client library has it."""

    def __init__(
        self,
        cache: Cache,
        name: str,
        block_bytes: int = 64 * KIB,
        model: str = "m",
        suffixes: tuple[GroupSpec, ...] = (),
    ) -> None:
        self.cache = cache
        self.now = 0.0
        self.session = cache.open_session(name, "", 0.0)
        spec = NamespaceSpec(model, (GroupSpec(16, block_bytes), *suffixes), hash_bytes=16)
        self.namespace = self.ask(m.Attach(1, b"", spec, (0,))).namespace

    def ask(self, request):
        return answer(self.cache, self.session, request, self.now)

    def reserve(self, names: list[str], parent: str | None = None) -> m.Reserved:
        run = m.Run(hashes(names), hashes([parent])[0] if parent else None)
        return self.ask(m.Reserve(1, b"", self.namespace, [run]))

    def settle(
        self, reserved: m.Reserved, outcome: Outcome = Outcome.COMMITTED, at: tuple[int, ...] = ()
    ) -> list[Verdict]:
        region = self.cache.geometry.region_id
        reply = self.ask(m.Settle(1, b"", region, reserved.reservation, (0,), outcome, list(at)))
        return [Verdict(verdict) for verdict in reply.verdicts]

    def store(self, names: list[str], parent: str | None = None) -> list[Refusal]:
        answers = b""
        for at in range(0, len(names), MAX_BLOCKS):
            reserved = self.reserve(names[at : at + MAX_BLOCKS], names[at - 1] if at else parent)
            if reserved.reservation:
                self.settle(reserved)
            answers += reserved.answers
        return [Refusal(answer) for answer in answers]

    def acquire(self, names: list[str], pin: bool = True) -> m.Acquired:
        return self.ask(m.Acquire(1, b"", self.namespace, hashes(names), pin=pin))

    def hits(self, names: list[str]) -> int:
        return self.acquire(names, pin=False).hits


def hashes(names: list[str]) -> list[bytes]:
    return [name.encode().ljust(16, b".") for name in names]


def chain(name: str, length: int) -> list[str]:
    return [f"{name}{number}" for number in range(length)]


def make_cache(blocks: int = 124, page_bytes: int = 4 * KIB, policy: str = WORTH, **limits: float) -> Cache:
    """Return a cache with room for so many blocks of 64 KiB."""
    geometry = geometry_of(blocks, page_bytes)
    bounds = Limits(**{"write_quota": 1.0} | limits)  # most tests here fill the pool in one go
    return Cache(memoryview(bytearray(geometry.region_bytes)), geometry, bounds, seed=11, policy=policy)


def pass_time(cache: Cache, now: float) -> None:
    """Let it be so late, and all that is due be done."""
    cache.tick(now)
    cache.sweeper.finish()


def audit(cache: Cache) -> None:
    """Check the state as the daemon does while it serves."""
    finish(integrity.audit(cache))


def make_group(block_bytes: int = 64) -> Group:
    return Group(1, 0, GroupSpec(16, block_bytes), 16, 4 * KIB)
