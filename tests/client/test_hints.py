"""Hints of requests: how they are read, and what the scheduler's side makes of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from toy_engine import BLOCK, Cache, Engine, chain

from kvcache_client.engines.vllm.kv_hints import MOST_ACTIONS, MOST_RETAINED
from kvcache_client.engines.vllm.views import request_view
from kvcache_client.scheduler import hints
from kvcache_client.scheduler.views import Hint, Rest, Retain, parse_hint
from kvcache_proto.errors import BadArgument
from kvcache_proto.types import MAX_HASHES


@pytest.fixture
def cache() -> Cache:
    return Cache()


def vllm_request(params: Any) -> Any:
    known = {"request_id": "r", "num_tokens": 40, "num_prompt_tokens": 33, "block_hashes": [b"h"] * 2}
    return SimpleNamespace(**known, all_token_ids=list(range(40)), kv_transfer_params=params)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"retain": True}, Hint(retain=True)),
        ({"retain": {"seconds": 60}}, Hint(retain=Retain(60.0))),
        ({"retain": {"seconds": 0.5, "tokens": 1024}}, Hint(retain=Retain(0.5, 1024))),
        ({"drop": True}, Hint(drop=True)),
        ({"drop": {"after": 512}, "retain": {"tokens": 512}}, Hint(Retain(tokens=512), Rest(512))),
        ({"done": True}, Hint(done=True)),
        (
            {"retain": [{"tokens": 512}, {"seconds": 60, "answer": True}]},
            Hint((Retain(tokens=512), Retain(60.0, answer=True))),
        ),
        ({"fetch": True}, Hint(fetch=True)),
        ({}, Hint()),
    ],
)
def test_hints_are_read_from_the_parameters_of_vllm_s_request(given: Any, read: Hint) -> None:
    view = request_view(vllm_request({"kvcache": given, "do_remote_prefill": False}))
    assert (view.hint, view.bad_hints) == (read, ())


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, [], "kvcache", 3])
def test_other_parameters_are_no_hint(params: Any) -> None:
    view = request_view(vllm_request(params))
    assert (view.hint, view.bad_hints) == (None, ())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("retain", "Expected `object`, got `str`"),
        (None, "Expected `object`, got `null`"),
        ({"retian": True}, "unknown field `retian`"),
        ({"retain": 3600}, "at `retain`"),
        ({"retain": {"seconds": 0}}, "Expected `float` > 0.0 - at `retain.seconds`"),
        ({"retain": {"seconds": 1e9}}, "at `retain.seconds`"),
        ({"retain": {"seconds": "60"}}, "at `retain.seconds`"),
        ({"retain": {"tokens": "all"}}, "at `retain.tokens`"),
        ({"retain": {"tokens": 0}}, "at `retain.tokens`"),
        ({"drop": {"after": -1}}, "at `drop.after`"),
        ({"done": "yes"}, "at `done`"),
        ({3: 4}, "Expected `str`"),
    ],
)
def test_what_is_wrong_with_a_hint_is_named_and_the_request_goes_on(
    cache: Cache, caplog: pytest.LogCaptureFixture, given: Any, told: str
) -> None:
    view = request_view(vllm_request({"kvcache": given}))
    assert view.hint is None
    ((counter, error),) = view.bad_hints
    assert counter == "hints_invalid" and told in error
    with pytest.raises(BadArgument):
        parse_hint(given)
    engine = Engine(cache)
    for number in range(3):
        engine.run(engine.request(f"r{number}", chain(f"r{number}", 2), bad_hints=view.bad_hints))
    assert engine.scheduler.counters["hints_invalid"] == 3
    (line,) = [each.getMessage() for each in caplog.records if "hint" in each.getMessage()]
    assert told in line and "kv_transfer_params, kvcache" in line
    assert len(cache.attach(engine_spec(engine), (), 0).visible) == 6


def envelope(*actions: Any, protocol: str = "0.1") -> Any:
    """Return hints as vLLM's; an action is (type, version, payload)."""
    names = ("action_type", "action_version", "payload")
    named = [SimpleNamespace(action_id="a", **dict(zip(names, each, strict=True))) for each in actions]
    return SimpleNamespace(protocol_version=protocol, message_id="m", actions=named)


