"""CANN's runtime calls that copies need, as declared in acl_rt.h, and nothing around them.

The library is the one that torch_npu has loaded. Each call checks its return code; each releases the GIL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int32, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any

from kvcache_client.devices import CopyError

NOT_SUPPORTED = 207000
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
RECORDED = 1  # status of an event
COMPLETE = 0  # status of a stream
HOST, DEVICE = 0, 1  # kinds of a location
EVENT_SYNC, EVENT_TIME_LINE = 0x1, 0x8
MAPPED, PINNED = 0x2, 0x1000_0000
RELAXED = 2  # ACL_MODEL_RI_CAPTURE_MODE_RELAXED
_MEANINGS = {
    107000: "invalid parameter",
    107001: "no such device",
    107002: "this thread has no context",
    107003: "a stream of another context",
    NOT_SUPPORTED: "not supported by this device or driver",
    207001: "out of memory, or more than the driver registers",
    507899: "internal error of the driver; of a registration: an address that is not page-aligned",
}
_LONGEST = 400  # characters of CANN's message, which may be pages long


class AclError(CopyError):
    """A call that failed: `call` and CANN's `result`."""

    def __init__(self, call: str, result: int, text: str) -> None:
        meaning = _MEANINGS.get(result)
        super().__init__(f"{call}: error {result}{f' ({meaning})' if meaning else ''}{f': {text}' if text else ''}")
        self.call, self.result = call, result


class Location(ctypes.Structure):
    """aclrtMemLocation."""

    _fields_ = (("id", c_uint32), ("type", c_int))


class BatchAttributes(ctypes.Structure):
    """aclrtMemcpyBatchAttr."""

    _fields_ = (("target", Location), ("source", Location), ("reserved", c_uint8 * 16))


class PointerAttributes(ctypes.Structure):
    """aclrtPtrAttributes, and room for additions of a later CANN."""

    _fields_ = (("location", Location), ("page_size", c_uint32), ("reserved", c_uint32 * 4), ("more", c_uint8 * 64))


_NEEDED: dict[str, tuple[Any, ...]] = {
    "aclrtSetDevice": (c_int32,),
    "aclrtGetDevice": (POINTER(c_int32),),
    "aclrtMallocHost": (POINTER(c_void_p), c_size_t),
    "aclrtFreeHost": (c_void_p,),
    "aclrtMemcpy": (c_void_p, c_size_t, c_void_p, c_size_t, c_int),
    "aclrtMemcpyAsync": (c_void_p, c_size_t, c_void_p, c_size_t, c_int, c_void_p),
    "aclrtCreateStreamWithConfig": (POINTER(c_void_p), c_uint32, c_uint32),
    "aclrtDestroyStream": (c_void_p,),
    "aclrtStreamQuery": (c_void_p, POINTER(c_int)),
    "aclrtStreamWaitEvent": (c_void_p, c_void_p),
    "aclrtSynchronizeStream": (c_void_p,),
    "aclrtCreateEventExWithFlag": (POINTER(c_void_p), c_uint32),
    "aclrtDestroyEvent": (c_void_p,),
    "aclrtRecordEvent": (c_void_p, c_void_p),
    "aclrtQueryEventStatus": (c_void_p, POINTER(c_int)),
    "aclrtSynchronizeEvent": (c_void_p,),
    "aclrtEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
}
_LATER: dict[str, tuple[Any, ...]] = {
    "aclrtHostRegisterV2": (c_void_p, c_uint64, c_uint32),
    "aclrtHostUnregister": (c_void_p,),
    "aclrtPointerGetAttributes": (c_void_p, POINTER(PointerAttributes)),
    "aclmdlRICaptureThreadExchangeMode": (POINTER(c_int),),
    "aclrtMemcpyBatchAsync": (
        *(c_void_p,) * 4,  # targets, sizes of the targets, sources, sizes
        c_size_t,
        POINTER(BatchAttributes),
        POINTER(c_size_t),
        c_size_t,
        POINTER(c_size_t),
        c_void_p,
    ),
}


class Acl:
    """The library. Calls go by their names in the header."""

    def __init__(self) -> None:
        """Raises CopyError if there is none, or if it lacks something that copies need."""
        try:
            self._library = ctypes.CDLL("libascendcl.so")
        except OSError as error:
            raise CopyError(f"no CANN runtime: {error}") from None
        self._calls: dict[str, Callable[..., int]] = {}
        for name, types in (_NEEDED | _LATER).items():
            call = getattr(self._library, name, None)
            if call is not None:
                call.argtypes, call.restype = types, c_int
                self._calls[name] = call
            elif name in _NEEDED:
                raise CopyError(f"this CANN is too old for copies beside the model: it has no {name}")
        self._text: Callable[[], bytes | None] | None = getattr(self._library, "aclGetRecentErrMsg", None)
        if self._text is not None:
            self._library.aclGetRecentErrMsg.restype = c_char_p

    def has(self, name: str) -> bool:
        return name in self._calls

    def call(self, name: str, *arguments: Any) -> None:
        result = self._calls[name](*arguments)
        if result:
            raise self.error(name, result)

    def result(self, name: str, *arguments: Any) -> int:
        """Return the result of a call, for callers that handle some errors."""
        return self._calls[name](*arguments)

    def status(self, name: str, handle: int) -> int:
        """Return the status that the call stores in its second argument."""
        status = c_int()
        self.call(name, handle, byref(status))
        return status.value

    def made(self, name: str, *arguments: Any) -> int:
        """Return the handle or address that the call stores in its first argument."""
        made = c_void_p()
        self.call(name, byref(made), *arguments)
        return made.value or 0

    def error(self, name: str, result: int) -> AclError:
        """Return the error of a call. Only right after it, on its thread: CANN keeps the thread's last error."""
        text = self._text() if self._text is not None else None
        return AclError(name, result, " ".join((text or b"").decode(errors="replace").split())[:_LONGEST])
