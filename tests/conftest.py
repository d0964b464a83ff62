"""Fixtures that several tests share: a real daemon process with a small region."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from leftovers import remove_regions

from kvcache_proto.endpoint import socket_path
from kvcache_proto.errors import ConfigError, Unavailable
from kvcache_server.admin_client import AdminClient
from kvcache_server.status import Status

START_SECONDS = 30.0

with contextlib.suppress(ImportError):  # tests/client/devices also runs on hosts without hypothesis
    import hypothesis

    # An example may take longer than its deadline on a busy host; no test asserts durations.
    hypothesis.settings.register_profile("without deadline", deadline=None)
    hypothesis.settings.load_profile("without deadline")
    # The same examples each time, and fewer, for `make test`: a change is not judged by what luck finds in other code.
    hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=40)


LONGEST_FILES = (
    *("test_hostile_stores.py", "test_openai_server.py", "test_troubles.py", "test_chaos.py", "test_hosts.py"),
    *("test_models.py", "test_sharing.py", "test_stats.py", "test_plan.py", "test_units.py", "test_kill_points.py"),
)
MANY_CASES = 3  # of one test


@pytest.hookimpl(tryfirst=True)  # before marks select tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files: where several run at a time, one that begins last is waited for alone.

    Of many cases of one test, every other one is long.
    """
    places = {name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST_FILES)))
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("long"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for some in cases.values():
        for item in some[1::2] if len(some) >= MANY_CASES else ():
            item.add_marker(pytest.mark.long)


@pytest.fixture(autouse=True, scope="module")
def _collected() -> Iterator[None]:
    """What a module has made is freed: a cache and its region are a cycle of few, large objects."""
    yield
    gc.collect()


def settings_free_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("KVCACHE_")}


