"""Notifications to the service manager, on a real socket: readiness, status, keep-alives."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from leftovers import remove_regions
from manager import Ear, an_ear

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_proto.codec import encode
from kvcache_proto.endpoint import handshake_path, socket_path
from kvcache_proto.messages import PROTOCOL_VERSION, Hello
from kvcache_server.admin_client import AdminClient
from kvcache_server.daemon.systemd import ServiceManager

WATCHDOG = 1.0  # seconds; the daemon's ticks are four a second


@pytest.fixture
def ear(short_folder: Path, request: pytest.FixtureRequest) -> Iterator[Ear]:
    ear = an_ear(short_folder, getattr(request, "param", "path"))
    yield ear
    ear.close()


@pytest.mark.parametrize("ear", ["path", "abstract"], indirect=True)
def test_notifications_from_start_to_stop(start_daemon: Any, ear: Ear) -> None:
    daemon = start_daemon(wait=False, env=ear.environ(WATCHDOG))
    preparing = ear.hear()
    assert preparing["STATUS"].startswith("preparing memory: ")
    assert preparing["STATUS"].endswith(" of 64.0 MiB")
    assert int(preparing["EXTEND_TIMEOUT_USEC"]) >= 10_000_000
    assert ear.wait_ready() == {"READY": "1", "STATUS": "0 B of 62.0 MiB used, 0 sessions"}
    AdminClient(daemon.endpoint).close()  # at once, with no second try: ready means that the door is open
    assert os.stat(daemon.status()["daemon"]["region"]).st_blocks * 512 >= 62 << 20  # and that the pages are there
    assert ear.wait(lambda message: "WATCHDOG" in message) == {"WATCHDOG": "1"}
    before = time.monotonic_ns() // 1000
    daemon.process.send_signal(signal.SIGHUP)
    reloading = ear.wait(lambda message: "RELOADING" in message)
    assert before <= int(reloading["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
    assert ear.wait(lambda message: "WATCHDOG" not in message)["READY"] == "1"
    daemon.process.terminate()
    assert ear.wait(lambda message: "STOPPING" in message)["STATUS"] == "stopping"
    assert daemon.stop() == 0
    order = [key for message in ear.heard for key in ("READY", "RELOADING", "STOPPING") if key in message]
    assert order == ["READY", "RELOADING", "READY", "STOPPING"]


def test_status_notifications(start_daemon: Any, ear: Ear) -> None:
    daemon = start_daemon(wait=False, env=ear.environ())
    ear.wait_ready()
    with Session.connect(daemon.endpoint, engine="writer", deadline=20.0) as session:
        namespace = session.attach(NamespaceSpec(model="llama", groups=[GroupSpec(16, (1 << 20,))]), shards=(0,))
        namespace.reserve([bytes([n]) * 32 for n in range(3)], parent=None).commit()
        ear.wait(lambda message: message.get("STATUS") == "3.0 MiB of 62.0 MiB used, 1 sessions")
    assert not any("WATCHDOG" in message for message in ear.heard)  # nobody asked for it


def test_a_daemon_that_cannot_start_reports_why(start_daemon: Any, ear: Ear) -> None:
    daemon = start_daemon(wait=False, env=ear.environ(), size="8TiB")
    assert daemon.process.wait(30) == 5
    assert "the region needs 8.0 TiB" in ear.wait(lambda message: "needs" in message.get("STATUS", ""))["STATUS"]
    assert not any("READY" in message for message in ear.heard)


def test_a_stopped_daemon_sends_no_keep_alives(start_daemon: Any, ear: Ear) -> None:
    daemon = start_daemon(wait=False, env=ear.environ(WATCHDOG))
    ear.wait_ready()
    assert not ear.starves(30.0)
    daemon.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, daemon.process.pid, os.WSTOPPED | os.WNOWAIT)
    ear.forget()
    assert ear.starves(WATCHDOG)
    daemon.process.send_signal(signal.SIGCONT)
    assert not ear.starves(30.0)


@pytest.fixture
def talker(short_folder: Path, ear: Ear) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon whose log goes to an unread pipe: a write blocks when the pipe has one page."""
    endpoint = f"ipc://{short_folder}/kv.sock"
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    command = [sys.executable, "-m", "kvcache_server", "serve", "--endpoint", endpoint, "--size", "64MiB"]
    process = subprocess.Popen(
        [*command, "--lock", "never", "--keep", "false"],
        stdin=subprocess.DEVNULL,
        stdout=writing,
        stderr=writing,
        env={key: value for key, value in os.environ.items() if not key.startswith("KVCACHE_")} | ear.environ(WATCHDOG),
    )
    os.close(writing)
    process.stdout = os.fdopen(reading, "rb", buffering=0)
    yield process
    process.kill()
    process.stdout.close()
    process.wait()
    remove_regions("/dev/shm", socket_path(endpoint))


