"""Engines and daemon in containers of every kind, which share the endpoint's folder and nothing else."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import a_short_folder
from container import ENGINE, NO_IDMAP, Container

Kind = dict[str, Any]


def may_have_containers() -> bool:
    """Whether this host lets us make namespaces of all kinds, and become other users."""
    command = ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    made = (command, ["unshare", "--user", "--map-root-user"])
    return os.geteuid() == 0 and not any(
        subprocess.run([*each, "true"], capture_output=True).returncode for each in made
    )


pytestmark = pytest.mark.skipif(
    not may_have_containers(), reason="only root with namespaces of all kinds has containers"
)

DAEMON, OWNER = 10_321, 54_321  # the image's user and group; a user of the host who has rootless containers
RANGE = 200_000  # the first of the users that the host sets aside for containers
# User namespaces: Podman's without root, Docker's with `userns-remap`, and that of a pod with `hostUsers: false`.
ROOTLESS: Kind = {"creator": OWNER, "maps": ((0, OWNER, 1), (1, RANGE + 1, 65_535))}
REMAPPED: Kind = {"maps": ((0, RANGE, 65_536),)}
POD: Kind = {**REMAPPED, "how": "idmap"}
NAMED: Kind = {"env": {"KVCACHE_SERVER_UIDS": "65534"}}
MOUNTS: Kind = {"at": "/somewhere/else", "namespaces": ("mount",)}

# Who saves and loads, and goes on after a restart.
SERVED: dict[str, Kind] = {
    "other mounts": MOUNTS,
    "other mounts, read-only": {**MOUNTS, "how": "ro"},
    "container's root": {},
    "container's user, read-only": {"uid": 1000, "gid": 1000, "how": "ro"},
    "rootless container's root": {**ROOTLESS, **NAMED},
    "rootless container's user": {**ROOTLESS, **NAMED, "uid": 1000, "gid": 1000},
    "container with users of its own": {**REMAPPED, **NAMED, "groups": (RANGE + DAEMON,)},
    "pod with users of its own": {**POD, **NAMED, "groups": (RANGE + DAEMON,)},
}
# Who is told in one line what to do.
REFUSED: dict[str, tuple[Kind, str]] = {
    "root without the group": (
        {"groups": ()},
        r"uid 0 with groups \[0\] may not attach: add it to the daemon's allow_",
    ),
    "rootless, nobody named": (ROOTLESS, "uid 65534 serves there, .* KVCACHE_SERVER_UIDS=65534"),
    "rootless, the host's number named": (
        {**ROOTLESS, "env": {"KVCACHE_SERVER_UIDS": str(DAEMON)}},
        "uid 65534 serves there, .* KVCACHE_SERVER_UIDS=65534",
    ),
    "pod with users of its own, not let in": (
        {**POD, **NAMED, "groups": (RANGE + 1,)},
        rf"uid {RANGE} with groups \[{RANGE}, {RANGE + 1}\] may not attach: add it to the daemon's allow_",
    ),
}


class Host:
    """The folders of a host, and the daemon, in a container as deploy/docker and deploy/k8s have it."""

    def __init__(self, scratch: Path) -> None:
        scratch.chmod(0o755)
        self._scratch, self.log_path = scratch, scratch / "log"
        self.folder, self.regions = Path(f"/run/{scratch.name}"), Path(f"/dev/shm/{scratch.name}")
        self.daemon: Container | None = None
        self.containers: list[Container] = []

    def make_folders(self) -> None:
        """As the init containers of deploy/docker and deploy/k8s do, over what is there."""
        owner = ("-o", str(DAEMON), "-g", str(DAEMON))
        subprocess.run(["install", "-d", "-m", "2755", *owner, self.folder, self.regions], check=True)

    def start(self, *flags: str, uid: int = DAEMON, gid: int = DAEMON, **kind: Any) -> None:
        before = self.log.count(" ready")
        self.daemon = daemon = Container(
            self._a_root(),
            *("-m", "kvcache_server", "serve", "--endpoint", "ipc:///run/kvcache/kvcache.sock"),
            *("--size=128MiB", "--lock=never", "--region-dir=/region", *flags),
            mounts=((self.folder, "/run/kvcache", "rw"), (self.regions, "/region", "rw")),
            uid=uid,
            gid=gid,
            log=self.log_path,
            **kind,
        )
        self.wait(lambda: daemon.process.poll() is not None or self.log.count(" ready") > before, "the daemon")
        assert daemon.process.poll() is None, self.log

    def wait(self, happened: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + 30
        while not happened():
            assert time.monotonic() < until, f"{what} did not come:\n{self.log}"
            time.sleep(0.02)

    def stop(self) -> None:
        assert self.daemon is not None
        assert self.daemon.end(signal.SIGTERM) == 0, self.log

    def kill(self) -> None:
        assert self.daemon is not None
        self.daemon.kill()

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def engine(
        self,
        name: str,
        *more: str,
        at: str = "/run/kvcache",
        how: str = "rw",
        groups: tuple[int, ...] = (DAEMON,),
        **kind: Any,
    ) -> Container:
        arguments = (f"ipc://{at}/kvcache.sock", name, *more)
        mounts = ((self.folder, at, how),)
        container = Container(self._a_root(), ENGINE, *arguments, mounts=mounts, groups=groups, **kind)
        self.containers.append(container)
        return container

    def _a_root(self) -> Path:
        root = self._scratch / f"root-{len(list(self._scratch.glob('root-*')))}"
        root.mkdir()
        return root

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for folder in (self.folder, self.regions):
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
            if self.daemon is not None:
                stack.callback(self.daemon.end, signal.SIGTERM)
            for container in self.containers:
                stack.callback(container.end)


@pytest.fixture
def host() -> Iterator[Host]:
    with a_host() as host:
        yield host


@contextlib.contextmanager
def a_host() -> Iterator[Host]:
    with a_short_folder() as scratch:
        host = Host(scratch)
        try:
            yield host
        finally:
            host.close()


@pytest.fixture(scope="module")
def heard() -> Iterator[dict[str, list[str]]]:
    """What each engine says: first, then while no daemon is there, after its restart, and after one that was killed."""
    with a_host() as host:
        flags = (f"--allow-gids={RANGE + DAEMON}",)
        host.make_folders()
        host.start(*flags)
        served = {name: host.engine(name, **kind) for name, kind in SERVED.items()}
        refused = {name: host.engine(name, **kind) for name, (kind, _) in REFUSED.items()}
        heard = {name: [engine.said()] for name, engine in (served | refused).items()}

        def ask(line: object) -> None:
            for engine in served.values():
                engine.tell(line)
            for name, engine in served.items():
                heard[name].append(engine.said())

        host.stop()
        ask(0)
        host.start(*flags)
        ask(8)
        host.kill()
        host.start(*flags)
        ask(8)
        ask("held")
        yield heard


def needs_idmap(heard: list[str]) -> None:
    if heard[0] == NO_IDMAP:
        pytest.skip("this kernel, or the file system of /run, maps no users of a mount")


@pytest.mark.parametrize("kind", SERVED)
def test_engines_save_load_and_survive_a_restart(heard: dict[str, list[str]], kind: str) -> None:
    needs_idmap(heard[kind])
    assert heard[kind] == ["saved 8", "found 0", "found 8", "found 8", "held 2, reclaimed, lost 0"]


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refused_engine_is_told_the_remedy(heard: dict[str, list[str]], kind: str) -> None:
    needs_idmap(heard[kind])
    (line,) = heard[kind]
    assert line.startswith("NotPermitted: ") and re.search(REFUSED[kind][1], line), line


def test_an_engine_that_starts_before_the_daemon_and_is_killed(host: Host) -> None:
    """As where kubelet makes a hostPath, root's: the daemon's pod has it owned, and it stays the same folder."""
    host.folder.mkdir(mode=0o755)
    engine = host.engine("early", "patient")
    assert engine.said() == "waiting"
    host.make_folders()
    host.start()
    assert engine.said() == "saved 8"
    engine.kill()
    host.wait(lambda: " ended: engine early" in host.log, "the end of a session in a pid namespace of its own")


def test_a_folder_that_was_removed_and_created_again(host: Host) -> None:
    """A mount goes on showing the removed one: only a restart of the container helps, and the engine says so."""
    host.make_folders()
    host.start()
    engine = host.engine("stale")
    assert engine.said() == "saved 8"
    host.stop()
    shutil.rmtree(host.folder)
    host.make_folders()
    host.start()
    host.wait(lambda: "/run/kvcache was removed" in engine.ask("why"), "the engine's line")
    assert "restart this container" in engine.ask("why")


FORK = """
import os, stat, sys
from kvcache_client import Session
def sockets():
    found = 0
    for number in range(64):
        try:
            found += stat.S_ISSOCK(os.fstat(number).st_mode)
        except OSError:
            pass
    return found
