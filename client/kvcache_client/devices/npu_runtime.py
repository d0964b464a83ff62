"""An Ascend NPU through CANN's own runtime: without torch_npu's task queue between us and the device."""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int32, c_size_t, create_string_buffer
from typing import NamedTuple

from kvcache_client.devices import CopyError
from kvcache_client.devices.acl import (
    DEVICE,
    DEVICE_TO_HOST,
    EVENT_SYNC,
    EVENT_TIME_LINE,
    HOST,
    HOST_TO_DEVICE,
    MAPPED,
    NOT_SUPPORTED,
    PINNED,
    RELAXED,
    Acl,
    BatchAttributes,
    Location,
    PointerAttributes,
)
from kvcache_client.devices.runtime import Addresses, Handle
from kvcache_client.devices.stream_pool import StreamPool, StreamTurn, is_recorded

logger = logging.getLogger("kvcache_client.devices")

_MOST = 4096  # pieces of a batch: DEVMM_MEMCPY_BATCH_MAX_COUNT of the driver, which refuses more
_NONE = c_size_t(-1).value  # no piece in particular has failed
_PAUSE = 0.001  # seconds between two checks for the end of a job, on the watching thread


class HostRegister(NamedTuple):
    """torch_npu's calls: (address, bytes, flags) -> result, and (address) -> result. Both release the GIL."""

    register: Callable[[int, int, int], int]
    unregister: Callable[[int], int]


