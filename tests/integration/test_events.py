"""KV events of a real daemon, read by sockets as routers read vLLM's, and decoded by vLLM's own classes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import socket as socketlib
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from follower import END, PATIENCE, Known, MakeSocket, Subscriber, maps, sockets
from host import Host

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_proto.types import REF_BYTES, Finding
from kvcache_server.admin_client import AdminClient
from kvcache_server.config import Config
from kvcache_server.events.publisher import REPLAYS, Publisher
from kvcache_server.events.sequence_file import ROOM, SequenceFile
from kvcache_server.events.topics import IN_ALL
from kvcache_server.transport.zmtp import GREETING, header, ready

SMALL = NamespaceSpec(model="small", groups=[GroupSpec(16, 64 << 10)])
LARGE = NamespaceSpec(model="large", groups=[GroupSpec(32, 192 << 10)])
TINY = NamespaceSpec(model="tiny", groups=[GroupSpec(16, 1024)])


def run_of(name: str, count: int) -> list[bytes]:
    return [f"{name}{number}".encode().rjust(32, b".") for number in range(count)]


def topic_of(spec: NamespaceSpec) -> bytes:
    return b"kvcache@" + spec.id.encode()


def as_int(name: bytes) -> int:
    return int.from_bytes(name[-8:], "big")


@pytest.fixture
def socket() -> Iterator[MakeSocket]:
    """`socket(kind)` makes one, which is closed after the test."""
    with sockets() as make:
        yield make


@pytest.fixture
def start(start_daemon: Any) -> Any:
    """A daemon that publishes, and what it says of that."""

    def begin(**flags: Any) -> tuple[Any, dict[str, Any]]:
        folder = flags.pop("folder", "")
        where = {"events": "tcp://127.0.0.1:*", "events_replay": "tcp://127.0.0.1:*"}
        if folder:
            where = {"events": f"ipc://{folder}/events", "events_replay": f"ipc://{folder}/again"}
        daemon = start_daemon(**where | flags)
        return daemon, daemon.status()["daemon"]["events"]

    return begin


def wait_subscribed(daemon: Any) -> None:
    daemon.wait_status(lambda s: s["daemon"]["events"]["subscriptions"], "the subscription")


def found(namespace: Any, chains: list[list[bytes]]) -> Known:
    """What lookups find of the chains."""
    known: Known = set()
    for chain in chains:
        with namespace.acquire(chain, pin=False) as lease:
            known |= {(0, as_int(name)) for name in chain[: lease.hits]}
    return known


# What a daemon's interpreter begins with: its host's clock has gone a day back.
CLOCK = """
import time
now, now_ns = time.time, time.time_ns
time.time = lambda: now() - 86_400
time.time_ns = lambda: now_ns() - 86_400 * 10**9
"""


@pytest.mark.parametrize("keep", ["true", "false"])
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_numbers_do_not_go_down_with_the_clock(
    start: Any, socket: MakeSocket, tmp_path: Path, keep: str, end: str
) -> None:
    """A subscriber takes what has a higher number than the last one: it would hear nothing for a day."""
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    early = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    last = 0
    for env in ({}, early, early, {}):
        daemon, report = start(keep=keep, env=env)
        subscriber = Subscriber(socket, report, topic_of(SMALL))
        wait_subscribed(daemon)
        with Session.connect(daemon.endpoint, engine="one", deadline=5.0) as session:
            session.attach(SMALL, (0,)).reserve(run_of("a", 3)).commit()
            topic = topic_of(SMALL)
            subscriber.read_until(lambda: len(subscriber.known.get(topic, ())) == 3, "the blocks")  # noqa: B023
        assert last < subscriber.last[topic] < (1 << 63)
        last = subscriber.last[topic]
        getattr(daemon, end)()


def test_invalid_numbers_in_the_file_are_ignored(start: Any, short_folder: Path, socket: MakeSocket) -> None:
    for text in ("x", "-5", str(1 << 64), str((1 << 63) + 1), "9" * 5000):
        (short_folder / "kv.numbers").write_text(text)
        daemon, report = start()
        assert "kv.numbers" in daemon.log
        assert report["batches"] == 0
        daemon.stop()
    (short_folder / "kv.numbers").unlink()
    (short_folder / "kv.numbers").symlink_to("elsewhere")
    daemon, _ = start()
    assert "kv.numbers" in daemon.log and not (short_folder / "elsewhere").exists()


def test_no_number_is_used_before_it_is_in_the_file(short_folder: Path) -> None:
    """The next daemon begins where the room ends that this one has noted, however it ended."""
    path = str(short_folder / "kv.numbers")
    numbers = SequenceFile(path, 100)
    assert numbers.first == 100
    for number in (100, 100 + ROOM - 1, 100 + ROOM, 100 + 5 * ROOM):
        numbers.give(number)
        assert SequenceFile(path, 7).first > number
        numbers = SequenceFile(path, 7)
    assert SequenceFile(path, 1 << 40).first == 1 << 40, "the clock, where it is ahead"


def test_vllm_s_own_classes_read_them(start: Any, socket: MakeSocket) -> None:
    events = pytest.importorskip("vllm.distributed.kv_events", reason="needs vLLM's classes", exc_type=ImportError)
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

    daemon, report = start()
    decoder = msgspec.msgpack.Decoder(events.KVEventBatch)
    heard: list[Any] = []

    def decode(payload: bytes) -> list[dict[str, Any]]:
        batch = decoder.decode(payload)
        assert batch.ts > 1e9 and batch.data_parallel_rank is None
        heard.extend(batch.events)
        return maps(payload)

    subscriber = Subscriber(socket, report, topic_of(SMALL), decode)
    wait_subscribed(daemon)
    hashes = run_of("a", 5)
    names = [maybe_convert_block_hash(BlockHash(name)) for name in hashes]
    with Session.connect(daemon.endpoint, engine="one", deadline=5.0) as session:
        namespace = session.attach(SMALL, (0,))
        namespace.reserve(hashes[:3]).commit()
        subscriber.read_until(lambda: len(heard) == 2, "the first run")
        namespace.reserve(hashes[3:], parent=hashes[2]).commit()
        subscriber.read_until(lambda: len(heard) == 3, "the second one")
        with AdminClient(daemon.endpoint) as admin:
            assert admin.clear() == 5
        subscriber.read_until(lambda: len(heard) == 4, "that it is gone")
    shape = {"token_ids": [], "block_size": 16, "lora_id": None, "medium": events.MEDIUM_CPU, "lora_name": None}
    assert heard == [
        events.AllBlocksCleared(),
        events.BlockStored(block_hashes=names[:3], parent_block_hash=None, group_idx=0, **shape),
        events.BlockStored(block_hashes=names[3:], parent_block_hash=names[2], group_idx=0, **shape),
        events.AllBlocksCleared(),
    ]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_subscriber_knows_what_lookups_find_across_a_restart(
    start: Any, socket: MakeSocket, short_folder: Path, seed: int
) -> None:
    """Saves, evictions, invalidations, clears and a kill -9 of the daemon; one subscriber hears all, one comes late."""
    draw = random.Random(seed)
    flags = {"folder": short_folder, "keep": "true", "size": "8MiB", "events_buffer": 20}
    daemon, report = start(**flags)
    early = Subscriber(socket, report)
    wait_subscribed(daemon)
    chains = [run_of(f"{letter}.", 6) for letter in "abcdefghijklmnopqrstuvwxyz"]
    with Session.connect(daemon.endpoint, engine="one", deadline=5.0) as session:
        spaces = {topic_of(spec): session.attach(spec, (0,)) for spec in (SMALL, LARGE)}
        for life in range(2):
            for _ in range(120):
                namespace, chain = draw.choice(list(spaces.values())), draw.choice(chains)
                what = draw.random()
                if what < 0.9:
                    namespace.reserve(chain[: draw.randint(1, 6)]).commit()
                elif what < 0.98:
                    with namespace.acquire(chain) as lease:
                        if lease.hits:
                            bad = lease.packed[:REF_BYTES] if draw.random() < 0.5 else lease.packed[-REF_BYTES:]
                            told: list[Any] = []
                            namespace.invalidate(bad, 0, Finding.CORRUPT, session.region.id, told.append)
                            daemon.wait_status(lambda s, told=told: bool(told), "the answer")
                            assert told[0], "who had stored it"
                else:
                    with AdminClient(daemon.endpoint) as admin:
                        admin.clear(draw.choice(["", namespace.spec.id]))
            expected = {topic: found(space, chains) for topic, space in spaces.items()}
            assert all(expected.values())
            early.read_until(lambda expected=expected: early.known == expected, "all that is there")
            late = Subscriber(socket, report)
            for topic in expected:
                late.catch_up(topic)
            assert late.known == expected
            if life:
                break
            daemon.kill()
            daemon, report = start(endpoint=daemon.endpoint, **flags)
            daemon.wait_status(lambda s: session.up and not s["grace"], "the session")
            assert {topic: found(space, chains) for topic, space in spaces.items()} == expected
    assert daemon.status()["counters"]["blocks_evicted"]


def test_a_subscriber_that_does_not_read_loses_batches_and_replays_them(start: Any, socket: MakeSocket) -> None:
    daemon, report = start(events_buffer=64, events_hashes="bytes", events_replay="tcp://127.0.0.1:*")
    lazy, eager = Subscriber(socket, report, RCVHWM=1, RCVBUF=4096), Subscriber(socket, report, RCVHWM=0)
    daemon.wait_status(lambda s: s["daemon"]["events"]["connections"]["open"] == 4, "both of them")
    wait_subscribed(daemon)
    with Session.connect(daemon.endpoint, engine="one", deadline=5.0) as session:
        namespace = session.attach(TINY, (0,))
        number = 0
        while not daemon.status()["daemon"]["events"]["batches_lost"]:
            assert number < 4000, "nothing is ever lost"
            for _ in range(10):
                hashes = run_of(f"{number}.", 250)
                namespace.reserve(hashes).commit()
                number += 1
        with namespace.acquire(hashes, pin=False) as lease:
            assert lease.hits == 250, "the daemon was not held up"
        blocks = daemon.status()["pool"]["blocks"]
        lazy.read_until(lambda: bool(lazy.gaps), "the gap")
        lazy.catch_up(topic_of(TINY))
    (known,) = lazy.known.values()
    assert len(known) == blocks
    eager.read_until(lambda: eager.known == lazy.known, "the same")
    assert not eager.gaps, "others are not affected"
    assert {(0, name) for name in hashes} <= known


def test_a_subscription_to_one_of_two_namespaces_has_no_gaps(start: Any, socket: MakeSocket) -> None:
    daemon, report = start(events_topic="kv@{namespace}@{model}")
    topic = f"kv@{SMALL.id}@small".encode()
    subscriber = Subscriber(socket, report, topic)
    wait_subscribed(daemon)
    with Session.connect(daemon.endpoint, engine="one", deadline=5.0) as session:
        spaces = [session.attach(spec, (0,)) for spec in (SMALL, LARGE)]
        for letter in "abcd":
            for namespace in spaces:
                namespace.reserve(run_of(letter, 2)).commit()
    expected = {(0, as_int(name)) for letter in "abcd" for name in run_of(letter, 2)}
    subscriber.read_until(lambda: subscriber.known == {topic: expected}, "its own blocks")
    assert not subscriber.gaps


@pytest.mark.parametrize("dialect", ["0.23", "0.24"])
def test_a_replay_for_older_subscribers(start: Any, socket: MakeSocket, dialect: str) -> None:
    daemon, report = start(events_dialect=dialect)
    with Session.connect(daemon.endpoint, engine="one", deadline=5.0) as session:
        session.attach(SMALL, (0,)).reserve(run_of("a", 2)).commit()
    dealer = socket(zmq.DEALER)
    dealer.connect(report["replay"])
    dealer.send_multipart([b"", (0).to_bytes(8, "big")])
    events = []
    while True:
        assert dealer.poll(PATIENCE * 1000)
        empty, number, payload = dealer.recv_multipart()
        assert not empty
        if not payload:
            break
        events += msgspec.msgpack.decode(payload)[1]
    assert number == END
    kinds = [event[0] if dialect == "0.23" else event["type"] for event in events]
    # What there is, and then all that is kept.
    assert kinds == ["AllBlocksCleared", "BlockStored", "AllBlocksCleared", "BlockStored"]


def test_replays_beyond_the_limit_wait_for_their_turn(start: Any, socket: MakeSocket) -> None:
    daemon, report = start()
    with Session.connect(daemon.endpoint, engine="one", deadline=5.0) as session:
        session.attach(SMALL, (0,)).reserve(run_of("a", 2)).commit()
        dealers = [socket(zmq.DEALER) for _ in range(3 * REPLAYS)]
        daemon.process.send_signal(signal.SIGSTOP)
        for dealer in dealers:
            dealer.connect(report["replay"])
            dealer.send_multipart([b"", bytes(8)])
        daemon.process.send_signal(signal.SIGCONT)
        for dealer in dealers:
            while True:
                assert dealer.poll(PATIENCE * 1000)
                if dealer.recv_multipart()[2] == END:
                    break
    assert daemon.status()["daemon"]["events"]["replays"] == len(dealers)
    assert daemon.status()["daemon"]["events"]["replays_cut"] == 0


def test_events_over_ipv6(start: Any, socket: MakeSocket) -> None:
    try:
        socketlib.create_server(("::1", 0), family=socketlib.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this host has no ::1: {error}")
    daemon, report = start(events="tcp://[::1]:*")
    assert report["endpoint"].startswith("tcp://[::1]:")
    subscriber = Subscriber(socket, report, IPV6=1)
    wait_subscribed(daemon)
    with Session.connect(daemon.endpoint, engine="one", deadline=5.0) as session:
        session.attach(SMALL, (0,)).reserve(run_of("a", 2)).commit()
        subscriber.read_until(lambda: len(subscriber.known.get(topic_of(SMALL), ())) == 2, "the blocks")


def test_invalid_requests_are_counted_and_others_served(start: Any, socket: MakeSocket) -> None:
    daemon, report = start()
    nonsense = [[b""], [b"", b"short"], [b"x", bytes(8)], [b"", bytes(8), b"", b""], [b"", bytes(9)]]
    dealer = socket(zmq.DEALER)
    dealer.connect(report["replay"])
    for frames in nonsense:
        dealer.send_multipart(frames)
    sub = socket(zmq.XSUB)
    sub.connect(report["endpoint"])
    sub.send(b"hello")
    daemon.wait_status(lambda s: s["daemon"]["events"]["nonsense"] == len(nonsense) + 1, "the count")
    Subscriber(socket, report).catch_up(b"")
    assert daemon.status()["daemon"]["events"]["replays"] == 1


def test_a_client_that_asks_and_leaves_is_forgotten(start: Any, socket: MakeSocket) -> None:
    daemon, report = start()
    with Session.connect(daemon.endpoint, engine="one", deadline=5.0) as session:
        namespace = session.attach(TINY, (0,))
        for number in range(120):
            namespace.reserve(run_of(f"{number}.", 250)).commit()
        asked = socket(zmq.DEALER)
        asked.setsockopt(zmq.RCVHWM, 1)
        asked.setsockopt(zmq.LINGER, 1000)
        asked.connect(report["replay"])
        asked.send_multipart([b"", bytes(8)])
        daemon.wait_status(lambda s: s["daemon"]["events"]["replays"] == 1, "the request")
        asked.close()
        late = Subscriber(socket, report)
        late.catch_up(topic_of(TINY))
        assert len(late.known[topic_of(TINY)]) == daemon.status()["pool"]["blocks"]


def connect(endpoint: str) -> socketlib.socket:
    """A connection that has said nothing yet."""
    scheme, _, where = endpoint.partition("://")
    if scheme == "ipc":
        peer = socketlib.socket(socketlib.AF_UNIX)
        peer.settimeout(PATIENCE)
        peer.connect(where)
        return peer
    host, _, port = where.rpartition(":")
    return socketlib.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE)


def raw_peer(endpoint: str, kind: bytes) -> socketlib.socket:
    """A connection that has greeted as a socket of that type, and may go on with frames as it likes."""
    peer = connect(endpoint)
    peer.sendall(GREETING + ready(kind))
    return peer


@pytest.mark.parametrize("which", ["endpoint", "replay"])
@pytest.mark.parametrize("over", ["tcp", "ipc"])
def test_idle_connections_are_limited_and_harmless(
    start: Any, socket: MakeSocket, short_folder: Path, over: str, which: str
) -> None:
    daemon, report = start(folder=short_folder if over == "ipc" else "")
    early = Subscriber(socket, report)
    wait_subscribed(daemon)
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (256, 256))
    with contextlib.ExitStack() as leave:
        for _ in range(600):
            leave.enter_context(connect(report[which]))
        with Session.connect(daemon.endpoint, engine="one", deadline=5.0) as session:
            namespace = session.attach(SMALL, (0,))
            hashes = run_of("a", 4)
            namespace.reserve(hashes).commit()
            there = {topic_of(SMALL): found(namespace, [hashes])}
            early.read_until(lambda: early.known == there, "what is there")
            late = Subscriber(socket, report)
            late.catch_up(topic_of(SMALL))
            assert late.known == there
        daemon.wait_status(lambda s: s["daemon"]["events"]["connections"]["cut"].get("crowded_out", 0) > 500)
        assert daemon.status()["daemon"]["events"]["connections"]["open"] <= 64
        assert len(os.listdir(f"/proc/{daemon.process.pid}/fd")) < 160


def test_the_sockets_are_for_owner_and_group_and_are_removed_with_the_daemon(start: Any, short_folder: Path) -> None:
    daemon, report = start(folder=short_folder)
    paths = [Path(report[name].removeprefix("ipc://")) for name in ("endpoint", "replay")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o660, 0o660]
    assert daemon.stop() == 0
    assert not any(path.exists() for path in paths)


def test_topics_are_counted_once_and_removed_with_their_subscriber(start: Any, socket: MakeSocket) -> None:
    daemon, report = start()
    sub = socket(zmq.XSUB)
    sub.connect(report["endpoint"])
    for topic in (b"x", b"x", b"x", b"y"):
        sub.send(b"\x01" + topic)
    sub.send(b"the last one")
    heard = daemon.wait_status(lambda s: s["daemon"]["events"]["nonsense"], "all of it")
    assert heard["daemon"]["events"]["subscriptions"] == 2
    sub.close()
    daemon.wait_status(lambda s: s["daemon"]["events"]["subscriptions"] == 0, "the end of both")


def test_a_topic_longer_than_any_ends_the_connection(start: Any, socket: MakeSocket) -> None:
    daemon, report = start()
    sub = socket(zmq.XSUB)
    monitor = sub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    sub.connect(report["endpoint"])
    sub.send(b"\x01" + bytes(4000))
    try:
        assert monitor.poll(PATIENCE * 1000), "it is taken"
    finally:
        sub.disable_monitor()
        monitor.close()
    assert daemon.status()["daemon"]["events"]["subscriptions"] == 0


@pytest.mark.parametrize("over", ["tcp", "ipc"])
def test_too_many_topics_cost_no_memory_and_only_their_sender_is_disconnected(
    start: Any, socket: MakeSocket, short_folder: Path, over: str
) -> None:
    daemon, report = start(folder=short_folder if over == "ipc" else "")
    early = Subscriber(socket, report)
    wait_subscribed(daemon)
    monitor = early.sub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        with Session.connect(daemon.endpoint, engine="one", deadline=5.0) as session:
            namespace = session.attach(SMALL, (0,))
            hashes = run_of("a", 4)
            namespace.reserve(hashes[:2]).commit()
            early.read_until(lambda: early.known == {topic_of(SMALL): found(namespace, [hashes])}, "what is there")
            before = resident(daemon.process.pid)
            flood, draw = socket(zmq.XSUB), random.Random(7)
            flood.setsockopt(zmq.SNDHWM, 0)
            flood.setsockopt(zmq.LINGER, 0)
            flood.connect(report["endpoint"])
            for _ in range(20_000):
                flood.send(b"\x01" + draw.randbytes(200))
            daemon.wait_status(lambda s: s["daemon"]["events"]["subscriptions_cut"], "that it is too much")
            flood.close()
            left = daemon.wait_status(lambda s: s["daemon"]["events"]["subscriptions"] == 1, "who was there, alone")
            assert left["daemon"]["events"]["connections"]["cut"]["too_many_topics"] >= 1
            namespace.reserve(hashes[2:], parent=hashes[1]).commit()
            early.read_until(lambda: early.known == {topic_of(SMALL): found(namespace, [hashes])}, "what has come")
        assert not monitor.poll(0)
        assert not early.gaps
    finally:
        early.sub.disable_monitor()
        monitor.close()
    grown = resident(daemon.process.pid) - before
    assert grown < 20 << 20, grown


def test_the_total_of_topics_is_bounded_and_the_subscriber_with_most_is_disconnected(
    start: Any, socket: MakeSocket
) -> None:
    daemon, report = start()
    Subscriber(socket, report)
    wait_subscribed(daemon)
    with contextlib.ExitStack() as leave:
        for number in range(IN_ALL + 1):
            peer = leave.enter_context(raw_peer(report["endpoint"], b"SUB"))
            topics = 1000 if number else 1020
            said = [b"\x01%d.%d" % (number, each) for each in range(topics)]
            peer.sendall(b"".join(header(len(each)) + each for each in said))
            if not number:
                daemon.wait_status(lambda s: s["daemon"]["events"]["subscriptions"] == 1 + 1020, "the first one's")
        left = daemon.wait_status(
            lambda s: s["daemon"]["events"]["subscriptions"] == 1 + IN_ALL * 1000, "what is left"
        )["daemon"]["events"]
        assert left["connections"] == {"open": 1 + IN_ALL + 1, "unbound": 0, "cut": {"too_many_topics": 1}}
        assert left["subscriptions_cut"] == 1020


def test_the_daemon_does_not_load_libzmq(start: Any) -> None:
    """It may end the process that uses it, and has threads of its own."""
    daemon, _ = start(http="127.0.0.1:0")
    assert "libzmq" not in Path(f"/proc/{daemon.process.pid}/maps").read_text()


def resident(pid: int) -> int:
    """Bytes that are the process's own, without the region."""
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(rows["RssAnon"].split()[0]) << 10


