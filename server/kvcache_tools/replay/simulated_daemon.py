"""The daemon's own index and eviction, over a region whose blocks are never written.

The region has its real size and layout. It is an anonymous file in memory, of which only rows are ever touched.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Sequence

from kvcache_proto import messages as m
from kvcache_proto.errors import ConfigError
from kvcache_proto.types import MAX_BLOCKS, GroupSpec, NamespaceSpec, Outcome, PoolGeometry, Refusal
from kvcache_server.core.cache import Cache
from kvcache_server.core.eviction.policy import WORTH
from kvcache_server.core.limits import Limits
from kvcache_tools.plan.room import Room
from kvcache_tools.replay.device_cache import DeviceCache

STEP_TOKENS = 8192  # number that an engine computes, and saves, per step


def block_hash(block: int | str) -> bytes:
    """Return a hash for a block of a trace, distributed like real ones."""
    return hashlib.blake2b(str(block).encode(), digest_size=32).digest()


def sparse_region(geometry: PoolGeometry) -> memoryview:
    """Return memory for a region of that layout; it takes pages only where it is written."""
    fd = os.memfd_create("kvcache-replay")
    try:
        os.ftruncate(fd, geometry.region_bytes)
        return memoryview(mmap.mmap(fd, geometry.region_bytes))
    except (OSError, ValueError) as error:
        raise ConfigError(f"a region of {geometry.region_bytes:,} bytes cannot be mapped: {error}") from None
    finally:
        os.close(fd)


class SimulatedDaemon:
    """A daemon with the capacity `room`, and `engines` engines that save all blocks that they compute.

    Of `suffixes`, they save the blocks needed to continue after a prompt, after every `checkpoint` blocks in it and,
    with `divergences`, where it parts from the blocks in the group of full attention.
    """

    def __init__(
        self,
        room: Room,
        block_tokens: int,
        engines: int,
        limits: Limits | None = None,
        policy: str = WORTH,
        suffixes: Sequence[GroupSpec] = (),
        checkpoint: int = 1 << 30,
        divergences: bool = False,
    ) -> None:
        self.engines = engines
        self._suffixes, self._checkpoint, self._divergences = suffixes, checkpoint, divergences
        self._step = max(1, STEP_TOKENS // block_tokens)
        self.cache = Cache(sparse_region(room.geometry), room.geometry, limits, seed=1, policy=policy)
        spec = NamespaceSpec("replay", (GroupSpec(block_tokens, room.block_bytes), *suffixes))
        self._sessions = [self.cache.open_session(f"engine {number}", "", 0.0) for number in range(engines)]
        self._attach(spec)

    def _attach(self, spec: NamespaceSpec, reports: bool = False) -> None:
        for session in self._sessions:
            attached = self.cache.handle(session, m.Attach(1, b"", spec, (0,), reports_leaving=reports), 0.0)
            assert isinstance(attached, m.Attached)
            self._namespace = attached.namespace

    def report_devices(self) -> None:
        """Let the engines report what their devices keep and evict."""
        self._attach(self.cache.namespaces[self._namespace].spec, reports=True)

    def saved(self, suffix: GroupSpec, length: int, begin: int, end: int, divergence: int = 0) -> list[int]:
        """Return the blocks of a suffix group that are saved for boundaries from block `begin` to `end` of a prompt.

        The prompt has `length` blocks; `divergence` is one more boundary in it, 0 for none.
        """
        ends = [at for at in range(begin + 1, end + 1) if at % self._checkpoint == 0 or at in (divergence, length)]
        return sorted({each for at in ends for each in range(at - suffix.needed(at), at)})

    def ask(
        self,
        engine: int,
        hashes: list[bytes],
        now: float,
        clock: Callable[[], float],
        device: DeviceCache | None = None,
    ) -> tuple[int, float]:
        """Look a prompt up, load the hits and save the rest; return the hits, and the seconds of the lookup.

        Hits on the engine's `device`, if any, are hits, too; the daemon saves what it lacks of them.
        """
        session, handle = self._sessions[engine], self.cache.handle
        self.cache.effects.take()  # nothing follows them
        while self.cache.sweeper.go_on():
            pass
        start, gone = device.ask(hashes, now) if device is not None else (0, [])
        question = m.Acquire(1, b"", self._namespace, hashes, start=start)
        begin = clock()
        found = handle(session, question, now)
        seconds = clock() - begin
        assert isinstance(found, m.Acquired)
        if found.lease:
            handle(session, m.Release(1, b"", [found.lease]), now)
        for run in gone:
            self._leave(session, run, now)
        divergence = self._whole(hashes) if self._divergences else 0
        for begin in range(found.hits, len(hashes), self._step):
            end = min(begin + self._step, len(hashes))
            runs = [m.Run([hashes[at]], hashes[at - 1] if at else None) for at in range(begin, end)]
            for number, suffix in enumerate(self._suffixes, 1):
                slots = self.saved(suffix, len(hashes), begin, end, divergence)
                runs += [m.Run([hashes[at]], None, number) for at in slots]
            if not all(self._save(session, runs[at : at + MAX_BLOCKS], now) for at in range(0, len(runs), MAX_BLOCKS)):
                break
        if device is not None and device.reports and device.capacity:
            self._keep(session, hashes[min(len(hashes), device.capacity) - 1], now)
        return max(start, found.hits), seconds

    def _keep(self, session: int, last: bytes, now: float) -> None:
        """Report that the device keeps a chain."""
        self.cache.handle(session, m.ReportDevice(1, b"", self._namespace, [last]), now)

    def _leave(self, session: int, run: m.Run, now: float) -> None:
        """Save what is missing of a chain whose last blocks leave the device."""
        hashes, stays = run.hashes, len(run.hashes) - run.leaving
        if stays:
            self._keep(session, hashes[stays - 1], now)
        for at in range(0, len(hashes), MAX_BLOCKS):
            end = min(at + MAX_BLOCKS, len(hashes))
            parent, leaving = hashes[at - 1] if at else None, max(end - max(at, stays), 0)
            if not self._save(session, [m.Run(hashes[at:end], parent, 0, leaving, run.idle_ms, run.found)], now):
                return  # those behind would have no parent

    def _save(self, session: int, runs: list[m.Run], now: float) -> bool:
        """Save blocks; return whether more may follow them."""
        reserved = self.cache.handle(session, m.Reserve(1, b"", self._namespace, runs), now)
        assert isinstance(reserved, m.Reserved)
        if not reserved.reservation:
            return set(reserved.answers) == {Refusal.PRESENT}  # blocks that a suffix group needs may follow
        region = self.cache.geometry.region_id
        self.cache.handle(session, m.Settle(1, b"", region, reserved.reservation, (0,), Outcome.COMMITTED), now)
        return True

    def _whole(self, hashes: list[bytes]) -> int:
        """Return the number of blocks of a prompt that the group of full attention has."""
        (namespace,) = self.cache.namespaces.values()
        return len(namespace.groups[0].prefix(hashes))