class Daemon:
    """A `kvcache-server serve` process. Flags are those of the command line: `size="64MiB"` is `--size 64MiB`, None is
    none, and its default. Without `env`, it has the environment of this process, but no settings of the daemon."""

    def __init__(self, folder: Path, env: dict[str, str] | None = None, **flags: object) -> None:
        self.folder = folder
        self.endpoint = str(flags.pop("endpoint", f"ipc://{folder}/kv.sock"))
        self.log_path = folder / f"daemon-{len(list(folder.glob('daemon-*.log')))}.log"
        self.region_dir = str(flags.get("region_dir", "/dev/shm"))
        fresh = ["--fresh"] if flags.pop("fresh", False) else []
        within = flags.pop("within", ())  # a command that runs another one, and its arguments
        program = flags.pop("program", ("-m", "kvcache_server"))
        env = settings_free_environment() if env is None else env
        options = {"endpoint": self.endpoint, "size": "64MiB", "lock": "never", "keep": "false", **flags}
        self.command = [*within, sys.executable, *program, "serve", *fresh]
        self.keeps = options["keep"] == "true"
        for name, value in options.items():
            self.command += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stderr=log, stdout=log, env=env)

    @property
    def log(self) -> str:
        """All that it has said so far."""
        return self.log_path.read_text()

    def wait_ready(self) -> Daemon:
        """Return once it answers. Raises AssertionError with its log where it ends or stays silent instead."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            assert self.process.poll() is None, f"the daemon ended with {self.process.returncode}:\n{self.log}"
            try:
                with AdminClient(self.endpoint):
                    assert "Error in sitecustomize" not in self.log, self.log  # a test changes what is no more
                    return self
            except Unavailable:
                time.sleep(0.02)
        raise AssertionError(f"the daemon is not ready after {START_SECONDS} s:\n{self.log}")

    def status(self) -> dict[str, Any]:
        """What `kvcache-server status --json` prints, without the asking session."""
        found: dict[str, Any] = msgspec.to_builtins(self.figures())
        return found

    def figures(self) -> Status:
        """The same as a struct."""
        with AdminClient(self.endpoint, "test", timeout=START_SECONDS) as admin:
            return admin.status()

    def wait_status(self, found: Callable[[dict[str, Any]], bool], what: str = "") -> dict[str, Any]:
        """Return the first status for which `found` holds. Raises AssertionError with the last one where none does."""
        until = time.monotonic() + START_SECONDS
        while True:
            status = self.status()
            if found(status):
                return status
            assert time.monotonic() < until, f"{what or 'the awaited state'} did not come: {status}\n{self.log}"
            time.sleep(0.02)

    @property
    def own_bytes(self) -> int:
        """What the process has in memory, without the region that it maps."""
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines())
        return int(fields["RssAnon"].split()[0]) << 10

    @property
    def descriptors(self) -> int:
        """How many it has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def check_integrity(self) -> None:
        """Let the daemon check all that must always hold. Raises AssertionError with its log where it does not."""
        assert self.integrity_failures() == 0, self.log

    def integrity_failures(self) -> int:
        """Let the daemon check all that must always hold; return how many checks have failed so far."""
        before = self.status()["daemon"]["integrity"]["checks"]
        self.process.send_signal(signal.SIGUSR1)
        status = self.wait_status(lambda s: s["daemon"]["integrity"]["checks"] > before, "the integrity check")
        return int(status["daemon"]["integrity"]["failures"])

    def stop(self, timeout: float = 20.0) -> int:
        """Ask it to stop (SIGTERM) and return its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(timeout)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def tidy(self) -> None:
        """Remove what a killed daemon left in memory; the next one of its endpoint would, and there is none."""
        with contextlib.suppress(ConfigError):
            remove_regions(self.region_dir, socket_path(self.endpoint))


StartDaemon = Callable[..., Daemon]


@contextlib.contextmanager
def a_short_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kv", dir=os.environ.get("TEST_FOLDERS", "/tmp")))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def a_stuck_engine(endpoint: str) -> Iterator[subprocess.Popen[bytes]]:
    """The process of engine `stuck`, which holds a reservation of nine blocks, and does nothing more."""
    code = (
        "import sys, time; from kvcache_client import *\n"
        "session = Session.connect(sys.argv[1], engine='stuck', deadline=20.0)\n"
        "namespace = session.attach(NamespaceSpec(model='m', groups=[GroupSpec(16, 64 << 10)]), (0,))\n"
        "assert len(namespace.reserve([bytes([n]) * 32 for n in range(9)]).granted) == 9\n"
        "print('reserved', flush=True); time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", code, endpoint], stdout=subprocess.PIPE) as engine:
        try:
            assert engine.stdout is not None and engine.stdout.readline() == b"reserved\n"
            yield engine
        finally:
            engine.kill()


@contextlib.contextmanager
def daemons_in(folder: Path) -> Iterator[StartDaemon]:
    daemons: list[Daemon] = []

    def start(*, wait: bool = True, env: dict[str, str] | None = None, **flags: object) -> Daemon:
        flags.setdefault("region_dir", folder if not os.access("/dev/shm", os.W_OK) else "/dev/shm")
        daemons.append(Daemon(folder, settings_free_environment() | (env or {}), **flags))
        return daemons[-1].wait_ready() if wait else daemons[-1]

    yield start
    problems = []
    for daemon in daemons:
        if daemon.process.poll() is not None:
            daemon.tidy()
            continue
        try:
            daemon.process.send_signal(signal.SIGCONT)
            daemon.check_integrity()
            if daemon.stop() != 0:
                problems.append(f"a daemon ended with {daemon.process.returncode}:\n{daemon.log}")
        except (AssertionError, Unavailable, subprocess.TimeoutExpired) as error:
            problems.append(f"{error}\n{daemon.log}")
        finally:
            if daemon.process.poll() is None:
                daemon.kill()
            daemon.tidy()  # one that keeps its region leaves it behind when it stops, too
    assert not problems, "\n".join(problems)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for the name of a socket: the kernel takes 108 bytes."""
    with a_short_folder() as folder:
        yield folder


@pytest.fixture
def start_daemon(short_folder: Path) -> Iterator[StartDaemon]:
    """`start_daemon(**flags)` starts a real daemon, 64 MiB where not told otherwise, and returns it ready.

    With `wait=False` it returns at once; `env={...}` adds to the environment. Every daemon is checked for integrity
    and ended after the test; those that are still up must end well, and leave no file behind.
    """
    with daemons_in(short_folder) as start:
        yield start


@pytest.fixture(scope="module")
def start_module_daemon() -> Iterator[StartDaemon]:
    """As `start_daemon`, for daemons that the tests of one module share."""
    with a_short_folder() as folder, daemons_in(folder) as start:
        yield start


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> Daemon:
    """A real daemon with a region of 64 MiB in a folder of its own."""
    return start_daemon()
