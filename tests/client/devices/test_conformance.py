"""What every device must do, whatever its kind."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from rigs import BLOCKS, LAYOUTS, RIGS, SLOTS, Bench, Layout, Memory, Rig

from kvcache_client.devices import CopyError, Unsupported, open_device
from kvcache_client.devices.hybrid import HybridDevice
from kvcache_client.devices.self_test import check_copies

# Bytes.


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "not yet registered"])
def test_every_byte_arrives_and_nothing_beside_it_changes(each_bench: Bench, registered: bool) -> None:
    bench, draw = each_bench, random.Random(1)
    if registered:
        bench.register()
    before, around = bench.blocks(), bench.around()
    blocks, slots = draw.sample(range(BLOCKS), 17), draw.sample(range(SLOTS), 17)
    bench.save(blocks, slots)
    bench.finish()
    for slot in range(SLOTS):
        expected = before[blocks[slots.index(slot)]] if slot in slots else b"\xa5" * bench.slot_bytes
        assert bench.slot(slot) == expected, slot
    assert bench.gaps_are_whole()
    assert bench.around() == around
    targets = draw.sample(range(BLOCKS), 17)
    bench.load(targets, slots)
    bench.finish()
    moved = dict(zip(targets, (before[block] for block in blocks), strict=True))
    assert bench.blocks() == [moved.get(number, before[number]) for number in range(BLOCKS)]
    bench.load(range(BLOCKS), _refill(bench, before))
    bench.finish()
    assert bench.around() == around
    assert bench.gaps_are_whole()


def _refill(bench: Bench, blocks: list[bytes]) -> range:
    for number, data in enumerate(blocks):
        bench.put(number, data)
    return range(len(blocks))


def test_all_blocks_at_once_in_order_and_backwards(each_bench: Bench) -> None:
    each_bench.register()
    before = each_bench.blocks()
    each_bench.save(range(BLOCKS), range(BLOCKS))
    each_bench.finish()
    assert [each_bench.slot(number) for number in range(BLOCKS)] == before
    each_bench.load(range(BLOCKS), [*reversed(range(BLOCKS))])
    each_bench.finish()
    assert each_bench.blocks() == before[::-1]
    assert each_bench.gaps_are_whole()


def test_a_job_of_no_blocks_ends(bench: Bench) -> None:
    bench.save([], [])
    bench.register()
    bench.load([], [])
    bench.finish()
    assert len(bench.ended) == 2


# Sections.


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "not yet registered"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_is_loaded_section_by_section(rig: Rig, layout: str, registered: bool) -> None:
    bench = Bench(rig, LAYOUTS[layout], sections=3)
    try:
        if registered:
            bench.register()
        before = bench.blocks()
        bench.save(range(BLOCKS), range(BLOCKS))
        bench.finish()
        assert [bench.slot(number) for number in range(BLOCKS)] == before, "a save takes whole blocks"
        blocks, slots = [5, 2, 9, 3], [20, 21, 7, 0]
        begin = 0
        for section, end in enumerate(bench.ends, 1):
            bench.load(blocks, slots, section)
            bench.finish()
            for block, slot in zip(blocks, slots, strict=True):
                assert bench.block(block) == before[slot][:end] + before[block][end:], (section, begin, end)
            begin = end
        others = [number for number in range(BLOCKS) if number not in blocks]
        assert [bench.block(number) for number in others] == [before[number] for number in others]
    finally:
        bench.close()


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("registered", [True, False], ids=["registered", "not yet registered"])
def test_what_is_held_for_a_load_sees_what_it_has_brought(rig: Rig, registered: bool, later: bool) -> None:
    bench = Bench(rig, LAYOUTS["keys and values apart"], sections=4)
    try:
        if registered:
            bench.register()
        new = [bytes([number + 1]) * bench.slot_bytes for number in range(BLOCKS)]
        for number, data in enumerate(new):
            bench.put(number, data)
        seen: list[bytes] = []
        bench.rig.delay()
        jobs = [bench.load(range(BLOCKS), range(BLOCKS), section, later) for section in range(1, 5)]
        bench.device.start(jobs[1])
        for job in jobs:
            bench.device.hold(job)
        copies = [tensor.clone() for tensor in bench.tensors]
        bench.finish()
        bench.device.hold(jobs[0])  # one that has ended
        bench.rig.synchronize()
        bench.tensors = copies
        seen = bench.blocks()
        assert seen == new
    finally:
        bench.close()


def test_a_load_that_begins_later_does_not_wait_for_what_is_computed_meanwhile(rig: Rig) -> None:
    if rig.kind == "cpu":
        pytest.skip("the host computes at once, and nothing is queued")
    bench = Bench(rig, LAYOUTS["keys and values apart"], sections=2)
    try:
        bench.register()
        bench.put(3, b"\x05" * bench.slot_bytes)
        loads = [bench.load([3], [3], section, later=True) for section in (1, 2)]
        bench.rig.delay()
        bench.fill(3, 7)  # nothing holds it: it comes after what need not wait
        bench.device.start(loads[-1])
        bench.finish()
        assert bench.ended == loads
        assert bench.block(3) == b"\x07" * bench.slot_bytes
    finally:
        bench.close()


def test_the_next_load_begins_with_those_that_were_put_off(rig: Rig) -> None:
    bench = Bench(rig, LAYOUTS["keys and values apart"], sections=2)
    try:
        bench.register()
        for number in range(3):
            bench.put(number, bytes([number + 7]) * bench.slot_bytes)
        parts = [bench.load([0], [0], section, later=True) for section in (1, 2)]
        other = bench.load([1], [1])
        bench.finish()
        assert bench.ended == [*parts, other]
        last = bench.load([2], [2], 1, later=True)
    finally:
        bench.close()
    assert bench.ended[-1] is last
    assert "closed" in last.error or not last.error, "each job ends, once"


# Blocks in several runs of pages.

SCATTERED = 12  # blocks


@pytest.mark.parametrize("unit", [1, 4096], ids=["cut anywhere", "cut at pages"])
@pytest.mark.parametrize("registered", [True, False], ids=["registered", "not yet registered"])
def test_scattered_blocks_hold_what_they_would_in_one_piece(each_bench: Bench, registered: bool, unit: int) -> None:
    bench, draw = each_bench, random.Random(unit)
    if registered:
        bench.register()
    before, around = bench.blocks(), bench.around()
    blocks, targets = draw.sample(range(BLOCKS), SCATTERED), draw.sample(range(BLOCKS), SCATTERED)
    places = bench.scatter(SCATTERED, unit, draw)
    bench.device.save(bench.scattered_job(blocks, places))
    bench.finish()
    assert bench.gathered(places) == [before[block] for block in blocks]
    assert bench.rest_is_whole(places)
    assert bench.around() == around
    bench.device.load(bench.scattered_job(targets, places))
    bench.finish()
    moved = dict(zip(targets, (before[block] for block in blocks), strict=True))
    assert bench.blocks() == [moved.get(number, before[number]) for number in range(BLOCKS)]
    bench.region.array[:] = 0xA5
    bench.load(range(BLOCKS), _refill(bench, before))
    bench.finish()
    assert bench.around() == around, "nothing beside the blocks was written on the device"


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "not yet registered"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_scattered_block_is_loaded_section_by_section(rig: Rig, layout: str, registered: bool) -> None:
    bench, draw = Bench(rig, LAYOUTS[layout], sections=3), random.Random(3)
    try:
        if registered:
            bench.register()
        before = bench.blocks()
        places = bench.scatter(SCATTERED, 1, draw)
        bench.device.save(bench.scattered_job(range(SCATTERED), places))
        bench.finish()
        assert bench.gathered(places) == before[:SCATTERED], "a save takes whole blocks"
        targets = draw.sample(range(BLOCKS), SCATTERED)
        for section, end in enumerate(bench.ends, 1):
            bench.device.load(bench.scattered_job(targets, places, section))
            bench.finish()
            found = bench.blocks()
            for number, target in enumerate(targets):
                assert found[target] == before[number][:end] + before[target][end:], (section, target)
        others = [number for number in range(BLOCKS) if number not in targets]
        assert [found[number] for number in others] == [before[number] for number in others]
        assert bench.rest_is_whole(places)
    finally:
        bench.close()


def test_scattered_places_beyond_the_last_run_are_an_error(bench: Bench) -> None:
    bench.register()
    around, places = bench.around(), bench.scatter(4, 1, random.Random(1))
    for start in (bench.device.save, bench.device.load):
        bad = bench.scattered_job(range(4), places)
        bad.offsets[3] += bench.slot_bytes
        start(bad)
        assert bench.device.drain(60)
        assert "of a region of" in bad.error
    assert bench.around() == around


# Order.


def test_a_save_waits_for_what_writes_the_block(bench: Bench) -> None:
    bench.register()
    for number in range(8):
        bench.rig.delay()
        bench.fill(number, number + 1)
        bench.save([number], [number])
    bench.finish()
    assert [bench.slot(number) for number in range(8)] == [bytes([n + 1]) * bench.slot_bytes for n in range(8)]


def test_a_load_waits_for_what_reads_the_block(bench: Bench) -> None:
    bench.register()
    old, new = bench.block(3), bench.block(5)
    bench.put(7, new)
    bench.rig.delay()
    seen = [tensor.clone() for tensor in bench.tensors]
    bench.load([3], [7])
    bench.finish()
    assert bench.block(3) == new
    bench.rig.synchronize()
    bench.tensors = seen
    assert bench.block(3) == old


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "not yet registered"])
def test_after_the_fence_a_block_may_be_written(bench: Bench, registered: bool) -> None:
    if registered:
        bench.register()
    before = bench.blocks()
    bench.rig.delay()
    all_blocks = bench.save(range(BLOCKS), range(BLOCKS))
    two_blocks = bench.save([4, 5], [30, 31])
    bench.device.fence([4, 9, 20])
    for number in (4, 9, 20):
        bench.fill(number, 0)
    bench.finish()
    if bench.device.registered()[1] == bench.region.bytes:  # only a save that waits for a thread is ever cancelled
        assert not (all_blocks.cancelled or two_blocks.cancelled)
    if not all_blocks.cancelled:
        assert [bench.slot(number) for number in range(BLOCKS)] == before
    if not two_blocks.cancelled:
        assert [bench.slot(30), bench.slot(31)] == before[4:6]
    assert bench.block(9) == bytes(bench.slot_bytes)


def test_after_the_fence_a_load_may_fill_a_block_that_is_being_saved(bench: Bench) -> None:
    bench.register()
    before = bench.blocks()
    bench.put(39, before[0])
    bench.rig.delay()
    saves = [bench.save([4], [slot]) for slot in range(6)]
    bench.device.fence([4])
    bench.load([4], [39])
    bench.finish()
    assert [bench.slot(slot) for slot, save in enumerate(saves) if not save.cancelled] == [
        before[4] for save in saves if not save.cancelled
    ]
    if bench.device.registered()[1] == bench.region.bytes:
        assert not any(save.cancelled for save in saves)
    assert bench.block(4) == before[0]


def test_the_fence_of_blocks_that_nobody_saves_returns(bench: Bench) -> None:
    bench.device.fence([5, 6])
    bench.device.fence([])
    bench.register()
    bench.save([1], [1])
    bench.finish()
    bench.device.fence(range(BLOCKS))


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "not yet registered"])
def test_the_last_of_several_copies_to_one_place_wins(bench: Bench, registered: bool) -> None:
    if registered:
        bench.register()
    before = bench.blocks()
    bench.put(30, before[0])
    for _ in range(20):
        bench.save(range(BLOCKS), range(BLOCKS))
        bench.save([0], [BLOCKS - 1])
        bench.finish()
        assert bench.slot(BLOCKS - 1) == before[0]
        bench.put(BLOCKS - 1, before[BLOCKS - 1])
        bench.load(range(BLOCKS), range(BLOCKS))
        bench.load([BLOCKS - 1], [30])
        bench.finish()
        assert bench.block(BLOCKS - 1) == before[0]
        bench.load([BLOCKS - 1], [BLOCKS - 1])
        bench.finish()


# Many.


def test_thousands_of_copies_in_flight_both_ways(bench: Bench) -> None:
    bench.register()
    before = bench.blocks()
    for number in range(12):
        bench.put(number, before[number])
    bench.rig.delay()
    for number in range(2400):
        bench.save([number % 12], [24 + number % 12])
        bench.load([23 - number % 12], [number % 12])
        if number % 100 == 0:
            bench.device.poll()
    bench.finish()
    assert len({id(job) for job in bench.ended}) == len(bench.ended) == 4800
    assert [bench.slot(24 + number) for number in range(12)] == before[:12]
    assert [bench.block(23 - number) for number in range(12)] == before[:12]
    assert bench.gaps_are_whole()


@pytest.mark.parametrize("registered", [True, False])
def test_lingering_returns_and_loses_nothing(bench: Bench, registered: bool) -> None:
    if registered:
        bench.register()
    bench.device.linger(5.0)  # for nothing
    bench.rig.delay()
    jobs = [bench.load(range(BLOCKS), range(BLOCKS)) for _ in range(3)]
    for _ in range(100_000):
        bench.device.poll()
        bench.device.linger(0.001)
        if len(bench.ended) == len(jobs):
            break
    bench.finish()
    # Each once; of two threads that see an end each, either may be the first to say so.
    assert sorted(map(id, bench.ended)) == sorted(map(id, jobs))
    assert bench.blocks() == [bench.slot(number) for number in range(BLOCKS)]


def test_jobs_end_without_anybody_asking(bench: Bench) -> None:
    bench.register()
    ended = threading.Event()
    job = bench.job([1], [2])
    job.ended = lambda job: ended.set()
    bench.rig.delay()
    bench.device.save(job)
    assert ended.wait(60)
    assert not job.error
    assert job.seconds > 0


# Failures.


@pytest.mark.parametrize(
    ("block", "offset", "message"),
    [(1, -64, "of a region of"), (1, 1 << 40, "of a region of"), (-1, 0, "blocks -1"), (BLOCKS, 0, f"of {BLOCKS}")],
)
def test_a_place_that_is_none_is_an_error_and_the_device_goes_on(
    bench: Bench, block: int, offset: int, message: str
) -> None:
    bench.register()
    around = bench.around()
    for start in (bench.device.save, bench.device.load):
        bad = bench.job([2, block], [0, 0])
        bad.offsets[1] = offset
        start(bad)
        assert bench.device.drain(60)
        assert message in bad.error
    good = bench.save([1], [5])
    assert bench.device.drain(60)
    assert not good.error
    assert bench.slot(5) == bench.block(1)
    assert bench.around() == around
    assert len(bench.ended) == 3


def test_a_region_replaced_while_copies_run(bench: Bench) -> None:
    bench.register()
    before = bench.blocks()
    first, second = bench.region, Memory(bench.region.bytes)
    bench.rig.delay()
    for number in range(BLOCKS):
        bench.save([number], [number])
    bench.region = second
    bench.register()
    bench.save(range(BLOCKS), [*reversed(range(BLOCKS))])
    old = bench.job([0], [30], first)
    bench.device.save(old)
    bench.finish()
    assert [bench.slot(number) for number in range(BLOCKS)] == before[::-1]
    bench.region = first
    assert [bench.slot(number) for number in range(BLOCKS)] == before
    assert bench.slot(30) == before[0]
    assert bench.gaps_are_whole()


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "not yet registered"])
def test_close_ends_every_job_once(bench: Bench, registered: bool) -> None:
    if registered:
        bench.register()
    before = bench.blocks()
    bench.rig.delay()
    jobs = [bench.save([number], [number]) for number in range(12)]
    jobs += [bench.load([12 + number], [30]) for number in range(12)]
    bench.device.close()
    late = bench.save([7], [7])
    assert sorted(map(id, bench.ended)) == sorted(map(id, [*jobs, late]))
    for number, job in enumerate(jobs[:12]):
        assert job.error or bench.slot(number) == before[number]
    assert late.error == "the device is closed"
    bench.device.fence(range(BLOCKS))  # nothing reads any more
    assert bench.gaps_are_whole()


def test_close_while_a_job_is_being_reported(bench: Bench) -> None:
    gate = threading.Event()
    bench.register()
    first = bench.job([0], [0])
    first.ended = lambda job: gate.wait(30) and None  # holds the thread that reports
    bench.device.save(first)
    waiting = [bench.save([number], [number]) for number in range(1, 6)]
    threading.Timer(0.05, gate.set).start()
    bench.device.close()
    assert sorted(map(id, bench.ended)) == sorted(map(id, waiting))


# Others.


def test_two_processes_on_one_region(rig: Rig) -> None:
    bench = Bench(rig, LAYOUTS["blocks first"])
    try:
        bench.register()
        before = bench.blocks()
        bench.save(range(12), range(12))
        bench.finish()
        # The other process loads what this one saved, and saves it elsewhere.
        command = [sys.executable, str(Path(__file__).parent / "other_process.py"), rig.kind, bench.region.path]
        subprocess.run(command, check=True, timeout=120)
        assert [bench.slot(20 + number) for number in range(12)] == before[:12]
        bench.load(range(12, 24), range(20, 32))
        bench.finish()
        assert bench.blocks() == before[:12] * 2
        assert bench.gaps_are_whole()
    finally:
        bench.close()


def test_the_self_test_leaves_everything_as_it_was(each_bench: Bench) -> None:
    around = each_bench.around()
    check_copies(each_bench.device, each_bench.fragments, BLOCKS)
    assert each_bench.around() == around
    each_bench.register()
    each_bench.save([1], [2])
    each_bench.finish()
    assert each_bench.slot(2) == each_bench.block(1)


def test_the_self_test_notices_a_device_that_copies_elsewhere(bench: Bench) -> None:
    wrong = [each._replace(pointer=each.pointer + 64) for each in bench.fragments]
    device = open_device(bench.rig.kind, wrong, BLOCKS - 1, bench.tensors)
    try:
        with pytest.raises(CopyError, match="wrong bytes"):
            check_copies(device, bench.fragments, BLOCKS - 1)
    finally:
        device.close()


def test_the_self_test_copies_sections_too(rig: Rig) -> None:
    bench = Bench(rig, LAYOUTS["keys and values apart"], sections=4)
    try:
        around = bench.around()
        check_copies(bench.device, bench.fragments, BLOCKS, bench.ends)
        assert bench.around() == around
        wrong = [end - 64 for end in bench.ends[:-1]] + bench.ends[-1:]
        with pytest.raises(CopyError, match="wrong bytes after section 1"):
            check_copies(bench.device, bench.fragments, BLOCKS, wrong)
        assert bench.around() == around
    finally:
        bench.close()


def test_the_self_test_notices_a_device_that_fails(bench: Bench) -> None:
    bench.device.close()
    with pytest.raises(CopyError, match="failed: the device is closed"):
        check_copies(bench.device, bench.fragments, BLOCKS)


def test_kinds_without_a_module_are_named() -> None:
    with pytest.raises(Unsupported, match=r"'xpu'.*only from 'cpu', 'cuda' and 'npu'"):
        open_device("xpu", [], 0)


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed here")
def test_an_npu_without_torch_npu_is_named() -> None:
    with pytest.raises(CopyError, match="torch_npu cannot be imported"):
        open_device("npu", [], 0)


def test_layers_that_lie_far_apart_in_host_memory() -> None:
    """Everything else of this process lies between the two: no side of a copy may pass for part of the other."""
    fragment = 1 << 16
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, fixed = ctypes.c_void_p, 0x100000  # MAP_FIXED_NOREPLACE
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed
    # Low in the address space, wherever a driver has left room there.
    found = (
        libc.mmap(low, BLOCKS * fragment, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        for low in (1 << bits for bits in range(33, 46))
    )
    low = next(address for address in found if address != ctypes.c_void_p(-1).value)
    far = torch.frombuffer((ctypes.c_uint8 * (BLOCKS * fragment)).from_address(low), dtype=torch.uint8)
    near = torch.empty(BLOCKS, fragment, dtype=torch.uint8)
    layout = Layout(lambda device: [far.view(BLOCKS, fragment), near])
    bench = Bench(RIGS["cpu"], layout)
    try:
        before = bench.blocks()
        bench.save(range(BLOCKS), range(BLOCKS))
        bench.finish()
        assert [bench.slot(number) for number in range(BLOCKS)] == before
        bench.load(range(BLOCKS), [*reversed(range(BLOCKS))])
        bench.finish()
        assert bench.blocks() == before[::-1]
    finally:
        bench.close()


# Several layouts of a block in one cache.


def test_layouts_share_what_is_page_locked(rig: Rig) -> None:
    """Each job goes to its layout's device; a save of either is waited for, and closing ends both."""
    one, two = sorted((Bench(rig, LAYOUTS[name]) for name in ("blocks first", "keys and values apart")), key=_size)
    one.region = two.region
    device = HybridDevice([one.device, two.device])
    device.register(two.region)
    two.device = one.device = device
    two.register()
    for layout, bench in enumerate((one, two)):
        before = bench.blocks()
        for copy, blocks in ((device.save, range(BLOCKS)), (device.load, [*reversed(range(BLOCKS))])):
            job = bench.job(blocks, range(BLOCKS))
            job.layout = layout
            copy(job)
            bench.finish()
        assert bench.blocks() == before[::-1]
        job = bench.job([5], [0])
        job.layout = layout
        device.save(job)
        device.fence([5])
        bench.fill(5, 7)
        bench.finish()
        assert job.cancelled or bench.slot(0) == before[BLOCKS - 6], "what was there before the fence"
    device.close()
    late = two.job([0], [0])
    late.layout = 1
    device.save(late)
    assert late.error


def _size(bench: Bench) -> int:
    return bench.region.bytes
