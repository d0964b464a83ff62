"""What the session says at a door where nobody is, where it may not enter, or where somebody strange answers."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvcache_client import Session, Unavailable
from kvcache_client.session import forks
from kvcache_client.session.handshake import shake_hands
from kvcache_proto import handshake
from kvcache_proto.codec import encode
from kvcache_proto.endpoint import handshake_path
from kvcache_proto.errors import BadFrame, NotPermitted, RegionError, VersionMismatch
from kvcache_proto.messages import PROTOCOL_VERSION, Error, Welcome
from kvcache_proto.types import PoolGeometry
from kvcache_server.admin_client import AdminClient


def test_nobody_there_is_said_with_its_cure(short_folder: Path) -> None:
    with pytest.raises(Unavailable, match="kvcache-server serve"):
        Session.connect(f"ipc://{short_folder}/kv.sock", engine="e1")


def test_a_started_program_inherits_no_descriptor(daemon: Any) -> None:
    """Otherwise it would keep the session of its parent alive, and the region mapped."""
    welcomed = shake_hands(daemon.endpoint, "e1", "", 10.0)
    try:
        assert not any(map(os.get_inheritable, (welcomed.descriptor, welcomed.region, welcomed.lock)))
    finally:
        for descriptor in (welcomed.descriptor, welcomed.region, welcomed.lock):
            forks.close(descriptor)


def test_no_permission_is_said(daemon: Any) -> None:
    program = (
        "import os, sys\n"
        "from kvcache_client import Session\n"
        "from kvcache_proto.errors import NotPermitted\n"
        "if os.getuid() == 0: os.setgid(65534), os.setgroups([]), os.setuid(65534)\n"
        "else: os.chmod(sys.argv[2], 0)\n"
        "try: Session.connect(sys.argv[1], engine='e1')\n"
        "except NotPermitted as error: print(error)\n"
    )
    path = handshake_path(daemon.endpoint)
    os.chmod(os.path.dirname(path), 0o755)
    ended = subprocess.run(
        [sys.executable, "-c", program, daemon.endpoint, path], capture_output=True, text=True, timeout=30
    )
    assert "permission" in ended.stdout, ended.stderr


class StrangeDoor:
    """A door that answers one visitor with `message` and `descriptors` descriptors; if `hasty`, before its hello."""

    def __init__(
        self, endpoint: str, message: Welcome | Error | bytes, descriptors: int = 0, hasty: bool = False
    ) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(handshake_path(endpoint))
        self._listener.listen()
        self._frame = message if isinstance(message, bytes) else encode(message)
        self._descriptors = [0] * descriptors
        self._hasty = hasty
        self.closed = threading.Event()  # the connection
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            if not self._hasty:
                connection.recv(4096)
            framed = struct.pack("<I", len(self._frame)) + self._frame
            socket.send_fds(connection, [framed], self._descriptors)
            if not self._hasty:
                connection.recv(1)
        self.closed.set()

    def close(self) -> None:
        self._thread.join(10)
        self._listener.close()


GEOMETRY = PoolGeometry(bytes(16), 4 << 20, 2 << 20, 1, 2 << 20)


@pytest.mark.parametrize(
    ("message", "descriptors", "error", "match"),
    [
        (Welcome(99, 1, bytes(16), GEOMETRY), 2, VersionMismatch, "protocol 99"),
        (Error(0, "version_mismatch", "too old"), 0, VersionMismatch, "too old"),
        (Error(0, "not_permitted", "uid 5"), 0, NotPermitted, "uid 5"),
        (Welcome(PROTOCOL_VERSION, 1, bytes(16), GEOMETRY), 1, BadFrame, "1 descriptors"),
        (Welcome(PROTOCOL_VERSION, 1, bytes(16), GEOMETRY), 2, RegionError, "cannot map"),
        (b"\xc1", 0, BadFrame, None),
        (b"", 0, BadFrame, "0 bytes"),
    ],
)
def test_a_strange_daemon_is_refused_by_name(
    short_folder: Path, message: Any, descriptors: int, error: type[Exception], match: str | None
) -> None:
    endpoint = f"ipc://{short_folder}/kv.sock"
    strange = StrangeDoor(endpoint, message, descriptors)
    before = len(os.listdir("/proc/self/fd"))
    try:
        with pytest.raises(error, match=match):
            Session.connect(endpoint, engine="e1")
    finally:
        strange.close()
    assert len(os.listdir("/proc/self/fd")) <= before, "no descriptor is kept"


def connect_session(endpoint: str) -> None:
    Session.connect(endpoint, engine="e1")


@pytest.mark.parametrize("connect", [connect_session, AdminClient])
def test_a_refusal_that_came_before_the_hello_gives_its_reason(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch, connect: Any
) -> None:
    endpoint = f"ipc://{short_folder}/kv.sock"
    strange = StrangeDoor(endpoint, Error(0, "unavailable", "no complete hello within 5 s"), hasty=True)

    def stall(connection: socket.socket, endpoint: str, connect: Any = handshake.connect) -> None:
        connect(connection, endpoint)
        assert strange.closed.wait(10)  # a busy host

    monkeypatch.setattr(handshake, "connect", stall)
    try:
        with pytest.raises(Unavailable, match="no complete hello"):
            connect(endpoint)
    finally:
        strange.close()
