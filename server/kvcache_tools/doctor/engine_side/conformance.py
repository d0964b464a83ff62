"""The conformance suite of the devices, run by pytest in this process and counted by kind of device."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcache_proto.check_result import CheckResult
from kvcache_tools.doctor.engine_side.copies import provenance

_HERE = Path(__file__).resolve()
# Beside this module in an installed package, else in the source tree.
FOLDERS = (_HERE.parent / "suite", _HERE.parents[4] / "tests" / "client" / "devices")
COMMON = "common"  # tests of no one kind
WORST = ("failed", "skipped", "passed")


def find_suite() -> Path | None:
    return next((folder for folder in FOLDERS if (folder / "test_conformance.py").exists()), None)


def of_devices() -> Iterator[CheckResult]:
    """Run the suite. A kind of device that is not here is untested, with the suite's own reason."""
    suite = find_suite()
    if suite is None:
        yield CheckResult("suite", "untested", f"not in this installation: none of {', '.join(map(str, FOLDERS))}")
        return
    for module, cure in (
        ("torch", "run this in the environment of an engine: `python -m kvcache_server doctor`"),
        ("pytest", "pip install 'kvcache-server[doctor]'"),
    ):
        if importlib.util.find_spec(module) is None:
            yield CheckResult("suite", "untested", f"{module} is not installed here", cure)
            return
    import pytest

    count = Count()
    # Nothing of the folders above: neither a configuration nor fixtures. Nothing is written beside an installed suite.
    options = [f"--rootdir={suite}", f"--confcutdir={suite}", "-c", os.devnull, "-o", f"pythonpath={suite}"]
    options += ["--import-mode=importlib", *("-p", "no:cacheprovider", "-p", "no:terminal", "-p", "no:faulthandler")]
    sys.dont_write_bytecode = True
    # Neither plugins nor options that this environment has for other suites.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    code = pytest.main([*options, str(suite)], plugins=[count])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        why = count.trouble or f"pytest ended with {int(code)}"
        yield CheckResult("suite", "failed", why, f"{sys.executable} -m pytest {suite}")
    for kind in count.kinds():
        yield count.finding(kind, suite)


class Count:
    """A plugin of pytest: what became of each test, by kind of device."""

    def __init__(self) -> None:
        self.trouble = ""
        self._kind: dict[str, str] = {}
        self._outcome: dict[str, str] = {}
        self._seconds: dict[str, float] = {}
        self._reason: dict[str, str] = {}

    def kinds(self) -> list[str]:
        return list(dict.fromkeys(self._kind.values()))

    def finding(self, kind: str, suite: Path) -> CheckResult:
        mine = [test for test, found in self._kind.items() if found == kind]
        failed, skipped, passed = ([test for test in mine if self._outcome.get(test) == how] for how in WORST)
        seconds = sum(self._seconds.get(test, 0.0) for test in mine)
        name, how = f"{kind} suite", provenance(kind)
        values = {"passed": len(passed), "failed": len(failed), "skipped": len(skipped), "seconds": seconds}
        if not passed and not failed:
            return CheckResult(
                name, "untested", self._reason[skipped[0]] if skipped else "it did not run", values=values
            )
        figure = f"{len(passed)} passed, {len(failed)} failed, {len(skipped)} skipped in {seconds:.0f} s"
        if failed:
            command = f"{sys.executable} -m pytest '{suite}/{failed[0]}'"
            return CheckResult(
                name, "failed", f"{figure}; first {failed[0]}: {self._reason[failed[0]]}", command, how, values
            )
        return CheckResult(name, "ok", figure, "", how, values)

    # Hooks.

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        rigs = {item.nodeid: item.callspec.params["rig"] for item in items if _has_rig(item)}
        for item in items:
            named = item.path.stem.removeprefix("test_")  # test_cuda.py is CUDA's own
            self._kind[item.nodeid] = rigs.get(item.nodeid) or (named if named in rigs.values() else COMMON)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.trouble = f"{report.nodeid}: {_last_line(report)}"

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        print(nodeid, file=sys.stderr, flush=True)  # the last words, should the process die

    def pytest_runtest_logreport(self, report: Any) -> None:
        test = report.nodeid
        self._seconds[test] = self._seconds.get(test, 0.0) + report.duration
        worst = min(report.outcome, self._outcome.get(test, "passed"), key=WORST.index)
        if worst != self._outcome.get(test):
            self._outcome[test] = worst
            self._reason[test] = _last_line(report)


def _has_rig(item: Any) -> bool:
    return hasattr(item, "callspec") and "rig" in item.callspec.params


def _last_line(report: Any) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    lines = [line for line in text.splitlines() if line.strip()]
    return (lines[0] if crash is not None else lines[-1]) if lines else ""
