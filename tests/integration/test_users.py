"""How much one user may take of shared limits, by real processes of several users."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvcache_proto.endpoint import handshake_path
from kvcache_proto.errors import KVCacheError, NotPermitted
from kvcache_server.admin_client import AdminClient
from kvcache_server.core.registry import OPERATORS
from kvcache_server.daemon.handshake import MAX_HANDSHAKES

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")

HOG, OTHER = 54_321, 54_322

# Imported before it becomes another user: the packages may lie where only root can read.
BECOME = """
import os, sys
from kvcache_proto.errors import KVCacheError
from kvcache_proto.types import GroupSpec, NamespaceSpec
from kvcache_proto import messages as m
from kvcache_server.admin_client import AdminClient
from kvcache_client.session.handshake import shake_hands
uid = int(sys.argv.pop(1))
os.setgroups([]); os.setgid(uid); os.setuid(uid)
"""
SESSIONS = """
held = []
try:
    while len(held) < 100:
        held.append(AdminClient(sys.argv[1], engine=f"hog {len(held)}" if len(sys.argv) < 3 else sys.argv[2]))
    print(len(held), flush=True)
except KVCacheError as error:
    print(len(held), type(error).__name__, error, flush=True)
sys.stdin.read()
"""
NAMESPACES = """
with AdminClient(sys.argv[1], engine="hog") as hog:
    made = 0
    try:
        while made < 100:
            hog.ask(m.Attach(0, b"", NamespaceSpec(f"model {made}", (GroupSpec(16, 64 << 10),)), (0,)))
            made += 1
        print(made, flush=True)
    except KVCacheError as error:
        print(made, type(error).__name__, error, flush=True)
    sys.stdin.read()
"""
HOLD = """
held = [shake_hands(sys.argv[1], f"engine {number}", "", 10) for number in range(10)]
print(len(held), flush=True)
sys.stdin.read()
"""
KNOCKS = """
import socket
held = [socket.socket(socket.AF_UNIX) for _ in range(int(sys.argv[2]))]
for each in held:
    each.connect(sys.argv[1])
print(len(held), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def user(uid: int, program: str, *arguments: str) -> Iterator[str]:
    """Run `program` as that user; gives the line that it says, and ends it at the end."""
    command = [sys.executable, "-c", BECOME + program, str(uid), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        yield process.stdout.readline().strip()
        process.stdin.close()
        process.wait(30)


def test_one_user_leaves_sessions_for_others(start_daemon: Any) -> None:
    daemon = start_daemon(allow_uids=f"{HOG},{OTHER}", max_sessions=16)
    daemon.folder.chmod(0o755)
    with user(HOG, SESSIONS, daemon.endpoint) as said:
        assert said.startswith("14 NotPermitted"), said
        assert f"uid {HOG}" in said and "max_user_sessions is 14" in said
        with user(OTHER, SESSIONS, daemon.endpoint) as said:
            assert said.startswith("2 NotPermitted") and "max_sessions is 16" in said
            assert len(daemon.status()["sessions"]) == 16, "root's commands get in all the same"
            with pytest.raises(NotPermitted, match="max_sessions is 16"):
                AdminClient(daemon.endpoint, engine="an engine of root's")
            with contextlib.ExitStack() as stack:
                for _ in range(OPERATORS):
                    stack.enter_context(AdminClient(daemon.endpoint))
                with pytest.raises(NotPermitted, match="max_sessions is 16"):
                    AdminClient(daemon.endpoint)
    daemon.wait_status(lambda status: not status["sessions"], "the end of all of them")
    with user(HOG, SESSIONS, daemon.endpoint) as said:
        assert said.startswith("14 NotPermitted"), "those that have ended count no more"


def test_the_name_of_an_operator_grants_no_access(start_daemon: Any) -> None:
    daemon = start_daemon(allow_uids=f"{HOG}", max_sessions=8, max_user_sessions=3)
    daemon.folder.chmod(0o755)
    with user(HOG, SESSIONS, daemon.endpoint, "kvcache-server") as said:
        assert said.startswith("3 NotPermitted") and "max_user_sessions is 3" in said


def test_a_single_user_may_have_nearly_all(start_daemon: Any) -> None:
    daemon = start_daemon()
    sessions = [AdminClient(daemon.endpoint, engine=f"engine {number}") for number in range(100)]
    for session in sessions:
        session.close()


def test_disconnected_sessions_count_for_their_user(start_daemon: Any) -> None:
    """They are known to the next daemon, which cannot ask the kernel whose they are."""
    daemon = start_daemon(allow_uids=f"{HOG}", max_sessions=16, keep="true")
    daemon.folder.chmod(0o755)
    with user(HOG, HOLD, daemon.endpoint) as said:
        assert said == "10"
        daemon.stop()
        daemon = start_daemon(allow_uids=f"{HOG}", max_sessions=16, keep="true")
        with user(HOG, SESSIONS, daemon.endpoint) as said:
            assert said.startswith("4 NotPermitted"), said


def test_one_user_leaves_namespaces_for_others(start_daemon: Any) -> None:
    daemon = start_daemon(allow_uids=f"{HOG},{OTHER}", max_namespaces=14)
    daemon.folder.chmod(0o755)
    with user(HOG, NAMESPACES, daemon.endpoint) as said:
        assert said.startswith("13 NotPermitted"), said
        assert f"uid {HOG}" in said and "max_user_namespaces is 13" in said
        with user(OTHER, NAMESPACES, daemon.endpoint) as said:
            # Those that the other one has made are open to all.
            assert said.startswith("14 NotPermitted") and "max_namespaces is 14" in said


def test_one_user_s_handshakes_make_room_for_another_s(start_daemon: Any) -> None:
    daemon = start_daemon(allow_uids=f"{HOG}")
    daemon.folder.chmod(0o755)
    with user(HOG, KNOCKS, handshake_path(daemon.endpoint), str(MAX_HANDSHAKES)) as said:
        assert said == str(MAX_HANDSHAKES)
        status = daemon.status()
        assert status["daemon"]["handshakes_refused"] == {"unavailable": 1}, "the oldest one of the user with most"


def test_a_user_with_most_handshakes_waits(start_daemon: Any) -> None:
    daemon = start_daemon()
    held = []
    try:
        for _ in range(MAX_HANDSHAKES):
            held.append(socket.socket(socket.AF_UNIX))
            held[-1].connect(handshake_path(daemon.endpoint))
        with pytest.raises(KVCacheError, match="handshakes are in progress"):
            AdminClient(daemon.endpoint)
    finally:
        for each in held:
            each.close()
        daemon.wait_ready()
