"""Copies on each device of this host: a self-test, then the rate compared with that of a plain copy of as many
bytes."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import logging
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvcache_client.devices import CopyError, Device, Job, Scratch, Unsupported, open_device
from kvcache_client.devices.layout import Fragment, Tensor, block_fragments
from kvcache_client.devices.self_test import check_copies
from kvcache_proto.errors import ConfigError
from kvcache_tools.doctor.check_result import CheckResult, How

LAYERS, FRAGMENT = 32, 64 << 10  # keys and values apart: 4 MiB per block, as for 32 tokens of an 8B model
SLOT = 2 * LAYERS * FRAGMENT
ROUNDS = 5
SLOW = 0.7  # of the plain copy
PATIENCE = 60.0
DEVICES = ("cuda", "npu")
OTHERS = ("xpu", "hpu", "mtia")  # other devices that torch may find, declined by name

Plain = Callable[[bool], None]  # copies once: out of the cache's memory if True


class HostKit:
    """A device as its runtime presents it: here, host memory.

    Attributes:
        kind: the kind for `open_device`.
        name: the name of this device.
        label: the runtime's name for it.
        how: "simulated" if something stands in for the hardware.
        blocks: number of blocks of the cache to make.
    """

    kind = name = "cpu"
    how: How = "measured"
    blocks = 32

    def __init__(self) -> None:
        self.label = platform.machine()

    def allocate(self, size: int) -> tuple[Any, int]:
        """Return `size` bytes of the kind of memory that caches are in, with their address."""
        memory = np.zeros(size, np.uint8)
        return memory, int(memory.ctypes.data)

    def plain(self, size: int) -> Plain:
        """Return a function that copies `size` contiguous bytes by the best means of the runtime, and waits for
        them."""
        here, there = np.ones(size, np.uint8), np.ones(size, np.uint8)

        def copy(saves: bool) -> None:
            target, source = (there, here) if saves else (here, there)
            ctypes.memmove(target.ctypes.data, source.ctypes.data, size)

        return copy


class TorchKit:
    """The same for a device of torch."""

    blocks = 64

    def __init__(self, torch: Any, kind: str, index: int) -> None:
        self.kind, self.name, self.how = kind, f"{kind}:{index}", provenance(kind)
        self._torch, self._runtime = torch, getattr(torch, kind)
        self._runtime.set_device(index)
        self.label = str(self._runtime.get_device_name(index))

    def allocate(self, size: int) -> tuple[Any, int]:
        memory = self._torch.empty(size, dtype=self._torch.uint8, device=self.name)
        return memory, int(memory.data_ptr())

    def plain(self, size: int) -> Plain:
        device = self._torch.empty(size, dtype=self._torch.uint8, device=self.name)
        host = self._torch.zeros(size, dtype=self._torch.uint8).pin_memory()

        def copy(saves: bool) -> None:
            target, source = (host, device) if saves else (device, host)
            target.copy_(source, non_blocking=True)
            self._runtime.synchronize()

        return copy


Kit = HostKit | TorchKit


def noisy(size: int) -> Scratch:
    """Return memory that stands in for the daemon's region, its pages present and full of noise."""
    region = Scratch(size)
    region.words[:] = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    return region


def on_host() -> Iterator[CheckResult]:
    """Check copies on the CPU, where an engine's cache lies in host memory. Needs no torch."""
    yield from examine(HostKit())


def on_devices() -> Iterator[CheckResult]:
    """Check copies on every accelerator that torch finds."""
    if importlib.util.find_spec("torch") is None:
        for kind in DEVICES:
            yield CheckResult(kind, "untested", "torch is not installed here", _IN_ENGINE)
        return
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError, RuntimeError) as error:
        yield CheckResult("torch", "failed", f"import torch: {_first_line(error)}", "no engine starts with this either")
        return
    for kind in DEVICES:
        why_none, cure = _why_none(torch, kind)
        if why_none:
            yield CheckResult(kind, "untested", why_none, cure)
            continue
        for index in range(getattr(torch, kind).device_count()):
            yield from _on(torch, kind, index)
    for kind in OTHERS:
        runtime = getattr(torch, kind, None)
        if runtime is not None and runtime.is_available():
            try:
                open_device(kind, (), 0)
            except Unsupported as error:
                yield CheckResult(kind, "untested", str(error), _UNCACHED)


def examine(kit: Kit) -> Iterator[CheckResult]:
    """Open a small cache on the device and copy both ways. The self-test comes first."""
    print(f"copies on {kit.name}, {kit.label}", file=sys.stderr, flush=True)  # the last output if the process dies
    reasons = _Reasons()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(reasons)
            memory, address = kit.allocate(kit.blocks * SLOT)
            places = _places(address, kit.blocks)
            device = open_device(kit.kind, places, kit.blocks, keep=[memory])
            stack.callback(device.close)
            begin = time.perf_counter()
            check_copies(device, places, kit.blocks)
            seconds = time.perf_counter() - begin
            figure = f"{kit.label}: two blocks of {SLOT >> 20} MiB out and back, every byte as it was"
            yield CheckResult(f"{kit.name} self-test", "ok", figure, how=kit.how, values={"seconds": seconds})
            region = noisy(kit.blocks * SLOT)
            yield from _registration(kit, device, region, reasons)
            yield _copies(kit, device, region)
    except Unsupported as error:
        yield CheckResult(kit.name, "untested", str(error), _UNCACHED)
    except (CopyError, ConfigError) as error:
        yield CheckResult(f"{kit.name} self-test", "failed", str(error), _UNCACHED, kit.how)


_IN_ENGINE = "run this in the environment of an engine: `python -m kvcache_server doctor`"
_UNCACHED = "an engine on it runs, uncached"


