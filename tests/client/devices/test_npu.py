"""What is Ascend's own: ways of registering and copying, failures that only a synchronisation tells of, full queues.

On the simulated CANN of tests/npu_rig, which can be told to refuse and to fail.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rigs import BLOCKS, LAYOUTS, RIGS, SECONDS, SLOTS, Bench, Npu

from kvcache_client.devices import Job, Unsupported, open_device
from kvcache_client.devices.acl import EVENT_SYNC, Acl
from kvcache_client.devices.npu_runtime import NpuRuntime
from kvcache_client.devices.stream_pool import StreamPool

CHUNK = 1 << 20
LATER = "aclrtHostRegisterV2"

RIG = RIGS["npu"]
assert isinstance(RIG, Npu)
_why = RIG.unsupported_reason() or ("" if RIG.simulation is not None else "a real NPU cannot be told to fail")
pytestmark = pytest.mark.skipif(bool(_why), reason=_why)


@pytest.fixture
def npu(simulation: Npu | None, monkeypatch: pytest.MonkeyPatch) -> Npu:
    assert simulation is not None
    monkeypatch.setenv("KVCACHE_COPY_STAGE_MIB", "1")
    monkeypatch.setenv("KVCACHE_REGISTER_CHUNK_MIB", "1")
    return simulation


@pytest.fixture
def now(npu: Npu) -> Npu:
    """A machine with the calls of CANN 8.5 and later."""
    if not hasattr(npu.simulation, LATER):
        pytest.skip(f"this machine's CANN has no {LATER}")
    return npu


@pytest.fixture
def bench(npu: Npu) -> Iterator[Bench]:
    made = Bench(npu, LAYOUTS["tuples"])
    yield made
    made.close()


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.001)


def lines(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]


# Registration.


@pytest.mark.parametrize("way", ["npuHostRegister", "aclrtHostRegisterV2"])
def test_the_region_is_page_locked_and_the_log_says_how(
    now: Npu, way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvcache_client.devices")
    if way == "aclrtHostRegisterV2":
        monkeypatch.delattr(torch.npu, "npurt")  # as in a torch_npu from before it had one
    bench = Bench(now, LAYOUTS["tuples"])
    try:
        bench.register()
        assert bench.device.registered() == (True, bench.region.bytes)
        assert now.count("registered_bytes") == bench.region.bytes
        assert len(lines(caplog, f"npu:0: the region is page-locked by {'torch_npu' if way[0] == 'n' else way}")) == 1
        now.simulation.fake_acl_reset()
        bench.round_trip()
        assert now.count("batch_entries") >= 2 * BLOCKS
        assert now.count("memcpy_async") == 0
    finally:
        bench.close()
    assert now.count("registered_bytes") == 0


def test_an_older_machine_copies_by_the_ring_and_one_by_one(npu: Npu, caplog: pytest.LogCaptureFixture) -> None:
    if hasattr(npu.simulation, LATER):
        pytest.skip(f"this machine's CANN has {LATER}")
    bench = Bench(npu, LAYOUTS["tuples"])
    try:
        bench.register()
        assert bench.device.registered() == (True, 0)
        (line,) = lines(caplog, "cannot be page-locked")
        assert LATER in line
        assert "at the rate of one core's memory copies" in line
        bench.round_trip()
        assert npu.count("batch_entries") == 0
        assert npu.count("memcpy_async") > 0
    finally:
        bench.close()


@pytest.mark.parametrize("chunks", [0, 2], ids=["all", "the rest"])
def test_where_registration_is_refused_copies_take_the_ring(
    now: Npu, chunks: int, caplog: pytest.LogCaptureFixture
) -> None:
    now.set("register_limit" if chunks else "register_refused", max(1, chunks * CHUNK))
    bench = Bench(now, LAYOUTS["tuples"])
    try:
        bench.register()
        assert bench.device.registered() == (True, chunks * CHUNK)
        (line,) = lines(caplog, "cannot be page-locked")
        assert ("207001" if chunks else "507899") in line
        bench.round_trip()
        bench.save([3], [0])
        bench.finish()
        assert bench.slot(0) == bench.block(3)
    finally:
        bench.close()


def test_an_engine_that_serves_has_locked_what_copies_ask_for(now: Npu) -> None:
    bench = Bench(now, LAYOUTS["tuples"])
    try:
        bench.device.enter_step()
        bench.device.register(bench.region)
        bench.save([3], [0])  # through the bounce buffers: nothing is locked, nor may be while the step runs
        bench.finish()
        assert bench.slot(0) == bench.block(3)
        assert bench.device.registered() == (False, 0)
        bench.device.leave_step()
        wait_until(lambda: bench.device.registered()[1] > 0)
        touched = (bench.slot_bytes - 1) // CHUNK + 1
        wait_until(lambda: bench.device.registered() == (False, touched * CHUNK))
        bench.load([5], [0])
        bench.finish()
        assert bench.block(5) == bench.slot(0)
    finally:
        bench.close()


def test_a_device_that_cannot_map_the_region_has_it_page_locked_all_the_same(
    now: Npu, caplog: pytest.LogCaptureFixture
) -> None:
    now.set("mapped_refused", 1)
    bench = Bench(now, LAYOUTS["tuples"])
    try:
        bench.register()
        assert bench.device.registered() == (True, bench.region.bytes)
        assert len(lines(caplog, "cannot map the region, copies may be slower")) == 1
        bench.round_trip()
    finally:
        bench.close()


def test_memory_that_does_not_begin_with_a_page_takes_the_ring(
    now: Npu, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    whole = bench.region
    size = whole.bytes - 64
    part = SimpleNamespace(address=whole.address + 64, bytes=size, present=size)
    part.buffer, part.array = whole.buffer[64:], whole.array[64:]
    bench.region = part  # type: ignore[assignment]
    bench.register()
    assert bench.device.registered() == (True, 0)
    assert len(lines(caplog, "does not begin with a page")) == 1
    bench.save([3], [1])
    bench.finish()
    assert bench.slot(1) == bench.block(3)


def test_a_region_that_ends_inside_a_page_is_page_locked_to_its_end(now: Npu, bench: Bench) -> None:
    whole = bench.region
    size = whole.bytes - 100
    bench.region = SimpleNamespace(  # type: ignore[assignment]
        buffer=whole.buffer, array=whole.array, address=whole.address, bytes=size, present=size
    )
    bench.register()
    assert bench.device.registered() == (True, whole.bytes - 100)
    assert now.count("registered_bytes") == whole.bytes


def test_under_an_old_kernel_copies_take_the_ring_unless_told_otherwise(
    now: Npu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release="5.10.0-136.12.0.86.aarch64"))
    for told, ways in (("0", 0), ("1", 1)):
        monkeypatch.setenv("KVCACHE_NPU_REGISTER", told)
        bench = Bench(now, LAYOUTS["tuples"])
        try:
            bench.register()
            assert bench.device.registered() == (True, ways * bench.region.bytes)
            bench.round_trip()
        finally:
            bench.close()
    (line,) = lines(caplog, "cannot be page-locked")
    assert "not 5.10.0-136.12.0.86.aarch64" in line and "KVCACHE_NPU_REGISTER=1" in line


def test_a_cache_in_a_format_of_the_device_is_declined(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_npu = importlib.import_module("torch_npu")
    shape, nz = (BLOCKS, 64, 64), 29
    monkeypatch.setitem(torch.npu.config.__dict__, "allow_internal_format", True)
    cache = torch_npu.empty_with_format(shape, dtype=torch.float16, device="npu", acl_format=nz)
    with pytest.raises(Unsupported, match="KV cache in NPU format 29"):
        open_device("npu", [], BLOCKS, [cache])


# Copies.


def test_a_device_without_batches_copies_one_by_one(now: Npu, caplog: pytest.LogCaptureFixture) -> None:
    now.set("no_batches", 1)
    bench = Bench(now, LAYOUTS["tuples"])
    try:
        bench.register()
        bench.round_trip()
        assert now.count("memcpy_async") >= 2 * BLOCKS
        assert now.count("batch_entries") == 0
        assert len(lines(caplog, "copies go one by one")) == 1
    finally:
        bench.close()


def test_batches_name_the_device_as_its_addresses_do(now: Npu) -> None:
    """A process that sees some devices of a host alone numbers them otherwise than CANN's runtime does."""
    now.set("location", 5)
    bench = Bench(now, LAYOUTS["tuples"])
    try:
        bench.register()
        bench.round_trip()
        assert now.count("batch_entries") > 0
    finally:
        bench.close()


