"""What the conformance suite runs on: kinds of devices, layouts of a cache, and a region to copy to."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcache_client import compression
from kvcache_client.address_ranges import Runs
from kvcache_client.devices import Device, Job, open_device
from kvcache_client.devices.layout import block_fragments
from kvcache_client.worker.kv_layout import describe_tensor, flatten

BLOCKS, LAYERS, SLOTS = 24, 5, 40
TOKENS, HEADS, DIM = 32, 4, 128
GAP = 192  # between slots lies what a copy must leave alone
SECONDS = 60.0


class Rig:
    """A kind of device. `delay` keeps whatever is queued on it from now on waiting for a while, and does not wait."""

    kind = "cpu"

    def unsupported_reason(self) -> str:
        """Return why this host cannot run it, or nothing."""
        return ""

    def delay(self) -> None:
        """On a host, what is written is written."""

    def synchronize(self) -> None:
        """Wait for all that was queued."""

    def prepare(self) -> None:
        """Called before the first test."""

    def fill(self, piece: Any, value: int) -> None:
        """Queue a write of every byte of a contiguous tensor."""
        piece.view(torch.uint8).fill_(value)


class Cuda(Rig):
    kind = "cuda"

    def unsupported_reason(self) -> str:
        return (
            "" if torch.cuda.is_available() else "torch.cuda.is_available() is False: no NVIDIA GPU, or torch for CPU"
        )

    def delay(self) -> None:
        torch.cuda._sleep(200_000_000)  # about 0.1 s

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class Npu(Rig):
    """An Ascend NPU, or what simulates one (tests/npu_rig): there, nothing computes, and writes are copies."""

    kind = "npu"

    def unsupported_reason(self) -> str:
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError, RuntimeError) as error:
            return f"torch_npu cannot be imported: {error}"
        return "" if torch.npu.is_available() else "torch.npu.is_available() is False: no NPU"

    @cached_property
    def simulation(self) -> Any:
        """The simulated CANN's own calls, None on an NPU. See tests/npu_rig/README.md."""
        library = ctypes.CDLL("libascendcl.so")
        if not hasattr(library, "fake_acl_counter"):
            return None
        library.fake_acl_counter.restype = ctypes.c_long
        library.fake_acl_counter.argtypes = (ctypes.c_char_p,)
        library.fake_acl_set.argtypes = (ctypes.c_char_p, ctypes.c_long)
        library.fake_acl_delay.argtypes = (ctypes.c_void_p, ctypes.c_long)
        library.fake_acl_hold.argtypes = (ctypes.c_void_p,)
        library.fake_acl_peek.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        return library

    def count(self, name: str) -> int:
        return int(self.simulation.fake_acl_counter(name.encode()))

    def set(self, name: str, value: int) -> None:
        self.simulation.fake_acl_set(name.encode(), value)

    def stream(self) -> int:
        return int(torch.npu.current_stream().npu_stream)

    def delay(self) -> None:
        if self.simulation is not None:
            self.simulation.fake_acl_delay(self.stream(), 100_000)
            return
        for _ in range(200):
            torch.matmul(self._large, self._large)

    def synchronize(self) -> None:
        torch.npu.synchronize()

    def fill(self, piece: Any, value: int) -> None:
        piece.view(torch.uint8).view(-1).copy_(self._paint[value][: piece.nbytes])

    @cached_property
    def _paint(self) -> list[Any]:
        return [torch.full((1 << 17,), value, dtype=torch.uint8).to("npu") for value in range(16)]

    @cached_property
    def _large(self) -> Any:
        return torch.ones(4096, 4096, dtype=torch.float16).to("npu")

    def prepare(self) -> None:
        """What `fill` and `delay` need is there before anything is delayed: making it waits for the device."""
        assert not self.unsupported_reason()
        assert self._paint
        if self.simulation is None:
            assert len(self._large)


RIGS = {rig.kind: rig for rig in (Rig(), Cuda(), Npu())}


class Layout:
    """Tensors as an attention back end makes them, and where in each of them block b is."""

    def __init__(self, make: Callable[[str], list[Any]], axis: int = 0, kernel_blocks: int = 1) -> None:
        self.make, self.axis, self.kernel_blocks = make, axis, kernel_blocks

    def block(self, tensor: Any, number: int) -> Any:
        return tensor.narrow(self.axis, number * self.kernel_blocks, self.kernel_blocks)