def hinted(kv_hints: Any, params: Any = None) -> Any:
    request = vllm_request(params)
    request.kv_hints = kv_hints
    return request_view(request)


def retain(*directives: Any) -> tuple[str, str, Any]:
    return "kv.retain", "1.0", {"scope": None, "directives": [*directives]}


WHOLE = {"priority": 50, "duration": 60}


@pytest.mark.parametrize(
    ("actions", "read"),
    [
        ([retain({"end": 32, "priority": 80, "duration": 600})], Hint((Retain(600.0, 32),))),
        ([retain({"start": 32, "end": 64, "priority": 1})], Hint((Retain(tokens=64),))),
        ([retain({"start": 0, "end": None, **WHOLE})], Hint((Retain(60.0, answer=True),))),
        ([retain({"covers_output": True, **WHOLE})], Hint((Retain(60.0, answer=True),))),
        ([retain({"end": 9, "priority": 9}), retain(WHOLE)], Hint((Retain(tokens=9), Retain(60.0, answer=True)))),
        ([retain({"priority": 9, "duration": 0}), retain()], None),
        ([("kv.fetch", "1.0", {"source_control_endpoint": "tcp://host", "block_hashes": [1]})], Hint((), fetch=True)),
        ([("kv.prefetch", "1.0", {})], Hint((), fetch=True)),
        ([("kv.deref", "1.2", {})], Hint((), done=True)),
        ([], None),
    ],
)
def test_hints_are_read_from_vllm_s_kv_hints(actions: Any, read: Hint | None) -> None:
    view = hinted(envelope(*actions))
    assert (view.hint, [*view.bad_hints]) == (read, [])


@pytest.mark.parametrize(
    ("kv_hints", "counter", "told"),
    [
        (envelope(("kv.fetch", "1.0", {}), protocol="2.0"), "hints_unknown_protocol", "'2.0'"),
        (envelope(("kv.demote", "1.0", {"session_id": "s"})), "hints_unknown_action", "kv.demote@1.0"),
        (envelope(("kv.retain", "2.0", {"directives": [WHOLE]})), "hints_unknown_action", "kv.retain@2.0"),
        (envelope(retain({"end": 32, "priority": 0})), "hints_unknown_action", "cannot be ended"),
        (envelope(retain({"end": 32})), "hints_invalid", "priority"),
        (envelope(retain({"start": 32, "end": 32, "priority": 1})), "hints_invalid", "`end`"),
        (envelope(retain({"end": 32, "priority": 101})), "hints_invalid", "priority"),
        (envelope(retain({"end": 32, "priority": 1, "duration": float("nan")})), "hints_invalid", "duration"),
        (envelope(retain({"end": 32, "priority": 1, "duration": 10**400})), "hints_invalid", "duration"),
        (envelope(retain({"end": 32, "priority": 1, "until": 3})), "hints_invalid", "until"),
        (envelope(retain(*[WHOLE] * (MOST_RETAINED + 1))), "hints_invalid", "directives"),
        (envelope(("kv.retain", "1.0", {"directives": "all"})), "hints_invalid", "directives"),
        (envelope(("kv.retain", "1.0", {})), "hints_invalid", "directives"),
        (envelope(("kv.retain", "1.0", None)), "hints_invalid", "payload"),
        (envelope(*[("kv.fetch", "1.0", {})] * (MOST_ACTIONS + 1)), "hints_invalid", "actions"),
        ("kv.retain", "hints_invalid", "kv_hints"),
        (SimpleNamespace(protocol_version="0.1"), "hints_invalid", "actions"),
    ],
)
def test_what_vllm_s_hints_have_that_is_not_understood_is_counted(
    cache: Cache, kv_hints: Any, counter: str, told: str
) -> None:
    view = hinted(kv_hints)
    assert view.hint is None
    assert [each.counter for each in view.bad_hints] == [counter] and told in view.bad_hints[0].error
    engine = Engine(cache)
    engine.run(engine.request("r", chain("r", 2), bad_hints=view.bad_hints))
    assert engine.scheduler.counters[counter] == 1
    assert len(saved(cache)) == 2


