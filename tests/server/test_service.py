"""The daemon at work, a real process over real sockets: what it survives, what it counts, how it stops."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from manager import an_ear

from kvcache_proto import messages as m
from kvcache_proto.codec import MAX_FRAME, decode_reply, encode
from kvcache_proto.endpoint import door_path, socket_path
from kvcache_proto.errors import BadToken, KVCacheError
from kvcache_proto.types import MAX_HASHES, GroupSpec, NamespaceSpec, Outcome
from kvcache_server.admin import Admin
from kvcache_server.memory import region_path

SPEC = NamespaceSpec("model", (GroupSpec(16, 4096),))
REGION = "/dev/shm"


def hashes(count: int, start: int = 0, size: int = 32) -> list[bytes]:
    return [number.to_bytes(size, "little") for number in range(start, start + count)]


class Engine(Admin):
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
        assert set(self.settle(self.reserve(run).reservation)) == {0}

    def acquire(self, run: list[bytes], pin: bool = True) -> m.Acquired:
        acquired: m.Acquired = self.ask(m.Acquire(0, b"", self.namespace, run, 0, pin))
        return acquired


@pytest.fixture
def engine(daemon: Any) -> Iterator[Engine]:
    with Engine(daemon.endpoint) as engine:
        yield engine


class Wire:
    """A DEALER that may say anything."""

    def __init__(self, endpoint: str, **options: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self.socket.connect(endpoint)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *ended: object) -> None:
        self._context.destroy(linger=0)

    def ask(self, *parts: bytes) -> Any:
        self.socket.send_multipart(parts)
        return self.hear()

    def hear(self) -> Any:
        return decode_reply(self.socket.recv())


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
        (encode(["release", 1, TOKEN, [5] * 1_000_000]), "bad_frame", "length <= 65536"),
        (encode(["reserve", 1, TOKEN, 1, [[]] * 1_000_000]), "bad_frame", "length <= 65536"),
        (encode(["settle", 1, TOKEN, TOKEN, 1, [0], 0, [5] * 1_000_000]), "bad_frame", "length <= 65536"),
        (encode(m.Acquire(7, TOKEN, 1, hashes(200_000))), "bad_frame", f"bytes: at most {MAX_FRAME}"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, bytes) else None,
)
def test_frames_that_are_no_requests(daemon: Any, engine: Engine, frame: bytes, code: str, told: str) -> None:
    engine.store(hashes(8))
    with Wire(daemon.endpoint) as wire:
        error = wire.ask(frame)
    assert (type(error), error.id, error.code) == (m.Error, 0, code)
    assert told in error.message
    assert daemon.status()["daemon"]["errors"] == {code: 1}
    assert engine.acquire(hashes(8)).hits == 8


def test_a_message_is_one_frame(daemon: Any, engine: Engine) -> None:
    with Wire(daemon.endpoint) as wire:
        ping = encode(m.Ping(1, TOKEN))
        for parts in ([ping, ping], [b"", ping], [b"x"] * 100):
            error = wire.ask(*parts)
            assert (error.id, error.code) == (0, "bad_frame")
        # The parts were not taken for messages of others: what follows is answered as itself.
        assert wire.ask(ping).code == "bad_token"
    engine.ping()


def test_an_enormous_frame_cuts_its_sender_off_and_nobody_else(daemon: Any, engine: Engine) -> None:
    with Wire(daemon.endpoint) as wire:
        wire.socket.send(bytes(64 << 20))
        engine.store(hashes(8))
        assert engine.acquire(hashes(8)).hits == 8
    assert daemon.process.poll() is None


@pytest.mark.parametrize("token", [TOKEN, b"", b"short", b"\xff" * 4096])
def test_a_wrong_token(daemon: Any, engine: Engine, token: bytes) -> None:
    with Wire(daemon.endpoint) as wire:
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
    with Wire(daemon.endpoint) as wire:
        assert wire.ask(encode(m.Ping(1, stale))).code == "bad_token"


# Requests that are wrong in themselves: the error has their id, and nothing has changed.


def wrong_requests(engine: Engine, reservation: int) -> Iterator[tuple[m.Request, str, str]]:
    n, region = engine.namespace, engine.geometry.region_id
    other = NamespaceSpec("model", (GroupSpec(16, 8192),))
    yield m.Attach(0, b"", other, (0,)), "geometry_mismatch", "shards (8192,); registered with (4096,)"
    yield m.Attach(0, b"", NamespaceSpec("model", SPEC.groups, hash_bytes=16)), "geometry_mismatch", "hashes of 16"
    huge = NamespaceSpec("huge", (GroupSpec(16, 1 << 40),))
    yield m.Attach(0, b"", huge, (0,)), "bad_argument", "does not fit an extent"
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
        m.Reserve(0, b"", n, [m.Run(many[:7]), m.Run(many[7:])]),
        "bad_argument",
        f"{MAX_HASHES + 1} hashes in one message",
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


def test_wrong_requests_are_refused_by_name_and_change_nothing(daemon: Any, engine: Engine) -> None:
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


def test_replies_that_nobody_reads_are_dropped_counted_and_taken_back(daemon: Any, engine: Engine) -> None:
    engine.store(hashes(4000))
    daemon.wait_status(lambda status: status["pool"]["blocks"] == 4000)
    with Wire(daemon.endpoint, RCVHWM=1, SNDHWM=0, RCVBUF=4096) as deaf:
        for number in range(4000):  # 24 KB each: more than all queues on the way hold
            deaf.socket.send(encode(m.Acquire(number, engine._token, engine.namespace, hashes(1000), 0, False)))
        daemon.wait_status(lambda status: status["daemon"]["messages"] >= 4000)
        dropped = daemon.status()["daemon"]["drops"]["peer_slow"]
        assert 0 < dropped < 4000
        deaf.socket.send(encode(m.Acquire(1, engine._token, engine.namespace, hashes(100))))
        deaf.socket.send(encode(m.Reserve(2, engine._token, engine.namespace, [m.Run(hashes(10, 5000))])))
        status = daemon.wait_status(lambda status: status["daemon"]["drops"]["peer_slow"] == dropped + 2)
        assert status["pool"]["pinned_bytes"] == 0
        assert status["pool"]["blocks_writing"] == 0
        # An honest client is served meanwhile.
        assert engine.acquire(hashes(100)).hits == 100


def memory_of(daemon: Any) -> int:
    """The bytes that the daemon has in memory, its region left out."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


