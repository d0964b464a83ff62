"""SIGHUP: what can change while the daemon serves does, the rest is named, and a broken file changes nothing."""

from __future__ import annotations

import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from manager import an_ear

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_proto.endpoint import handshake_path, socket_path
from kvcache_proto.errors import NotPermitted
from kvcache_proto.region import plan_geometry
from kvcache_server.admin_client import AdminClient
from kvcache_server.config import Config, settings
from kvcache_server.core.cache import Cache
from kvcache_server.core.integrity import check_integrity
from kvcache_server.core.limits import Limits
from kvcache_server.daemon.reload import Reload
from kvcache_server.daemon.tier_processes import TierProcesses
from kvcache_server.transport.sockets import set_access

ACL = "system.posix_acl_access"
SPEC = NamespaceSpec(model="llama", groups=[GroupSpec(16, (1 << 20,))])


@pytest.fixture
def configured(start_daemon: Any, short_folder: Path) -> tuple[Any, Callable[[str], str]]:
    """A daemon with a file, and `reload(text)`, which gives it a new one and returns the log's line about it."""
    file = short_folder / "kv.toml"
    file.write_text('max_sessions = 4\nsize = "64MiB"\n')
    daemon = start_daemon(config=file, size=None)

    def reload(text: str) -> str:
        file.write_text(text)
        before = daemon.log.count("read the configuration again") + daemon.log.count("is not read again")
        daemon.process.send_signal(signal.SIGHUP)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            lines = [line for line in daemon.log.splitlines() if "read the configuration again" in line]
            lines += [line for line in daemon.log.splitlines() if "is not read again" in line]
            if len(lines) > before:
                return str(max(lines))  # they begin with the time
            time.sleep(0.02)
        raise AssertionError(f"no line about a reload:\n{daemon.log}")

    return daemon, reload


def test_limits_change_while_sessions_are_open(configured: Any) -> None:
    daemon, reload = configured
    with Session.connect(daemon.endpoint, engine="early", deadline=20.0) as early:
        line = reload('max_sessions = 1\nmax_namespaces = 1\nsize = "64MiB"')
        assert line.endswith("INFO read the configuration again: max_sessions 4 -> 1, max_namespaces 1024 -> 1")
        with pytest.raises(NotPermitted, match="max_sessions is 1"):
            AdminClient(daemon.endpoint, engine="late")
        namespace = early.attach(SPEC, shards=(0,))  # who was there goes on
        namespace.reserve([b"a" * 32], parent=None).commit()
        reload('max_sessions = 9\npin_quota = 0.01\nsize = "64MiB"')  # 0.6 MiB: less than a block
        assert not namespace.acquire([b"a" * 32]).hits
        reload('max_sessions = 9\nsize = "64MiB"')
        with namespace.acquire([b"a" * 32]) as lease:
            assert lease.hits == 1
    daemon.check_integrity()


def test_a_ceiling_that_is_set_later(configured: Any) -> None:
    daemon, reload = configured
    with Session.connect(daemon.endpoint, engine="early", deadline=20.0) as early:
        namespace = early.attach(SPEC, shards=(0,))
        hashes = [bytes([n]) * 32 for n in range(31)]
        namespace.reserve(hashes, parent=None).commit()
        reload('namespace_ceiling = 0.25\nsize = "64MiB"')
        assert daemon.status()["pool"]["blocks"] == 31  # what is there stays
        namespace.reserve([b"more" * 8], parent=None).commit()
        status = daemon.status()
        assert (status["pool"]["blocks"], status["counters"]["blocks_evicted"]) == (31, 1)  # and does not grow


def test_what_needs_a_restart_is_named(configured: Any) -> None:
    daemon, reload = configured
    line = reload('size = "128MiB"\nkeep = true\nregion_dir = "/tmp"\nmax_sessions = 5\n')
    assert daemon.status()["daemon"]["max_sessions"] == 5
    # --keep and --region-dir were flags, which beat the file: nothing of them has changed.
    assert line.endswith("WARNING read the configuration again: max_sessions 4 -> 5; needs a restart: size")
    assert daemon.status()["pool"]["bytes"] == 62 << 20
    assert reload('size = "64MiB"\nmax_sessions = 5\n').endswith("INFO read the configuration again: nothing to apply")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max_sessions = ", "kv.toml:1: not TOML"),
        ("max_sessions = 1\nmax_sesions = 2", "kv.toml: unknown setting 'max_sesions'; did you mean 'max_sessions'?"),
        ("max_sessions = 1\npin_quota = 7", "pin_quota 7.0: 0 to 1"),
        ("max_sessions = 1\nnamespace_floor = 0.5\nnamespace_ceiling = 0.4", "at most namespace_ceiling"),
    ],
)
def test_a_broken_file_changes_nothing(configured: Any, text: str, told: str) -> None:
    daemon, reload = configured
    line = reload(text)
    assert "ERROR the configuration is not read again, and nothing has changed: " in line and told in line
    with AdminClient(daemon.endpoint), AdminClient(daemon.endpoint):  # more than one session
        pass


def test_the_log_changes_its_level_and_format(configured: Any) -> None:
    daemon, reload = configured
    assert "log_level info -> error" in reload('log_level = "error"\nsize = "64MiB"\nmax_sessions = 4')
    said = daemon.log
    with Session.connect(daemon.endpoint, engine="unseen", deadline=20.0):
        assert daemon.log == said
    line = reload('log_level = "debug"\nlog_format = "json"\nsize = "64MiB"\nmax_sessions = 4')
    assert '"applied":["log_level","log_format"],"needs_restart":[]' in line
    with Session.connect(daemon.endpoint, engine="seen", deadline=20.0):
        assert '"engine":"seen"' in daemon.log


