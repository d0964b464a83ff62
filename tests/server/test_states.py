"""The tables of states have all transitions that happen, and no others."""

from __future__ import annotations

from itertools import pairwise

import pytest
from host import Host, Story
from small_cache import KIB, Engine, chain, make_cache

from kvcache_proto import region
from kvcache_proto.region import WORD, RegionRows
from kvcache_server.core.states import LEASE, RESERVATION, SHARD, SLOT

NAMES = {getattr(region, name): name for name in ("FREE", "WRITING", "READY", "DOOMED")}


def stepped(steps: tuple[object, ...]) -> set[tuple[str, str]]:
    return {(step.before, step.after) for step in steps}  # type: ignore[attr-defined]


def test_blocks_change_state_as_in_their_table(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[str, str]] = set()
    set_state, open_row, close_row = RegionRows.set_state, RegionRows.open_row, RegionRows.close_row

    def state(rows: RegionRows, at: int) -> str:
        return NAMES[rows._words[at // WORD]]

    def noted_state(rows: RegionRows, at: int, after: int) -> None:
        before = state(rows, at)
        set_state(rows, at, after)
        if before != NAMES[after]:
            seen.add((before, NAMES[after]))

    def noted_opening(rows: RegionRows, at: int, *what: object) -> None:
        before = state(rows, at)
        open_row(rows, at, *what)  # type: ignore[arg-type]
        seen.add((before, state(rows, at)))

    def noted_closing(rows: RegionRows, at: int) -> None:
        before = rows._words[at // WORD]
        close_row(rows, at)
        if before in NAMES:  # not of a further run
            seen.add((NAMES[before], state(rows, at)))

    monkeypatch.setattr(RegionRows, "set_state", noted_state)
    monkeypatch.setattr(RegionRows, "close_row", noted_closing)
    monkeypatch.setattr(RegionRows, "open_row", noted_opening)
    for seed in range(8):
        host = Host()
        story = Story(host, seed)
        for _ in range(200):
            story.step()
    assert seen == stepped(SLOT)


def test_reservations_change_state_as_in_their_table() -> None:
    engine = Engine(make_cache(), "one", block_bytes=KIB)
    names = chain("a", 8)
    reserved = engine.reserve(names)
    (reservation,) = engine.cache.engines["one"].reservations.values()
    seen = [reservation.state]
    engine.settle(reserved, at=(0,))
    assert reservation.state == seen[-1]
    engine.settle(reserved, at=tuple(range(1, len(names))))
    seen.append(reservation.state)
    assert set(pairwise(seen)) == stepped(RESERVATION)


def test_every_table_names_each_step_once() -> None:
    for table in (SLOT, SHARD, RESERVATION, LEASE):
        assert len({(step.before, step.event) for step in table}) == len(table)
