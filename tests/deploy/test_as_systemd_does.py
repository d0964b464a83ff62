"""Started, stopped and restarted by the unit's own line, as systemd does, beside an engine in a mount namespace."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from leftovers import remove_regions
from manager import Ear, an_ear

from kvcache_tools.install_service import FOLDERS

UNIT = (FOLDERS[1] / "kvcache-server.service").read_text()
NAMESPACE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
WATCHDOG = 2.0


def apart() -> bool:
    """Whether this host lets us have a mount namespace."""
    return bool(shutil.which("unshare")) and not subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode


pytestmark = pytest.mark.skipif(not apart(), reason="no mount namespace may be had here")


class Systemd:
    """As much of it as a service sees: the unit's command line, a socket to notify, signals."""

    def __init__(self, folder: Path) -> None:
        self.ear: Ear = an_ear(folder)
        self.endpoint = f"ipc://{folder}/kvcache/kvcache.sock"
        config = folder / "kvcache.toml"
        config.write_text(f'endpoint = "{self.endpoint}"\nregion_dir = "/dev/shm"\nsize = "64MiB"\nlock = "never"\n')
        found = re.search(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)
        assert found is not None
        line = found[1].replace("/etc/kvcache/kvcache.toml", str(config))
        program, *arguments = shlex.split(line)
        assert program == "/usr/local/bin/kvcache-server"
        self.command = [sys.executable, "-m", "kvcache_server", *arguments]
        self.environ = {key: value for key, value in os.environ.items() if not key.startswith("KVCACHE_")}
        self.log = folder / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # The watchdog is for the process that systemd has started, which is the one that executes the daemon.
        shell = ["sh", "-c", 'WATCHDOG_PID=$$ exec "$@"', "sh", *self.command]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                shell, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environ | self.ear.environ(WATCHDOG)
            )
        self.ear.wait_ready()

    def stop(self, signum: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(signum)
        return self.process.wait(30)


@pytest.fixture
def systemd(short_folder: Path) -> Iterator[Systemd]:
    systemd = Systemd(short_folder)
    systemd.start()
    yield systemd
    if systemd.process is not None and systemd.process.poll() is None:
        systemd.stop(signal.SIGKILL)
    systemd.ear.close()
    remove_regions("/dev/shm", systemd.endpoint.removeprefix("ipc://"))


@pytest.fixture
def engine(systemd: Systemd, short_folder: Path) -> Iterator[subprocess.Popen[str]]:
    """An engine that sees the endpoint's folder, bound to another place when it started, and nothing of /dev/shm."""
    elsewhere = short_folder / "mnt"
    elsewhere.mkdir()
    inside = (
        'mount --make-rprivate / && mount --bind "$1/kvcache" "$1/mnt" && mount -t tmpfs tmpfs "$1/kvcache" && '
        'mount -t tmpfs tmpfs /dev/shm && exec "$2" "$3" "ipc://$1/mnt/kvcache.sock"'
    )
    script = Path(__file__).with_name("engine.py")
    engine = subprocess.Popen(
        [*NAMESPACE, "sh", "-c", inside, "sh", str(short_folder), sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert engine.stdout is not None and engine.stdin is not None
    assert engine.stdout.readline() == "saved 8\n", systemd.log.read_text()
    yield engine
    engine.stdin.close()
    engine.wait(30)
    engine.stdout.close()


def found(engine: subprocess.Popen[str], wanted: int = 8) -> str:
    assert engine.stdin is not None and engine.stdout is not None
    print(wanted, file=engine.stdin)
    return engine.stdout.readline().strip()


def test_stopped_and_started(systemd: Systemd, engine: subprocess.Popen[str]) -> None:
    for _ in range(2):
        assert systemd.stop() == 0
        systemd.ear.wait(lambda message: "STOPPING" in message)
        assert found(engine, 0) == "found 0"
        systemd.start()
        assert found(engine) == "found 8"
    assert systemd.log.read_text().count("resumed: engine engine") == 2


def test_killed(systemd: Systemd, engine: subprocess.Popen[str]) -> None:
    assert systemd.stop(signal.SIGKILL) == -signal.SIGKILL
    systemd.start()
    assert found(engine) == "found 8"


def test_hung_and_aborted_by_the_watchdog(systemd: Systemd, engine: subprocess.Popen[str]) -> None:
    assert systemd.process is not None
    assert not systemd.ear.starves(30.0)
    systemd.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, systemd.process.pid, os.WSTOPPED | os.WNOWAIT)
    systemd.ear.forget()
    assert systemd.ear.starves(WATCHDOG)
    systemd.process.send_signal(signal.SIGABRT)  # WatchdogSignal=, and SIGCONT after it, as systemd sends it
    assert "WatchdogSignal=SIGABRT" in UNIT
    assert systemd.stop(signal.SIGCONT) == -signal.SIGABRT
    systemd.start()
    assert found(engine) == "found 8"


def test_exit_codes_that_a_restart_does_not_cure(systemd: Systemd, short_folder: Path) -> None:
    line = re.search(r"^RestartPreventExitStatus=(.*)$", UNIT, re.MULTILINE)
    assert line is not None
    assert systemd.stop() == 0
    (short_folder / "kvcache.toml").write_text("siez = 1\n")
    ended = subprocess.run(systemd.command, capture_output=True, env=systemd.environ)
    assert str(ended.returncode) in line[1].split(), ended.stderr
