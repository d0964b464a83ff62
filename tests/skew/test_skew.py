"""The previous release with this one: its client with our daemon, and our client with its daemon, from its wheel.

A release puts its wheel here in place of the one before it:
`pip wheel --no-deps --no-build-isolation --wheel-dir tests/skew .`
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache_proto import __version__
from kvcache_proto.messages import PROTOCOL_VERSION

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NEW = [ROOT / "proto", ROOT / "server", ROOT / "client"]
(WHEEL,) = HERE.glob("*.whl")
OLD_VERSION = WHEEL.name.split("-")[1]
OLDER = {"old": (OLD_VERSION, "1"), "new": (__version__, str(PROTOCOL_VERSION))}  # what each must be called
PAIRS = [("old", "new"), ("new", "old")]  # daemon and client
pairs = pytest.mark.parametrize(("daemons", "clients"), PAIRS, ids=["old daemon, new client", "new daemon, old client"])


Until = Callable[[Callable[[], Any], str], Any]


class Peer:
    """A peer.py of one version."""

    def __init__(self, path: str) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith("KVCACHE_")}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "peer.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env | {"PYTHONPATH": path},
        )

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({"op": op, **arguments}), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        assert line, "the client ended"
        return json.loads(line)

    def close(self) -> None:
        self.process.communicate(timeout=30)


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """PYTHONPATH of each version."""
    old = tmp_path_factory.mktemp("old")
    zipfile.ZipFile(WHEEL).extractall(old)
    return {"old": str(old), "new": os.pathsep.join(map(str, NEW))}


@pytest.fixture
def peer(versions: dict[str, str]) -> Iterator[Callable[..., Peer]]:
    """`peer(version, daemon, engine)` starts a client and connects it."""
    started: list[Peer] = []

    def start(version: str, daemon: Any, engine: str) -> Peer:
        made = Peer(versions.get(version, version))
        started.append(made)
        opened = made.ask("open", endpoint=daemon.endpoint, engine=engine)
        assert opened["from"].startswith(versions.get(version, version).split(os.pathsep)[-1]), opened
        return made

    yield start
    for made in started:
        if made.process.poll() is None:
            made.close()
        for pipe in (made.process.stdin, made.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def until() -> Until:
    """`until(found, what)` waits for the first truth of `found()`."""

    def wait(found: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + 30.0
        while not (value := found()):
            assert time.monotonic() < end, f"{what} did not come"
            time.sleep(0.01)
        return value

    return wait


@pytest.fixture
def start(start_daemon: Any, versions: dict[str, str], until: Until) -> Iterator[Callable[..., Any]]:
    started: list[Any] = []

    def of(version: str, **flags: Any) -> Any:
        flags["keep"] = None if version in ("old", versions["old"]) else "true"  # 0.1.0 knew no such flag
        wait = flags.pop("wait", True)
        daemon = start_daemon(env={"PYTHONPATH": versions.get(version, version)}, wait=False, **flags)
        if wait:
            until(lambda: "ready at" in daemon.log, "the daemon")  # our own questions might be refused
        started.append(daemon)
        return daemon

    yield of
    for daemon in started:
        daemon.stop()


def run(count: int) -> list[str]:
    return [secrets.token_hex(32) for _ in range(count)]


def test_the_wheel_contains_another_version(versions: dict[str, str]) -> None:
    command = [sys.executable, "-c", "from kvcache_server import cli; print(cli.__version__, cli.__file__)"]
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": versions["old"]}, capture_output=True, text=True)
    version, file = ended.stdout.split()
    assert version == OLD_VERSION
    assert file.startswith(versions["old"]), "the code in the wheel, not this tree"


@pairs
def test_an_older_release_is_refused_in_one_line(
    start: Callable[..., Any], peer: Callable[..., Peer], daemons: str, clients: str
) -> None:
    """The engine runs uncached and says so once, with package and protocol of both sides."""
    daemon = start(daemons)
    client = peer(clients, daemon, "e1")
    assert client.ask("tries", count=3)["failed"] >= 3
    assert client.ask("load", hashes=run(2)) == {"hits": 0, "right": True, "failed": True}
    assert client.ask("save", hashes=run(2)) == {"granted": 0, "visible": 0}
    (line,) = client.ask("log")["said"]
    for version, protocol in OLDER.values():
        for named in (version, protocol):
            assert re.search(rf"(?<![0-9.]){re.escape(named)}(?![0-9])", line), (named, line)
    ours = peer(daemons, daemon, "e2")
    assert ours.ask("save", hashes=run(2)) == {"granted": 2, "visible": 2}


@pytest.mark.parametrize(("first", "then"), PAIRS, ids=["upgrade", "downgrade"])
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_daemon_of_another_version_takes_over(
    start: Callable[..., Any], peer: Callable[..., Peer], first: str, then: str, end: str
) -> None:
    daemon = start(first)
    hashes = run(5)
    assert peer(first, daemon, "e1").ask("save", hashes=hashes)["visible"] == 5
    getattr(daemon, end)()
    if (end, then) == ("kill", "new"):  # what a killed 0.1.0 leaves is not for us to read
        refused = start(then, strict="true", wait=False)
        assert refused.process.wait(30) == 5
        assert "--fresh" in refused.log
    again = start(then)
    if (end, then) == ("kill", "new"):
        assert "put aside" in again.log
    client = peer(then, again, "e2")
    assert client.ask("up", wanted=True) == {"up": True}
    assert client.ask("save", hashes=hashes)["visible"] == 5
    assert client.ask("load", hashes=hashes) == {"hits": 5, "right": True, "failed": False}


@pytest.mark.parametrize("older", ["daemon", "command"])
def test_status_names_both_versions(start: Callable[..., Any], versions: dict[str, str], older: str) -> None:
    daemon = start("old" if older == "daemon" else "new")
    command = [sys.executable, "-m", "kvcache_server", "status", "--endpoint", daemon.endpoint]
    env = os.environ | {"PYTHONPATH": versions["new" if older == "daemon" else "old"]}
    shown = subprocess.run(command, env=env, capture_output=True, text=True)
    assert shown.returncode != 0
    assert len(shown.stderr.splitlines()) == 1
    assert OLD_VERSION in shown.stderr and __version__ in shown.stderr


def test_figures_of_a_later_release_are_refused_in_one_line(
    start: Callable[..., Any], versions: dict[str, str], tmp_path: Path
) -> None:
    """It speaks the same protocol, and lacks a figure that this release reads."""
    later = Path(patched(NEW, tmp_path / "later", __version__, PROTOCOL_VERSION))
    for name in ("status", "daemon/service"):
        path = later / "kvcache_server" / f"{name}.py"
        path.write_text(path.read_text().replace("uptime_s", "seconds_up"))
    daemon = start(str(later))
    command = [sys.executable, "-m", "kvcache_server", "status", "--endpoint", daemon.endpoint]
    env = os.environ | {"PYTHONPATH": versions["new"]}
    shown = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert shown.returncode != 0 and len(shown.stderr.splitlines()) == 1
    assert "another version" in shown.stderr and "uptime_s" in shown.stderr


# Where versions do not meet.


def patched(source: list[Path] | Path, folder: Path, version: str, protocol: int) -> str:
    """Return the path of a copy that calls itself `version` and speaks `protocol` and nothing older."""
    for each in source if isinstance(source, list) else [source]:
        shutil.copytree(each, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file, name, value in (
        ("messages.py", "PROTOCOL_VERSION", protocol),
        ("messages.py", "OLDEST_VERSION", protocol),
        ("__init__.py", "__version__", f'"{version}"'),
    ):
        path = folder / "kvcache_proto" / file
        text, changes = re.subn(rf"^{name} = .*$", f"{name} = {value}", path.read_text(), flags=re.MULTILINE)
        assert changes == 1
        path.write_text(text)
    return str(folder)


@pytest.mark.parametrize("older", ["old", "new"])
@pytest.mark.parametrize("ahead", ["client", "daemon"])
def test_incompatible_versions_are_named_in_one_line(
    start: Callable[..., Any],
    peer: Callable[..., Peer],
    versions: dict[str, str],
    tmp_path: Path,
    until: Until,
    older: str,
    ahead: str,
) -> None:
    """The engine runs uncached and says so once, with package and protocol of both sides."""
    protocol = PROTOCOL_VERSION + 2
    future = patched(NEW, tmp_path / "future", "9.9.0", protocol)
    daemon = start(versions[older]) if ahead == "client" else start(future, wait=False)
    try:
        until(lambda: "ready at" in daemon.log, "the daemon")  # our own questions would be refused, too
        client = peer(future if ahead == "client" else versions[older], daemon, "e1")
        assert client.ask("tries", count=3)["failed"] >= 3
        assert client.ask("load", hashes=run(2)) == {"hits": 0, "right": True, "failed": True}
        assert client.ask("save", hashes=run(2)) == {"granted": 0, "visible": 0}
        (line,) = client.ask("log")["said"]
    finally:
        daemon.stop()
    assert line.startswith("WARNING"), line
    for named in ("9.9.0", str(protocol), *OLDER[older]):
        assert re.search(rf"(?<![0-9.]){re.escape(named)}(?![0-9])", line), (named, line)
