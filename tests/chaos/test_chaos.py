"""A short run of each kind of fault. `run.py`, `churn.py` and `stopped_writer.py` run longer, with flags."""

from __future__ import annotations

import ast
import json
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROUNDS = 8  # at most: the life of a daemon is short, and of what happens in it a busy machine does little
SHORT = ("--clients", 3, "--pace", 0.2, "--lives", 1)


def play(script: str, *options: object) -> list[dict[str, Any]]:
    """Run one of the scripts here and return its lines."""
    command = [sys.executable, str(HERE / script), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("themes", "must_have"),
    [
        (("store", "evict", "after-reply"), ("died_there",)),
        (("client-kill", "client-stop"), ("kills", "stops")),
        pytest.param(("ranks", "proxy"), ("kills", "visible"), marks=pytest.mark.long),
        (("daemon-stop", "full", "clock"), ("refused_mounts",)),
    ],
)
def test_nothing_is_lost_and_no_byte_is_wrong(themes: tuple[str, ...], must_have: tuple[str, ...]) -> None:
    wanted = {"verified": 1000, "visible": 100} | dict.fromkeys(must_have, 1)
    total: Counter[str] = Counter()
    for round_ in range(ROUNDS):
        first = round_ * len(themes)
        seeds = f"{first}..{first + len(themes) - 1}"
        *_, last = play("run.py", "--seeds", seeds, "--themes", ",".join(themes), *SHORT)
        assert last["broken"] == 0
        total.update(last["total"])
        if all(total[name] >= count for name, count in wanted.items()):
            return
    pytest.fail(f"{ROUNDS} rounds have not brought {wanted}: {total}")


def test_the_points_still_exist_in_the_code() -> None:
    for point, places in runpy.run_path(str(HERE / "daemon_that_dies.py"))["POINTS"].items():
        for where in places:
            (file,) = HERE.parents[1].glob(f"*/{where.module}.py")
            defined = {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}
            assert where.functions <= defined, f"{point}: {file} has no {sorted(where.functions - defined)}"


def test_a_suspended_writer_delays_and_damages_nothing() -> None:
    (line,) = play("stopped_writer.py", "--seconds", 1, "--supersede-after", 0.5)
    assert set(line["writer_is_told"]) == {"SUPERSEDED"}
    assert line["evicted_meanwhile"] > 300  # more than one round of the pool
    assert line["second_engine_steps_until_cached"] > 1


def test_a_suspended_writer_keeps_its_slots_after_its_connection_has_closed() -> None:
    (line,) = play("stopped_writer.py", "--seconds", 1, "--supersede-after", 0.1, "--cut")
    assert line["evicted_meanwhile"] > 300
    assert line["verified"] > 300


@pytest.mark.long  # a minute
def test_objects_that_come_and_go_leave_nothing_in_the_daemon() -> None:
    rounds = 20
    *_, total = play("churn.py", "--rounds", rounds, "--period", rounds)
    assert total["grown"] == {}
    assert total["cycles"] == {}