@pytest.mark.parametrize(("width", "turn"), [(100, 2000), (2000, 1500), (20_000, 100)])
def test_who_never_reads_cannot_make_the_daemon_grow(start_daemon: Any, width: int, turn: int) -> None:
    daemon = start_daemon()
    spec = NamespaceSpec("small", (GroupSpec(16, 1024),))
    with Engine(daemon.endpoint, "honest", spec) as engine, Engine(daemon.endpoint, "deaf", spec) as other:
        engine.store(hashes(width))
        question = encode(m.Acquire(1, other._token, other.namespace, hashes(width), 0, False))
        sizes, before = [], daemon.status()["daemon"]["messages"]
        with Wire(daemon.endpoint, RCVHWM=1, SNDHWM=0, RCVBUF=4096) as deaf:
            for number in range(1, 5):  # the first one fills what there is: replies of 24 bytes a hash
                for _ in range(turn):
                    deaf.socket.send(question)
                asked = before + number * turn
                daemon.wait_status(lambda status, asked=asked: status["daemon"]["messages"] >= asked)
                assert engine.acquire(hashes(width), pin=False).hits == width
                sizes.append(memory_of(daemon))
            figures = daemon.status()["daemon"]
            # Of long requests only some wait for their turn; the others are answered in a few bytes.
            dropped = figures["drops"]["peer_slow"] + figures["errors"].get("unavailable", 0)
            assert dropped > turn
            # Not all of it: what waits to be received is bounded too, by its number.
            assert max(sizes) - sizes[0] < 0.4 * dropped * 24 * width, sizes
            deaf.socket.send(encode(m.Acquire(2, other._token, other.namespace, hashes(width))))
            deaf.socket.send(encode(m.Ping(3, other._token)))
            daemon.wait_status(lambda status: status["daemon"]["messages"] >= asked + 2)
            assert daemon.status()["pool"]["pinned_bytes"] == 0


def test_a_burst_of_who_reads_is_answered_whole(daemon: Any, engine: Engine) -> None:
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


def test_replies_to_who_has_gone_are_dropped_and_taken_back(daemon: Any, engine: Engine) -> None:
    engine.store(hashes(8))
    daemon.process.send_signal(signal.SIGSTOP)
    with Wire(daemon.endpoint, LINGER=1000) as gone:
        # Both wait in the daemon's queue when it wakes, its sender is off by then or not: nothing may be held.
        for number in range(50):
            gone.socket.send(encode(m.Acquire(number, engine._token, engine.namespace, hashes(8))))
        time.sleep(0.2)
    daemon.process.send_signal(signal.SIGCONT)
    status = daemon.status()
    drops = status["daemon"]["drops"].get("peer_gone", 0)
    asked = status["namespaces"][0]["lookups"]
    assert status["sessions"][0]["leases"] == asked - drops


# Start and stop.


def left_behind(daemon: Any) -> list[str]:
    paths = [socket_path(daemon.endpoint), door_path(daemon.endpoint), socket_path(daemon.endpoint)[:-5] + ".lock"]
    regions = [f"{REGION}/{name}" for name in os.listdir(REGION) if name == os.path.basename(daemon.region)]
    return [path for path in paths if os.path.exists(path)] + regions


@pytest.fixture
def known(daemon: Any) -> Any:
    """The daemon, with the path of its region noted."""
    daemon.region = daemon.status()["daemon"]["region"]
    assert os.path.exists(daemon.region)
    return daemon


def test_the_sockets_are_for_owner_and_group(daemon: Any) -> None:
    for path in (socket_path(daemon.endpoint), door_path(daemon.endpoint)):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o660


