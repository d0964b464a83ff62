"""Which daemons a client trusts with its KV: those of its own user, of root, or of a configured user."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import a_short_folder

from kvcache_proto.endpoint import handshake_path, socket_path

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")

VICTIM, OTHER = 54_321, 54_322

# Imported before they become another user: the packages may lie where only root can read.
BECOME = """
import os, sys
import kvcache_client, kvcache_server.admin_client, kvcache_server.daemon.lifecycle
from kvcache_tools import bench
from kvcache_tools import record
from kvcache_server.commands import top
from kvcache_server.commands import why
from kvcache_server import cli
from kvcache_tools import doctor
from kvcache_tools.doctor import endpoint
uid = int(sys.argv.pop(1))
os.setgroups([]); os.setgid(uid); os.setuid(uid)
"""
ATTACH = """
import json
from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_proto.errors import KVCacheError
try:
    with Session.connect(sys.argv[1], engine="victim", server_uids=json.loads(sys.argv[2]), deadline=5.0) as session:
        session.attach(NamespaceSpec(model="m", groups=[GroupSpec(16, 64 << 10)]), (0,))
        print("attached")
except KVCacheError as error:
    print(type(error).__name__, error)
"""
# Says nothing and keeps what it hears: what a client gives away before it has looked at who serves.
LISTEN = """
import socket
sockets = [socket.socket(socket.AF_UNIX) for _ in sys.argv[1:]]
for each, path in zip(sockets, sys.argv[1:]):
    each.bind(path)
    os.chmod(path, 0o777)
    each.listen()
print("listening", flush=True)
connection, _ = sockets[0].accept()
print(len(connection.recv(4096)), flush=True)
"""


def become(uid: int, program: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Run `program` as that user."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVCACHE_")}
    return subprocess.Popen(
        [sys.executable, "-c", BECOME + program, str(uid), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=inherited | (env or {}),
    )


def said(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=60)[0]


@contextlib.contextmanager
def serving(uid: int, folder: Path, **flags: str) -> Iterator[str]:
    """A daemon of that user's in `folder`; gives its endpoint."""
    endpoint = f"ipc://{folder}/kv.sock"
    options = {"endpoint": endpoint, "size": "16MiB", "lock": "never", "keep": "false", **flags}
    daemon = become(
        uid, "cli.main()", "serve", *(f"--{key.replace('_', '-')}={value}" for key, value in options.items())
    )
    try:
        assert daemon.stdout is not None
        heard = ""
        while "ready" not in heard:
            line = daemon.stdout.readline()
            assert line, f"it ended: {heard}"
            heard += line
        yield endpoint
    finally:
        daemon.terminate()
        daemon.communicate(timeout=30)


@pytest.fixture
def folder_of_another() -> Iterator[Path]:
    """A folder that OTHER has made for itself in /tmp, under a name that a victim may ask for."""
    with a_short_folder() as above:
        above.chmod(0o1777)
        folder = above / "f"
        folder.mkdir(0o755)
        os.chown(folder, OTHER, OTHER)
        yield folder


def attach(uid: int, endpoint: str, *server_uids: int | str, env: dict[str, str] | None = None) -> str:
    return said(become(uid, ATTACH, endpoint, json.dumps(server_uids), env=env))


def test_a_daemon_of_another_user_is_refused_and_named(folder_of_another: Path) -> None:
    with serving(OTHER, folder_of_another, allow_uids=f"0,{VICTIM}") as endpoint:
        for uid in (VICTIM, 0):
            came = attach(uid, endpoint)
            assert came.startswith("NotPermitted"), came
            assert f"uid {OTHER}" in came and "server_uids" in came and "KVCACHE_SERVER_UIDS" in came, came
            assert len(came.splitlines()) == 1
        assert attach(VICTIM, endpoint, OTHER) == "attached\n"
        assert attach(VICTIM, endpoint, str(OTHER)) == "attached\n"
        assert attach(VICTIM, endpoint, env={"KVCACHE_SERVER_UIDS": f"daemon, {OTHER}"}) == "attached\n"
        assert attach(OTHER, endpoint) == "attached\n"
        assert attach(VICTIM, endpoint, 99).startswith("NotPermitted"), "what the caller names counts, not more"
        assert attach(VICTIM, endpoint, "no such user").startswith("ConfigError")


def test_a_daemon_of_root_serves_all_users(short_folder: Path) -> None:
    short_folder.chmod(0o755)
    with serving(0, short_folder, allow_uids=str(VICTIM)) as endpoint:
        assert attach(VICTIM, endpoint) == "attached\n"


def test_a_folder_that_a_user_may_not_enter_is_named(short_folder: Path) -> None:
    """The daemon lets the user in, but the way to it does not: to allow it there once more would not help."""
    inner = short_folder / "private" / "kvcache"
    inner.mkdir(0o755, parents=True)
    short_folder.chmod(0o755)
    inner.parent.chmod(0o700)
    link = short_folder / "kvcache"
    link.symlink_to("private/kvcache")
    with serving(0, link, allow_uids=str(VICTIM)) as endpoint:
        closed = f"uid {VICTIM} may not enter {inner.parent}"
        for came in (attach(VICTIM, endpoint), said(become(VICTIM, "cli.main()", "status", "--endpoint", endpoint))):
            assert closed in came and "allow_uids" not in came and "--allow-uids" not in came, came
            assert len(came.splitlines()) == 1


