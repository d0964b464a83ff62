"""`prove`: which prompts it asks, and what their answers prove."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvcache_server.cli import commands
from kvcache_tools.daemon_process import tail
from kvcache_tools.prove.cases import ANSWER_TOKENS, Draw, Sizes, fills, later_cases, lengths, loadable, saved_cases
from kvcache_tools.prove.verdict import DIFFERS, EQUAL, UNPROVEN, Answer, Result, largest_gap, row, summary, verdicts

SIZES = Sizes(block=16, cached=128, chunk=1024, window=200, checkpoint=512, top_k=250)
COMPUTED = Answer([5, 6, 7], [-1.0, -2.0, -3.0], 0)
DEVICE = Answer([5, 6, 7], [-1.0, -2.0, -3.5], 128)
RESULT = Result("chunk", 200, 128, COMPUTED, DEVICE, COMPUTED, DEVICE, Answer([9, 6, 7], [-1.0, -1.0, -1.0], 0))
WRONG = Answer([5, 8, 7], [-1.0, -2.5, -3.0], 128)


def test_prompts_end_around_each_boundary() -> None:
    found, beyond = lengths(SIZES, 2048)
    for boundary in (16, 128, 3 * 128, 200, 200 + 128, 512 + 128, 250, 2 * 250, 1024, 1024 + 128):
        assert {boundary - 1, boundary, boundary + 1} <= set(found)
    assert not beyond
    found, beyond = lengths(SIZES, 1024)
    assert max(found) == 1024
    assert beyond == ["chunk + cached block (1,152 tokens)"]


def test_no_prompt_is_longer_than_it_may_be_or_begins_as_another_one() -> None:
    for longest in (64, 300, 600, 2048):
        draw = Draw("seed", 512)
        cases = saved_cases(SIZES, longest, draw)
        cases += later_cases(cases, [[1] * ANSWER_TOKENS for _ in cases], SIZES, draw)
        assert max(len(case.prompt) for case in cases) <= longest
        alike = [case for case in cases if case.name not in ("branch", "second branch", "turn 2")]
        assert len({tuple(case.prompt[:12]) for case in alike}) == len(alike)


def test_branches_and_the_second_turn_continue_within_a_block() -> None:
    draw = Draw("seed", 512)
    saved = saved_cases(SIZES, 2048, draw)
    answers = [[number] * ANSWER_TOKENS for number, _ in enumerate(saved)]
    prompts = {case.name: case.prompt for case in saved}
    one, two, turn = later_cases(saved, answers, SIZES, draw)
    shared = 2 * 128 + 64
    assert one.prompt[:shared] == two.prompt[:shared] == prompts["trunk"][:shared]
    assert len({each[shared] for each in (one.prompt, two.prompt, prompts["trunk"])}) == 3
    assert turn.turn == prompts["turn 1"]
    assert turn.prompt[: len(turn.turn) + ANSWER_TOKENS] == turn.turn + answers[-1]
    assert len(turn.turn) < 3 * 128 < len(turn.turn) + ANSWER_TOKENS, "a block ends within the answer"
    assert loadable(turn, SIZES) == 3 * 128


def test_an_engine_is_filled_up_to_the_boundary() -> None:
    draw = Draw("seed", 512)
    saved = saved_cases(SIZES, 2048, draw)
    same, short = fills(saved[-2], 256, draw)
    assert len(same) == len(saved[-2].prompt) and same[:256] == saved[-2].prompt[:256]
    assert short == same[:257] and same[256] != saved[-2].prompt[256]
    turn = later_cases(saved, [[1] * ANSWER_TOKENS for _ in saved], SIZES, draw)[-1]
    assert fills(turn, 384, draw)[0] == turn.turn, "the answer's KV is computed token by token"


def test_equal_answers() -> None:
    assert verdicts(RESULT) == ("equal", "equal")
    code, text = summary([RESULT])
    assert code == EQUAL and "loaded up to 64.0% of their tokens" in text and "1 equal a device hit's" in text
    assert row(RESULT) == ("chunk", "200", "128 of 128", "equal", "equal", "0", "0.5", "yes")
    assert "0 equal a device hit's" in summary([replace(RESULT, loaded=replace(DEVICE, logprobs=[-1.0] * 3))])[1]


def test_log_probabilities_show_what_tokens_do_not() -> None:
    """The most likely token may be the same whatever the KV is."""
    exact = replace(RESULT, device=replace(DEVICE, logprobs=[-1.0, -2.0, -3.0]), loaded=replace(COMPUTED, cached=128))
    other = replace(COMPUTED, logprobs=[-1.0, -2.0, -3.5])
    result = replace(exact, other=other)
    assert result.matters and verdicts(result)[1] == "equal" and row(result)[-1] == "0.5"
    wrong = replace(result, loaded=replace(other, cached=128))
    assert verdicts(wrong)[1] == "DIFFERS in logprobs" and summary([wrong])[0] == DIFFERS
    slight = replace(result, loaded=replace(COMPUTED, logprobs=[-1.0, -2.0, -3.0001], cached=128))
    assert verdicts(slight)[1] == "equal"
    noisy = replace(wrong, computed=replace(COMPUTED, logprobs=[-1.0, -2.0, -3.1]))
    assert verdicts(noisy)[1] == "equal" and not noisy.matters, "the noise is as large"


def test_an_answer_that_differs() -> None:
    result = replace(RESULT, loaded=WRONG)
    assert verdicts(result) == ("equal", "DIFFERS at 1")
    assert summary([RESULT, result])[0] == DIFFERS
    assert verdicts(replace(RESULT, saved=WRONG)) == ("DIFFERS at 1", "equal")
    assert verdicts(replace(RESULT, loaded=replace(DEVICE, tokens=[5, 6]))) == ("equal", "DIFFERS at 2")
    assert largest_gap(WRONG, COMPUTED) == 0.0, "only up to the token that differs"


@pytest.mark.parametrize("own", [{"computed": WRONG}, {"more": [WRONG]}])
def test_the_noise_of_an_engine_that_has_several_answers(own: dict[str, Answer]) -> None:
    result = replace(RESULT, loaded=WRONG, saved=None, **own)  # type: ignore[arg-type]
    assert verdicts(result) == ("", "noise")
    code, text = summary([result])
    assert code == EQUAL and "1 within the engine's own noise" in text


def test_a_tie_is_noise() -> None:
    """Which of two tokens is the most likely one depends on the last bits, if both are as likely."""
    noisy = replace(DEVICE, second=[(9, -9.0), (8, -2.4), (9, -9.0)])
    result = replace(RESULT, loaded=WRONG, device=noisy)
    assert result.noise == 0.5 and verdicts(result) == ("equal", "noise")
    clear = replace(DEVICE, second=[(9, -9.0), (8, -2.6), (9, -9.0)])
    assert verdicts(replace(result, device=clear))[1] == "DIFFERS at 1", "the token is not as likely"
    varying = replace(result, device=clear, more=[replace(DEVICE, logprobs=[-1.0, -2.7, -3.5])])
    assert verdicts(varying)[1] == "noise", "the engine itself varies by more than that"
    third = replace(DEVICE, second=[(8, -1.0), (9, -2.0), (8, -3.0)])
    assert verdicts(replace(result, device=third))[1] == "DIFFERS at 1", "another token is the second one"
    shorter = replace(DEVICE, tokens=[5, 6])
    assert verdicts(replace(result, loaded=shorter))[1] == "DIFFERS at 2"


def test_without_a_hit_of_the_engine_s_own_a_hit_equals_what_is_computed() -> None:
    assert verdicts(replace(RESULT, device=None)) == ("equal", "equal")
    assert verdicts(replace(RESULT, device=None, loaded=WRONG))[1] == "DIFFERS at 1"


def test_equal_answers_that_prove_nothing() -> None:
    nothing = replace(RESULT, loaded=COMPUTED, device=None, other=None)
    assert summary([nothing]) == (UNPROVEN, "nothing was loaded, so nothing is proved")
    code, text = summary([replace(RESULT, other=DEVICE)])
    assert code == UNPROVEN and "no answer depends on what was loaded" in text
    assert summary([nothing, RESULT])[0] == EQUAL


def test_the_first_error_of_an_engine_is_shown(tmp_path: Path) -> None:
    """The last lines of its log only say that there was one."""
    log = tmp_path / "engine.log"
    before = ["INFO 11-28 [a.py:1] no Error yet", "(EngineCore pid=7) ERROR 11-28 19:05 [core.py:15] Traceback"]
    cause = "(EngineCore pid=7) ERROR 11-28 19:05 [core.py:15] torch.OutOfMemoryError: no memory"
    last = [f"(APIServer pid=6) ERROR 11-28 19:05 [utils.py:{n}] RuntimeError: see above" for n in range(40)]
    log.write_text("\n".join([*before, cause, *last]))
    assert tail(log).splitlines() == [cause, "...", *last[-30:]]
    log.write_text("\n".join([*before, cause]))
    assert tail(log).splitlines() == [*before, cause]


@pytest.mark.parametrize("given", ["{", "[1]"])
def test_options_of_the_engine_are_an_object(given: str) -> None:
    assert CliRunner().invoke(commands, ["prove", "model", "--engine-args", given]).exit_code == 2


def test_a_model_that_does_not_exist_proves_nothing() -> None:
    done = CliRunner().invoke(commands, ["prove", "/no/such/model"])
    assert done.exit_code == UNPROVEN and "/no/such/model" in done.output