def provenance(kind: str) -> How:
    """Return True if the runtime of `kind` drives hardware; one of the NPU's runtimes reports that it does not."""
    if kind == "npu":
        with contextlib.suppress(OSError):
            return "simulated" if hasattr(ctypes.CDLL("libascendcl.so"), "fake_acl_counter") else "measured"
    return "measured"


def _why_none(torch: Any, kind: str) -> tuple[str, str]:
    """Return the reason that this host has no device of `kind`, and the remedy, if any; nothing if it has one."""
    if kind == "npu":
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed here", ""
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError, RuntimeError) as error:
            return f"import torch_npu: {_first_line(error)}", "source CANN's set_env.sh first"
    runtime = getattr(torch, kind, None)
    if runtime is None or not runtime.is_available() or not runtime.device_count():
        return f"torch {torch.__version__} finds no device: torch.{kind}.is_available() is False", ""
    return "", ""


def _on(torch: Any, kind: str, index: int) -> Iterator[CheckResult]:
    try:
        yield from examine(TorchKit(torch, kind, index))
    except RuntimeError as error:  # torch's, with the runtime's message
        if "out of memory" in str(error):
            cure = "stop the engine that holds it, or leave more free (gpu_memory_utilization)"
            yield CheckResult(f"{kind}:{index}", "untested", "no memory of the device is free", cure)
        else:
            yield CheckResult(f"{kind}:{index}", "failed", _first_line(error), _UNCACHED, provenance(kind))
    getattr(torch, kind).empty_cache()


def _places(address: int, blocks: int) -> list[Fragment]:
    layer = 2 * blocks * FRAGMENT
    shape, strides = (2, blocks, FRAGMENT), (blocks * FRAGMENT, FRAGMENT, 1)
    tensors = (Tensor(address + number * layer, shape, strides, 1) for number in range(LAYERS))
    return block_fragments(tensors, blocks, SLOT)


def _registration(kit: Kit, device: Device, region: Scratch, reasons: _Reasons) -> Iterator[CheckResult]:
    begin = time.perf_counter()
    device.register(region)
    pause = threading.Event()
    while not device.registered()[0] and time.perf_counter() - begin < PATIENCE:
        pause.wait(0.001)
    seconds, (over, direct) = time.perf_counter() - begin, device.registered()
    if kit.kind == "cpu":
        return  # nothing to register for a copy from host memory to host memory
    name, a_gib = f"{kit.name} registration", seconds / (region.bytes / (1 << 30))
    values = {"direct_bytes": direct, "bytes": region.bytes, "seconds_a_gib": a_gib}
    if over and direct == region.bytes:
        yield CheckResult(name, "ok", f"direct, {a_gib:.2f} s a GiB", how=kit.how, values=values)
        return
    why = reasons.last or f"{direct:,} of {region.bytes:,} bytes direct after {seconds:.0f} s"
    cure = "raise the limit on locked memory (ulimit -l); else see what the device's driver logs"
    yield CheckResult(name, "slow", f"bounce buffers: {why}", cure, kit.how, values)


def _copies(kit: Kit, device: Device, region: Scratch) -> CheckResult:
    draw = np.random.default_rng(1)
    blocks, offsets = (draw.permutation(kit.blocks).astype(np.int64) * unit for unit in (1, SLOT))

    def copy(saves: bool) -> float:
        ended = threading.Event()
        job = Job(region, blocks, offsets, lambda job: ended.set())
        (device.save if saves else device.load)(job)
        if not ended.wait(PATIENCE):
            raise CopyError(f"a copy of {region.bytes:,} bytes has not ended after {PATIENCE:.0f} s")
        if job.error:
            raise CopyError(job.error)
        return job.seconds

    kept = region.words.copy()
    copy(saves=False)
    region.words[:] = 0
    copy(saves=True)
    wrong = int((region.words != kept).sum())
    name = f"{kit.name} copies"
    if wrong:
        cure = f"{_UNCACHED}; the self-test did not see this: please report it"
        return CheckResult(name, "failed", f"{wrong:,} of {region.bytes:,} bytes came back wrong", cure, kit.how)
    del kept
    plain = kit.plain(region.bytes)
    rates = {what: _rates(region.bytes, what == "save", copy, plain) for what in ("save", "load")}
    figure = ", ".join(
        f"{what} {ours / 1e9:.1f} GB/s ({ours / theirs:.0%} of one plain copy)"
        for what, (ours, theirs) in rates.items()
    )
    values: dict[str, float] = {}
    for what, (ours, theirs) in rates.items():
        values |= {f"{what}_gbs": ours / 1e9, f"{what}_plain_gbs": theirs / 1e9}
    # A simulation's time means nothing.
    slow = kit.how == "measured" and min(ours / theirs for ours, theirs in rates.values()) < SLOW
    cure = "look for what else keeps the cores or the bus busy, and at the lines above; then repeat" if slow else ""
    return CheckResult(name, "slow" if slow else "ok", figure, cure, kit.how, values)


def _rates(size: int, saves: bool, copy: Callable[[bool], float], plain: Plain) -> tuple[float, float]:
    """Return our rate and that of the plain copy in bytes per second, medians.

    They are measured in turns, so that a busy host affects both alike.
    """
    ours, theirs = [], []
    for _ in range(ROUNDS + 1):
        ours.append(copy(saves))
        begin = time.perf_counter()
        plain(saves)
        theirs.append(time.perf_counter() - begin)
    one, other = (size / max(statistics.median(seconds[1:]), 1e-9) for seconds in (ours, theirs))
    return one, other


class _Reasons(logging.Handler):
    """Keeps the reasons for which a device did less than it could, which it reports in the engine's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()

    def __enter__(self) -> None:
        logging.getLogger("kvcache_client").addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("kvcache_client").removeHandler(self)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
