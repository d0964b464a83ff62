"""Real engines over a region that somebody spoils: every token stays what it was, and the logs say who stored what."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from kvcache_client import Session
from kvcache_proto.region import READY, RegionRows, row_of
from kvcache_proto.types import BlockRef

pytestmark = pytest.mark.long  # tests/client has it without an engine

BLOCK = 32


@pytest.fixture
def daemon(start_daemon: Any) -> Any:
    return start_daemon(size="64MiB")


def wait_idle(daemon: Any, engine: Any) -> None:
    engine.generate([3, 4, 5])  # what the daemon answered after the engine's last step is taken with the next one
    daemon.wait_status(
        lambda s: not s["pool"]["blocks_writing"] and not s["pool"]["pinned_bytes"] and not s["pool"]["blocks_hidden"],
        "an idle cache",
    )


def spoil(daemon: Any, number: int) -> None:
    """Turn the bits of all bytes of one cached block."""
    with Session.connect(daemon.endpoint, engine="vandal", deadline=5.0) as session:
        assert session.region is not None
        rows = session.region.rows
        ref = next(itertools.islice(ready(rows), number, None))
        (size,) = (n["block_bytes"][0] for n in daemon.status()["namespaces"])
        for data in rows.views(ref, size, 0, size):
            data[:] = bytes(byte ^ 0xFF for byte in data)


def ready(rows: RegionRows) -> Iterator[BlockRef]:
    """Yield a reference to each READY block."""
    for page in range(rows.geometry.pages):
        row = rows.read_row(row_of(page))
        if row is not None and row.state == READY:
            yield BlockRef(rows.geometry.data_offset + page * rows.geometry.page_bytes, row.generation)


def test_spoilt_blocks_are_not_answered_from(reopened: Any, daemon: Any, prompt: Any, reference: Any) -> None:
    engine = reopened("checked", daemon.endpoint, {"verify": "all"})
    prompts = [prompt(8 * BLOCK + 3)]
    for _ in range(2):  # the second time loads, and finds all as it was
        assert engine.generate(*prompts) == reference(prompts)
        wait_idle(daemon, engine)
        engine.ask("reset")
    assert "blocks_corrupt" not in daemon.status()["counters"]
    spoil(daemon, 4)
    assert engine.generate(*prompts) == reference(prompts)
    wait_idle(daemon, engine)
    assert daemon.status()["counters"]["blocks_corrupt"] == 1
    for log in (engine.log, daemon.log):
        assert log.count("stored by engine checked-") == 1
    engine.ask("reset")
    assert engine.generate(*prompts) == reference(prompts)  # what was computed anew has been stored anew
    assert daemon.status()["counters"]["blocks_corrupt"] == 1
    engine.ask("close")


def test_canaries_are_quiet_until_a_block_is_spoilt(reopened: Any, daemon: Any, prompt: Any, reference: Any) -> None:
    engine = reopened("singing", daemon.endpoint, {"verify": "off", "canary_every": 1})
    prompts = [prompt(4 * BLOCK + 3 * n) for n in range(1, 6)]
    assert engine.generate(*prompts) == reference(prompts)
    wait_idle(daemon, engine)
    engine.ask("reset")
    assert engine.generate(prompts[0]) == reference(prompts[:1])  # alone, and then beside others
    assert engine.generate(*prompts) == reference(prompts)
    wait_idle(daemon, engine)
    assert engine.log.count("cached blocks are as computed") == 5
    assert "canary_mismatches" not in daemon.status()["counters"]

    engine.ask("reset")
    before = daemon.status()["pool"]["blocks"]
    for number in range(before):
        spoil(daemon, number)
    assert engine.generate(*prompts) == reference(prompts)
    status = daemon.wait_status(lambda s: s["counters"].get("canary_mismatches"), "the alarm")
    assert status["pool"]["blocks"] < before
    assert "stored by engine singing-" in daemon.log
    engine.ask("close")
