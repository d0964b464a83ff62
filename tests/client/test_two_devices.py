"""An engine of two ranks, each in a process and on a device of its own, as with tensor parallelism."""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from steps import BLOCK, PATIENCE, Request, Rig, VllmScheduler, idle

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_client.scheduler.views import EngineFacts
from kvcache_client.settings import ConnectorSettings
from kvcache_client.worker.places import RankFacts, Shards
from kvcache_client.worker.worker import Worker

torch = pytest.importorskip("torch")

RANKS = 2
needs_gpus = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")
DEVICES = [("cpu", "cpu"), pytest.param(("cuda:0", "cuda:1"), marks=needs_gpus)]


def spec_of(rank_bytes: int) -> NamespaceSpec:
    return NamespaceSpec("two devices", (GroupSpec(BLOCK, (rank_bytes,) * RANKS),), {"weights": ""})


def serve_rank(
    pipe: Any, endpoint: str, engine: str, rank: int, device: str, layers: int, blocks: int, page: int
) -> None:
    """Carry out a rank's part of the steps that come through `pipe`, in a process of its own."""
    if device != "cpu":
        torch.cuda.set_device(device)
    torch.seed()
    session = Session.open(endpoint, engine=engine, label=f"rank {rank}", deadline=5.0)
    tensors = [torch.randint(0, 255, (blocks, page), dtype=torch.uint8, device=device) for _ in range(layers)]
    size = layers * page
    worker = Worker(session, spec_of(size), ConnectorSettings(endpoint), Shards(RANKS, 1), rank, RankFacts(size))
    worker.register({str(layer): tensor for layer, tensor in enumerate(tensors)}, blocks)
    pipe.send(None)
    while (call := pipe.recv()) is not None:
        name, arguments = call
        if name == "digest":
            (numbers,) = arguments
            held = [tensor[number].cpu().numpy().tobytes() for number in numbers for tensor in tensors]
            pipe.send(hashlib.sha256(b"".join(held)).digest())
        else:
            pipe.send(getattr(worker, name)(*arguments))
    worker.close()
    pipe.send(None)


class Ranks:
    """The ranks of an engine, called like one worker. A load is over once it is for each of them, as in vLLM."""

    def __init__(self, endpoint: str, engine: str, devices: tuple[str, ...], *sizes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        self._received: Counter[str] = Counter()
        for rank, device in enumerate(devices):
            ours, theirs = context.Pipe()
            arguments = (theirs, endpoint, engine, rank, device, *sizes)
            process = context.Process(target=serve_rank, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            assert pipe.poll(120.0), "a rank did not start"
            pipe.recv()

    def _all(self, name: str, *arguments: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((name, arguments))
        return [pipe.recv() for pipe in self._pipes]

    def begin(self, plan: Any) -> None:
        self._all("begin", plan)

    def load(self, plan: Any) -> None:
        self._all("load", plan)

    def received(self) -> set[str]:
        self._received.update(name for names in self._all("received") for name in names)
        return {name for name, ranks in self._received.items() if ranks == len(self._pipes)}

    def take_errors(self) -> set[int]:
        return set().union(*self._all("take_errors"))

    def digests(self, blocks: list[int]) -> list[bytes]:
        return self._all("digest", blocks)

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            pipe.recv()
            process.join(PATIENCE)


class TwoRanks(Rig):
    """An engine of two ranks, whose steps a test writes out."""

    def __init__(
        self, endpoint: str, name: str, devices: tuple[str, ...], layers: int = 3, blocks: int = 64, page: int = 4096
    ) -> None:
        options, spec = ConnectorSettings(endpoint), spec_of(layers * page)
        self.worker = Ranks(endpoint, name, devices, layers, blocks, page)  # type: ignore[assignment]
        self.session = Session.open(endpoint, engine=name, label="scheduler", deadline=5.0)
        self.scheduler = VllmScheduler(self.session, spec, options, EngineFacts(BLOCK, ranks=RANKS))
        self.seen = set()

    def await_hit(self, request: Request, tokens: int) -> None:
        until = time.monotonic() + PATIENCE
        while self.scheduler.matched_tokens(request, 0) != (tokens, True):
            assert time.monotonic() < until, f"no hit of {tokens} tokens"
            self.step()
            time.sleep(0.01)


@pytest.fixture
def engine(daemon: Any) -> Iterator[Callable[..., TwoRanks]]:
    made: list[TwoRanks] = []

    def make(name: str, devices: tuple[str, ...], **sizes: int) -> TwoRanks:
        made.append(TwoRanks(daemon.endpoint, name, devices, **sizes))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("devices", DEVICES, ids=lambda devices: devices[0])
def test_each_rank_gets_its_own_shards_back(engine: Any, daemon: Any, devices: tuple[str, ...]) -> None:
    """Also on the other device: a slot says nothing of who wrote it."""
    one, two = engine("one", devices), engine("two", devices[::-1])
    stored, loaded = list(range(3, 27)), list(range(60, 36, -1))
    request = Request("r", len(stored) * BLOCK)
    one.run(request, stored)
    idle(daemon, len(stored))
    again = Request("s", len(stored) * BLOCK + 1, request.block_hashes)
    two.await_hit(again, len(stored) * BLOCK)
    two.admit(again, loaded, load=len(stored) * BLOCK)
    two.step({again: 1})
    assert two.await_loads() == {"s"}
    expected = one.worker.digests(stored)
    assert two.worker.digests(loaded) == expected
    assert len(set(expected)) == RANKS, "the ranks hold different bytes"