def test_what_is_understood_of_vllm_s_hints_is_done() -> None:
    full = [retain(WHOLE)] * MOST_RETAINED
    view = hinted(
        envelope(("kv.share", "1.0", {}), *full[:2], retain({"priority": "high"}), retain(*full[0][2]["directives"]))
    )
    assert view.hint == Hint((Retain(60.0, answer=True),) * 3)
    assert [each.counter for each in view.bad_hints] == ["hints_unknown_action", "hints_invalid"]
    half = retain(*[WHOLE] * (MOST_RETAINED // 2 + 1))
    view = hinted(envelope(half, half))
    assert len(view.hint.retained) == MOST_RETAINED // 2 + 1
    assert [each.counter for each in view.bad_hints] == ["hints_invalid"]


@pytest.mark.parametrize("ours", [{"drop": True}, {"retain": "for ever"}])
def test_our_own_hint_replaces_vllm_s(ours: Any) -> None:
    theirs = envelope(retain(WHOLE))
    both, alone = hinted(theirs, {"kvcache": ours}), hinted(None, {"kvcache": ours})
    assert (both.hint, both.bad_hints) == (alone.hint, alone.bad_hints)
    assert hinted(theirs, {"do_remote_prefill": True}).hint == Hint((Retain(60.0, answer=True),))


def engine_spec(engine: Engine) -> Any:
    return next(iter(engine.cache.spaces.values())).spec


def saved(cache: Cache) -> set[bytes]:
    return {each for space in cache.spaces.values() for each in space.visible}


def test_a_prompt_is_retained_once_whether_it_is_cached_or_not(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 4)
    hint = Hint(retain=Retain(60.0))
    request = engine.request("first", run, hint=hint)
    engine.run(request)
    assert cache.hints == [("retain", "first", run, 60.0)]
    again = engine.request("again", run, hint=hint)
    assert engine.ask(again) == (4 * BLOCK, True)
    engine.admit(again, 4 * BLOCK)
    engine.scheduler.allocated(again.view, [again.blocks], 0)
    assert cache.hints[1:] == [("retain", "again", run, 60.0)]


def test_only_whole_blocks_of_the_first_tokens_are_retained(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 4)
    for tokens, blocks in ((2 * BLOCK + 1, 2), (1000 * BLOCK, 4), (BLOCK - 1, 0)):
        cache.hints.clear()
        engine.run(engine.request(f"r{tokens}", run, hint=Hint(retain=Retain(tokens=tokens))))
        assert [each[2] for each in cache.hints] == ([run[:blocks]] if blocks else [])


def test_an_answer_is_retained_from_its_end_on(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 2)
    kept = (Retain(600.0, BLOCK), Retain(60.0, answer=True))
    request = engine.request("r", run, hint=Hint(kept))
    engine.admit(request)
    engine.step((request, request.tokens))
    first = [("retain", "r", run[:1], 600.0), ("retain", "r", [*run], 60.0)]
    assert cache.hints == first
    run += chain("answer", 2)
    engine.finish(request)
    assert cache.hints == [*first, ("retain", "r", run, 60.0)]


def test_a_refused_retention_is_counted_and_logged(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(cache)
    cache.retain_refusal = "quota"
    for number in range(3):
        engine.run(engine.request(f"r{number}", chain(f"r{number}", 2), hint=Hint(retain=True)))
    cache.retain_refusal = "something new"
    engine.run(engine.request("other", chain("other", 2), hint=Hint(retain=True)))
    counts = engine.scheduler.counters
    assert (counts["retain_refused_quota"], counts["retain_refused_other"]) == (3, 1)
    assert len([each for each in caplog.records if "not retained" in each.getMessage()]) == 2


def test_what_is_used_once_is_not_saved_and_why_learns_it(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 4)
    request = engine.request("once", run, hint=Hint(drop=True))
    engine.run(request)
    assert saved(cache) == set()
    assert cache.hints == []
    assert ("once", "drop") in cache.notes


def test_what_too_few_have_asked_for_is_not_saved_and_why_learns_it(cache: Cache) -> None:
    engine, head = Engine(cache, min_hits=3), chain("system", 3)
    for name in ("a", "b", "c", "d"):
        engine.run(engine.request(name, head + chain(name, 2)))
        assert saved(cache) == (set() if name in "ab" else set(head))
        assert (name, "min_hits") in cache.notes
    engine.run(engine.request("kept", own := chain("kept", 2), hint=Hint(Retain())))
    assert saved(cache) == {*head, *own}, "what is to be retained is saved in any case"


def test_what_several_dropped_prompts_begin_with_is_saved(cache: Cache) -> None:
    engine, head = Engine(cache), chain("system", 3)
    for name in ("a", "b", "c"):
        engine.run(engine.request(name, head + chain(name, 2), hint=Hint(drop=True)))
        assert saved(cache) == (set() if name == "a" else set(head))


def test_several_answers_to_one_dropped_prompt_do_not_save_it(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 4)
    answers = [engine.request(f"{number}_r", run, hint=Hint(drop=True)) for number in range(4)]
    for each in answers:
        engine.ask(each)
        engine.admit(each)
    engine.step(*((each, each.tokens) for each in answers))
    for each in answers:
        engine.finish(each)
    cache.answer()
    engine.step()
    assert saved(cache) == set()


def test_the_first_tokens_of_a_dropped_prompt_are_saved_if_it_says_so(cache: Cache) -> None:
    engine, head = Engine(cache), chain("system", 3)
    engine.run(engine.request("a", head + chain("a", 2), hint=Hint(drop=Rest(3 * BLOCK))))
    assert saved(cache) == set(head)
    other = chain("other", 3)
    engine.run(engine.request("b", other + chain("b", 2), hint=Hint(Retain(tokens=3 * BLOCK), drop=True)))
    assert saved(cache) == {*head, *other}
    assert cache.hints == [("retain", "b", other, 3600.0)]


def test_cached_blocks_of_a_dropped_prompt_stay(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 4)
    engine.run(engine.request("kept", run))
    engine.run(engine.request("once", run, hint=Hint(drop=True)))
    assert saved(cache) == set(run)
    assert cache.hints == []


def test_the_memory_of_dropped_prompts_is_bounded(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "SEEN", 8)
    engine, run = Engine(cache), chain("a", 4)
    for name in ("a", "b", "c", "a"):
        engine.run(engine.request(f"{name}{len(cache.notes)}", chain(name, 4), hint=Hint(drop=True)))
    assert saved(cache) == set()
    engine.run(engine.request("at once", run, hint=Hint(drop=True)))
    assert saved(cache) == set(run)


def test_the_last_request_of_a_conversation_saves_nothing_and_gives_its_blocks_up(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 6)
    engine.run(engine.request("first", run[:4]))
    request = engine.request("last", run, hint=Hint(done=Rest(BLOCK)))
    engine.ask(request)
    engine.run(request)
    assert saved(cache) == set(run[:4])
    assert cache.hints == [("drop", "last", run, 1)]
    assert not cache.leases


def test_what_has_no_name_of_its_own_is_neither_retained_nor_dropped(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 4)
    for hint in (Hint(retain=True), Hint(done=True)):
        engine.run(engine.request(f"r{hint.done}", run, hint=hint, uncacheable="lora"))
    assert cache.hints == []
    assert engine.scheduler.counters["hints_uncacheable"] == 1


def test_a_prompt_that_is_longer_than_one_message_is_retained_up_to_there(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", MAX_HASHES + 1)
    engine.run(engine.request("long", run, hint=Hint(retain=True)))
    assert [len(each[2]) for each in cache.hints] == [MAX_HASHES]
    engine.run(engine.request("over", run, hint=Hint(done=True)))
    assert len(cache.hints) == 1
    assert engine.scheduler.counters["hints_too_long"] == 1
