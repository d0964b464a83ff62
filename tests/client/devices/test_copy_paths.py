"""What must come before what when blocks go by way of the stage, on a model of streams and events."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from kvcache_client.address_ranges import Spans
from kvcache_client.devices import CopyError
from kvcache_client.devices.copy_paths import Staged
from kvcache_client.devices.layout import Fragment, sections

SLOT = 1 << 16


class Streams:
    """A runtime that runs nothing: of each stream and event it knows what has been queued before."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.before: dict[int, frozenset[str]] = {}
        self.after: dict[str, frozenset[str]] = {}  # of each piece of work, what comes before it
        self.streams: dict[str, int] = {}
        self.work = itertools.count()
        self.fail_at = -1

    def create_stream(self) -> int:
        number = next(self.numbers)
        self.before[number] = frozenset()
        return number

    create_event = create_stream

    def record(self, event: int, stream: int) -> None:
        self.before[event] = self.before[stream]

    finish = record

    def wait(self, stream: int, event: int) -> None:
        self.before[stream] |= self.before[event]

    def queue(self, kind: str, stream: int) -> str:
        name = f"{kind} {next(self.work)}"
        self.after[name], self.streams[name] = self.before[stream], stream
        self.before[stream] |= {name}
        return name

    def copy_batch(self, targets: Any, sources: Any, sizes: Any, saves: bool, stream: int) -> None:
        for number in range(len(sizes)):
            if number == self.fail_at:
                raise CopyError("no")
            self.queue("copy", stream)


class Packer:
    most = 2

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def launch(self, gather: bool, blocks: Any, buffer: int, stream: int, section: int) -> None:
        self.streams.queue("kernel", stream)


def whole(spans: Spans) -> Spans:
    return spans


def run(streams: Streams, path: Staged, parts: int) -> int:
    """Queue a job of `parts` moves; return its end."""
    ready, begun, end = (streams.create_event() for _ in range(3))
    compute = streams.create_stream()
    streams.queue("model", compute)
    streams.record(ready, compute)
    path.begin(ready, begun)
    for _ in range(parts):
        path.move(np.arange(2), np.array([0, 1 << 30], np.uint64), whole)
    path.finish(end)
    return end


def works(streams: Streams, kind: str) -> list[str]:
    return [name for name in streams.after if name.startswith(kind)]


@pytest.fixture(params=[True, False], ids=["saves", "loads"])
def saves(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def streams() -> Streams:
    return Streams()


@pytest.fixture
def path(streams: Streams, saves: bool) -> Staged:
    return Staged(
        streams, Packer(streams), [1 << 20, 2 << 20], 2 * SLOT, sections([Fragment(0, SLOT, SLOT)], []), saves
    )  # type: ignore[arg-type]


def test_a_job_ends_after_all_of_it_and_begins_after_the_model(streams: Streams, path: Staged) -> None:
    end = run(streams, path, 5)
    every = set(streams.after)
    assert streams.before[end] == every
    (model,) = works(streams, "model")
    assert all(model in streams.after[name] for name in every - {model})


def test_a_job_that_fails_midway_ends_after_what_it_has_queued(streams: Streams, path: Staged) -> None:
    run(streams, path, 3)
    ready, begun, end = (streams.create_event() for _ in range(3))
    path.begin(ready, begun)
    streams.fail_at = 1
    with pytest.raises(CopyError):
        path.move(np.arange(2), np.array([0, 1 << 30], np.uint64), whole)
    path.finish(end)
    assert streams.before[end] == set(streams.after)


def test_of_two_saves_to_one_slot_the_later_one_stays(streams: Streams, path: Staged, saves: bool) -> None:
    if not saves:
        pytest.skip("a load writes the cache with kernels, all on one stream")
    run(streams, path, 3)
    earlier = set(works(streams, "copy"))
    run(streams, path, 3)
    for copy in set(works(streams, "copy")) - earlier:
        assert earlier <= streams.after[copy]


def test_a_buffer_is_not_filled_before_it_is_empty(streams: Streams, path: Staged, saves: bool) -> None:
    run(streams, path, 6)
    kernels, copies = works(streams, "kernel"), works(streams, "copy")
    parts = [copies[2 * number : 2 * number + 2] for number in range(6)]
    for number in range(6):
        if saves:
            assert all(kernels[number] in streams.after[copy] for copy in parts[number])
            assert number < 2 or set(parts[number - 2]) <= streams.after[kernels[number]]
        else:
            assert set(parts[number]) <= streams.after[kernels[number]]
            assert number < 2 or all(kernels[number - 2] in streams.after[copy] for copy in parts[number])


def test_no_stream_has_its_next_copy_ready_when_the_last_one_ends(streams: Streams, path: Staged) -> None:
    """Else the device's copy engine would never leave it, and the model's own copies wait for all of the job."""
    run(streams, path, 8)
    copies = works(streams, "copy")
    for stream in {streams.streams[copy] for copy in copies}:
        own = [copy for copy in copies if streams.streams[copy] == stream]
        for earlier, later in zip(own[1::2], own[2::2], strict=False):  # the last copy of a part, the first of the next
            between = streams.after[later] - streams.after[earlier]
            assert any(name.startswith("kernel") and earlier in streams.after[name] for name in between)
