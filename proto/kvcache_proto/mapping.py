"""Map a file such that huge pages can be used: the kernel does not align the mapping of a tmpfs by itself."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

HUGE_PAGE = 2 << 20  # on x86-64, and on aarch64 with pages of 4 KiB

_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_file(descriptor: int, size: int) -> memoryview:
    """Return `size` bytes of the file, shared and writable, at a multiple of HUGE_PAGE if possible.

    The mapping exists as long as anything refers to the view; `descriptor` may be closed. Raises OSError if the kernel
    refuses, or if the file is shorter.
    """
    if size <= 0 or os.fstat(descriptor).st_size < size:
        raise OSError(0, f"a mapping of {size} bytes of a file of {os.fstat(descriptor).st_size}")
    address = _aligned(descriptor, size) or _map(None, size, mmap.MAP_SHARED, descriptor)
    array = (ctypes.c_ubyte * size).from_address(address)
    unmap = weakref.finalize(array, _libc.munmap, address, size)
    unmap.atexit = False  # type: ignore[misc]  # threads may use it to the very end
    return memoryview(array).cast("B")


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of a writable view."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))


def _aligned(descriptor: int, size: int) -> int:
    """Return the address of an aligned mapping; 0 if it is impossible, as on a hugetlbfs with larger pages."""
    reserved = size + HUGE_PAGE
    try:
        begin = _map(None, reserved, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    except OSError:
        return 0
    address = -(-begin // HUGE_PAGE) * HUGE_PAGE
    try:
        _map(address, size, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
    except OSError:
        _libc.munmap(begin, reserved)
        return 0
    end = -(-(address + size) // mmap.PAGESIZE) * mmap.PAGESIZE
    for part, length in ((begin, address - begin), (end, begin + reserved - end)):
        if length > 0:
            _libc.munmap(part, length)
    return address


def _map(
    address: int | None,
    size: int,
    flags: int,
    descriptor: int,
    protection: int = mmap.PROT_READ | mmap.PROT_WRITE,
) -> int:
    found = _libc.mmap(address, size, protection, flags, descriptor, 0)
    if found in (None, _FAILED):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(found)
