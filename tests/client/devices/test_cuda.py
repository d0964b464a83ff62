"""What is CUDA's own: registrations that are refused, ways beside the usual one, graphs captured meanwhile."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rigs import BLOCKS, LAYOUTS, RIGS, Bench

from kvcache_client.devices import CopyError, open_device
from kvcache_client.devices.cuda_driver import Driver
from kvcache_client.devices.cuda_kernels import find_compiler

CHUNK = 1 << 20

pytestmark = pytest.mark.skipif(bool(RIGS["cuda"].unsupported_reason()), reason=RIGS["cuda"].unsupported_reason())


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KVCACHE_COPY_STAGE_MIB", "1")
    monkeypatch.setenv("KVCACHE_COPY_STAGED_BELOW_KIB", "1024")
    monkeypatch.setenv("KVCACHE_REGISTER_CHUNK_MIB", "1")
    return str(request.param)


@pytest.mark.parametrize("chunk", [0, 2], ids=["all", "the rest"])
def test_where_registration_is_refused_copies_take_the_ring(
    layout: str, chunk: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What somebody has page-locked already cannot be locked again."""
    caplog.set_level(logging.INFO, "kvcache_client.devices")
    bench = Bench(RIGS["cuda"], LAYOUTS[layout])
    driver = Driver()
    driver.register(bench.region.address + chunk * CHUNK, 4096)
    try:
        bench.register()
        assert bench.device.registered() == (True, chunk * CHUNK)
        lines = [record.getMessage() for record in caplog.records if "cannot be page-locked" in record.getMessage()]
        assert len(lines) == 1
        assert "small page-locked buffers" in lines[0]
        bench.round_trip()
    finally:
        bench.close()
        driver.unregister(bench.region.address + chunk * CHUNK)


def test_every_fragment_by_itself(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_COPY_STAGED_BELOW_KIB", "0")
    bench = Bench(RIGS["cuda"], LAYOUTS[layout])
    try:
        bench.round_trip()
        bench.register()
        bench.round_trip()
    finally:
        bench.close()


def test_a_graph_is_captured_while_the_region_is_registered() -> None:
    """Engines capture their graphs right after they have handed over the cache."""
    bench = Bench(RIGS["cuda"], LAYOUTS["blocks first"])
    x = torch.zeros(1 << 20, device="cuda")
    (x + 1).sum()
    torch.cuda.synchronize()
    graphs = []
    try:
        bench.device.register(bench.region)
        for _ in range(50):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                x += 1
            graphs.append(graph)
            bench.device.poll()
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
        assert x.eq(50).all()
        bench.register()
        bench.round_trip()
    finally:
        bench.close()


def test_a_graph_is_captured_while_copies_run() -> None:
    bench = Bench(RIGS["cuda"], LAYOUTS["blocks first"])
    x = torch.zeros(1 << 20, device="cuda")
    try:
        bench.register()
        before = bench.blocks()
        bench.rig.delay()
        bench.save(range(BLOCKS), range(BLOCKS))
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            x += 1
        bench.finish()
        graph.replay()
        torch.cuda.synchronize()
        assert x.eq(1).all()
        assert [bench.slot(number) for number in range(BLOCKS)] == before
    finally:
        bench.close()


def empty(bench: Bench) -> None:
    for number in range(BLOCKS):
        bench.fill(number, 0)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("name", ["mla", "padded", "kernel blocks", "odd"])
def test_blocks_come_from_another_process(name: str, parts: int) -> None:
    """Here from the same device."""
    command = [sys.executable, str(Path(__file__).parent / "other_rank.py"), name]
    bench = Bench(RIGS["cuda"], LAYOUTS[name])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            *theirs, shared = (bytes.fromhex(other.stdout.readline()) for _ in range(BLOCKS + 1))
            empty(bench)
            before, around = bench.blocks(), bench.around()
            assert before != theirs
            assert bench.device.share(1)
            bench.device.connect({7: [shared]})
            for first in range(parts):
                assert bench.device.pull(7, 0, np.arange(first, BLOCKS - 2, parts)) > 0
            torch.cuda.synchronize()
            assert bench.blocks() == theirs[:-2] + before[-2:]
            empty(bench)
            assert bench.around() == around, "beside the blocks, nothing changes"
        finally:
            bench.close()
            other.communicate("")


def test_a_cache_of_another_layout_is_not_read() -> None:
    bench, other = (Bench(RIGS["cuda"], LAYOUTS[name]) for name in ("mla", "padded"))
    try:
        bench.device.share(1)
        with pytest.raises(CopyError, match="another layout"):
            bench.device.connect({1: other.device.share(1)})
        with pytest.raises(CopyError):  # of this process
            bench.device.connect({1: bench.device.share(1)})
    finally:
        bench.close()
        other.close()


def test_a_driver_without_batches_copies_one_by_one() -> None:
    data = torch.arange(4096, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    driver = Driver()
    assert driver._batch is not None
    driver._batch = None
    stream, size = driver.create_stream(), data.nbytes
    host = driver.allocate_host(size)
    addresses = np.arange(0, size, 1024, dtype=np.uint64)
    sizes = np.full(len(addresses), 1024, np.uint64)
    driver.copy_batch(addresses + np.uint64(host), addresses + np.uint64(data.data_ptr()), sizes, True, stream)
    back = torch.zeros_like(data)
    torch.cuda.synchronize()
    driver.copy_batch(addresses + np.uint64(back.data_ptr()), addresses + np.uint64(host), sizes, False, stream)
    driver.synchronize(stream)
    assert back.equal(data)
    driver.free_host(host)
    driver.destroy_stream(stream)


@pytest.mark.parametrize(
    ("spare", "line"),
    [(40, "MiB of device memory for copies, less than wanted because it is short"), (0, "copied by itself")],
)
def test_where_device_memory_is_short_the_stage_is_smaller_or_none(
    spare: int, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvcache_client.devices")
    bench = Bench(RIGS["cuda"], LAYOUTS["blocks first"])
    bench.device.close()
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + (spare << 20)
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    try:
        caplog.clear()
        bench.device = open_device("cuda", bench.fragments, BLOCKS, bench.tensors)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    try:
        assert [line in record.getMessage() for record in caplog.records] == [True]
        bench.register()
        bench.round_trip()
    finally:
        bench.close()


def test_a_compiler_that_is_not_there_is_named() -> None:
    with pytest.raises(CopyError, match=r"no NVRTC in libnothing\.so"):
        find_compiler(["libnothing.so"], 90)