class NpuRuntime:
    """One device. See `Runtime`.

    Events are made by aclrtCreateEventExWithFlag: they may be recorded repeatedly, a wait is for the record before it
    whatever follows, and aclrtResetEvent must not be called for them (CANN's reference, aclrtRecordEvent and that
    call). Recording and querying on different threads must be ordered (aclrtQueryEventStatus): a copy queue does that.
    """

    def __init__(self, device: int, tensor: int, torch_register: HostRegister | None, refused: str = "") -> None:
        """`tensor` is an address of the cache on `device`; `refused` is the reason that nothing may be page-locked.

        Raises CopyError if CANN lacks calls that copies need.
        """
        self._acl = Acl()
        self._call, self._made = self._acl.call, self._acl.made
        self._device, self._refused = device, refused
        self._torch_register = torch_register if self._acl.has("aclrtHostRegisterV2") else None  # calls that very one
        self._pools: dict[Handle, StreamPool] = {}
        self._turns: dict[Handle, StreamTurn] = {}  # by the event that ends a job
        self._timed: set[Handle] = set()
        self._flags = MAPPED | PINNED
        self._batches = self._acl.has("aclrtMemcpyBatchAsync")
        self.use()
        here, there = Location(0, HOST), Location(self._location(tensor), DEVICE)
        self._attributes = {True: BatchAttributes(here, there), False: BatchAttributes(there, here)}

    def describe(self) -> str:
        """Describe, for a log line, how the region is page-locked and how pieces are copied."""
        if self._refused or not self._acl.has("aclrtHostRegisterV2"):
            register = "not at all"
        elif self._torch_register is not None:
            register = "by torch_npu's npuHostRegister"
        else:
            register = "by aclrtHostRegisterV2"
        copy = "aclrtMemcpyBatchAsync" if self._batches else "aclrtMemcpyAsync"
        return f"the region is page-locked {register}, pieces go by {copy}"

    def use(self) -> None:
        """aclrtSetDevice counts its calls: it is called only if the thread uses another device."""
        now = c_int32(-1)
        if self._acl.result("aclrtGetDevice", byref(now)) or now.value != self._device:
            self._call("aclrtSetDevice", self._device)

    def enter_thread(self) -> None:
        self._call("aclrtSetDevice", self._device)
        if self._acl.has("aclmdlRICaptureThreadExchangeMode"):
            # A trial interface: without it an engine that captures with mode GLOBAL may see its capture fail.
            result = self._acl.result("aclmdlRICaptureThreadExchangeMode", byref(c_int(RELAXED)))
            if result:
                logger.warning("%s", self._acl.error("aclmdlRICaptureThreadExchangeMode", result))

    # Host memory.

    def register(self, address: int, size: int) -> None:
        """Page-lock whole pages, and make them known to the device.

        With PINNED alone, a driver that cannot page-lock by itself only notes the range (HostRegisterV2 of CANN's
        runtime); copies then run at a third of the rate (DeepSpeed measured 9 against 23 GB/s). MAPPED makes it hand
        the pages to the device. aclrtHostRegister, which is older, maps too, but it is not documented that copies treat
        such memory as page-locked, and an older CANN copies other memory with "unpredictable errors": not used.
        """
        if self._refused:
            raise CopyError(self._refused)
        if address % mmap.PAGESIZE:
            raise CopyError(f"memory at {address:#x} does not begin with a page of {mmap.PAGESIZE} bytes")
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self._register(address, size, self._flags)
        except CopyError as error:
            if self._flags == PINNED:
                raise
            self._register(address, size, PINNED)
            self._flags = PINNED
            logger.warning("the device cannot map the region, copies may be slower: %s", error)

    def unregister(self, address: int) -> None:
        if self._torch_register is not None:
            self._check("npuHostUnregister", self._torch_register.unregister(address))
        else:
            self._call("aclrtHostUnregister", address)

    def allocate_host(self, size: int) -> int:
        return self._made("aclrtMallocHost", size)

    def free_host(self, address: int) -> None:
        self._call("aclrtFreeHost", address)

    # Streams and events. A stream of the copy queues is a pool of several; the engine's is one.

    def create_stream(self) -> Handle:
        pool = StreamPool(self._acl)
        self._pools[pool.handle] = pool
        return pool.handle

    def destroy_stream(self, stream: Handle) -> None:
        self._pools.pop(stream).close()

    def synchronize(self, stream: Handle) -> None:
        self._pools[stream].synchronize()

    def create_event(self, timed: bool = False) -> Handle:
        event = self._made("aclrtCreateEventExWithFlag", EVENT_SYNC | EVENT_TIME_LINE if timed else EVENT_SYNC)
        if timed:
            self._timed.add(event)
        return event

    def destroy_event(self, event: Handle) -> None:
        self._turns.pop(event, None)
        self._timed.discard(event)
        self._call("aclrtDestroyEvent", event)

    def record(self, event: Handle, stream: Handle) -> None:
        self._turns.pop(event, None)
        pool = self._pools.get(stream)
        if pool is not None:
            pool.record(event)
        else:
            self._call("aclrtRecordEvent", event, stream)

    def finish(self, event: Handle, stream: Handle) -> None:
        self._turns[event] = self._pools[stream].finish(event)

    def wait(self, stream: Handle, event: Handle) -> None:
        pool = self._pools.get(stream)
        if pool is not None:
            pool.wait(event)
        else:
            self._call("aclrtStreamWaitEvent", stream, event)

    def is_over(self, event: Handle) -> bool:
        turn = self._turns.get(event)
        if turn is None:
            return is_recorded(self._acl, event)
        if not turn.pool.settle(turn):
            return False
        _raise_failed(turn)
        return True

    def wait_host(self, event: Handle) -> None:
        if event in self._timed:
            while not self.is_over(event):
                time.sleep(_PAUSE)  # aclrtSynchronizeEvent takes a core while it waits, and nothing signals the event
            return
        turn = self._turns.get(event)
        if turn is None:
            self._call("aclrtSynchronizeEvent", event)
            return
        turn.pool.wait_settled(turn)
        _raise_failed(turn)

    def seconds(self, begin: Handle, end: Handle) -> float:
        milliseconds = c_float()
        self._call("aclrtEventElapsedTime", byref(milliseconds), begin, end)
        return milliseconds.value / 1000

    # Copies.

    def peek(self, address: int, size: int) -> bytes:
        found = create_string_buffer(size)
        self._call("aclrtMemcpy", found, size, address, size, DEVICE_TO_HOST)
        return found.raw

    def poke(self, address: int, data: bytes) -> None:
        self._call("aclrtMemcpy", address, len(data), data, len(data), HOST_TO_DEVICE)

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, saves: bool, stream: Handle) -> None:
        real = self._pools[stream].begin()
        for first in range(0, len(sizes), _MOST):
            part = slice(first, first + _MOST)
            if not (self._batches and self._copy_together(targets[part], sources[part], sizes[part], saves, real)):
                self._copy_apart(targets[part], sources[part], sizes[part], saves, real)

    def _copy_together(
        self, targets: Addresses, sources: Addresses, sizes: Addresses, saves: bool, stream: Handle
    ) -> bool:
        """Return False if the device, or its driver, has no batches after all."""
        name, failed = "aclrtMemcpyBatchAsync", c_size_t(_NONE)
        lengths = sizes.ctypes.data
        arrays = (targets.ctypes.data, lengths, sources.ctypes.data, lengths, len(sizes))
        result = self._acl.result(
            name, *arrays, byref(self._attributes[saves]), byref(c_size_t(0)), 1, byref(failed), stream
        )
        if result == NOT_SUPPORTED:
            self._batches = False
            logger.warning("%s; copies go one by one, which costs the host more", self._acl.error(name, result))
            return False
        if result:
            error = self._acl.error(name, result)
            if failed.value < len(sizes):
                raise CopyError(f"{error}; piece {failed.value} of {len(sizes)}")
            raise error
        return True

    def _copy_apart(
        self, targets: Addresses, sources: Addresses, sizes: Addresses, saves: bool, stream: Handle
    ) -> None:
        call, kind = self._call, DEVICE_TO_HOST if saves else HOST_TO_DEVICE
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            call("aclrtMemcpyAsync", target, size, source, size, kind, stream)

    def _register(self, address: int, size: int, flags: int) -> None:
        if self._torch_register is not None:
            self._check("npuHostRegister", self._torch_register.register(address, size, flags))
        elif self._acl.has("aclrtHostRegisterV2"):
            self._call("aclrtHostRegisterV2", address, size, flags)
        else:
            raise CopyError("this CANN has no aclrtHostRegisterV2")

    def _check(self, name: str, result: int) -> None:
        if result:
            raise self._acl.error(name, result)

    def _location(self, address: int) -> int:
        """Return the device's number in batches: they compare it with that of each address."""
        if self._acl.has("aclrtPointerGetAttributes"):
            found = PointerAttributes()
            result = self._acl.result("aclrtPointerGetAttributes", address, byref(found))
            if not result and found.location.type == DEVICE:
                return int(found.location.id)
        return self._device


def _raise_failed(turn: StreamTurn) -> None:
    if turn.error:
        raise CopyError(f"a copy failed on the device, or one queued beside it: {turn.error}")
