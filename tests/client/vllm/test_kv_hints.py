"""`Request.kv_hints`, with which a router or an orchestrator says what becomes of a request's blocks."""

from __future__ import annotations

from typing import Any

import pytest

BLOCK = 32


@pytest.fixture
def kv_hints() -> Any:
    """`kv_hints(*actions)` returns vLLM's envelope; an action is its type, its payload and, by default, version 1.0."""
    protocol = pytest.importorskip("vllm.v1.kv_hints", reason="from 0.32 on")

    def envelope(*actions: Any, version: str = "0.1") -> Any:
        made = []
        for name, payload, *others in actions:
            made.append(protocol.KvHintAction("a", name, others[0] if others else "1.0", payload))
        return protocol.KvHintsEnvelope(version, "m", made)

    return envelope


def test_a_session_that_waits_for_its_tool_is_retained(
    engines: Any, daemon: Any, sim: Any, prompt: Any, idle: Any, kv_hints: Any
) -> None:
    """Its prompt and its answer, so that the next request of the session finds both."""
    tokens = prompt(3 * BLOCK + 4)
    one = engines("one")
    hints = kv_hints(("kv.retain", {"directives": [{"priority": 80, "duration": 600}]}))
    one.add("r", tokens, 2 * BLOCK, kv_hints=hints)
    one.run()
    one.step()
    idle()
    assert one.outputs["r"] == sim.expected(tokens, 2 * BLOCK)

    mine = one.connector._scheduler._session.engine

    def retained(status: Any) -> bool:
        (found,) = [each for each in status["hints"]["engines"] if each["engine"] == mine]
        return bool(found["retentions"] == 2 and found["bytes"] >= 5 * 3 * sim.PAGE and not status["hints"]["waiting"])

    daemon.wait_status(retained, "the three full blocks of the prompt, and all five with the answer")


def test_a_session_that_has_ended_gives_its_blocks_up(
    engines: Any, daemon: Any, sim: Any, prompt: Any, idle: Any, kv_hints: Any
) -> None:
    tokens = prompt(3 * BLOCK + 1)
    one = engines("one")
    one.generate(tokens)
    idle()
    before = daemon.status()["hints"]["dropped_blocks"]
    one.add("last", [*tokens, *prompt(2 * BLOCK)], kv_hints=kv_hints(("kv.deref", {})))
    one.run()
    one.step()
    daemon.wait_status(lambda s: s["hints"]["dropped_blocks"] == before + 3, "its cached blocks are evicted first")
    assert one.counters["saved_bytes"] == 3 * 3 * sim.PAGE


def test_hints_that_are_not_understood_change_nothing(
    engines: Any, sim: Any, prompt: Any, idle: Any, kv_hints: Any
) -> None:
    tokens = prompt(3 * BLOCK + 1)
    one, two = engines("one"), engines("two")
    one.add("r", tokens, kv_hints=kv_hints(("kv.retain", {}), version="7"))
    one.run()
    idle()
    demote, bad = ("kv.demote", {"session_id": "s"}), ("kv.retain", {"directives": [{"priority": -1}]})
    two.add("r", tokens, kv_hints=kv_hints(demote, ("kv.fetch", {}), bad))
    two.run()
    two.step()
    assert two.prefills["r"] == (1, 0, 3 * BLOCK)
    assert one.outputs["r"] == two.outputs["r"] == sim.expected(tokens, 1)
    counted = [
        {name: count for name, count in each.counters.items() if name.startswith("hints_")} for each in (one, two)
    ]
    assert counted == [{"hints_unknown_protocol": 1}, {"hints_unknown_action": 1, "hints_invalid": 1}]


def test_our_own_hint_replaces_those_of_vllm(engines: Any, daemon: Any, prompt: Any, idle: Any, kv_hints: Any) -> None:
    one = engines("one")
    sampling = {"extra_args": {"kv_transfer_params": {"kvcache": {"drop": True}}}}
    hints = kv_hints(("kv.retain", {"directives": [{"priority": 80}]}))
    one.add("r", prompt(3 * BLOCK + 1), sampling=sampling, kv_hints=hints)
    one.run()
    one.step()
    idle()
    assert not one.counters.get("saved_bytes")
    mine = one.connector._scheduler._session.engine
    assert mine not in [each["engine"] for each in daemon.status()["hints"]["engines"]]
