"""What the doctor says of devices that do not work as they should."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvcache_client.devices import Job
from kvcache_client.devices.cpu import CpuDevice
from kvcache_client.devices.layout import Fragment
from kvcache_tools.doctor.check_result import CheckResult
from kvcache_tools.doctor.engine_side import copies


class Kit(copies.HostKit):
    """A small cache on a device that is no CPU, as far as the report goes."""

    name, blocks = "toy:0", 4
    kind: Any = "toy"


class Elsewhere(CpuDevice):
    """Copies from and to one block's room further on."""

    def __init__(self, fragments: Sequence[Fragment], num_blocks: int, keep: Sequence[Any] = ()) -> None:
        super().__init__([each._replace(pointer=each.pointer + 64) for each in fragments], num_blocks - 1, keep)


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
