"""One line a minute in the engine's log, and none for each request."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvcache_client.scheduler import summary
from kvcache_client.scheduler.summary import Summary, summarize


def test_the_line_says_what_happened_and_leaves_out_what_did_not() -> None:
    assert summarize({}, {}, 60.0) == ""
    assert summarize({}, {"notes_dropped": 3}, 60.0) == "", "no refusal"
    assert summarize({"saved_bytes": 3 << 20, "save_us": 100}, {}, 60.2) == "in 60 s: saved 3.0 MiB at 31.5 GB/s"
    counts = {"requests": 2, "tokens": 5000, "hit_tokens": 4096, "load_tokens": 1024, "loaded_bytes": 1 << 20}
    assert summarize(counts | {"load_us": 1000}, {"saves_quota": 7, "lookups_declined_lora": 1}, 60.0) == (
        "in 60 s: 2 requests of 5,000 tokens, 4,096 hit, 1,024 to load; loaded 1.0 MiB at 1.0 GB/s; "
        "refused: lookups_declined_lora 1, saves_quota 7"
    )


def test_a_line_comes_by_itself_and_only_where_something_happened(until: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "EVERY", 0.02)
    lines: list[str] = []
    refusals = {"saves_quota": 1}
    said = Summary(lines.append, lambda: refusals)
    said.copied({"verdict_visible": 4})  # nothing that a line is about
    said.request(100, 0, 0)
    until(lambda: lines, "the first line")
    said.request(50, 0, 0)
    until(lambda: len(lines) == 2, "the second line")
    assert "1 requests of 100 tokens" in lines[0] and "saves_quota 1" in lines[0]
    assert "1 requests of 50 tokens" in lines[1] and "saves_quota" not in lines[1]
    said.close()
    said.close()
    assert len(lines) == 2


def test_the_log_of_an_engine(rigs: Any, daemon: Any, caplog: pytest.LogCaptureFixture) -> None:
    from steps import BLOCK, Request, idle

    caplog.set_level(logging.DEBUG)
    rig = rigs("one")
    request = Request("r", 4 * BLOCK)
    rig.scheduler.matched_tokens(request, 0)
    rig.run(request, [0, 1, 2, 3])
    idle(daemon, 4)
    again = Request("s", 5 * BLOCK, request.block_hashes)
    assert rig.scheduler.matched_tokens(again, BLOCK) == (3 * BLOCK, True)
    rig.admit(again, [10, 11, 12, 13, 14], BLOCK, 3 * BLOCK)
    rig.step()
    rig.await_loads()
    rig.scheduler.copied(rig.worker.counters)
    rig.scheduler.close()
    of_requests = [each for each in caplog.records if "request r" in each.getMessage() or "request s" in each.message]
    assert of_requests and {each.levelno for each in of_requests} == {logging.DEBUG}
    (line,) = [each.getMessage() for each in caplog.records if " requests of " in each.getMessage()]
    assert f"2 requests of {9 * BLOCK} tokens, {4 * BLOCK} hit, {3 * BLOCK} to load; loaded 0.0 MiB at" in line
    assert line.startswith("engine one, in ")
    assert (rig.scheduler.counters["needed_blocks"], rig.scheduler.counters["needed_bytes"]) == (3, 3 * 3 * 4096)
