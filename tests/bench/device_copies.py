"""Compare copies between a device's KV cache and the region with one contiguous copy of pinned memory, alternating.

    python tests/bench/device_copies.py [--device cuda|npu] [--fragments 16,32,64,512] [--layers 32,64] [--mib 1024]
                                        [--compress] [--json FILE]

The blocks are scattered over the cache, and the slots over the region. A layer is one tensor with separate keys and
values. Rates are those of the device, from the first byte to the last; `told` is the time from the submission until the
engine is told that the copy has ended. Also measured: a decode step of 8 sequences (with the matrices of an 8B model,
in a graph) beside continuous copies, the time that a GiB costs the engine's thread, bounce buffers, and page-locking.
With --compress, blocks are of random bfloat16 and compressed on their way; bytes are still those in the cache.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvcache_client import compression
from kvcache_client.address_ranges import Runs
from kvcache_client.devices import Device, Job, open_device
from kvcache_client.devices.cuda_driver import Driver
from kvcache_client.devices.layout import block_fragments
from kvcache_client.devices.npu_runtime import NpuRuntime
from kvcache_client.devices.runtime import Runtime
from kvcache_client.devices.self_test import check_copies
from kvcache_client.worker.kv_layout import describe_tensor

GIB = 1 << 30


class Machine:
    """The device: torch's module for its kind, and what copies use."""

    def __init__(self, kind: str) -> None:
        if kind == "npu":
            importlib.import_module("torch_npu")
        self.kind, self.torch = kind, getattr(torch, kind)
        self.torch.synchronize()  # makes the context

    def runtime(self, memory: Any) -> Runtime:
        if self.kind == "cuda":
            return Driver()
        return NpuRuntime(self.torch.current_device(), memory.data_ptr(), None)

    def graph(self) -> Any:
        return self.torch.CUDAGraph() if self.kind == "cuda" else self.torch.NPUGraph()


