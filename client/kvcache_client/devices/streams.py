"""A device with streams: a copy queue per direction, on our own streams beside the one on which the engine computes.

A save waits for the work that was queued on the engine's stream before it; so does a load, since the running step may
still read a freed block. Neither makes the engine's thread wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvcache_client.devices import CopyError, Device, Job, Memory, check_job
from kvcache_client.devices.bounce_buffers import BounceBuffers
from kvcache_client.devices.copy_paths import Path
from kvcache_client.devices.copy_queue import CopyQueue
from kvcache_client.devices.registration import Registration
from kvcache_client.devices.runtime import Handle, Runtime
from kvcache_client.devices.tuning import Tuning

logger = logging.getLogger("kvcache_client.devices")

_SETTLED = 0.003  # seconds without work after which a device counts as idle: between two steps there is less


class Peers(Protocol):
    """The caches of other ranks: see `Device`."""

    def share(self) -> bytes: ...

    def connect(self, peers: Mapping[int, bytes]) -> None: ...

    def pull(self, rank: int, blocks: npt.NDArray[np.int64]) -> float: ...

    def close(self) -> None: ...


class Paths(NamedTuple):
    """`make(saves)` makes the path of saves or of loads; `close` frees their shared resources, and they read `keep`.

    `peers(most)` makes what reads other ranks' caches.
    """

    make: Callable[[bool], Path]
    keep: object
    close: Callable[[], None] = lambda: None
    peers: Callable[[int], Peers] | None = None


class StreamDevice(Device):
    """Copies for one cache. Called from the engine's thread."""

    def __init__(
        self,
        runtime: Runtime,
        compute: Callable[[], Handle],
        synchronize: Callable[[], None],
        paths: Paths,
        slot: int,
        num_blocks: int,
        tuning: Tuning,
        room: int | None = None,
    ) -> None:
        """`compute` returns the stream on which the engine computes now, `synchronize` waits for the whole device.

        `room` is as in `CopyQueue`.
        """
        self._runtime, self._now, self._synchronize = runtime, compute, synchronize
        self._paths = paths
        self._peers: Peers | None = None
        self._slot, self._blocks = slot, num_blocks
        self.registration: Registration = Registration(runtime, tuning.register_chunk)
        self._owns_registration = True

        def make_buffers(path: Path) -> BounceBuffers:
            return BounceBuffers(runtime, path, tuning.stage_bytes)

        self._saves, self._loads = (
            CopyQueue(runtime, paths.make(saves), self.registration, make_buffers, saves, room)
            for saves in (True, False)
        )
        self._saved_last: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)  # a block's last save, by number
        self._serving = self._stepping = False
        self._step_end: Handle | None = None  # an event, recorded while memory is still to be page-locked
        self._idle_since = 0.0
        self._idle_lock = threading.Lock()  # an event must not be recorded and queried at once
        self._closed = False

    def register(self, region: Memory) -> None:
        self.registration.register(region)

    def registered(self) -> tuple[bool, int]:
        return self.registration.progress()

    def save(self, job: Job) -> None:
        job.saves = True
        number = self._start(self._saves, job)
        if number:
            self._saved_last[job.blocks] = number

    def load(self, job: Job) -> None:
        self._start(self._loads, job)

    def start(self, job: Job) -> None:
        if not self._closed:
            self._runtime.use()
            self._loads.start(job)

    def hold(self, job: Job) -> None:
        self.start(job)
        event = None if self._closed else self._loads.wait_queued(job)
        if event is not None:
            self._runtime.wait(self._compute(), event)

    def adopt(self, registration: Registration, owned: bool = True) -> None:
        former, owned_it = self.registration, self._owns_registration
        self.registration, self._owns_registration = registration, owned
        for queue in (self._saves, self._loads):
            queue.use(registration)
        if owned_it:
            former.close()

    def enter_step(self) -> None:
        self._stepping = True
        if not self._serving:
            self._serving = True
            self.registration.serve(self._is_idle)

    def leave_step(self) -> None:
        if self.registration.unfinished and not self._closed:
            with self._idle_lock:
                if self._step_end is None:
                    self._step_end = self._runtime.create_event()
                self._runtime.record(self._step_end, self._compute())
        self._stepping = False

    def _is_idle(self) -> bool:
        """Whether the engine has computed nothing for a moment; its sampler may come after `leave_step`."""
        now = time.monotonic()
        if not self._stepping:
            with self._idle_lock:
                if self._step_end is None or self._runtime.is_over(self._step_end):
                    self._idle_since = self._idle_since or now
                    return now - self._idle_since >= _SETTLED
        self._idle_since = 0.0
        return False

    def fence(self, blocks: Collection[int]) -> None:
        """Saves read blocks in their order, so the one to wait for is the last save of any of these that is queued on
        the device. The device waits, not the host."""
        if not blocks or self._closed:
            return
        given = np.fromiter(blocks, np.int64, len(blocks))
        numbers = np.unique(self._saved_last[given])
        if self._saves.find(int(numbers[-1])) is None:
            return
        mask = np.zeros(self._blocks, np.bool_)
        mask[given] = True
        self._saves.cancel(mask)
        for number in numbers[::-1].tolist():
            last = self._saves.find(number)
            if last is None:
                return
            if last.queued:
                for stream in (self._compute(), self._loads.path.cache):
                    self._runtime.wait(stream, last.events.off)
                return

    def poll(self) -> None:
        self._saves.settle(wait=False)
        self._loads.settle(wait=False)

    def linger(self, seconds: float) -> None:
        self._loads.linger(seconds)

    def share(self, most: int) -> list[bytes]:
        if self._paths.peers is None:
            return []
        try:
            self._runtime.use()
            self._peers = self._paths.peers(most)
            return [self._peers.share()]
        except CopyError as error:
            logger.info("other ranks cannot read this one's KV cache: %s", error)
            return []

    def connect(self, peers: Mapping[int, Sequence[bytes]]) -> None:
        if self._peers is None:
            raise CopyError("this cache is not shared")
        self._peers.connect({rank: shared for rank, (shared,) in peers.items()})

    def pull(self, rank: int, layout: int, blocks: npt.NDArray[np.int64]) -> float:
        if self._peers is None:
            raise CopyError("this cache is not shared")
        return self._peers.pull(rank, blocks)

    def peek(self, address: int, size: int) -> bytes:
        self._runtime.use()
        self._synchronize()
        return self._runtime.peek(address, size)

    def poke(self, address: int, data: bytes) -> None:
        self._runtime.use()
        self._synchronize()
        self._runtime.poke(address, data)
        self._synchronize()

    def drain(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        return all(queue.drain(max(0.0, until - time.monotonic())) for queue in (self._saves, self._loads))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        unlock = (self.registration.close,) if self._owns_registration else ()
        peers = () if self._peers is None else (self._peers.close,)
        for free in (self._runtime.use, *peers, self._saves.close, self._loads.close, *unlock, self._paths.close):
            try:
                free()
            except CopyError as error:  # the device is gone, and its resources with it
                logger.warning("the device does not free what copies used: %s", error)

    def _compute(self) -> Handle:
        self._runtime.use()
        return self._now()

    def _start(self, queue: CopyQueue, job: Job) -> int:
        """Return the job's number in its queue, 0 if it has already ended with an error."""
        try:
            check_job(job, self._blocks, self._slot)
            return queue.put(job, self._compute())
        except ValueError as error:
            job.error = f"ValueError: {error}"
        except CopyError as error:
            job.error = str(error)
        job.ended(job)
        return 0
