"""KV cache on an Ascend NPU: batches of copies between its memory and the region, straight through CANN."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from kvcache_client.devices import CopyError
from kvcache_client.devices.npu_runtime import HostRegister, NpuRuntime
from kvcache_client.devices.paths import Path, Straight
from kvcache_client.devices.runtime import Handle
from kvcache_client.devices.streams import StreamDevice
from kvcache_client.devices.tuning import read_tuning
from kvcache_client.layout import Fragment, Run

logger = logging.getLogger("vllm.kvcache.device")

# A stream of a 910B takes 2,048 tasks less 35, and whoever queues more waits for the device; half is left to events.
_TASKS = 1024


def open_npu(runs: Sequence[Run], num_blocks: int, keep: Sequence[Any]) -> StreamDevice:
    """Return the device of the tensors `keep`. Raises as `open_device` does."""
    try:
        import torch_npu  # noqa: F401  # gives torch its `npu`
    except (ImportError, OSError, RuntimeError) as error:
        raise CopyError(f"torch_npu cannot be imported: {error}") from None
    npu: Any = getattr(torch, "npu")  # noqa: B009
    tuning, device = read_tuning(), keep[0].device
    fragments = [
        Fragment(run.pointer + number * run.step, run.stride, run.bytes) for run in runs for number in range(run.number)
    ]
    runtime = NpuRuntime(device.index, fragments[0].pointer, _host_register(npu))
    logger.info("%s: %s", device, runtime.describe())

    def make_path(saves: bool) -> Path:
        return Straight(runtime, fragments, saves)

    def compute() -> Handle:
        # Read anew each time: reading makes torch_npu hand all that it has queued on the host to the device. A handle
        # kept from before may be ahead of a wait that the engine has asked for.
        return int(npu.current_stream(device).npu_stream)

    def synchronize() -> None:
        npu.synchronize(device)

    slot = sum(fragment.bytes for fragment in fragments)
    room = _TASKS // len(fragments)
    return StreamDevice(runtime, compute, synchronize, make_path, slot, num_blocks, tuning, keep, room=room)


def _host_register(npu: Any) -> HostRegister | None:
    """Return torch_npu's way to page-lock memory, where this version has one."""
    try:
        runtime = npu.npurt()
        return HostRegister(runtime.npuHostRegister, runtime.npuHostUnregister)
    except (AttributeError, RuntimeError):
        return None