class Region:
    """A region without rows, as the daemon makes it: a file in memory, every page there."""

    def __init__(self, size: int) -> None:
        descriptor = os.memfd_create("region", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        self.buffer = memoryview(mmap.mmap(descriptor, size))
        self.array = np.frombuffer(self.buffer, np.uint8)
        self.address, self.bytes = int(self.array.ctypes.data), size
        self.present = size
        parts = [threading.Thread(target=self.array[at : at + GIB].fill, args=(7,)) for at in range(0, size, GIB)]
        for part in parts:
            part.start()
        for part in parts:
            part.join()


class Case:
    """A cache of twice `total` bytes and a device for it; jobs of `total` bytes."""

    runs: Runs | None = None

    def __init__(
        self, machine: Machine, region: Any, fragment: int, layers: int, total: int, compress: bool = False
    ) -> None:
        draw = np.random.default_rng(fragment + layers)
        raw = 2 * layers * fragment
        slot = compression.stored_bytes(raw) if compress else raw
        self.count, blocks = max(1, total // raw), max(2, 2 * total // raw)
        self.machine, self.total, self.region = machine, self.count * raw, region
        shape, kind = (2, blocks, fragment // 2), machine.kind
        self.tensors = [torch.empty(shape, dtype=torch.bfloat16, device=kind) for _ in range(layers)]
        noise = torch.randn(shape, dtype=torch.bfloat16)
        for tensor in self.tensors:
            tensor.copy_(noise)
        machine.torch.synchronize()
        fragments = block_fragments(map(describe_tensor, self.tensors), blocks, raw)
        begin = time.perf_counter()
        self.device: Device = open_device(kind, fragments, blocks, self.tensors, compress=compress)
        self.opened = time.perf_counter() - begin
        check_copies(self.device, fragments, blocks, compress=compress)
        self.checked = time.perf_counter() - begin - self.opened
        self.blocks = draw.permutation(blocks)[: self.count].astype(np.int64)
        self.slots = draw.permutation(region.bytes // slot)[: self.count].astype(np.int64) * slot

    def register(self) -> float:
        begin = time.perf_counter()
        self.device.register(self.region)
        while not self.device.registered()[0]:
            time.sleep(0.001)  # a device has no event for the end of a registration
        return time.perf_counter() - begin

    def copy(self, saves: bool) -> tuple[float, float, float]:
        """Return the seconds on the device, those until the end is told, and those of the submission."""
        ended = threading.Event()
        job = Job(self.region, self.blocks, self.slots, lambda job: ended.set(), self.runs)
        begin = time.perf_counter()
        (self.device.save if saves else self.device.load)(job)
        submitted = time.perf_counter() - begin
        ended.wait()
        assert not job.error, job.error
        return job.seconds, time.perf_counter() - begin, submitted

    def close(self) -> None:
        self.device.close()
        self.tensors.clear()
        self.machine.torch.empty_cache()


class Limit:
    """One contiguous copy of memory that the runtime itself has pinned."""

    def __init__(self, machine: Machine, total: int) -> None:
        self.memory = torch.empty(total, dtype=torch.uint8, device=machine.kind)
        self.runtime = machine.runtime(self.memory)
        self.host = self.runtime.allocate_host(total)
        self.stream, self.end = self.runtime.create_stream(), self.runtime.create_event()

    def copy(self, saves: bool, total: int) -> float:
        one = [np.array([value], np.uint64) for value in (self.host, self.memory.data_ptr(), total)]
        begin = time.perf_counter()
        self.runtime.copy_batch(*(one[:2] if saves else one[1::-1]), one[2], saves, self.stream)
        self.runtime.finish(self.end, self.stream)
        self.runtime.wait_host(self.end)
        return time.perf_counter() - begin


class Decode:
    """A step of 8 sequences through the matrices of an 8B model, captured once; with `copies`, those of a few bytes
    that an engine's step makes: what to compute, and what was found."""

    def __init__(self, machine: Machine, layers: int = 32) -> None:
        shapes = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
        make: Callable[..., Any] = torch.randn
        weights = [[make(*s, device=machine.kind, dtype=torch.bfloat16) * 0.01 for s in shapes] for _ in range(layers)]
        x = make(8, 4096, device=machine.kind, dtype=torch.bfloat16)

        def step() -> Any:
            y = x
            for qkv, out, up, down in weights:
                y = y + (y @ qkv)[:, :4096] @ out
                both = y @ up
                y = y + (both[:, :14336] * both[:, 14336:]) @ down
            return y

        self.copies = False
        self.inputs = [torch.zeros(64, dtype=torch.int32).pin_memory() for _ in range(6)]
        self.taken = [torch.zeros(64, dtype=torch.int32, device=machine.kind) for _ in self.inputs]
        self.answer = torch.zeros(64, dtype=torch.int32).pin_memory()
        on = self.on = machine.torch
        self.keep, self.stream = (weights, x), on.Stream()
        with on.stream(self.stream):
            step()
            on.synchronize()
            self.graph = machine.graph()
            with on.graph(self.graph, stream=self.stream):
                step()

    def milliseconds(self, steps: int = 80) -> float:
        begin, end = (self.on.Event(enable_timing=True) for _ in range(2))
        with self.on.stream(self.stream):
            self.graph.replay()
            begin.record()
            for _ in range(steps):
                self._step()
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) / steps

    def _step(self) -> None:
        if self.copies:
            for taken, given in zip(self.taken, self.inputs, strict=True):
                taken.copy_(given, non_blocking=True)
        self.graph.replay()
        if self.copies:
            self.answer.copy_(self.taken[0], non_blocking=True)


def beside(case: Case, decode: Decode, saves: bool, rounds: int) -> tuple[float, float]:
    """Return milliseconds a step while copies go on, and their GB/s meanwhile."""
    stop, moved = threading.Event(), [0]

    def pump() -> None:
        on = case.machine.torch
        on.set_device(0)
        free = threading.Semaphore(3)

        def ended(job: Job) -> None:
            moved[0] += case.total
            free.release()

        with on.stream(on.Stream()):
            while not stop.is_set():
                free.acquire()
                job = Job(case.region, case.blocks, case.slots, ended)
                (case.device.save if saves else case.device.load)(job)

    thread = threading.Thread(target=pump)
    thread.start()
    time.sleep(0.2)  # until copies run evenly: their beginning is not what is measured
    before, begin = moved[0], time.perf_counter()
    found = statistics.median(decode.milliseconds() for _ in range(rounds))
    rate = (moved[0] - before) / (time.perf_counter() - begin) / 1e9
    stop.set()
    thread.join()
    assert case.device.drain(60)
    return found, rate


def measure(
    machine: Machine, fragments: list[int], layers: list[int], total: int, rounds: int, compress: bool
) -> dict[str, Any]:
    region, limit, on = Region(total + total // 2 + GIB), Limit(machine, total), machine.torch
    rows, costs = [], {}
    free = on.mem_get_info()[0]
    for number, (fragment, count) in enumerate((f, n) for f in fragments for n in layers):
        case = Case(machine, region, fragment << 10, count, total, compress)
        if not number:
            costs = {"open_seconds": case.opened, "canary_seconds": case.checked}
            for name, saves in (("ring_save_gbs", True), ("ring_load_gbs", False)):
                # Not registered yet: bounce buffers. The second job finds them allocated.
                case.copy(saves)
                costs[name] = case.total / case.copy(saves)[1] / 1e9
            free = on.mem_get_info()[0]
            costs["register_seconds_a_gib"] = case.register() / (region.bytes / GIB)
            costs["register_device_mib_a_gib"] = (free - on.mem_get_info()[0]) / 2**20 / (region.bytes / GIB)
        else:
            case.register()
        for saves in (True, False):
            pairs = [(case.copy(saves), limit.copy(saves, case.total)) for _ in range(rounds + 1)][1:]
            ours = case.total / statistics.median(seconds[0] for seconds, _ in pairs) / 1e9
            theirs = case.total / statistics.median(seconds for _, seconds in pairs) / 1e9
            told = statistics.median(seconds[1] - seconds[0] for seconds, _ in pairs)
            spread = [case.total / seconds[0] / 1e9 for seconds, _ in pairs]
            rows.append(
                {
                    "way": "save" if saves else "load",
                    "fragment_kib": fragment,
                    "layers": count,
                    "gbs": ours,
                    "gbs_low": min(spread),
                    "gbs_high": max(spread),
                    "limit_gbs": theirs,
                    "ratio": ours / theirs,
                    "submit_ms_a_gib": statistics.median(o[2] for o, _ in pairs) * 1e3 / (case.total / GIB),
                    "told_ms": told * 1e3,
                }
            )
        case.close()
    del limit
    return {"device": on.get_device_name(), "torch": torch.__version__, "copies": rows, "costs": costs}


def measure_decode(
    machine: Machine, fragments: list[int], total: int, rounds: int, compress: bool
) -> list[dict[str, Any]]:
    region, decode, rows = Region(total + total // 2 + GIB), Decode(machine), []
    for fragment in fragments:
        case = Case(machine, region, fragment << 10, 32, total, compress)
        case.register()
        for saves, decode.copies in itertools.product((True, False), (False, True)):
            decode.milliseconds()
            alone = statistics.median(decode.milliseconds() for _ in range(rounds))
            found, rate = beside(case, decode, saves, rounds)
            again = statistics.median(decode.milliseconds() for _ in range(rounds))
            base = (alone + again) / 2
            way = "save" if saves else "load"
            rows.append(
                {
                    "way": way,
                    "with_copies": decode.copies,
                    "fragment_kib": fragment,
                    "alone_ms": base,
                    "ms": found,
                    "slower": found / base - 1,
                    "gbs": rate,
                }
            )
        case.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "npu"], default="cuda")
    parser.add_argument("--fragments", default="16,32,64,512", help="KiB")
    parser.add_argument("--layers", default="32,64")
    parser.add_argument("--mib", type=int, default=1024, help="MiB per job")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-decode", action="store_true")
    parser.add_argument("--compress", action="store_true")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    fragments, layers = ([int(n) for n in text.split(",")] for text in (options.fragments, options.layers))
    total = options.mib << 20
    machine = Machine(options.device)
    found = measure(machine, fragments, layers, total, options.rounds, options.compress)
    found["decode"] = [] if options.no_decode else measure_decode(machine, fragments, total, 3, options.compress)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    print(f"{found['device']}, torch {found['torch']}, jobs of {options.mib} MiB, medians of {options.rounds}")
    print("  way   fragment layers   GB/s (low..high)      limit  of it   submit, ms a GiB   told, ms")
    for r in found["copies"]:
        spread = f"{r['gbs']:5.2f} ({r['gbs_low']:5.2f}..{r['gbs_high']:5.2f})"
        print(
            f"  {r['way']}  {r['fragment_kib']:4d} KiB   {r['layers']:4d}   {spread:20s}  {r['limit_gbs']:5.2f}"
            f"  {r['ratio']:6.1%}  {r['submit_ms_a_gib']:5.2f}              {r['told_ms']:5.2f}"
        )
    for r in found["decode"]:
        print(
            f"  decode{' that copies' if r['with_copies'] else ''} beside {r['way']}s of {r['fragment_kib']:4d} KiB:"
            f" {r['ms']:.3f} ms a step,"
            f" {r['alone_ms']:.3f} alone, {r['slower']:+.1%}, copies at {r['gbs']:.1f} GB/s"
        )
    print("  " + ", ".join(f"{name} {value:.3f}" for name, value in found["costs"].items()))


if __name__ == "__main__":
    main()
