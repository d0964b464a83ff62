"""What the doctor says of devices that do not work as they should, and of a suite that does not pass."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcache_client.devices import Job
from kvcache_client.devices.cpu import CpuDevice
from kvcache_client.devices.layout import FragmentRun
from kvcache_proto.check_result import CheckResult
from kvcache_tools.doctor.engine_side import conformance, copies


class Kit(copies.HostKit):
    """A small cache on a device that is no CPU, as far as the report goes."""

    name, blocks = "toy:0", 4
    kind: Any = "toy"


class Elsewhere(CpuDevice):
    """Copies from and to one block's room further on."""

    def __init__(self, runs: Sequence[FragmentRun], num_blocks: int, keep: Sequence[Any] = ()) -> None:
        super().__init__([run._replace(pointer=run.pointer + 64) for run in runs], num_blocks - 1, keep)


class Tired(CpuDevice):
    """Does well as long as there is little to do."""

    def save(self, job: Job) -> None:
        if len(job.blocks) > 2:
            job.blocks = job.blocks[::-1].copy()
        super().save(job)


class Slow(CpuDevice):
    """Takes a hundred times as long, by its own clock."""

    def save(self, job: Job) -> None:
        told: Callable[[Job], None] = job.ended

        def ended(job: Job) -> None:
            job.seconds *= 100
            told(job)

        job.ended = ended
        super().save(job)


class Unregistered(CpuDevice):
    def registered(self) -> tuple[bool, int]:
        return True, 0

    def register(self, region: Any) -> None:
        super().register(region)
        logging.getLogger("kvcache_client.devices").warning("all cannot be page-locked: error 207001")


def examine(monkeypatch: pytest.MonkeyPatch, device: type[CpuDevice]) -> dict[str, CheckResult]:
    monkeypatch.setattr(copies, "open_device", lambda kind, runs, blocks, keep: device(runs, blocks, keep))
    return {finding.name: finding for finding in copies.examine(Kit())}


def test_a_device_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    found = examine(monkeypatch, CpuDevice)
    assert list(found) == ["toy:0 self-test", "toy:0 registration", "toy:0 copies"]
    assert found["toy:0 self-test"].verdict == found["toy:0 registration"].verdict == "ok"
    assert found["toy:0 registration"].values["direct_bytes"] == 4 * copies.SLOT
    assert all(finding.how == "measured" for finding in found.values())


def test_a_device_that_copies_elsewhere_fails_its_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = examine(monkeypatch, Elsewhere).values()
    assert (finding.name, finding.verdict) == ("toy:0 self-test", "failed")
    assert "self-test" in finding.figure
    assert "uncached" in finding.cure


def test_bytes_that_the_self_test_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = examine(monkeypatch, Tired)["toy:0 copies"]
    assert finding.verdict == "failed"
    assert "came back wrong" in finding.figure


def test_a_device_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = examine(monkeypatch, Slow)["toy:0 copies"]
    assert finding.verdict == "slow"
    assert finding.cure
    assert finding.values["save_gbs"] < copies.SLOW * finding.values["save_plain_gbs"]


def test_a_simulation_is_never_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kit, "how", "simulated")
    finding = examine(monkeypatch, Slow)["toy:0 copies"]
    assert (finding.verdict, finding.how) == ("ok", "simulated")


def test_a_region_that_cannot_be_registered_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = examine(monkeypatch, Unregistered)["toy:0 registration"]
    assert finding.verdict == "slow"
    assert finding.values["direct_bytes"] == 0
    assert "error 207001" in finding.figure


def test_a_kind_that_is_declined() -> None:
    (finding,) = copies.examine(Kit())
    assert (finding.name, finding.verdict) == ("toy:0", "untested")
    assert "'toy'" in finding.figure
    assert finding.cure == "an engine on it runs, uncached"


# The suite.


def test_a_wheel_has_the_suite_where_it_is_looked_for() -> None:
    toml = pytest.importorskip("tomllib", reason="tomllib is Python 3.11's")
    root = Path(__file__).parents[2]
    wheel = toml.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    target = str(conformance.FOLDERS[0].relative_to(root / "client"))
    (source,) = (source for source, place in wheel["force-include"].items() if place == target)
    assert root / source == conformance.FOLDERS[1] == conformance.find_suite()


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the suite wants torch")
CONFTEST = """
import pytest
@pytest.fixture(params=["cpu", "toy"])
def rig(request):
    if request.param == "toy":
        pytest.skip("no toy is here")
    return request.param
"""


def judge(folder: Path, tests: str) -> tuple[dict[str, CheckResult], subprocess.CompletedProcess[str]]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_conformance.py").write_text("import os, pytest\n" + tests)
    code = (
        "import pathlib, sys; from kvcache_tools.doctor.engine_side import __main__, conformance;"
        f"conformance.FOLDERS = (pathlib.Path({str(folder)!r}),); sys.argv[1:] = ['conformance']; __main__.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    findings = [CheckResult(**json.loads(line)) for line in done.stdout.splitlines()]
    return {finding.name: finding for finding in findings}, done


@needs_torch
def test_each_kind_is_counted_by_itself(tmp_path: Path) -> None:
    (tmp_path / "test_cpu.py").write_text("def test_own(): pass\n")
    found, done = judge(
        tmp_path,
        "def test_good(rig): print('on stdout, as libraries do')\n"
        "def test_bad(rig): assert rig == 'gpu'\n"
        "@pytest.fixture\ndef untidy(rig):\n    yield\n    raise OSError('left behind')\n"
        "def test_untidy(untidy): pass\n"
        "def test_common(): pass\n",
    )
    assert done.returncode == 0, done.stderr
    assert found["cpu suite"].verdict == "failed"
    assert found["cpu suite"].figure.startswith("2 passed, 2 failed, 0 skipped")
    assert "first test_conformance.py::test_bad[cpu]: " in found["cpu suite"].figure
    assert "assert 'cpu' == 'gpu'" in found["cpu suite"].figure
    assert (found["toy suite"].verdict, found["toy suite"].figure) == ("untested", "no toy is here")
    assert found["common suite"].verdict == "ok"


@needs_torch
def test_a_suite_that_cannot_be_collected(tmp_path: Path) -> None:
    found, _ = judge(tmp_path, "import no_such_module\n")
    assert found["suite"].verdict == "failed"
    assert "no_such_module" in found["suite"].figure


@needs_torch
def test_a_test_that_ends_the_process_is_named(tmp_path: Path) -> None:
    _, done = judge(tmp_path, "def test_fine(): pass\ndef test_deadly(): os.kill(os.getpid(), 11)\n")
    assert done.returncode == -11
    assert done.stderr.splitlines()[-1] == "test_conformance.py::test_deadly"
