"""The CUDA driver's calls that copies need, as declared in the header, and nothing around them.

The driver library comes with the driver, whatever runtime the engine brings. Each call checks its return code; each
releases the GIL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

from kvcache_client.devices import CopyError
from kvcache_client.devices.runtime import Addresses, Handle

NOT_READY = 600
_PORTABLE = 1  # page-locked for every context of this process
_NON_BLOCKING = 1  # a stream that the legacy default stream does not wait for
_BLOCKING_SYNC, _NO_TIMING = 1, 2  # an event whose waiter sleeps; one without a time
_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class DriverError(CopyError):
    """A call that failed: `call` and the driver's `result`."""

    def __init__(self, call: str, result: int, text: str) -> None:
        super().__init__(f"{call}: {text}")
        self.call, self.result = call, result


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", c_ubyte * 64),)


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes_v1."""

    _fields_ = (("order", c_int), ("source", _Location), ("target", _Location), ("flags", c_uint))


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpy": (c_uint64, c_uint64, c_size_t),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuModuleLoadData": (POINTER(c_void_p), c_void_p),
    "cuModuleUnload": (c_void_p,),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuIpcGetMemHandle": (POINTER(_Handle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), _Handle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p),
}
_BATCH = (c_void_p, c_void_p, c_void_p, c_size_t, POINTER(_Attributes), POINTER(c_size_t), c_size_t)


class Driver:
    """A Runtime: the library, and the context that was current when this was made, that of the engine's tensors."""

    def __init__(self) -> None:
        """Raises CopyError if there is no driver or no current context."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CopyError(f"no CUDA driver: {error}") from None
        self._get_error_string = self._library.cuGetErrorString
        self._get_error_string.argtypes = (c_int, POINTER(c_char_p))
        self._calls = {name: self._bind(name, *types) for name, types in _SIGNATURES.items()}
        self._batch = self._bind_batch()
        self._attributes, self._from_first = _Attributes(_IN_STREAM_ORDER), c_size_t(0)
        self._call("cuInit", 0)
        self._context = self._made("cuCtxGetCurrent")
        if not self._context:
            raise CopyError("this thread has no CUDA context")

    def use(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def enter_thread(self) -> None:
        self.use()
        self._call("cuThreadExchangeStreamCaptureMode", byref(c_int(_RELAXED)))

    # Host memory.

    def register(self, address: int, size: int) -> None:
        self._call("cuMemHostRegister_v2", address, size, _PORTABLE)

    def unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def allocate_host(self, size: int) -> int:
        return self._made("cuMemHostAlloc", size, _PORTABLE)

    def free_host(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    # Streams and events.

    def create_stream(self) -> Handle:
        return self._made("cuStreamCreate", _NON_BLOCKING)

    def destroy_stream(self, stream: Handle) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def synchronize(self, stream: Handle) -> None:
        self._call("cuStreamSynchronize", stream)

    def create_event(self, timed: bool = False) -> Handle:
        return self._made("cuEventCreate", _BLOCKING_SYNC if timed else _NO_TIMING)

    def destroy_event(self, event: Handle) -> None:
        self._call("cuEventDestroy_v2", event)

    def record(self, event: Handle, stream: Handle) -> None:
        self._call("cuEventRecord", event, stream)

    def finish(self, event: Handle, stream: Handle) -> None:
        """Here every call after a failed copy fails, calls on the event included."""
        self.record(event, stream)

    def wait(self, stream: Handle, event: Handle) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    def is_over(self, event: Handle) -> bool:
        """Raises DriverError if work before the event has failed."""
        result = self._calls["cuEventQuery"](event)
        if result == NOT_READY:
            return False
        self._check("cuEventQuery", result)
        return True

    def wait_host(self, event: Handle) -> None:
        self._call("cuEventSynchronize", event)

    def seconds(self, begin: Handle, end: Handle) -> float:
        milliseconds = c_float()
        self._call("cuEventElapsedTime", byref(milliseconds), begin, end)
        return milliseconds.value / 1000

    # Copies. Either side may be device memory or page-locked host memory, depending on the addresses.

    def peek(self, address: int, size: int) -> bytes:
        found = ctypes.create_string_buffer(size)
        self._call("cuMemcpy", ctypes.addressof(found), address, size)
        return found.raw

    def poke(self, address: int, data: bytes) -> None:
        held = ctypes.create_string_buffer(data, len(data))
        self._call("cuMemcpy", address, ctypes.addressof(held), len(data))

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, saves: bool, stream: Handle) -> None:
        """Copy each of n pieces, in no particular order. The addresses decide the direction, not `saves`."""
        if self._batch is not None and len(sizes) > 1:
            self._check("cuMemcpyBatchAsync", self._batch(targets, sources, sizes, stream))
            return
        copy = self._calls["cuMemcpyAsync"]
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self._check("cuMemcpyAsync", copy(target, source, size, stream))

    # Device memory of other processes.

    def allocation_of(self, address: int) -> int:
        """Return where the allocation around `address` begins."""
        base, size = c_uint64(), c_size_t()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
        return base.value

    def share_memory(self, base: int) -> bytes:
        """Return the handle by which other processes of this host open an allocation."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", byref(handle), base)
        return bytes(handle.reserved)

    def open_memory(self, handle: bytes) -> int:
        """Return the address of another process's allocation, which may be on another device."""
        base = c_uint64()
        opened = _Handle((c_ubyte * 64).from_buffer_copy(handle))
        self._call("cuIpcOpenMemHandle_v2", byref(base), opened, _PEER_ACCESS)
        return base.value

    def close_memory(self, base: int) -> None:
        self._call("cuIpcCloseMemHandle", base)

    # Kernels.

    def load_module(self, image: bytes) -> Handle:
        return self._made("cuModuleLoadData", image)

    def unload_module(self, module: Handle) -> None:
        self._call("cuModuleUnload", module)

    def function(self, module: Handle, name: str) -> Handle:
        return self._made("cuModuleGetFunction", module, name.encode())

    def launch(self, function: Handle, grid: int, threads: int, stream: Handle, arguments: Any) -> None:
        """`arguments` is a C array of the addresses of the arguments; they are read before this returns."""
        self._call("cuLaunchKernel", function, grid, 1, 1, threads, 1, 1, 0, stream, arguments, None)

    # Implementation.

    def _bind(self, name: str, *types: Any) -> Callable[..., int]:
        try:
            call = self._library[name]
        except AttributeError:
            raise CopyError(f"the CUDA driver is too old: it has no {name}") from None
        call.argtypes, call.restype = types, c_int
        return call

    def _bind_batch(self) -> Callable[[Addresses, Addresses, Addresses, Handle], int] | None:
        """Return the call for many copies: CUDA 12.8 and later. In CUDA 13 it lost its parameter `failIdx`."""
        before: tuple[Any, ...]
        if hasattr(self._library, "cuMemcpyBatchAsync_v2"):
            call, before = self._bind("cuMemcpyBatchAsync_v2", *_BATCH, c_void_p), ()
        elif hasattr(self._library, "cuMemcpyBatchAsync"):
            call = self._bind("cuMemcpyBatchAsync", *_BATCH, POINTER(c_size_t), c_void_p)
            before = (byref(c_size_t()),)
        else:
            return None

        def batch(targets: Addresses, sources: Addresses, sizes: Addresses, stream: Handle) -> int:
            arrays = (targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes))
            return call(*arrays, byref(self._attributes), byref(self._from_first), 1, *before, stream)

        return batch

    def _made(self, name: str, *arguments: Any) -> int:
        made = c_void_p()
        self._call(name, byref(made), *arguments)
        return made.value or 0

    def _call(self, name: str, *arguments: Any) -> None:
        result = self._calls[name](*arguments)
        if result:
            self._check(name, result)

    def _check(self, name: str, result: int) -> None:
        if result:
            text = c_char_p()
            self._get_error_string(result, byref(text))
            raise DriverError(name, result, f"{text.value.decode() if text.value else 'unknown error'} ({result})")