def test_a_level_that_was_set_at_run_time_stays(start_daemon: Any, short_folder: Path) -> None:
    file = short_folder / "kv.toml"
    file.write_text("")
    daemon = start_daemon(config=file, http="127.0.0.1:0")
    asked = urllib.request.Request(
        daemon.status()["daemon"]["http"]["address"] + "/api/v1/log-level",
        data=b'{"level": "debug"}',
        headers={"Authorization": f"Bearer {(short_folder / 'kv.token').read_text().strip()}"},
    )
    urllib.request.urlopen(asked, timeout=30).close()
    file.write_text("max_sessions = 7\n")
    daemon.process.send_signal(signal.SIGHUP)
    while "max_sessions 1024 -> 7" not in daemon.log:
        assert daemon.process.poll() is None
        time.sleep(0.02)
    assert daemon.status()["daemon"]["log_level"] == "debug"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_users_are_allowed_and_excluded(configured: Any) -> None:
    daemon, reload = configured
    daemon.folder.chmod(0o755)
    sockets = handshake_path(daemon.endpoint), socket_path(daemon.endpoint)
    assert knock_as(65_432, sockets[0]) == "Permission denied"
    reload('allow_uids = [65432]\nsize = "64MiB"')
    assert knock_as(65_432, sockets[0]) == "let in"
    assert all(ACL in os.listxattr(path) for path in sockets)
    reload('allow_gids = [65433]\nsize = "64MiB"')
    assert knock_as(65_432, sockets[0]) == "Permission denied"
    reload('size = "64MiB"')
    assert [(os.listxattr(path), os.stat(path).st_mode & 0o777) for path in sockets] == [([], 0o660)] * 2


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_users_of_events_are_allowed_and_excluded(start_daemon: Any, short_folder: Path) -> None:
    file = short_folder / "kv.toml"
    file.write_text("")
    where = {name: f"{short_folder}/{name}" for name in ("events", "events_replay")}
    daemon = start_daemon(config=file, **{name: f"ipc://{path}" for name, path in where.items()})
    daemon.folder.chmod(0o755)
    short_folder.chmod(0o755)
    for text, told in (("allow_uids = [65432]", "let in"), ("", "Permission denied")):
        before = daemon.log.count("read the configuration again")
        file.write_text(text)
        daemon.process.send_signal(signal.SIGHUP)
        while daemon.log.count("read the configuration again") == before:
            assert daemon.process.poll() is None
            time.sleep(0.02)
        assert [knock_as(65_432, path) for path in where.values()] == [told] * 2


KNOCK = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[2])
    print("let in")
except OSError as error:
    print(error.strerror)
"""


def knock_as(uid: int, path: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", KNOCK, str(uid), path]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_slower_door(configured: Any) -> None:
    daemon, reload = configured
    reload('attach_rate = 0.01\nmax_sessions = 1\nsize = "64MiB"')
    with AdminClient(daemon.endpoint):
        pass
    with socket.socket(socket.AF_UNIX) as again:
        again.settimeout(10)
        again.connect(handshake_path(daemon.endpoint))
        again.sendall(struct.pack("<I", 5))
        assert b"attach_rate allows" in again.recv(4096)
    reload('size = "64MiB"')  # or nobody could ask for its status


def test_a_terminal_that_hangs_up_ends_its_daemon(short_folder: Path) -> None:
    ours, its = pty.openpty()
    ear = an_ear(short_folder)
    command = [sys.executable, "-m", "kvcache_server", "serve", "--endpoint", f"ipc://{short_folder}/kv.sock"]
    command += ["--size", "64MiB", "--lock", "never", "--keep", "false"]
    with (short_folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=its, stdout=log, stderr=log, env=os.environ | ear.environ())
    os.close(its)
    try:
        ear.wait_ready()
        process.send_signal(signal.SIGHUP)
        assert process.wait(30) == 0, (short_folder / "log").read_text()
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        ear.close()
    assert "stopped" in (short_folder / "log").read_text()


def test_settings_that_the_sockets_reject_are_tried_again_next_time(
    short_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = f"ipc://{short_folder}/kv.sock"
    router = short_folder / "kv.sock"
    router.touch()
    geometry = plan_geometry(bytes(16), 16 << 20)
    cache = Cache(memoryview(bytearray(geometry.region_bytes)), geometry)
    old = Config(endpoint=endpoint, max_sessions=4, pin_quota=0.5)
    new = Config(endpoint=endpoint, max_sessions=9, pin_quota=0.25)
    cache.set_limits(old.limits())
    in_force = Reload(
        old, lambda: new, cache, lambda config: set_access(str(router), (), ()), TierProcesses(old.endpoint)
    )
    with caplog.at_level("INFO"):
        router.unlink()
        in_force.read_again()
        assert (in_force.config, cache.limits) == (old, old.limits())
        assert "not read again" in caplog.text and "kv.sock" in caplog.text
        router.touch()
        in_force.read_again()
    assert (in_force.config, cache.limits) == (new, new.limits())
    assert "max_sessions 4 -> 9" in caplog.text


def test_every_limit_is_live() -> None:
    assert set(Limits.__struct_fields__) <= {row.name for row in settings() if row.is_live}


def test_the_cache_applies_new_limits_at_once() -> None:
    geometry = plan_geometry(bytes(16), 16 << 20)
    cache = Cache(memoryview(bytearray(geometry.region_bytes)), geometry)
    wanted = Config(endpoint="ipc:///x/kv.sock", supersede_after=0.5, write_quota=0.25, namespace_floor=0.125).limits()
    cache.set_limits(wanted)
    assert (cache.limits, cache.reservations.limits) == (wanted, wanted)
    check_integrity(cache)
