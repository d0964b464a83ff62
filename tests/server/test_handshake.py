"""The door, with a real socket and a real loop: admission, what is passed to clients, and when a session ends."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvcache_proto.codec import MAX_HANDSHAKE_FRAME, decode_handshake, encode
from kvcache_proto.errors import ConfigError, EndpointTaken, NotPermitted
from kvcache_proto.messages import PROTOCOL_VERSION, Error, Hello, Ping, Welcome
from kvcache_proto.types import PoolGeometry
from kvcache_server.daemon import handshake
from kvcache_server.daemon.handshake import MAX_HANDSHAKES, Admission, HandshakeServer
from kvcache_server.rates import Rate
from kvcache_server.storage.folder import Folder
from kvcache_server.storage.session_locks import SessionFiles
from kvcache_server.transport.sockets import Peer

GEOMETRY = PoolGeometry(bytes(range(16)), 64 << 20, 4 << 20, 15, 2 << 20)
PATIENCE = 10.0


class Host:
    """A door on a loop in its own thread; `opened` and `ended` are the calls to its daemon."""

    def __init__(
        self, folder: Path, uids: tuple[int, ...] = (), gids: tuple[int, ...] = (), rate: Rate | None = None
    ) -> None:
        self.endpoint = f"ipc://{folder}/kv.sock"
        self.path = folder / "kv.door"
        self.region = os.memfd_create("region")
        os.write(self.region, b"the region")
        self.opened: queue.Queue[tuple[Hello, Peer]] = queue.Queue()
        self.ended: queue.Queue[int] = queue.Queue()
        self.files = SessionFiles(Folder(str(folder)), "kv.sessions")
        self.refusal: Exception | None = None
        self._sessions = 0
        self._guests: list[Guest] = []
        self.loop = uvloop.new_event_loop()
        self.door = HandshakeServer(self.loop, self.endpoint, self.region, GEOMETRY, self._open, self.ended.put)
        self.door.allow_users(uids, gids, rate)
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def _open(self, hello: Hello, peer: Peer) -> Admission:
        if self.refusal is not None:
            raise self.refusal
        self._sessions += 1
        self.opened.put((hello, peer))
        file, _ = self.files.make(self._sessions)
        return Admission(self._sessions, self._sessions.to_bytes(16, "little"), file, False)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run `function` on the loop and return what it returns."""
        answer: queue.Queue[Any] = queue.Queue()
        self.loop.call_soon_threadsafe(lambda: answer.put(function()))
        return answer.get(timeout=PATIENCE)

    def close(self) -> None:
        for guest in self._guests:
            guest.close()
        self.call(self.door.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        os.close(self.region)

    def connect(self) -> Guest:
        self._guests.append(Guest(str(self.path)))
        return self._guests[-1]


class Guest:
    """A client of the door that may say anything."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE)
        self.descriptors: list[int] = []
        try:
            self.sock.connect(path)
        except OSError:
            self.sock.close()
            raise

    def say(self, data: bytes) -> Guest:
        self.sock.sendall(data)
        return self

    def hello(self, **changes: Any) -> Guest:
        fields = {"version": PROTOCOL_VERSION, "engine": "e", "label": "rank 0", **changes}
        return self.say(framed(encode(Hello(**fields))))

    def hear(self) -> Any:
        """The door's message, or None where it closes without one."""
        heard = b""
        while len(heard) < 4 or len(heard) < 4 + struct.unpack_from("<I", heard)[0]:
            data, descriptors, _, _ = socket.recv_fds(self.sock, 1 << 17, 4)
            self.descriptors += descriptors
            if not data:
                assert not heard
                return None
            heard += data
        return decode_handshake(heard[4:])

    def error(self) -> Error:
        """The error that is heard before the door closes."""
        error = self.hear()
        assert isinstance(error, Error), error
        assert not self.descriptors
        assert self.at_end()
        return error

    def at_end(self) -> bool:
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:  # it closed without reading all that we said
            return True

    def close(self) -> None:
        self.sock.close()
        while self.descriptors:
            os.close(self.descriptors.pop())


def framed(frame: bytes) -> bytes:
    return struct.pack("<I", len(frame)) + frame


@pytest.fixture
def host(short_folder: Path) -> Iterator[Host]:
    host = Host(short_folder)
    yield host
    host.close()


@pytest.fixture
def guest(host: Host) -> Guest:
    return host.connect()


def test_welcome_hands_over_region_and_lock(host: Host, guest: Guest) -> None:
    welcome = guest.hello(engine="engine 7").hear()
    assert isinstance(welcome, Welcome)
    assert (welcome.version, welcome.session, welcome.geometry) == (PROTOCOL_VERSION, 1, GEOMETRY)
    assert len(welcome.token) == 16
    region, lock = guest.descriptors
    assert os.pread(region, 100, 0) == b"the region"
    os.pwrite(region, b"T", 0)
    assert os.pread(host.region, 3, 0) == b"The"
    hello, peer = host.opened.get(timeout=PATIENCE)
    assert (hello.engine, hello.label) == ("engine 7", "rank 0")
    assert (peer.pid, peer.uid) == (os.getpid(), os.getuid())
    # The lock is held by the description that was handed over, and by nobody else.
    other = os.open(f"/proc/self/fd/{lock}", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    guest.close()
    fcntl.flock(other, fcntl.LOCK_EX)
    os.close(other)


def test_the_end_of_the_connection_is_the_end_of_the_session(host: Host) -> None:
    guests = [host.connect().hello() for _ in range(3)]
    sessions = [guest.hear().session for guest in guests]
    guests[1].close()
    assert host.ended.get(timeout=PATIENCE) == sessions[1]
    guests[0].close()
    assert host.ended.get(timeout=PATIENCE) == sessions[0]
    guests[2].close()
    assert host.ended.get(timeout=PATIENCE) == sessions[2]


def test_a_hello_may_arrive_in_pieces(host: Host, guest: Guest) -> None:
    for byte in framed(encode(Hello(PROTOCOL_VERSION, "e"))):
        guest.say(bytes([byte]))
    assert isinstance(guest.hear(), Welcome)


def test_two_connections_open_two_sessions(host: Host) -> None:
    one, two = host.connect(), host.connect()
    first, second = one.hello().hear(), two.hello().hear()
    assert first.session != second.session
    assert first.token != second.token


@pytest.mark.parametrize(
    ("said", "code", "told"),
    [
        (b"\xff\xff\xff\xff", "bad_frame", f"at most {MAX_HANDSHAKE_FRAME}"),
        (struct.pack("<I", MAX_HANDSHAKE_FRAME + 1), "bad_frame", f"at most {MAX_HANDSHAKE_FRAME}"),
        (b"GET / HTTP/1.1\r\n\r\n", "bad_frame", "at most"),
        (framed(b""), "bad_frame", ""),
        (framed(b"\xc1"), "bad_frame", ""),
        (framed(b"\x91" * 60_000), "bad_frame", ""),
        (framed(b"\x93\xa5hello\x01\xa2\xff\xff"), "bad_frame", ""),
        (framed(encode(["hello"])), "bad_frame", ""),
        (framed(encode(["hello", "one", "e"])), "bad_frame", ""),
        (framed(encode(["nobody", 1])), "bad_frame", "nobody"),
        (framed(encode(Ping(1, b""))), "bad_frame", "ping"),
        (framed(encode(Error(0, "x", "y"))), "bad_frame", "expected a hello"),
        (framed(encode(Hello(PROTOCOL_VERSION, "e"))) + b"more", "bad_frame", "4 bytes after the hello"),
        (framed(encode(Hello(0, "e"))), "version_mismatch", "protocol 0, this daemon"),
        (framed(encode(Hello(99, "e"))), "version_mismatch", "protocol 99, this daemon"),
        (framed(encode(Hello(-(2**40), "e"))), "version_mismatch", "protocol -1099511627776"),
        (framed(encode(Hello(PROTOCOL_VERSION, ""))), "bad_argument", "engine id of 0 characters"),
        (framed(encode(Hello(PROTOCOL_VERSION, "e" * 257))), "bad_argument", "engine id of 257 characters"),
        (framed(encode(Hello(PROTOCOL_VERSION, "e", "l" * 257))), "bad_argument", "label of 257 characters"),
    ],
)
def test_invalid_hellos_are_refused(host: Host, guest: Guest, said: bytes, code: str, told: str) -> None:
    error = guest.say(said).error()
    assert (error.id, error.code) == (0, code)
    assert told in error.message
    assert host.door.refused == {code: 1}
    assert isinstance(host.connect().hello().hear(), Welcome)


def test_a_client_one_version_ahead_gets_our_version(host: Host, guest: Guest) -> None:
    assert guest.hello(version=PROTOCOL_VERSION + 1).hear().version == PROTOCOL_VERSION


def test_data_after_the_welcome_ends_the_session(host: Host, guest: Guest) -> None:
    session = guest.hello().hear().session
    guest.say(b"and another thing")
    assert host.ended.get(timeout=PATIENCE) == session
    assert "17 bytes after the welcome" in guest.hear().message
    assert guest.at_end()


def test_the_daemon_may_refuse(host: Host, guest: Guest) -> None:
    host.refusal = NotPermitted("1024 sessions are open")
    error = guest.hello().error()
    assert (error.code, error.message) == ("not_permitted", "1024 sessions are open")


def test_a_silent_connection_is_closed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.05)
    assert "no complete hello" in host.connect().say(b"\x05").error().message
    monkeypatch.undo()
    host.connect().close()
    assert isinstance(host.connect().hello().hear(), Welcome)
    assert host.ended.empty()


def test_the_number_of_silent_connections_is_bounded(host: Host) -> None:
    for _ in range(MAX_HANDSHAKES):
        host.connect()
    assert host.connect().error().code == "unavailable"


def test_handshakes_beyond_the_rate_are_refused_and_counted(short_folder: Path) -> None:
    host = Host(short_folder, rate=Rate(1e-6, 3))
    for _ in range(3):
        assert isinstance(host.connect().hello().hear(), Welcome)
    error = host.connect().hello().error()
    assert error.code == "unavailable"
    assert f"uid {os.getuid()} shakes hands more often than attach_rate allows" in error.message
    assert host.door.refused == {"attach_rate": 1}
    assert host.opened.qsize() == 3
    host.close()


def test_unexpected_descriptors_are_closed(host: Host, guest: Guest) -> None:
    """Before the welcome and after it: the other end of a pipe that was sent along is closed in the end."""
    mine = []
    for number in range(2):
        out, into = os.pipe()
        mine.append(into)
        data = framed(encode(Hello(PROTOCOL_VERSION, "e")))
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(guest.sock, [data[:3], data[3:]] if number == 0 else [b"more"], [out] * 200)
        os.close(out)
        if number == 0:
            assert isinstance(guest.hear(), Welcome)
            assert len(os.listdir("/proc/self/fd")) < before + 20
        else:
            assert "bytes after the welcome" in guest.hear().message
        with pytest.raises(BrokenPipeError):  # the kernel knows of nobody who could read
            os.write(into, b"anybody?")
    for into in mine:
        os.close(into)


def test_refusals_do_not_fill_the_log(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvcache_server.daemon.handshake")
    for _ in range(3 * handshake.LINES_A_MINUTE):
        host.connect().say(b"\xff\xff\xff\xff").error()
    assert host.door.refused == {"bad_frame": 3 * handshake.LINES_A_MINUTE}
    assert 0 < len([1 for record in caplog.records if "refused" in record.message]) < 1.5 * handshake.LINES_A_MINUTE


def test_modes_of_the_door(short_folder: Path) -> None:
    for allowed in ((), (12345,)):  # whom the list names, the access control list does: nobody else gets in by that
        host = Host(short_folder, allowed)
        assert stat.S_IMODE(host.path.stat().st_mode) == 0o660
        host.close()
        assert not host.path.exists()


# It becomes somebody else once Python has started: the interpreter may lie where only root can read.
KNOCK = """
import os, socket, sys
os.setgroups([])
os.setgid(int(sys.argv[4]))
os.setuid(int(sys.argv[3]))
door = socket.socket(socket.AF_UNIX)
door.settimeout(10)
try:
    door.connect(sys.argv[1])
except PermissionError:
    sys.exit("denied")
door.sendall(bytes.fromhex(sys.argv[2]))
sys.stdout.buffer.write(door.recv(1 << 16)[4:])
"""


def knock_as(uid: int, gid: int, host: Host) -> Any:
    """What a process of that user hears at the door; None where the kernel keeps it away."""
    os.chmod(host.path.parent, 0o755)
    hello = framed(encode(Hello(PROTOCOL_VERSION, "e"))).hex()
    asked = subprocess.run(
        [sys.executable, "-c", KNOCK, str(host.path), hello, str(uid), str(gid)], capture_output=True, check=False
    )
    if asked.stderr == b"denied\n":
        return None
    assert asked.returncode == 0, asked.stderr
    return decode_handshake(asked.stdout)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_other_users_are_refused_by_the_kernel_or_by_name(short_folder: Path) -> None:
    host = Host(short_folder)
    assert knock_as(65534, 65534, host) is None
    host.close()
    host = Host(short_folder, (12345,))
    assert isinstance(knock_as(12345, 65534, host), Welcome)
    assert knock_as(65534, 65534, host) is None
    os.chmod(host.path, 0o666)  # as on a file system without access control lists: the door looks for itself
    os.removexattr(host.path, "system.posix_acl_access")
    os.chmod(host.path, 0o666)
    error = knock_as(65534, 65534, host)
    assert error.code == "not_permitted"
    assert "uid 65534 with groups [65534] may not attach" in error.message
    host.close()
    host = Host(short_folder, gids=(54321,))
    assert isinstance(knock_as(65534, 54321, host), Welcome)
    assert knock_as(65534, 65534, host) is None
    host.close()


def test_a_stopping_daemon_closes_all_doors_and_ends_no_session(host: Host, guest: Guest) -> None:
    guest.hello().hear()
    host.call(host.door.close)
    with pytest.raises(FileNotFoundError):
        host.connect()
    assert guest.hear() is None
    assert host.ended.empty()


def test_a_stale_door_is_replaced_and_an_active_one_is_not(short_folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(short_folder / "kv.door"))
    host = Host(short_folder)
    with contextlib.closing(uvloop.new_event_loop()) as loop, pytest.raises(EndpointTaken):
        HandshakeServer(loop, host.endpoint, host.region, GEOMETRY, host._open, host.ended.put)
    assert isinstance(host.connect().hello().hear(), Welcome)
    host.close()
    (short_folder / "kv.door").write_text("notes")
    with pytest.raises(ConfigError, match="is not a socket"):
        Host(short_folder)
