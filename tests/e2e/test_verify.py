"""A real engine over a region that somebody spoils: canaries are quiet until then, and tell who stored what."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from cache_state import BLOCK, wait_idle

from kvcache_client import Session
from kvcache_proto.region import READY, RegionRows, row_of
from kvcache_proto.types import BlockRef

pytestmark = pytest.mark.long  # tests/client has it without an engine


@pytest.fixture
def daemon(start_daemon: Any) -> Any:
    return start_daemon(size="64MiB")


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
