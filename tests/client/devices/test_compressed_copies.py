"""Blocks that are compressed on their way: what lies in a slot, and that every byte comes back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_on_cpu import Kernels
from rigs import BLOCKS, LAYOUTS, Bench, Rig

from kvcache_client import compression
from kvcache_client.devices import CopyError, Unsupported, open_device
from kvcache_client.devices.cuda_compression import Compressing
from kvcache_client.devices.layout import Fragment, sections
from kvcache_client.devices.self_test import check_copies

COMPRESSED = ("layers outermost", "mla", "padded", "kernel blocks", "mamba")


@pytest.fixture
def compressing(rig: Rig) -> Rig:
    if rig.kind == "npu":
        pytest.skip("there are no kernels for NPUs yet")
    return rig


@pytest.fixture(params=COMPRESSED)
def bench(compressing: Rig, request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(compressing, LAYOUTS[request.param], compress=True)
    yield made
    made.close()


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "not yet registered"])
def test_every_byte_comes_back_and_nothing_beside_it_changes(bench: Bench, registered: bool) -> None:
    if registered:
        bench.register()
    around = bench.around()
    bench.round_trip()
    bench.load(range(BLOCKS), [*reversed(range(BLOCKS))])
    bench.finish()
    assert bench.around() == around


def test_scattered_blocks(bench: Bench) -> None:
    bench.register()
    draw, before = random.Random(3), bench.blocks()
    places = bench.scatter(8, 64, draw)
    bench.device.save(bench.scattered_job(range(8), places))
    bench.finish()
    assert bench.gathered(places) == bench.stored(before[:8])
    bench.device.load(bench.scattered_job(range(8, 16), places))
    bench.finish()
    assert bench.blocks() == before[:8] + before[:8] + before[16:]


def test_a_block_is_loaded_section_by_section(compressing: Rig) -> None:
    bench = Bench(compressing, LAYOUTS["keys and values apart"], sections=3, compress=True)
    try:
        bench.register()
        before = bench.blocks()
        bench.save(range(BLOCKS), range(BLOCKS))
        bench.finish()
        for section, end in enumerate(bench.ends, 1):
            bench.load([5, 2], [20, 21], section)
            bench.finish()
            for block, slot in ((5, 20), (2, 21)):
                assert bench.block(block) == before[slot][:end] + before[block][end:], section
    finally:
        bench.close()


def test_what_cannot_be_compressed_says_so_in_its_first_bytes(compressing: Rig) -> None:
    bench = Bench(compressing, LAYOUTS["layers outermost"], compress=True)
    try:
        bench.register()
        noise = random.Random(1).randbytes(bench.fragments[2].bytes)
        at, stride, _ = bench.fragments[2]
        bench.device.poke(at + 7 * stride, noise)
        bench.save([6, 7], [0, 1])
        bench.finish()
        first = sum(fragment.bytes for fragment in bench.fragments[:2]) // compression.PIECE_BYTES
        lost = range(first, first + bench.fragments[2].bytes // compression.PIECE_BYTES)
        pieces = compression.pieces_of(bench.block_bytes)
        assert bench.slot(0)[:pieces] == bytes(pieces)
        assert bench.slot(1)[:pieces] == bytes(number in lost for number in range(pieces))
    finally:
        bench.close()


def test_the_self_test_finds_a_device_that_compresses_otherwise(
    compressing: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(compressing, LAYOUTS["mla"], compress=True)
    try:
        check_copies(bench.device, bench.fragments, BLOCKS, compress=True)
        compress = compression.compress
        monkeypatch.setattr(compression, "compress", lambda raw: compress(raw ^ np.uint8(1)))
        with pytest.raises(CopyError, match="self-test"):
            check_copies(bench.device, bench.fragments, BLOCKS, compress=True)
    finally:
        bench.close()


def test_other_devices_refuse() -> None:
    with pytest.raises(Unsupported, match="does not compress"):
        open_device("npu", [Fragment(0, 4096, 4096)], 2, compress=True)


# The kernels, on a CPU: no accelerator is needed to see that they do what the reference does.


@pytest.mark.parametrize("sizes", [(4608, 18432, 1024), (49152,), (4096,), (16384, 16384, 64)], ids=str)
def test_kernels_write_and_read_the_same_bytes_as_the_reference(sizes: tuple[int, ...], tmp_path: Path) -> None:
    draw, blocks = np.random.default_rng(7), 5
    memories = [np.zeros((blocks, size + 64), np.uint8) for size in sizes]
    scale = np.exp(1.4 * draw.standard_normal(sum(sizes) // 2))
    values = (draw.standard_normal((blocks, sum(sizes) // 2)) * scale).astype(np.float32)
    raw = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    raw[4] = draw.integers(0, 256, raw.shape[1])
    bounds = np.cumsum([0, *sizes])

    def parts() -> list[np.ndarray]:
        return [memory[:, :size] for memory, size in zip(memories, sizes, strict=True)]

    for begin, part in zip(bounds, parts(), strict=False):
        part[:] = raw[:, begin : begin + part.shape[1]]
    fragments = [Fragment(each.ctypes.data, each.strides[0], size) for each, size in zip(memories, sizes, strict=True)]
    ends = [*range(compression.PIECE_BYTES, sum(sizes), compression.PIECE_BYTES), sum(sizes)]
    cut = sections(fragments, ends, compress=True)
    kernels, expected = Kernels(Compressing(cut), tmp_path), compression.compress(raw)
    slots = np.full_like(expected, 0xA5)
    kernels.launch(True, range(blocks), slots)
    assert np.array_equal(slots, expected)
    assert slots[:, : compression.pieces_of(sum(sizes))].any(axis=1).tolist() == [False] * 4 + [True]
    order, good = [3, 0, 2, 1], slice(0, 4)
    for memory in memories:
        memory[:] = 0
    kernels.launch(False, order, np.ascontiguousarray(slots[order]))
    assert np.array_equal(np.concatenate(parts(), axis=1)[good], raw[good])
    for section, (begin, size, _) in enumerate(cut[1:], 1):
        for part in parts():
            part[:] = 0
        kernels.launch(False, range(4), np.ascontiguousarray(slots[good, begin : begin + size]), section)
        found, first = np.concatenate(parts(), axis=1)[good], [0, *ends][section - 1]
        assert np.array_equal(found[:, first : ends[section - 1]], raw[good, first : ends[section - 1]])
        assert not found[:, :first].any() and not found[:, ends[section - 1] :].any()
    assert all((memory[:, size:] == 0).all() for memory, size in zip(memories, sizes, strict=True))


def test_kernels_need_whole_words() -> None:
    with pytest.raises(CopyError, match="multiples of 8 bytes"):
        Compressing(sections([Fragment(4096, 4104, 4104)], [], compress=True))
