"""Copies between real tensors and a region: every byte arrives, nothing beside it is touched."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcache_client.devices import Job, open_device
from kvcache_client.devices.cpu import CpuDevice
from kvcache_client.layout import block_fragments, runs
from kvcache_client.worker import _describe

torch = pytest.importorskip("torch")

BLOCKS, LAYERS = 24, 5
TOKENS, HEADS, DIM = 32, 4, 128  # a page of 64 KiB in float32


def shared_buffer() -> list[Any]:
    """Layers outermost in one allocation, as vLLM 0.32 makes it: evenly spaced fragments."""
    whole = torch.empty(LAYERS, BLOCKS, HEADS, TOKENS, DIM, dtype=torch.float32)
    return list(whole)


def apart() -> list[Any]:
    """A tensor a layer, keys and values apart: every fragment on its own."""
    return [torch.empty(2, BLOCKS, TOKENS, HEADS, DIM // 2, dtype=torch.float32) for _ in range(LAYERS)]


def packed() -> list[Any]:
    """Blocks outermost: one fragment a block."""
    whole = torch.empty(BLOCKS, LAYERS, HEADS, TOKENS, DIM, dtype=torch.float32)
    return [whole[:, layer] for layer in range(LAYERS)]


PAGE = TOKENS * HEADS * DIM * 4
SLOT = LAYERS * PAGE
GAP = 192  # between slots lies what a copy must leave alone
SLOTS = 40


class Bench:
    def __init__(self, tensors: list[Any]) -> None:
        self.tensors = tensors
        for tensor in tensors:
            tensor.copy_(torch.randint(-(2**31), 2**31 - 1, tensor.shape, dtype=torch.int32).view(torch.float32))
        fragments = block_fragments(map(_describe, tensors), BLOCKS, SLOT)
        self.device = CpuDevice(runs(fragments), BLOCKS, tensors)
        self.memory = np.full(SLOTS * (SLOT + GAP), 0xA5, np.uint8)
        self.region: Any = SimpleNamespace(
            id=b"r" * 16, buffer=memoryview(self.memory), address=self.memory.ctypes.data, bytes=self.memory.size
        )
        self.device.register(self.region)
        self.ended: list[Job] = []

    def job(self, blocks: list[int], slots: list[int]) -> Job:
        offsets = np.array(slots, np.int64) * (SLOT + GAP)
        return Job(self.region, np.array(blocks, np.int64), offsets, self.ended.append)

    def block(self, number: int) -> bytes:
        """The bytes of a device block, in a slot's order, by torch's own means."""
        axis = 1 if self.tensors[0].shape[0] == 2 else 0
        return b"".join(tensor.select(axis, number).contiguous().numpy().tobytes() for tensor in self.tensors)

    def slot(self, number: int) -> bytes:
        begin = number * (SLOT + GAP)
        return self.memory[begin : begin + SLOT].tobytes()

    def gaps_are_whole(self) -> bool:
        return bool((self.memory.reshape(SLOTS, SLOT + GAP)[:, SLOT:] == 0xA5).all())


@pytest.fixture(params=[shared_buffer, apart, packed])
def bench(request: pytest.FixtureRequest) -> Any:
    made = Bench(request.param())
    yield made
    made.device.close()


def test_saves_and_loads_keep_every_byte(bench: Bench) -> None:
    before = [bench.block(number) for number in range(BLOCKS)]
    bench.device.save(bench.job([3, 0, 23], [7, 8, 39]))
    assert bench.device.drain(30)
    assert [bench.slot(slot) for slot in (7, 8, 39)] == [before[3], before[0], before[23]]
    untouched = set(range(SLOTS)) - {7, 8, 39}
    assert all(bench.slot(slot) == b"\xa5" * SLOT for slot in untouched)
    bench.device.load(bench.job([11, 12, 13], [39, 7, 8]))
    assert bench.device.drain(30)
    assert bench.gaps_are_whole()
    after = [bench.block(number) for number in range(BLOCKS)]
    assert after == [{11: before[23], 12: before[3], 13: before[0]}.get(n, before[n]) for n in range(BLOCKS)]
    assert [job.error for job in bench.ended] == ["", ""]


def test_many_jobs_in_flight_both_ways(bench: Bench) -> None:
    before = [bench.block(number) for number in range(BLOCKS)]
    for slot in range(BLOCKS):
        bench.memory[slot * (SLOT + GAP) : slot * (SLOT + GAP) + SLOT] = np.frombuffer(before[slot], np.uint8)
    for number in range(12):
        bench.device.save(bench.job([number], [24 + number]))
        bench.device.load(bench.job([23 - number], [number]))
    assert bench.device.drain(30)
    assert len(bench.ended) == 24
    assert [bench.slot(24 + number) for number in range(12)] == before[:12]
    assert [bench.block(23 - number) for number in range(12)] == before[:12]
    assert bench.gaps_are_whole()


def test_the_fence_waits_for_saves_of_its_blocks(bench: Bench) -> None:
    gate = threading.Event()
    first = bench.job([0], [0])
    first.ended = lambda job: gate.wait(30) and None  # holds the copying thread after the first job
    bench.device.save(first)
    before = bench.block(1)
    bench.device.save(bench.job([1, 2], [1, 2]))
    bench.device.fence([5, 6])  # nobody reads these: returns at once
    threading.Timer(0.05, gate.set).start()
    bench.device.fence([9, 1])
    assert bench.slot(1) == before
    bench.device.fence([0, 1, 2])


def test_a_block_saved_twice_is_fenced_until_the_second_save(bench: Bench) -> None:
    for slot in range(6):
        bench.device.save(bench.job([4], [slot]))
    bench.device.fence([4])
    assert [bench.slot(slot) for slot in range(6)] == [bench.block(4)] * 6


def test_a_place_outside_of_the_region_is_an_error_and_the_device_goes_on(bench: Bench) -> None:
    bad = bench.job([1], [SLOTS])
    bench.device.load(bad)
    low = bench.job([1], [0])
    low.offsets = np.array([-64], np.int64)
    bench.device.save(low)
    bench.device.save(bench.job([1], [5]))
    assert bench.device.drain(30)
    assert "of a region of" in bad.error
    assert "of a region of" in low.error
    assert bench.slot(5) == bench.block(1)


def test_close_ends_every_job_once(bench: Bench) -> None:
    gate = threading.Event()
    first = bench.job([0], [0])
    first.ended = lambda job: gate.wait(30) and None
    bench.device.save(first)
    waiting = [bench.job([number], [number]) for number in range(1, 6)]
    for job in waiting:
        bench.device.save(job)
    threading.Timer(0.05, gate.set).start()
    bench.device.close()
    late = bench.job([7], [7])
    bench.device.save(late)
    assert sorted(map(id, bench.ended)) == sorted(map(id, [*waiting, late]))
    for job in [*waiting, late]:
        assert job.error or bench.slot(int(job.blocks[0])) == bench.block(int(job.blocks[0]))
    assert late.error == "the device is closed"
    bench.device.fence(range(BLOCKS))  # nothing reads any more


def test_kinds_without_a_module_are_named() -> None:
    with pytest.raises(NotImplementedError, match=r"'cuda'.*'cpu' alone"):
        open_device("cuda", [], 0)