@pytest.mark.parametrize("removed", [socket_path, door_path], ids=["socket", "door"])
@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced"])
def test_a_daemon_that_nobody_can_find_any_more_says_so_and_ends(known: Any, removed: Any, replaced: bool) -> None:
    path = removed(known.endpoint)
    os.unlink(path)
    if replaced:
        Path(path).write_text("somebody else's")
    assert known.process.wait(20) == 7
    assert known.log.count(f"{path} was removed or replaced: nobody can attach any more") == 1
    assert "Traceback" not in known.log
    assert left_behind(known) == ([path] if replaced else [])


def test_parts_of_a_tick_that_fail_are_counted_and_the_others_go_on(start_daemon: Any, short_folder: Path) -> None:
    (short_folder / "sitecustomize.py").write_text(BROKEN)
    path = os.pathsep.join([str(short_folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    with contextlib.closing(an_ear(short_folder)) as ear:
        daemon = start_daemon(env={"PYTHONPATH": path} | ear.environ(watchdog=0.2))
        daemon.wait_status(lambda status: status["daemon"]["errors"].get("internal", 0) >= 9, "the third tick")
        ear.wait(lambda message: "WATCHDOG" in message)
        os.unlink(socket_path(daemon.endpoint))
        assert daemon.process.wait(20) == 7
    for part in ("tick", "shrink", "tidy"):
        assert f"work failed inside the daemon: this {part} fails" in daemon.log


BROKEN = """
from kvcache_server.cache import Cache
from kvcache_server.unread import Unread

def fail(part):
    def failing(*arguments):
        raise RuntimeError(f"this {part} fails")
    return failing

Cache.tick, Cache.shrinking, Unread.tidy = map(fail, ("tick", "shrink", "tidy"))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_daemon_stops_at_once_and_leaves_nothing(known: Any, number: int) -> None:
    known.process.send_signal(number)
    assert known.process.wait(10) == 0
    assert left_behind(known) == []
    assert known.log.rstrip().endswith("stopped")


def test_sessions_with_nothing_under_way_do_not_delay_the_end(known: Any) -> None:
    with Engine(known.endpoint) as engine:
        engine.store(hashes(8))
        engine.acquire(hashes(8))
        assert known.stop(timeout=4) == 0
    assert left_behind(known) == []


def test_one_daemon_an_endpoint(daemon: Any, start_daemon: Any) -> None:
    second = start_daemon(endpoint=daemon.endpoint, wait=False)
    assert second.process.wait(20) == 3
    assert f"another daemon serves {daemon.endpoint}" in second.log
    os.unlink(socket_path(daemon.endpoint)[:-5] + ".lock")  # somebody tidied up
    third = start_daemon(endpoint=daemon.endpoint, wait=False)
    assert third.process.wait(20) == 3
    with Engine(daemon.endpoint) as engine:
        engine.store(hashes(8))


def test_what_a_killed_daemon_left_is_replaced(known: Any, start_daemon: Any) -> None:
    with Engine(known.endpoint) as engine:
        engine.store(hashes(8))
        region = engine.geometry.region_id
        known.kill()
        assert set(left_behind(known)) > {known.region}
        again = start_daemon(endpoint=known.endpoint)
        with pytest.raises(BadToken):
            engine.ask(m.Ping(0, b""))
    with Engine(again.endpoint) as engine:
        assert engine.geometry.region_id != region
        assert engine.acquire(hashes(8)).hits == 0
    again.region = known.region
    assert again.status()["daemon"]["region"] == known.region
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
    assert not os.path.exists(region_path(REGION, str(short_folder / "kv.sock")))
    assert "Traceback" not in daemon.log


def test_two_signals_while_the_region_is_prepared_leave_nothing(start_daemon: Any, short_folder: Path) -> None:
    daemon = start_daemon(size="1GiB", wait=False)
    region = region_path(REGION, str(short_folder / "kv.sock"))
    while not os.path.exists(region):
        assert daemon.process.poll() is None, daemon.log
    for signum in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C, and the supervisor's
        daemon.process.send_signal(signum)
    assert daemon.process.wait(20) == 0, daemon.log
    assert not os.path.exists(region)
    assert not [path for path in short_folder.iterdir() if path.suffix != ".log"]
    assert "Traceback" not in daemon.log


def test_the_log_names_who_comes_and_goes(daemon: Any) -> None:
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


def test_the_log_says_once_that_blocks_leave_much_of_the_region_empty(start_daemon: Any) -> None:
    daemon = start_daemon(size="64MiB", extent_size="8MiB")
    odd, even = (NamespaceSpec(name, (GroupSpec(16, size),)) for name, size in (("odd", 3 << 20), ("even", 64 << 10)))
    with Engine(daemon.endpoint, "one", odd), Engine(daemon.endpoint, "two", odd), Engine(daemon.endpoint, "x", even):
        found = {space["model"]: space for space in daemon.status()["namespaces"]}
    said = [line for line in daemon.log.splitlines() if "of the region empty" in line]
    assert len(said) == 1 and "model odd: blocks of 3.0 MiB leave 25.0 %" in said[0]
    assert found["odd"]["better_extent_bytes"] > 8 << 20 and "; extent_size " in said[0]
    assert found["even"]["better_extent_bytes"] == 0