def hang(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Make the daemon's loop hang: it logs each visitor until the pipe is full."""
    frame = encode(Hello(PROTOCOL_VERSION, "e" * 200, "l" * 200))
    while not Path(f"/proc/{process.pid}/syscall").read_text().startswith("1 0x2 "):  # write(2, ...)
        with socket.socket(socket.AF_UNIX) as door:
            door.settimeout(0.2)
            door.connect(handshake_path(f"ipc://{folder}/kv.sock"))
            door.sendall(struct.pack("<I", len(frame)) + frame)
            try:
                door.recv(1 << 16)
            except TimeoutError:
                continue


def test_a_hung_loop_sends_no_keep_alives(talker: subprocess.Popen[bytes], ear: Ear, short_folder: Path) -> None:
    ear.wait_ready()
    assert not ear.starves(30.0)
    hang(talker, short_folder)
    ear.forget()
    assert ear.starves(WATCHDOG)
    assert talker.poll() is None  # the process lives: it is the loop that does not
    assert talker.stdout is not None
    talker.stdout.read(1 << 16)  # somebody reads the log again, and the loop goes on
    assert not ear.starves(30.0)


def test_the_watchdog_s_signal_logs_where_the_loop_hung(
    talker: subprocess.Popen[bytes], ear: Ear, short_folder: Path
) -> None:
    ear.wait_ready()
    hang(talker, short_folder)
    talker.send_signal(signal.SIGABRT)
    assert talker.stdout is not None
    said = b""
    while more := talker.stdout.read(1 << 16):
        said += more
    assert talker.wait() == -signal.SIGABRT
    assert b"Fatal Python error: Aborted" in said
    assert b" in _welcome" in said  # what hung, by its lines


# Without a daemon: the parts that time decides.


@pytest.fixture
def manager_of() -> Iterator[Callable[[dict[str, str]], ServiceManager]]:
    with contextlib.ExitStack() as stack:
        yield lambda environ: stack.enter_context(contextlib.closing(ServiceManager(environ)))


def petted(manager: ServiceManager, ear: Ear, seconds: float) -> list[float]:
    """Return when a loop with four ticks per second sends keep-alives, within `seconds`."""
    times = []
    for tick in range(int(seconds * 4)):
        now = 1000 + tick / 4
        manager.tick(now)
        try:
            assert ear.hear(0.001) == {"WATCHDOG": "1"}
            times.append(now)
        except TimeoutError:
            pass
    return times


@pytest.mark.parametrize("interval", [0.5, 1.0, 3.0, 30.0])
def test_keep_alives_are_sent_in_time_but_not_at_each_tick(ear: Ear, manager_of: Any, interval: float) -> None:
    times = petted(manager_of(ear.environ(interval)), ear, 4 * interval)
    apart = [after - before for before, after in itertools.pairwise(times)]
    assert apart and set(apart) == {interval / 2}


def test_the_watchdog_of_another_process_gets_no_keep_alives(ear: Ear, manager_of: Any) -> None:
    assert not petted(manager_of(ear.environ(1.0) | {"WATCHDOG_PID": str(os.getppid())}), ear, 2.0)
    assert petted(manager_of(ear.environ(1.0) | {"WATCHDOG_PID": str(os.getpid())}), ear, 2.0)


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": "vsock:2:1234"}, {"NOTIFY_SOCKET": "/nowhere/at/all"}])
def test_without_a_service_manager_nothing_happens(manager_of: Any, environ: dict[str, str]) -> None:
    manager = manager_of(environ | {"WATCHDOG_USEC": "1000000"})
    manager.ready("well")
    manager.tick(1000.0)
    manager.stopping()


def test_an_invalid_watchdog_timeout_is_ignored(ear: Ear, manager_of: Any) -> None:
    assert not petted(manager_of(ear.environ() | {"WATCHDOG_USEC": "soon"}), ear, 2.0)


def test_a_slow_service_manager_is_not_waited_for_and_misses_nothing(ear: Ear, manager_of: Any) -> None:
    manager = manager_of(ear.environ(1.0))
    with contextlib.ExitStack() as others:
        sent = 1
        while sent:  # until one that is new cannot say a word: not its own buffer is full, but the queue
            other = others.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK))
            sent = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    sent += other.sendto(b"X=1", ear.address)
        manager.ready("well")
        manager.tick(1000.0)
        manager.status("a line that comes too early")
        manager.tick(2000.0)
        ear.forget()
    manager.tick(3000.0)
    assert ear.hear() == {"READY": "1", "STATUS": "well"}
    manager.tick(4000.0)
    assert ear.hear() == {"WATCHDOG": "1"}