@pytest.mark.parametrize("saves", [True, False], ids=["save", "load"])
def test_more_pieces_than_the_driver_takes_at_once(now: Npu, saves: bool) -> None:
    many, size = 5000, 64
    memory = torch.empty(many * size, dtype=torch.uint8, device="npu")
    memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8))
    runtime = NpuRuntime(0, memory.data_ptr(), None)
    stream, event, host = runtime.create_stream(), runtime.create_event(), runtime.allocate_host(many * size)
    found = np.frombuffer((ctypes.c_uint8 * (many * size)).from_address(host), np.uint8)
    order = np.random.default_rng(1).permutation(many).astype(np.uint64) * np.uint64(size)
    there, here = order + np.uint64(memory.data_ptr()), np.arange(many, dtype=np.uint64) * np.uint64(size)
    here += np.uint64(host)
    before = memory.cpu().numpy().reshape(many, size)
    found[:] = before.ravel()
    sizes = np.full(many, size, np.uint64)
    runtime.copy_batch(*((here, there) if saves else (there, here)), sizes, saves, stream)
    runtime.finish(event, stream)
    runtime.wait_host(event)
    after = found.reshape(many, size) if saves else memory.cpu().numpy().reshape(many, size)
    moved = (order // np.uint64(size)).astype(np.int64)
    assert np.array_equal(after if saves else after[moved], before[moved] if saves else before)
    assert now.count("batch_entries") == many
    runtime.free_host(host)
    runtime.destroy_event(event)
    runtime.destroy_stream(stream)


def test_what_torch_npu_has_queued_on_the_host_comes_before_a_save(npu: Npu, bench: Bench) -> None:
    """A wait_event lies in torch_npu's own queue for a while: a handle kept from before it would be ahead of it."""
    bench.register()
    other, written = torch.npu.Stream(), torch.npu.Event()
    raced = 0
    for trial in range(60):
        with torch.npu.stream(other):
            npu.simulation.fake_acl_delay(npu.stream(), 3000)
            bench.fill(4, trial % 16)
            written.record(other)
        torch.npu.current_stream().wait_event(written)
        bench.save([4], [trial % SLOTS])
        bench.finish()
        raced += bench.slot(trial % SLOTS) != bytes([trial % 16]) * bench.slot_bytes
    assert raced == 0


def test_a_load_waits_for_a_fenced_save_whatever_stream_the_engine_starts_it_on(now: Npu, bench: Bench) -> None:
    bench.register()
    before = bench.blocks()
    bench.put(39, before[0])
    bench.rig.delay()
    bench.save([4], [0])
    bench.device.fence([4])
    with torch.npu.stream(torch.npu.Stream()):
        bench.load([4], [39])
    bench.finish()
    assert bench.slot(0) == before[4]
    assert bench.block(4) == before[0]


def test_the_engine_does_not_wait_where_the_device_takes_no_more(npu: Npu, bench: Bench) -> None:
    """The computing stream stands still until this very thread lets it go on."""
    bench.register()
    before = bench.blocks()
    npu.simulation.fake_acl_hold(npu.stream())
    for _ in range(40):
        bench.save(range(BLOCKS), range(BLOCKS))
        bench.load([5], [30])
        bench.device.poll()
    npu.simulation.fake_acl_release()
    bench.finish()
    assert [bench.slot(number) for number in range(BLOCKS) if number != 5] == [*before[:5], *before[6:]]


# Failures.


def run(bench: Bench, saves: bool, block: int, slot: int) -> Job:
    job = (bench.save if saves else bench.load)([block], [slot])
    assert bench.device.drain(60)
    return job


@pytest.mark.parametrize("saves", [True, False], ids=["save", "load"])
@pytest.mark.parametrize("registered", [True, False], ids=["registered", "not yet registered"])
@pytest.mark.parametrize("setting", ["fail_next_copy", "refuse_next_copy"])
def test_a_copy_that_fails_is_a_failed_job_and_the_next_one_works(
    npu: Npu, bench: Bench, saves: bool, registered: bool, setting: str
) -> None:
    if registered:
        bench.register()
    data = bench.block(7)
    bench.put(9, data)
    npu.set(setting, 1)
    job = run(bench, saves, 3, 9)
    assert "507899" in job.error
    assert ("failed on the device" in job.error) == (setting == "fail_next_copy")
    job = run(bench, saves, 3, 9)
    assert job.error == ""
    if saves:
        assert bench.slot(9) == bench.block(3)
    else:
        assert bench.block(3) == data


@pytest.mark.parametrize("saves", [True, False], ids=["save", "load"])
def test_one_failed_copy_of_several_in_flight_fails_its_own_job(now: Npu, bench: Bench, saves: bool) -> None:
    bench.register()
    before = bench.blocks()
    for number in range(3):
        bench.put(number, before[20 + number])
    now.simulation.fake_acl_hold(now.stream())
    start = bench.save if saves else bench.load
    jobs = [start([0], [0])]
    now.set("fail_next_copy", 1)
    jobs += [start([1], [1]), start([2], [2])]
    now.simulation.fake_acl_release()
    assert bench.device.drain(60)
    assert [bool(job.error) for job in jobs] == [False, True, False]
    for number in (0, 2):
        assert bench.slot(number) == (before[number] if saves else before[20 + number])
        assert bench.block(number) == bench.slot(number)


def test_a_failed_copy_among_more_jobs_than_streams(now: Npu, bench: Bench) -> None:
    """Some jobs share a stream then: those beside the failed one may fail with it, none that failed may pass."""
    bench.register()
    before = bench.blocks()
    now.simulation.fake_acl_hold(now.stream())
    jobs = []
    for number in range(20):
        if number == 13:
            now.set("fail_next_copy", 1)
        jobs.append(bench.save([number], [number]))
    now.simulation.fake_acl_release()
    assert bench.device.drain(60)
    assert jobs[13].error
    assert not jobs[0].error
    for number, job in enumerate(jobs):
        assert job.error or bench.slot(number) == before[number]
    after = [bench.save([number], [number]) for number in range(20)]
    assert bench.device.drain(60)
    assert [job.error for job in after] == [""] * 20
    assert [bench.slot(number) for number in range(20)] == before[:20]


def test_a_stream_that_jobs_share_is_not_asked_while_it_has_more_to_do(npu: Npu, bench: Bench) -> None:
    """Asking would make the engine wait, and take away the failure of the job that is being queued."""
    acl = Acl()
    pool = StreamPool(acl)
    *ends, other = [acl.made("aclrtCreateEventExWithFlag", EVENT_SYNC) for _ in range(6)]
    turns = [pool.finish(end) for end in ends[:4]]
    assert len({turn.stream for turn in turns}) == 4  # there are no more
    pool.begin()
    acl.call("aclrtSynchronizeStream", turns[3].stream)
    assert not pool.settle(turns[3])
    assert pool.finish(ends[4]) is turns[3]
    npu.simulation.fake_acl_hold(npu.stream())
    acl.call("aclrtRecordEvent", other, npu.stream())
    pool.wait(other)
    acl.call("aclrtSynchronizeEvent", ends[4])
    assert not pool.settle(turns[3])
    npu.simulation.fake_acl_release()
    pool.wait_settled(turns[3])
    assert turns[3].error == ""
    assert all(pool.settle(turn) for turn in turns)
    pool.close()


def test_a_device_that_is_gone_ends_every_job_and_says_so(
    npu: Npu, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.register()
    npu.simulation.fake_acl_hold(npu.stream())
    jobs = [bench.save([number], [number]) for number in range(6)]
    npu.set("device_gone", 1)
    npu.simulation.fake_acl_release()
    jobs.append(bench.load([7], [8]))
    assert bench.device.drain(60)
    assert all("507010" in job.error for job in jobs if job.error)
    assert jobs[-1].error
    late = bench.save([1], [1])
    assert "the device is gone" in late.error
    bench.close()
    assert lines(caplog, "does not free")


def test_close_gives_back_streams_and_memory(npu: Npu) -> None:
    torch.npu.synchronize()
    before = npu.count("streams")
    bench = Bench(npu, LAYOUTS["tuples"])
    bench.register()
    assert npu.count("streams") - before == 8
    bench.close()
    assert npu.count("streams") == before
    assert npu.count("registered_bytes") == 0


def test_the_simulated_memory_agrees(npu: Npu, bench: Bench) -> None:
    """What torch reads back, which the other tests believe, is what the simulation holds."""
    found = np.empty(bench.tensors[0].nbytes, np.uint8)
    assert npu.simulation.fake_acl_peek(bench.tensors[0].data_ptr(), found.ctypes.data, found.nbytes) == 0
    assert found.tobytes()[: bench.slot_bytes // len(bench.tensors)] == bench.block(0)[: bench.slot_bytes // 10]