def test_an_impostor_receives_nothing(folder_of_another: Path) -> None:
    """Not even the hello: it has the token of a session that goes on."""
    endpoint = f"ipc://{folder_of_another}/kv.sock"
    impostor = become(OTHER, LISTEN, handshake_path(endpoint), socket_path(endpoint))
    assert impostor.stdout is not None and impostor.stdout.readline() == "listening\n"
    assert attach(VICTIM, endpoint).startswith("NotPermitted")
    assert impostor.stdout.readline() == "0\n"
    assert impostor.wait(10) == 0
    impostor.stdout.close()


def test_a_genuine_door_beside_a_false_socket(folder_of_another: Path, short_folder: Path) -> None:
    """The door of a trusted daemon, reached through a link of OTHER, which has put its own socket beside it."""
    short_folder.chmod(0o755)
    with serving(0, short_folder, allow_uids=str(VICTIM)) as true:
        false = f"ipc://{folder_of_another}/kv.sock"
        os.symlink(handshake_path(true), handshake_path(false))
        with become(OTHER, LISTEN, socket_path(false)) as impostor:
            assert impostor.stdout is not None and impostor.stdout.readline() == "listening\n"
            came = attach(VICTIM, false)
            impostor.kill()
        assert came.startswith("NotPermitted"), came
        assert str(OTHER) in came


@pytest.mark.parametrize(
    "command",
    [["status"], ["top", "--once"], ["why", "r"], ["clear"], ["session", "fence-off", "1"], ["record", "OUT"]],
    ids=str,
)
def test_commands_refuse_an_impostor_too(folder_of_another: Path, short_folder: Path, command: list[str]) -> None:
    command = [str(short_folder / "trace") if each == "OUT" else each for each in command]
    with serving(OTHER, folder_of_another, allow_uids="0") as endpoint:
        asked = become(0, "cli.main()", *command, "--endpoint", endpoint)
        came = said(asked)
        assert asked.returncode == 6, came
        assert f"uid {OTHER}" in came and "KVCACHE_SERVER_UIDS" in came
        if command == ["status"]:
            asked = become(0, "cli.main()", *command, "--endpoint", endpoint, env={"KVCACHE_SERVER_UIDS": str(OTHER)})
            assert "MiB" in said(asked) and asked.returncode == 0


def test_doctor_names_the_user_of_the_daemon(folder_of_another: Path) -> None:
    with serving(OTHER, folder_of_another, allow_uids="0") as endpoint:
        came = said(become(0, "cli.main()", "doctor", "endpoint", "--endpoint", endpoint))
        assert f"uid {OTHER}" in came and "Traceback" not in came


def test_an_owner_whom_root_has_given_the_folder() -> None:
    """Like /run/kvcache of the daemon: only root could put anything there, so nothing must be configured."""
    folder = Path(f"/run/kvt-{os.getpid()}")
    folder.mkdir(0o755)
    os.chown(folder, OTHER, OTHER)
    try:
        with serving(OTHER, folder, allow_uids=f"{VICTIM}") as endpoint:
            assert attach(VICTIM, endpoint) == "attached\n"
    finally:
        folder.rmdir()


UNSHARE = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(4, 1, 0, 0, 0)  # who has changed its user may not write its own maps otherwise
if libc.unshare(0x10000000):  # CLONE_NEWUSER
    sys.exit("no user namespace: " + os.strerror(ctypes.get_errno()))
with open("/proc/self/uid_map", "w") as file:
    file.write(f"0 {uid} 1")
"""


def attach_in_a_user_namespace(uid: int, endpoint: str, *server_uids: int | str) -> str:
    """As root of a container, which is `uid` on the host, and knows no other user of the host."""
    one_thread = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    came = said(become(uid, UNSHARE + ATTACH, endpoint, json.dumps(server_uids), env=one_thread))
    if came.startswith("no user namespace"):
        pytest.skip(came)
    return came


def test_in_a_user_namespace_an_unknown_user_must_be_configured(short_folder: Path) -> None:
    short_folder.chmod(0o755)
    with serving(0, short_folder, allow_uids=str(VICTIM)) as endpoint:
        came = attach_in_a_user_namespace(VICTIM, endpoint)
        assert came.startswith("NotPermitted"), came
        assert "uid 65534" in came and "user namespace" in came and "server_uids" in came
        assert attach_in_a_user_namespace(VICTIM, endpoint, 65534) == "attached\n"


def test_in_a_user_namespace_its_own_user_is_known(folder_of_another: Path) -> None:
    os.chown(folder_of_another, VICTIM, VICTIM)
    with serving(VICTIM, folder_of_another) as endpoint:
        assert attach_in_a_user_namespace(VICTIM, endpoint) == "attached\n"


def test_the_daemon_ignores_the_variable(start_daemon: Any) -> None:
    """It may share its environment with engines."""
    start_daemon(env={"KVCACHE_SERVER_UIDS": "0"}).status()