def _empty(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.empty(*shape, dtype=dtype, device=device)


def _layers_outermost(device: str) -> list[Any]:
    """One allocation, as vLLM 0.32 makes it: evenly spaced fragments."""
    return list(_empty(LAYERS, BLOCKS, HEADS, TOKENS, 2 * DIM, device=device))


def _keys_and_values_apart(device: str) -> list[Any]:
    return [_empty(2, BLOCKS, TOKENS, HEADS, DIM, device=device) for _ in range(LAYERS)]


def _blocks_first(device: str) -> list[Any]:
    return [_empty(BLOCKS, 2, TOKENS, HEADS, DIM, device=device) for _ in range(LAYERS)]


def _cross_layer(device: str) -> list[Any]:
    """Blocks outermost: one fragment a block."""
    whole = _empty(BLOCKS, LAYERS, HEADS, TOKENS, 2 * DIM, device=device)
    return [whole[:, layer] for layer in range(LAYERS)]


def _large(device: str) -> list[Any]:
    """Fragments that no stage is needed for."""
    return [_empty(BLOCKS, 1 << 20, device=device, dtype=torch.uint8) for _ in range(2)]


def _mla(device: str) -> list[Any]:
    return [_empty(BLOCKS, TOKENS, 576, device=device) for _ in range(LAYERS)]


def _padded(device: str) -> list[Any]:
    """Views that begin inside a storage, of rows longer than what is used, more of them than blocks."""
    whole = _empty(LAYERS, BLOCKS + 3, TOKENS + 5, HEADS * DIM, device=device)
    return [layer[1:, 2 : TOKENS + 2] for layer in whole]


def _kernel_blocks(device: str) -> list[Any]:
    return [_empty(2, 2 * BLOCKS, TOKENS // 2, HEADS, DIM, device=device) for _ in range(LAYERS)]


def _odd(device: str) -> list[Any]:
    """Quantised keys with their scales behind them: nothing begins at a multiple of four."""
    return [_empty(BLOCKS, 40_962, device=device, dtype=torch.uint8) for _ in range(LAYERS)]


def _mixed(device: str) -> list[Any]:
    """Layers of two geometries, as with an indexer beside MLA."""
    return [*_mla(device), *(_empty(BLOCKS, TOKENS, 132, device=device, dtype=torch.uint8) for _ in range(LAYERS))]


def _aligned(nbytes: int, device: str) -> Any:
    """Bytes that begin at a multiple of 2 MiB, somewhere inside a longer storage, as vllm-ascend makes them."""
    unit = 2 << 20
    raw = _empty(nbytes + unit, device=device, dtype=torch.int8)
    offset = -raw.data_ptr() % unit
    return raw[offset : offset + nbytes]


def _ascend(shapes: Sequence[tuple[int, ...]], device: str, blocks: int = BLOCKS, layers: int = LAYERS) -> list[Any]:
    """A tuple of tensors a layer, each allocated by itself."""

    def tensor(shape: tuple[int, ...]) -> Any:
        count = blocks * int(np.prod(shape))
        return _aligned(count * 2, device).view(torch.bfloat16).view(blocks, *shape)

    return [tuple(tensor(shape) for shape in shapes) for _ in range(layers)]


def _tuples(device: str) -> list[Any]:
    return _ascend([(TOKENS, HEADS, DIM)] * 2, device)


def _nope_and_rope(device: str) -> list[Any]:
    return _ascend([(TOKENS, 1, 512), (TOKENS, 1, 64)], device)


def _sparse(device: str) -> list[Any]:
    return _ascend([(TOKENS, 1, 512), (TOKENS, 1, 64), (TOKENS, 1, 128), (TOKENS, 1, 1)], device)


def _more_blocks_than_are_used(device: str) -> list[Any]:
    return _ascend([(TOKENS, HEADS, DIM)] * 2, device, BLOCKS + 2)


def _mamba(device: str) -> list[Any]:
    """Two states of a layer in one page, of two types."""
    conv, ssm = (3, 1024), (HEADS, 64, 16)
    page = 2 * int(np.prod(conv)) + 4 * int(np.prod(ssm)) + 512

    def layer() -> list[Any]:
        raw = _aligned(BLOCKS * page, device)
        half, full = raw.view(torch.bfloat16), raw.view(torch.float32)
        begin = 2 * int(np.prod(conv)) // 4
        first = half.as_strided((BLOCKS, *conv), (page // 2, conv[1], 1), half.storage_offset())
        strides = (page // 4, ssm[1] * ssm[2], ssm[2], 1)
        return [first, full.as_strided((BLOCKS, *ssm), strides, full.storage_offset() + begin)]

    return [layer() for _ in range(3)]


LAYOUTS = {
    "layers outermost": Layout(_layers_outermost),
    "keys and values apart": Layout(_keys_and_values_apart, axis=1),
    "blocks first": Layout(_blocks_first),
    "cross layer": Layout(_cross_layer),
    "large": Layout(_large),
    "mla": Layout(_mla),
    "padded": Layout(_padded),
    "kernel blocks": Layout(_kernel_blocks, axis=1, kernel_blocks=2),
    "odd": Layout(_odd),
    "mixed": Layout(_mixed),
    "tuples": Layout(_tuples),
    "nope and rope": Layout(_nope_and_rope),
    "sparse": Layout(_sparse),
    "more blocks than are used": Layout(_more_blocks_than_are_used),
    "mamba": Layout(_mamba),
}


class Memory:
    """A region without rows: a file in memory, which another process can map too."""

    def __init__(self, size: int, path: str = "") -> None:
        descriptor = os.open(path, os.O_RDWR) if path else os.memfd_create("region", os.MFD_CLOEXEC)
        if not path:
            os.ftruncate(descriptor, size)
        self.buffer = memoryview(mmap.mmap(descriptor, size))
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.descriptor = descriptor
        self.array = np.frombuffer(self.buffer, np.uint8)
        self.address, self.bytes = int(self.array.ctypes.data), size
        self.present = size

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self.descriptor)


class Scattered(NamedTuple):
    """Places for blocks in a region: those that copies are told, and the pieces of each: offsets, and bytes."""

    offsets: list[int]
    runs: Runs
    pieces: list[list[tuple[int, int]]]


def _memories(tensors: Sequence[Any]) -> dict[int, Any]:
    """The tensors' storages as bytes, by address: copies of whole storages need nothing that computes."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return {
        pointer: torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)
        for pointer, storage in storages.items()
    }


def _pieces(view: Any) -> Iterator[Any]:
    """The contiguous parts of a view."""
    if view.is_contiguous():
        yield view
        return
    for part in view:
        yield from _pieces(part)


def _noise(count: int, tame: bool) -> Any:
    """Random bytes; `tame` ones are those of bfloat16 values between 2 ** -7 and 2, but for one in 128."""
    noise = torch.randint(0, 256, (count,), dtype=torch.uint8)
    if tame:
        high, some = noise[1::2], noise[1::256].clone()
        high.copy_(high & 0x83 | 0x3C)
        high[::128] = some
    return noise


class Bench:
    """A cache full of noise, a region, and the device between them. A slot every `slot` + GAP bytes."""

    def __init__(self, rig: Rig, layout: Layout, path: str = "", sections: int = 0, compress: bool = False) -> None:
        """With `sections`, a block is divided into so many, where its tensors end, or anywhere."""
        self.rig, self.layout = rig, layout
        rig.prepare()
        self.tensors = list(flatten(layout.make(rig.kind)))
        for memory in _memories(self.tensors).values():
            memory.copy_(_noise(len(memory), compress))
        rig.synchronize()
        self.block_bytes = sum(self._block(tensor, 0).nbytes for tensor in self.tensors)
        self.slot_bytes = compression.stored_bytes(self.block_bytes) if compress else self.block_bytes
        self.fragments = block_fragments(map(describe_tensor, self.tensors), BLOCKS, self.block_bytes)
        self.compress = compress
        self.pitch = self.slot_bytes + GAP
        size = -(-SLOTS * self.pitch // mmap.PAGESIZE) * mmap.PAGESIZE
        self.region = Memory(size, path)
        if not path:
            self.region.array[:] = 0xA5
        self.ends = [self.block_bytes * (at + 1) // sections for at in range(sections)]
        if compress:
            self.ends[:-1] = [end // compression.PIECE_BYTES * compression.PIECE_BYTES for end in self.ends[:-1]]
        self.device: Device = open_device(rig.kind, self.fragments, BLOCKS, self.tensors, self.ends, compress)
        self.ended: list[Job] = []

    def _block(self, tensor: Any, number: int) -> Any:
        return self.layout.block(tensor, number)

    def register(self) -> None:
        """Register the region, and wait until copies go the way that they will go."""
        self.device.register(self.region)
        pause = threading.Event()
        for _ in range(int(SECONDS * 1000)):
            if self.device.registered()[0]:
                return
            pause.wait(0.001)
        raise AssertionError("registering does not come to an end")

    def job(self, blocks: Sequence[int], slots: Sequence[int], region: Any = None) -> Job:
        offsets = np.array(slots, np.int64) * self.pitch
        return Job(region or self.region, np.array(blocks, np.int64), offsets, self.ended.append)

    def scatter(self, count: int, unit: int, draw: random.Random) -> Scattered:
        """Return places for so many blocks in up to six pieces of multiples of `unit` bytes each, of all blocks among
        each other; every fourth block is in one piece."""
        units = -(-self.slot_bytes // unit)
        cuts = [sorted(draw.sample(range(1, units), min(number % 4 and 5, units - 1))) for number in range(count)]
        sizes = [[(b - a) * unit for a, b in itertools.pairwise([0, *each, units])] for each in cuts]
        order = [(number, at) for number, each in enumerate(sizes) for at in range(len(each))]
        draw.shuffle(order)
        place, lie = 0, {}
        for each in order:
            lie[each] = place
            place += sizes[each[0]][each[1]] + draw.randrange(3) * unit
        assert place <= self.region.bytes
        pieces = [[(lie[number, at], size) for at, size in enumerate(each)] for number, each in enumerate(sizes)]
        offsets, rows, end = [], [], self.region.bytes
        for each in pieces:
            offsets.append(each[0][0] if len(each) == 1 else end)
            for at, size in each if len(each) > 1 else ():
                rows.append((end, at, size))
                end += size
        begins, places, lengths = (np.array([row[column] for row in rows], np.uint64) for column in range(3))
        return Scattered(offsets, Runs(begins, places, lengths), pieces)

    def scattered_job(self, blocks: Sequence[int], places: Scattered, section: int = 0) -> Job:
        offsets = np.array(places.offsets, np.int64)
        return Job(
            self.region, np.array(blocks, np.int64), offsets, self.ended.append, runs=places.runs, section=section
        )

    def gathered(self, places: Scattered) -> list[bytes]:
        """The bytes of each block, in one piece."""
        return [
            b"".join(self.region.array[at : at + size].tobytes() for at, size in each)[: self.slot_bytes]
            for each in places.pieces
        ]

    def rest_is_whole(self, places: Scattered) -> bool:
        """Whether nothing but the blocks' bytes was written in the region."""
        rest = self.region.array.copy()
        for each in places.pieces:
            left = self.slot_bytes
            for at, size in each:
                rest[at : at + min(size, left)] = 0xA5
                left -= min(size, left)
        return bool((rest == 0xA5).all())

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> Job:
        job = self.job(blocks, slots)
        self.device.save(job)
        return job

    def load(self, blocks: Sequence[int], slots: Sequence[int], section: int = 0, later: bool = False) -> Job:
        job = self.job(blocks, slots)
        job.section, job.later = section, later
        self.device.load(job)
        return job

    def finish(self) -> None:
        assert self.device.drain(SECONDS)
        assert [job.error for job in self.ended if job.error and not job.cancelled] == []

    def block(self, number: int) -> bytes:
        """The bytes of a device block, in a slot's order, by torch's own means."""
        return self._read([number])[0]

    def blocks(self) -> list[bytes]:
        self.rig.synchronize()
        return self._read(range(BLOCKS))

    def _read(self, numbers: Sequence[int]) -> list[bytes]:
        copies = {pointer: memory.cpu() for pointer, memory in _memories(self.tensors).items()}

        def on_host(tensor: Any) -> Any:
            copy = copies[tensor.untyped_storage().data_ptr()]
            whole = copy[: len(copy) // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
            return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

        tensors = [on_host(tensor) for tensor in self.tensors]
        return [
            b"".join(self._block(t, number).contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)
            for number in numbers
        ]

    def fill(self, number: int, value: int) -> None:
        """Queue a write of every byte of a block, behind what is queued."""
        for tensor in self.tensors:
            for piece in _pieces(self._block(tensor, number)):
                self.rig.fill(piece, value)

    def slot(self, number: int) -> bytes:
        return self.region.array[number * self.pitch : number * self.pitch + self.slot_bytes].tobytes()

    def stored(self, blocks: Sequence[bytes]) -> list[bytes]:
        """What is in a slot for each block."""
        if not self.compress:
            return [*blocks]
        raw = np.frombuffer(b"".join(blocks), np.uint8).reshape(len(blocks), -1)
        return [each.tobytes() for each in compression.compress(raw)]

    def put(self, number: int, data: bytes) -> None:
        self.region.array[number * self.pitch : number * self.pitch + len(data)] = np.frombuffer(data, np.uint8)

    def round_trip(self) -> None:
        """Save every block and load it elsewhere; every byte arrives, and none beside it changes."""
        before = self.blocks()
        self.save(range(BLOCKS), [*reversed(range(BLOCKS))])
        self.finish()
        assert [self.slot(number) for number in range(BLOCKS)] == self.stored(before[::-1])
        self.load(range(BLOCKS), range(BLOCKS))
        self.finish()
        assert self.blocks() == before[::-1]
        assert self.gaps_are_whole()

    def gaps_are_whole(self) -> bool:
        slots = self.region.array[: SLOTS * self.pitch].reshape(SLOTS, self.pitch)
        return bool(
            (slots[:, self.slot_bytes :] == 0xA5).all() and (self.region.array[SLOTS * self.pitch :] == 0xA5).all()
        )

    def around(self) -> list[bytes]:
        """Every byte of the tensors' storages, those that are no block's too."""
        self.rig.synchronize()
        return [memory.cpu().numpy().tobytes() for memory in _memories(self.tensors).values()]

    def close(self) -> None:
        self.device.close()
