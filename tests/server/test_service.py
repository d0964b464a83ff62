"""The running daemon, a real process with real sockets: what it survives, what it counts, how it stops."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from manager import an_ear

from kvcache_proto import messages as m
from kvcache_proto.codec import MAX_FRAME, decode_reply, encode
from kvcache_proto.endpoint import handshake_path, routing_id, socket_path
from kvcache_proto.errors import BadToken, KVCacheError
from kvcache_proto.types import MAX_BLOCKS, MAX_HASHES, GroupSpec, NamespaceSpec, Outcome
from kvcache_server.admin_client import AdminClient
from kvcache_server.config import Config
from kvcache_server.daemon.descriptor_limit import needed
from kvcache_server.storage.region_names import LOCK, RegionFolder
from kvcache_server.transport.zmtp import GREETING, header, ready

SPEC = NamespaceSpec("model", (GroupSpec(16, 4096),))
REGION = "/dev/shm"


def hashes(count: int, start: int = 0, size: int = 32) -> list[bytes]:
    return [number.to_bytes(size, "little") for number in range(start, start + count)]


class Engine(AdminClient):
    """A session that is attached to one namespace, whole by itself."""

    def __init__(self, endpoint: str, name: str = "engine", spec: NamespaceSpec = SPEC) -> None:
        super().__init__(endpoint, engine=name)
        self.namespace = self.ask(m.Attach(0, b"", spec, tuple(range(spec.shards)))).namespace

    def reserve(self, run: list[bytes], parent: bytes | None = None) -> m.Reserved:
        reserved: m.Reserved = self.ask(m.Reserve(0, b"", self.namespace, [m.Run(run, parent)]))
        return reserved

    def settle(self, reservation: int, outcome: Outcome = Outcome.COMMITTED) -> bytes:
        region = self.geometry.region_id
        verdicts: bytes = self.ask(m.Settle(0, b"", region, reservation, (0,), outcome)).verdicts
        return verdicts

    def store(self, run: list[bytes]) -> None:
        for at in range(0, len(run), MAX_BLOCKS):
            reserved = self.reserve(run[at : at + MAX_BLOCKS], run[at - 1] if at else None)
            assert set(self.settle(reserved.reservation)) == {0}

    def acquire(self, run: list[bytes], pin: bool = True) -> m.Acquired:
        acquired: m.Acquired = self.ask(m.Acquire(0, b"", self.namespace, run, 0, pin))
        return acquired


@pytest.fixture
def engine(daemon: Any) -> Iterator[Engine]:
    with Engine(daemon.endpoint) as engine:
        yield engine


class RequestSocket:
    """A DEALER that may say anything, with a session's token or without one."""

    def __init__(self, endpoint: str, token: bytes = b"", **options: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        if token:
            self.socket.setsockopt(zmq.ROUTING_ID, routing_id(token))
        self.socket.connect(endpoint)

    def __enter__(self) -> RequestSocket:
        return self

    def __exit__(self, *ended: object) -> None:
        self._context.destroy(linger=0)

    def ask(self, *parts: bytes) -> Any:
        self.socket.send_multipart(parts)
        return self.hear()

    def hear(self) -> Any:
        return decode_reply(self.socket.recv())


class Unheard(AdminClient):
    """A session whose connection somebody else makes."""

    def _dealer(self) -> zmq.Socket[bytes]:
        return self._context.socket(zmq.PAIR)


# Frames.

TOKEN = b"\0" * 16
SHAPE = ["m", [[16, 4096, "full"]], {}, 32]


@pytest.mark.parametrize(
    ("frame", "code", "told"),
    [
        (b"", "bad_frame", ""),
        (b"\xc1", "bad_frame", ""),
        (b"\x93\xa7acq", "bad_frame", ""),
        (b"hello, daemon", "bad_frame", ""),
        (b"\x91" * 100_000, "bad_frame", ""),
        (b"\xdd\xff\xff\xff\xff", "bad_frame", ""),
        (encode({"tag": "ping"}), "bad_frame", ""),
        (encode(["conquer", 1, TOKEN]), "bad_frame", "conquer"),
        (encode(["ping"]), "bad_frame", ""),
        (encode(["ping", "one", TOKEN]), "bad_frame", "int"),
        (encode(["ping", 1, "text for a token"]), "bad_frame", ""),
        (encode(["acquire", 1, TOKEN, 1, [1, 2, 3]]), "bad_frame", "bytes"),
        (encode(["acquire", 1, TOKEN, 1, ["text"]]), "bad_frame", ""),
        (encode(["attach", 1, TOKEN, ["m", [], {}, 32]]), "bad_argument", "0 groups: 1 to"),
        (encode(["attach", 1, TOKEN, ["m", [[16, -4096, "full"]], {}, 32]]), "bad_argument", "shard_bytes -4096: 1 to"),
        (encode(["attach", 1, TOKEN, ["m", [[16, 2**63, "full"]], {}, 32]]), "bad_argument", "shard_bytes 9223372036"),
        (encode(["attach", 1, TOKEN, ["m", [[16, [1] * 65, "full"]], {}, 32]]), "bad_argument", "65 shards: 1 to"),
        (encode(["attach", 1, TOKEN, ["m", [[0, 4096, "full"]], {}, 32]]), "bad_argument", "block_tokens 0"),
        (encode(["attach", 1, TOKEN, ["m", [[16, 1, "full"]], {}, 33]]), "bad_argument", "hash_bytes 33: 8 to 32"),
        (encode(["attach", 1, TOKEN, ["", [[16, 1, "full"]], {}, 32]]), "bad_argument", "model name of 0"),
        (encode(["release", 1, TOKEN, [5] * 1_000_000]), "bad_frame", f"length <= {MAX_HASHES}"),
        (encode(["reserve", 1, TOKEN, 1, [[]] * 1_000_000]), "bad_frame", f"length <= {MAX_BLOCKS}"),
        (encode(["settle", 1, TOKEN, TOKEN, 1, [0], 0, [5] * 1_000_000]), "bad_frame", f"length <= {MAX_HASHES}"),
        (encode(m.Acquire(7, TOKEN, 1, hashes(200_000))), "bad_frame", f"bytes: at most {MAX_FRAME}"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, bytes) else None,
)
def test_frames_that_are_not_requests(daemon: Any, engine: Engine, frame: bytes, code: str, told: str) -> None:
    engine.store(hashes(8))
    with Unheard(daemon.endpoint) as admin, RequestSocket(daemon.endpoint, admin._token) as wire:
        error = wire.ask(frame)
    assert (type(error), error.id, error.code) == (m.Error, 0, code)
    assert told in error.message
    assert daemon.status()["daemon"]["errors"] == {code: 1}
    assert engine.acquire(hashes(8)).hits == 8


def test_a_message_is_one_frame(daemon: Any, engine: Engine) -> None:
    with RequestSocket(daemon.endpoint) as wire:
        ping = encode(m.Ping(1, TOKEN))
        for parts in ([ping, ping], [b"", ping], [b"x"] * 100):
            error = wire.ask(*parts)
            assert (error.id, error.code) == (0, "bad_frame")
        # The parts were not taken for messages of others: what follows is answered as itself.
        assert wire.ask(ping).code == "bad_token"
    engine.ping()


def test_an_enormous_frame_disconnects_only_its_sender(daemon: Any, engine: Engine) -> None:
    with RequestSocket(daemon.endpoint) as wire:
        wire.socket.send(bytes(64 << 20))
        engine.store(hashes(8))
        assert engine.acquire(hashes(8)).hits == 8
    assert daemon.process.poll() is None


@pytest.mark.parametrize("token", [TOKEN, b"", b"short", b"\xff" * 4096])
def test_a_wrong_token(daemon: Any, engine: Engine, token: bytes) -> None:
    with RequestSocket(daemon.endpoint) as wire:
        error = wire.ask(encode(m.Acquire(9, token, engine.namespace, hashes(3))))
        assert (error.id, error.code) == (9, "bad_token")
        assert "shake hands again" in error.message
        wire.socket.send(encode(m.Release(10, token, [1])))  # never answered
        assert wire.ask(encode(m.Ping(11, token))).id == 11
    assert daemon.status()["daemon"]["errors"] == {"bad_token": 3}


def test_a_token_ends_with_its_session(daemon: Any) -> None:
    with Engine(daemon.endpoint) as gone:
        stale = gone._token
    daemon.wait_status(lambda status: not status["sessions"])
    with RequestSocket(daemon.endpoint) as wire:
        assert wire.ask(encode(m.Ping(1, stale))).code == "bad_token"


# Requests that are wrong in themselves: the error has their id, and nothing has changed.


def wrong_requests(engine: Engine, reservation: int) -> Iterator[tuple[m.Request, str, str]]:
    n, region = engine.namespace, engine.geometry.region_id
    other = NamespaceSpec("model", (GroupSpec(16, 8192),))
    yield m.Attach(0, b"", other, (0,)), "geometry_mismatch", "shards (8192,); registered with (4096,)"
    yield m.Attach(0, b"", NamespaceSpec("model", SPEC.groups, hash_bytes=16)), "geometry_mismatch", "hashes of 16"
    huge = NamespaceSpec("huge", (GroupSpec(16, 1 << 40),))
    yield m.Attach(0, b"", huge, (0,)), "bad_argument", "does not fit into a region"
    yield m.Attach(0, b"", SPEC, (-1,)), "bad_argument", "shards"
    yield m.Attach(0, b"", SPEC, (0, 0)), "bad_argument", "shards"
    yield m.Attach(0, b"", SPEC, (1,)), "bad_argument", "shards"
    yield m.Attach(0, b"", SPEC, (0,), -1), "bad_argument", "ceiling_bytes -1"
    yield m.Attach(0, b"", SPEC, (0,), 2**64 - 1), "bad_argument", "ceiling_bytes"
    for number in (0, -1, 77, 2**63):
        yield m.Acquire(0, b"", number, hashes(1)), "unknown_handle", f"namespace {number}"
        yield m.Reserve(0, b"", number, [m.Run(hashes(1))]), "unknown_handle", f"namespace {number}"
    for group in (-1, 1, 2**40):
        yield m.Acquire(0, b"", n, hashes(1), group), "bad_argument", f"group {group}"
        yield m.Reserve(0, b"", n, [m.Run(hashes(1))], group), "bad_argument", f"group {group}"
    for odd in (b"", b"x", bytes(31), bytes(33)):
        yield m.Acquire(0, b"", n, [odd]), "bad_argument", f"hash of {len(odd)} bytes"
        yield m.Acquire(0, b"", n, [*hashes(2, 50), odd]), "bad_argument", f"hash of {len(odd)} bytes"
        yield m.Reserve(0, b"", n, [m.Run([*hashes(2, 50), odd])]), "bad_argument", f"hash of {len(odd)} bytes"
        yield m.Reserve(0, b"", n, [m.Run(hashes(2, 50), odd)]), "bad_argument", f"hash of {len(odd)} bytes"
    many = hashes(MAX_HASHES + 1, 1000)
    yield m.Acquire(0, b"", n, many), "bad_argument", f"{MAX_HASHES + 1} hashes in one message"
    yield (
        m.Reserve(0, b"", n, [m.Run(many[:7]), m.Run(many[7 : MAX_BLOCKS + 1])]),
        "bad_argument",
        f"{MAX_BLOCKS + 1} blocks in one reservation",
    )
    yield m.Reserve(0, b"", n, [m.Run(hashes(1, 50) * 2)]), "bad_argument", "twice"
    yield m.Settle(0, b"", bytes(16), reservation, (0,), 0), "unknown_handle", "another region"
    yield m.Settle(0, b"", region, 999, (0,), 0), "unknown_handle", "reservation 999"
    yield m.Settle(0, b"", region, -1, (0,), 0), "unknown_handle", "reservation -1"
    for shards in ((), (1,), (-1,), (2**40,)):
        yield m.Settle(0, b"", region, reservation, shards, 0), "bad_argument", "shard"
    for outcome in (-1, 3, 2**40):
        yield m.Settle(0, b"", region, reservation, (0,), outcome), "bad_argument", f"outcome {outcome}"
    for positions in ([-1], [4], [0, 0], [2**40]):
        yield m.Settle(0, b"", region, reservation, (0,), 0, positions), "bad_argument", "positions"
    yield m.Clear(0, b"", "no such id"), "client_error", "no such id"


def test_invalid_requests_are_refused_by_name_and_change_nothing(daemon: Any, engine: Engine) -> None:
    engine.store(hashes(8))
    reservation = engine.reserve(hashes(4, 100)).reservation
    before = daemon.status()
    for request, code, told in wrong_requests(engine, reservation):
        number = engine.tell(request)
        error = decode_reply(engine._socket.recv())
        assert isinstance(error, m.Error), request
        assert (error.id, error.code) == (number, code), (error, str(request)[:200])
        assert told in error.message
    after = daemon.status()
    assert after["pool"] == before["pool"]
    assert after["namespaces"] == before["namespaces"]
    assert after["daemon"]["errors"]["bad_argument"] > 20
    assert "internal" not in after["daemon"]["errors"]
    assert engine.acquire(hashes(8)).hits == 8
    assert set(engine.settle(reservation)) == {0}


def test_leases_of_others_are_not_released(daemon: Any, engine: Engine) -> None:
    engine.store(hashes(8))
    lease = engine.acquire(hashes(8)).lease
    with Engine(daemon.endpoint, "thief") as thief:
        thief.tell(m.Release(0, b"", [lease, -1, 2**63, 0]))
        thief.ping()
    status = daemon.status()
    assert status["pool"]["pinned_bytes"] == 8 * 4096
    assert status["counters"]["releases_unknown"] == 4


# Who does not read.


class Deaf(Engine):
    """One whose replies pile up, on its side and on the way."""

    def _dealer(self) -> zmq.Socket[bytes]:
        socket = super()._dealer()
        for option, value in ((zmq.RCVHWM, 1), (zmq.SNDHWM, 0), (zmq.RCVBUF, 4096)):
            socket.setsockopt(option, value)
        return socket


def test_a_client_that_stops_reading_loses_no_replies(daemon: Any, engine: Engine) -> None:
    engine.store(hashes(4000))
    with Deaf(daemon.endpoint) as deaf:
        asked = [deaf.tell(m.Acquire(0, b"", deaf.namespace, hashes(1000), 0, False)) for _ in range(4000)]
        for _ in range(50):  # replies of 24 KB each: more than all buffers on the way hold
            assert engine.acquire(hashes(100), pin=False).hits == 100
        assert daemon.status()["daemon"]["messages"] < 2000
        assert [decode_reply(deaf._socket.recv()).id for _ in asked] == asked
    assert daemon.status()["daemon"]["drops"] == {}


def memory_of(daemon: Any) -> int:
    """The bytes that the daemon has in memory, its region left out."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


@pytest.mark.parametrize(("width", "turn"), [(100, 2000), (2000, 500), (MAX_HASHES, 50)])
def test_a_client_that_never_reads_does_not_grow_the_daemon(start_daemon: Any, width: int, turn: int) -> None:
    daemon = start_daemon(size="192MiB")
    spec = NamespaceSpec("small", (GroupSpec(16, 1024),))
    with Engine(daemon.endpoint, "honest", spec) as engine:
        engine.store(hashes(width))
        with contextlib.ExitStack() as leave:
            crowd = [leave.enter_context(Deaf(daemon.endpoint, f"deaf {number}", spec)) for number in range(4)]
            question = [encode(m.Acquire(1, deaf._token, deaf.namespace, hashes(width), 0, False)) for deaf in crowd]
            sizes = []
            for _ in range(4):
                for deaf, asked in zip(crowd, question, strict=True):
                    for _ in range(turn):
                        deaf._socket.send(asked)
                for _ in range(20):
                    assert engine.acquire(hashes(width), pin=False).hits == width
                sizes.append(memory_of(daemon))
            # Each: what may be unread, a reply beyond that, and what was read of it at one time.
            assert max(sizes) - sizes[0] < len(crowd) * (4 << 20), sizes
            crowd[0].tell(m.Acquire(0, b"", crowd[0].namespace, hashes(width)))
        assert daemon.wait_status(lambda status: len(status["sessions"]) == 1)["pool"]["pinned_bytes"] == 0


def test_a_burst_from_a_reading_client_is_answered_completely(daemon: Any, engine: Engine) -> None:
    for begin in range(0, 20_000, 1000):
        burst = range(begin, begin + 1000)
        for number in burst:
            engine._socket.send(encode(m.Ping(number, engine._token)))
        assert [decode_reply(engine._socket.recv()).id for _ in burst] == list(burst)
    assert daemon.status()["daemon"]["drops"] == {}


def test_leases_of_a_session_are_bounded(start_daemon: Any) -> None:
    daemon = start_daemon(max_leases=3)
    with Engine(daemon.endpoint) as engine, Engine(daemon.endpoint, "another") as another:
        engine.store(hashes(4))
        leases = [engine.acquire(hashes(2)).lease for _ in range(3)]
        refused = engine.acquire(hashes(4))
        assert (refused.lease, refused.hits, refused.withheld) == (0, 0, 4)
        assert engine.acquire(hashes(4), pin=False).hits == 4
        assert another.acquire(hashes(4)).hits == 4
        assert daemon.status()["refusals"]["leases"] == 4
        engine.tell(m.Release(0, b"", leases[:1]))
        assert engine.acquire(hashes(4)).hits == 4


def test_the_end_of_the_request_connection_ends_the_session(daemon: Any, engine: Engine) -> None:
    engine.store(hashes(8))
    other = Engine(daemon.endpoint, "other")
    daemon.process.send_signal(signal.SIGSTOP)
    for _ in range(50):
        other.tell(m.Acquire(0, b"", other.namespace, hashes(8)))
    other._socket.close(linger=1000)  # its door is open
    other._context.term()
    daemon.process.send_signal(signal.SIGCONT)
    status = daemon.wait_status(lambda status: len(status["sessions"]) == 1)
    assert status["namespaces"][0]["lookups"] == 50  # what it had said was heard, and its leases went with it
    assert (status["pool"]["leases"], status["pool"]["pinned_bytes"]) == (0, 0)
    assert other._handshake.recv(1) == b""
    other._handshake.close()


def test_a_session_has_one_connection(daemon: Any, engine: Engine) -> None:
    with RequestSocket(daemon.endpoint) as late:  # it shows the token with what it says
        assert late.ask(encode(m.Ping(1, engine._token))).code == "bad_token"
    for _ in range(20):
        with RequestSocket(daemon.endpoint, engine._token) as second:
            monitor = second.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            assert monitor.poll(20_000)
            second.socket.disable_monitor()
    with Engine(daemon.endpoint, "other") as other:
        other.tell(m.Ping(0, b""))
        assert decode_reply(other._socket.recv()).id
        other._socket.send(encode(m.Ping(7, engine._token)))
        assert decode_reply(other._socket.recv()).code == "bad_token"  # nor has a connection two sessions
    engine.ping()
    assert daemon.status()["daemon"]["connections"]["cut"]["second_connection"] >= 20


def test_idle_connections_are_limited_and_harmless(start_daemon: Any) -> None:
    daemon = start_daemon()
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (256, 256))
    with Engine(daemon.endpoint) as engine, contextlib.ExitStack() as leave:
        for _ in range(600):
            idle = leave.enter_context(socket.socket(socket.AF_UNIX))
            idle.connect(socket_path(daemon.endpoint))
        engine.store(hashes(8))
        with Engine(daemon.endpoint, "late") as late:
            assert late.acquire(hashes(8)).hits == 8
        figures = daemon.wait_status(lambda status: status["daemon"]["connections"]["cut"].get("crowded_out", 0) > 500)
        assert figures["daemon"]["connections"]["unbound"] <= 64
        assert len(os.listdir(f"/proc/{daemon.process.pid}/fd")) < 160


def test_too_few_descriptors_for_all_sessions_are_reported(start_daemon: Any, short_folder: Path) -> None:
    settings = short_folder / "settings.toml"
    settings.write_text("max_sessions = 20\nmax_user_sessions = 20\n")
    most = needed(Config(endpoint="ipc:///x", max_sessions=20))
    within = ("sh", "-c", 'ulimit -S -n 64; ulimit -H -n "$0"; exec "$@"', most)
    daemon = start_daemon(within=[str(each) for each in within], config=settings)
    assert resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE) == (most, most), "the soft limit was not raised"
    assert "descriptors" not in daemon.log
    with contextlib.ExitStack() as leave:
        admin = leave.enter_context(AdminClient(daemon.endpoint))
        while len(admin.status().sessions) > 1:  # the one that has seen the daemon's start may be ending yet
            pass
        before = len(os.listdir(fds := f"/proc/{daemon.process.pid}/fd"))
        for number in range(19):
            leave.enter_context(Engine(daemon.endpoint, f"engine {number}"))
        assert len(os.listdir(fds)) == before + 2 * 19
        leave.enter_context(AdminClient(daemon.endpoint))  # beyond all others, for who runs the daemon
    settings.write_text("max_sessions = 21\nmax_user_sessions = 20\n")
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_status(lambda status: status["daemon"]["max_sessions"] == 21)
    (line,) = [line for line in daemon.log.splitlines() if "descriptors" in line]
    assert f"WARNING max_sessions 21 may need {most + 2} descriptors, and the limit is {most}: raise it" in line
    assert daemon.stop() == 0
    daemon = start_daemon(within=[str(each) for each in within], max_sessions=100)
    assert daemon.log.count(f"LimitNOFILE={most + 160} in the unit") == 1


def raw_peer(daemon: Any, token: bytes = b"") -> socket.socket:
    """A connection that has greeted, and may go on with frames as it likes."""
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(20)
    peer.connect(socket_path(daemon.endpoint))
    peer.sendall(GREETING)
    identity = routing_id(token) if token else b""
    own = b"\5READY\x0bSocket-Type\0\0\0\6DEALER\x08Identity" + len(identity).to_bytes(4, "big") + identity
    peer.sendall(bytes((4, len(own))) + own)
    heard, expected = b"", GREETING + ready(b"ROUTER")
    while len(heard) < len(expected):
        heard += peer.recv(1 << 16)
    assert heard == expected
    return peer


@pytest.mark.parametrize(
    "said",
    [
        *(b"\1\0", b"\1\1x", b"\3" + (60_000).to_bytes(8, "big") + bytes(60_000), b"\4\1\0"),
        *(b"\x08\0", b"\7\0", b"\2" + (1 << 62).to_bytes(8, "big"), b"\4\2\3a" * 1000),
    ],
)
def test_an_endless_message_is_cut_off_and_not_kept(daemon: Any, engine: Engine, said: bytes) -> None:
    before = memory_of(daemon)
    with raw_peer(daemon) as peer, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(5000):
            peer.sendall(said)
    engine.ping()
    assert memory_of(daemon) - before < 4 << 20
    assert daemon.wait_status(lambda s: s["daemon"]["connections"]["cut"].get("bad_protocol") == 1)


def test_a_terminated_connection_that_does_not_read_is_closed_soon(daemon: Any, engine: Engine) -> None:
    """Less is unread than makes the daemon stop reading, and more than the kernel takes."""
    fds = f"/proc/{daemon.process.pid}/fd"
    before = len(os.listdir(fds))
    ping = encode(m.Ping(1, TOKEN))
    with contextlib.ExitStack() as leave:
        for _ in range(20):
            leave.enter_context(raw_peer(daemon)).sendall((header(len(ping)) + ping) * 3000)
        daemon.wait_status(lambda s: s["daemon"]["errors"].get("bad_token") == 60_000, "the answers")
        with contextlib.ExitStack() as crowd:
            for _ in range(64 + 20):
                idle = crowd.enter_context(socket.socket(socket.AF_UNIX))
                idle.connect(socket_path(daemon.endpoint))
            daemon.wait_status(lambda s: s["daemon"]["connections"]["cut"].get("crowded_out", 0) >= 20)
        daemon.wait_status(lambda s: len(os.listdir(fds)) < before + 10, "the end of their connections")
    engine.ping()


def test_endless_pings_are_answered_as_long_as_the_peer_reads(daemon: Any, engine: Engine) -> None:
    before = memory_of(daemon)
    with raw_peer(daemon) as peer:
        peer.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionError):  # cut off, where many came at one time
            while True:
                peer.sendall(b"\4\x17\4PING\0\0" + bytes(16))
        engine.ping()
        assert memory_of(daemon) - before < 4 << 20


def test_the_total_of_incomplete_frames_is_bounded(daemon: Any, engine: Engine) -> None:
    with contextlib.ExitStack() as leave:
        before = memory_of(daemon)
        for number in range(40):
            admin = leave.enter_context(Unheard(daemon.endpoint, engine=f"slow {number}"))
            peer = leave.enter_context(raw_peer(daemon, admin._token))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                peer.sendall(b"\2" + (4 << 20).to_bytes(8, "big") + bytes((4 << 20) - 1))
        engine.ping()
        assert memory_of(daemon) - before < 100 << 20
        assert daemon.status()["daemon"]["connections"]["cut"]["too_much_held"] > 20


# Start and stop.


def left_behind(daemon: Any) -> list[str]:
    paths = [socket_path(daemon.endpoint), handshake_path(daemon.endpoint), socket_path(daemon.endpoint)[:-5] + ".lock"]
    own = os.path.basename(daemon.region).removesuffix(".region")
    regions = [f"{REGION}/{name}" for name in os.listdir(REGION) if name.startswith(own)]
    return [path for path in paths if os.path.exists(path)] + regions


def regions_of(folder: Path) -> list[str]:
    """What daemons of the folder's endpoint have in REGION."""
    with RegionFolder(REGION, str(folder / "kv.sock")) as regions:
        return regions.found() + regions.found(LOCK)


@pytest.fixture
def known(daemon: Any) -> Any:
    """The daemon, with the path of its region noted."""
    daemon.region = daemon.status()["daemon"]["region"]
    assert os.path.exists(daemon.region)
    return daemon


def test_a_daemon_that_is_ready_has_imported_numpy(daemon: Any) -> None:
    """Otherwise the first lookups would wait for it, longer than their deadlines."""
    assert "/numpy/" in Path(f"/proc/{daemon.process.pid}/maps").read_text()


def test_the_sockets_are_for_owner_and_group(daemon: Any) -> None:
    for path in (socket_path(daemon.endpoint), handshake_path(daemon.endpoint)):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o660


@pytest.mark.parametrize("removed", [socket_path, handshake_path], ids=["socket", "door"])
@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced"])
def test_a_daemon_whose_sockets_were_removed_logs_it_and_ends(known: Any, removed: Any, replaced: bool) -> None:
    path = removed(known.endpoint)
    os.unlink(path)
    if replaced:
        Path(path).write_text("somebody else's")
    assert known.process.wait(20) == 7
    assert known.log.count(f"{path} was removed or replaced: no client can attach any more") == 1
    assert "Traceback" not in known.log
    assert left_behind(known) == ([path] if replaced else [])


def test_failing_parts_of_a_tick_are_counted_and_the_others_continue(start_daemon: Any, short_folder: Path) -> None:
    (short_folder / "sitecustomize.py").write_text(BROKEN)
    path = os.pathsep.join([str(short_folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    with contextlib.closing(an_ear(short_folder)) as ear:
        daemon = start_daemon(env={"PYTHONPATH": path} | ear.environ(watchdog=0.2))
        daemon.wait_status(lambda status: status["daemon"]["errors"].get("internal", 0) >= 9, "the third tick")
        ear.wait(lambda message: "WATCHDOG" in message)
        os.unlink(socket_path(daemon.endpoint))
        assert daemon.process.wait(20) == 7
    for part in ("tick", "insight", "sweep"):
        assert f"work failed inside the daemon: this {part} fails" in daemon.log


BROKEN = """
from kvcache_server.core.cache import Cache
from kvcache_server.daemon.session_registry import SessionRegistry
from kvcache_server.insight.insight import Insight

def fail(part):
    def failing(*arguments):
        raise RuntimeError(f"this {part} fails")
    return failing

Cache.tick, Insight.tick, SessionRegistry.sweep = map(fail, ("tick", "insight", "sweep"))
"""


FORGETFUL = """
from kvcache_server.insight.insight import Insight

def follow(self, changes):
    raise RuntimeError("insight fails")

Insight.follow = follow
"""


def test_an_error_in_a_follower_of_changes_costs_no_reply(start_daemon: Any, short_folder: Path) -> None:
    (short_folder / "sitecustomize.py").write_text(FORGETFUL)
    path = os.pathsep.join([str(short_folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    daemon = start_daemon(env={"PYTHONPATH": path})
    with Engine(daemon.endpoint) as engine:
        engine.store(hashes(8))
        assert engine.acquire(hashes(8)).hits == 8
    assert "work failed inside the daemon: insight fails" in daemon.log


def test_a_tick_due_during_shutdown_does_not_report_missing_sockets(start_daemon: Any, short_folder: Path) -> None:
    (short_folder / "sitecustomize.py").write_text("from kvcache_server.daemon import service\nservice.TICK = 0.0\n")
    path = os.pathsep.join([str(short_folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    daemon = start_daemon(env={"PYTHONPATH": path})
    assert daemon.stop() == 0, daemon.log
    assert "was removed or replaced" not in daemon.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_daemon_stops_at_once_and_leaves_nothing(known: Any, number: int) -> None:
    known.process.send_signal(number)
    assert known.process.wait(10) == 0
    assert left_behind(known) == []
    assert known.log.rstrip().endswith("stopped")


def test_idle_sessions_do_not_delay_the_shutdown(known: Any) -> None:
    with Engine(known.endpoint) as engine:
        engine.store(hashes(8))
        engine.acquire(hashes(8))
        assert known.stop(timeout=4) == 0
    assert left_behind(known) == []


def test_one_daemon_per_endpoint(daemon: Any, start_daemon: Any) -> None:
    second = start_daemon(endpoint=daemon.endpoint, wait=False)
    assert second.process.wait(20) == 3
    assert f"another daemon serves {daemon.endpoint}" in second.log
    os.unlink(socket_path(daemon.endpoint)[:-5] + ".lock")  # somebody tidied up
    third = start_daemon(endpoint=daemon.endpoint, wait=False)
    assert third.process.wait(20) == 3
    with Engine(daemon.endpoint) as engine:
        engine.store(hashes(8))


def test_sockets_of_a_killed_daemon_are_replaced(known: Any, start_daemon: Any) -> None:
    with Engine(known.endpoint) as engine:
        engine.store(hashes(8))
        region = engine.geometry.region_id
        known.kill()
        assert set(left_behind(known)) > {known.region}
        killed = known.region
        again = start_daemon(endpoint=known.endpoint)
        with pytest.raises(BadToken):
            engine.ask(m.Ping(0, b""))
    with Engine(again.endpoint) as engine:
        assert engine.geometry.region_id != region
        assert engine.acquire(hashes(8)).hits == 0
    assert not os.path.exists(killed)
    again.region = again.status()["daemon"]["region"]
    assert again.stop() == 0
    assert left_behind(again) == []


def test_a_signal_during_the_start_leaves_nothing(start_daemon: Any, short_folder: Path) -> None:
    daemon = start_daemon(size="1GiB", wait=False)
    lock = short_folder / "kv.lock"
    while not lock.exists():
        assert daemon.process.poll() is None, daemon.log
    while daemon.process.poll() is None:  # an operator who is in a hurry
        daemon.process.terminate()
    assert daemon.process.wait(20) == 0
    assert not [path for path in short_folder.iterdir() if path.suffix != ".log"]
    assert not regions_of(short_folder)
    assert "Traceback" not in daemon.log


def test_two_signals_while_the_region_is_prepared_leave_nothing(start_daemon: Any, short_folder: Path) -> None:
    daemon = start_daemon(size="1GiB", wait=False)
    while not regions_of(short_folder):
        assert daemon.process.poll() is None, daemon.log
    for signum in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C, and the supervisor's
        daemon.process.send_signal(signum)
    assert daemon.process.wait(20) == 0, daemon.log
    assert not regions_of(short_folder)
    assert not [path for path in short_folder.iterdir() if path.suffix != ".log"]
    assert "Traceback" not in daemon.log


def test_the_log_names_sessions_that_open_and_end(daemon: Any) -> None:
    with Engine(daemon.endpoint, "qwen-0"):
        pass
    daemon.wait_status(lambda status: not status["sessions"])
    assert f"opened: engine qwen-0 (admin), pid {os.getpid()}" in daemon.log
    assert "ended: engine qwen-0 (admin)" in daemon.log


def test_sessions_are_bounded(start_daemon: Any) -> None:
    daemon = start_daemon(max_sessions=3)
    sessions = [Engine(daemon.endpoint, f"engine {number}") for number in range(3)]
    with pytest.raises(KVCacheError, match="max_sessions is 3"):
        Engine(daemon.endpoint)
    sessions.pop().close()
    for session in sessions:
        session.close()