before = sockets()
with Session.connect(sys.argv[1], engine="parent", deadline=20.0, connect_timeout=20.0) as session:
    if os.fork():
        assert os.wait()[1] == 0
        session.ping()
    else:
        print(sockets() - before, "left", flush=True)
        with Session.connect(sys.argv[1], engine="child", deadline=20.0, connect_timeout=20.0) as own:
            print(len(own.stats()["sessions"]), "sessions", flush=True)
        os._exit(0)
"""


def test_a_fork_without_proc(daemon: Any) -> None:
    inside = 'mount --make-rprivate / && mount -t tmpfs tmpfs /proc && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", inside, "sh", sys.executable, "-c", FORK, daemon.endpoint]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr) == ("0 left\n2 sessions\n", "")


@pytest.mark.long
def test_daemon_and_engines_in_rootless_containers_of_one_user(host: Host) -> None:
    """They know each other, whatever their namespaces call them: nothing is to be configured."""
    for folder in (host.folder, host.regions):
        folder.mkdir(mode=0o755)
        os.chown(folder, OWNER, OWNER)
    host.start(uid=0, gid=0, **ROOTLESS)
    engine = host.engine("engine", groups=(), **ROOTLESS)
    assert engine.said() == "saved 8"
    host.stop()
    assert engine.ask(0) == "found 0"
    host.start(uid=0, gid=0, **ROOTLESS)
    assert engine.ask(8) == "found 8"
