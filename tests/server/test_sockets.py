"""Access control, with real processes of other users: to the door, the request socket, and every file of the daemon."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcache_proto.endpoint import handshake_path, socket_path
from kvcache_server.admin_client import AdminClient
from kvcache_server.transport.sockets import Listener, set_access

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")

STRANGER = 65_432

# What a local user would try; it prints what came of each. It becomes that user once Python has started: the
# interpreter may lie where only root can read.
TRY = """
import json, os, socket, struct, sys
import zmq
from kvcache_proto.codec import decode_handshake, decode_reply, encode
from kvcache_proto.errors import KVCacheError
from kvcache_proto.messages import Error, Hello, PROTOCOL_VERSION, Stats

uid, gid, groups, door, wire, token, files = json.loads(sys.argv[1])
context = zmq.Context()
os.setgroups(groups)
os.setgid(gid)
os.setuid(uid)
came = {}

with socket.socket(socket.AF_UNIX) as knock:
    knock.settimeout(10)
    try:
        knock.connect(door)
        frame = encode(Hello(PROTOCOL_VERSION, "stranger"))
        knock.sendall(struct.pack("<I", len(frame)) + frame)
        data, descriptors, _, _ = socket.recv_fds(knock, 1 << 16, 8)
        heard = decode_handshake(data[4:])
        came["door"] = [heard.code if isinstance(heard, Error) else "welcome", len(descriptors)]
        for descriptor in descriptors[:1]:
            came["region"] = os.pread(descriptor, 8, 0).decode()
    except OSError as error:
        came["door"] = [error.strerror, 0]

dealer = context.socket(zmq.DEALER)
dealer.connect("ipc://" + wire)
dealer.send(encode(Stats(1, bytes.fromhex(token))))
came["wire"] = "silent"
if dealer.poll(int(sys.argv[2])):
    heard = decode_reply(dealer.recv())
    came["wire"] = heard.code if isinstance(heard, Error) else type(heard).__name__
context.destroy(linger=0)

for name in files:
    try:
        os.close(os.open(name, os.O_RDONLY))
        came[name] = "opened"
    except OSError as error:
        came[name] = error.strerror
print(json.dumps(came))
"""


def tried(daemon: Any, token: bytes, uid: int, gid: int, groups: list[int], patience_ms: int) -> dict[str, Any]:
    """Let a process of that user try everything; `patience_ms` is how long to wait for an answer that must not come."""
    daemon.folder.chmod(0o755)
    door, wire = handshake_path(daemon.endpoint), socket_path(daemon.endpoint)
    region = daemon.status()["daemon"]["region"]
    own = [str(each) for each in daemon.folder.rglob("*") if each.suffix != ".log" and str(each) not in (door, wire)]
    descriptors = [f"/proc/{daemon.process.pid}/fd", f"/proc/{daemon.process.pid}/mem"]
    asked = [uid, gid, groups, door, wire, token.hex(), [region, *own, *descriptors]]
    found = subprocess.run(
        [sys.executable, "-c", TRY, json.dumps(asked), str(patience_ms)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    came: dict[str, Any] = json.loads(found.stdout)
    files = {name: what for name, what in came.items() if name.startswith("/")}
    assert len(files) >= 4, "region, lock, descriptors and memory at the least"
    assert set(files.values()) == {"Permission denied"}, files
    return came


@pytest.mark.parametrize("flags", [{}, {"allow_uids": "daemon,54321"}, {"allow_gids": "54321"}], ids=str)
def test_users_that_are_not_allowed_get_no_access(start_daemon: Any, flags: dict[str, str]) -> None:
    """Not even with the token of a live session: they cannot connect."""
    daemon = start_daemon(**flags)
    with AdminClient(daemon.endpoint) as admin:
        came = tried(daemon, admin._token, STRANGER, STRANGER, [STRANGER], 1000)
        admin.ping()
    assert came["door"] == ["Permission denied", 0]
    assert came["wire"] == "silent"
    assert "region" not in came
    status = daemon.status()["daemon"]
    assert (status["handshakes_refused"], status["errors"]) == ({}, {})


@pytest.mark.parametrize(
    ("flags", "uid", "gid", "groups"),
    [
        ({"allow_uids": f"daemon,{STRANGER}"}, STRANGER, STRANGER, []),
        ({"allow_gids": "54321"}, STRANGER, 54321, []),
        ({"allow_gids": "54321"}, STRANGER, STRANGER, [54321]),
        ({"allow_uids": "1", "allow_gids": "54321"}, 1, STRANGER, []),
        ({}, STRANGER, 0, []),  # the sockets' own group
    ],
    ids=str,
)
def test_allowed_users_can_attach(
    start_daemon: Any, flags: dict[str, str], uid: int, gid: int, groups: list[int]
) -> None:
    """Only through the door: they cannot open any of the daemon's files, and a forged token is refused."""
    daemon = start_daemon(**flags)
    came = tried(daemon, bytes(16), uid, gid, groups, 20_000)
    assert came["door"] == ["welcome", 2]
    assert came["region"] == "KVCREGN1"
    assert came["wire"] == "bad_token"


def test_without_access_control_lists_door_and_token_still_refuse(start_daemon: Any) -> None:
    """On such a file system everyone can connect to the sockets, but gets nothing else."""
    daemon = start_daemon(allow_uids="54321")
    for path in (handshake_path(daemon.endpoint), socket_path(daemon.endpoint)):
        os.removexattr(path, "system.posix_acl_access")
        os.chmod(path, 0o666)
    with AdminClient(daemon.endpoint) as admin:
        came = tried(daemon, admin._token, STRANGER, STRANGER, [], 1000)
        admin.ping()
    assert came["door"] == ["not_permitted", 0]
    assert "region" not in came
    assert came["wire"] == "silent"  # though it has the token of a living session
    figures = daemon.status()["daemon"]
    assert figures["handshakes_refused"] == {"not_permitted": 1}
    assert figures["connections"]["cut"]["not_permitted"] > 0


def test_without_access_control_lists_everyone_can_connect(
    short_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = short_folder / "x.sock"
    path.touch(0o600)
    set_access(str(path), range(100_000), ())  # more than any file system stores
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert "does not support access control lists" in caplog.text


def test_a_replaced_file_is_not_removed(short_folder: Path) -> None:
    path, loop = short_folder / "x.sock", asyncio.new_event_loop()
    listener = Listener(loop, str(path), f"ipc://{path}", lambda sock, peer: True, lambda reason: None)
    assert listener.is_ours()
    path.rename(short_folder / "away")
    assert not listener.is_ours()
    path.touch()
    assert not listener.is_ours()
    listener.close()
    assert path.exists()
    loop.close()
