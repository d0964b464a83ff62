"""KV cache on an Ascend NPU: batches of copies between its memory and the region, directly through CANN."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from typing import Any

import torch

from kvcache_client.devices import CopyError, Unsupported
from kvcache_client.devices.copy_paths import Path, Straight
from kvcache_client.devices.layout import Fragment, sections
from kvcache_client.devices.npu_runtime import HostRegister, NpuRuntime
from kvcache_client.devices.runtime import Handle
from kvcache_client.devices.streams import Paths, StreamDevice
from kvcache_client.devices.tuning import Tuning, read_tuning

logger = logging.getLogger("kvcache_client.devices")

# A stream of a 910B takes 2,048 - 35 tasks, and queueing more waits for the device; half is left to events.
_TASKS = 1024
# How long a call keeps the driver busy has not been measured, and some drivers keep a list of registered memory.
_NORMAL = Tuning(register_chunk=1 << 30)
# NC1HWC0, FRACTAL_Z, FRACTAL_NZ, NDC1HWC0, FRACTAL_Z_3D
_PRIVATE = {3, 4, 29, 32, 33}


def open_npu(
    fragments: Sequence[Fragment], num_blocks: int, keep: Sequence[Any], ends: Sequence[int] = ()
) -> StreamDevice:
    """Return the device of the tensors `keep`. Raises the errors of `open_device`."""
    try:
        import torch_npu  # gives torch its `npu`
    except (ImportError, OSError, RuntimeError) as error:
        raise CopyError(f"torch_npu cannot be imported: {error}") from None
    npu: Any = getattr(torch, "npu")  # noqa: B009
    for tensor in keep:
        layout = int(torch_npu.get_npu_format(tensor))
        if layout in _PRIVATE:
            raise Unsupported(f"KV cache in NPU format {layout}, whose bytes do not lie as its strides say")
    tuning, device = read_tuning(normal=_NORMAL), keep[0].device
    parts = sections(fragments, ends)
    slot = parts[0].bytes
    refused = "" if tuning.npu_register else _refusal(os.uname().release)
    runtime = NpuRuntime(device.index, fragments[0].pointer, _host_register(npu), refused)
    logger.info("%s: %s", device, runtime.describe())

    def make_path(saves: bool) -> Path:
        return Straight(runtime, parts, saves)

    def compute() -> Handle:
        # Read each time: reading makes torch_npu pass its whole host queue to the device. With an earlier handle,
        # copies might run ahead of a wait that the engine has queued.
        return int(npu.current_stream(device).npu_stream)

    def synchronize() -> None:
        npu.synchronize(device)

    room = _TASKS // len(fragments)
    return StreamDevice(runtime, compute, synchronize, Paths(make_path, keep), slot, num_blocks, tuning, room)


def early_runtime() -> tuple[NpuRuntime, int]:
    """Return a runtime that only page-locks, on this thread's NPU, and the bytes of a piece. Raises CopyError."""
    npu: Any = getattr(torch, "npu")  # noqa: B009
    tuning = read_tuning(normal=_NORMAL)
    some = torch.empty(1, dtype=torch.uint8, device=f"npu:{npu.current_device()}")
    refused = "" if tuning.npu_register else _refusal(os.uname().release)
    return NpuRuntime(some.device.index, some.data_ptr(), _host_register(npu), refused), tuning.register_chunk


def _host_register(npu: Any) -> HostRegister | None:
    """Return torch_npu's way to page-lock memory, if this version has one."""
    try:
        runtime = npu.npurt()
        return HostRegister(runtime.npuHostRegister, runtime.npuHostUnregister)
    except (AttributeError, RuntimeError):
        return None


def _refusal(release: str) -> str:
    """Return the reason that this kernel allows only CANN's own memory to be page-locked, "" if it allows any.

    "With kernel 5.10 or older, memory that is not page-locked leads to exceptions, so that it must be allocated by
    aclrtMallocHost", says CANN's reference of aclrtHostRegisterV2.
    """
    found = re.match(r"(\d+)\.(\d+)", release)
    if found is None or (int(found[1]), int(found[2])) > (5, 10):
        return ""
    return (
        f"CANN page-locks memory that it has not allocated safely only under kernels after 5.10, not {release}; "
        "KVCACHE_NPU_REGISTER=1 does it all the same"
    )