@pytest.mark.parametrize(("which", "kind"), [("endpoint", b"XSUB"), ("replay", b"DEALER")])
def test_a_flood_of_invalid_requests_does_not_occupy_the_loop(which: str, kind: bytes) -> None:
    """Between two pieces of it the loop has its turn, and others are heard."""
    flood = 100_000
    loop = asyncio.new_event_loop()
    where = {"events": "tcp://127.0.0.1:*", "events_replay": "tcp://127.0.0.1:*"}
    events = Publisher(loop, Config(endpoint="ipc:///x/kv.sock", **where), Host().cache)

    async def until(said: str, count: int) -> None:
        while getattr(events.report(), said) < count:
            await asyncio.sleep(0)

    try:
        endpoint = getattr(events.report(), which)
        peer, other = raw_peer(endpoint, kind), raw_peer(events.report().endpoint, b"SUB")
        with peer, other:
            thread = threading.Thread(target=peer.sendall, args=((header(5) + b"hello") * flood,))
            thread.start()
            loop.run_until_complete(asyncio.wait_for(until("nonsense", 1), PATIENCE))
            other.sendall(header(2) + b"\x01x")
            loop.run_until_complete(asyncio.wait_for(until("subscriptions", 1), PATIENCE))
            assert events.report().nonsense < flood
            loop.run_until_complete(asyncio.wait_for(until("nonsense", flood), PATIENCE))
            thread.join()
    finally:
        events.close()
        loop.close()


@pytest.mark.parametrize(("over", "code", "told"), [("tcp", 6, "cannot be bound"), ("ipc", 3, "another daemon serves")])
def test_an_endpoint_that_cannot_be_bound(
    start: Any, start_daemon: Any, short_folder: Path, over: str, code: int, told: str
) -> None:
    first, report = start(folder=short_folder if over == "ipc" else "")
    daemon = start_daemon(
        wait=False, endpoint=f"ipc://{short_folder}/other.sock", events=report["endpoint"], events_replay=None
    )
    assert daemon.process.wait(PATIENCE) == code
    assert told in daemon.log and report["endpoint"] in daemon.log
    connect(report["endpoint"]).close()
    assert first.status()["daemon"]["events"]["endpoint"] == report["endpoint"]
