"""A daemon is stopped, killed and replaced while engines run: what they find afterwards."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from conftest import a_stuck_engine

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_client.session import forks
from kvcache_client.session.handshake import shake_hands
from kvcache_proto.endpoint import socket_path
from kvcache_proto.errors import RegionError
from kvcache_proto.messages import Welcome
from kvcache_proto.types import Outcome, PoolGeometry, Verdict
from kvcache_server.storage.region_file import check_room

SPEC = NamespaceSpec(model="m", groups=[GroupSpec(16, 64 << 10)])
GEOMETRY = PoolGeometry(bytes(16), 0, 0, 0, 0)
PATIENCE = 20.0


def run_of(name: str, count: int) -> list[bytes]:
    return [f"{name}{number}".encode().ljust(32, b".") for number in range(count)]


def content(block_hash: bytes) -> bytes:
    return block_hash * (SPEC.groups[0].block_bytes // len(block_hash))


def write(session: Session, reservation: Any, hashes: list[bytes]) -> None:
    for at, slot in zip(reservation.granted, reservation.slots, strict=True):
        session.view(slot)[:] = content(hashes[at])


def store(session: Session, namespace: Any, hashes: list[bytes]) -> None:
    reservation = namespace.reserve(hashes)
    write(session, reservation, hashes)
    assert set(reservation.commit()) == {Verdict.VISIBLE}


def holds(session: Session, namespace: Any, hashes: list[bytes]) -> int:
    """How many of the hashes are found, each with its own bytes."""
    with namespace.acquire(hashes) as lease:
        for block_hash, slot in zip(hashes, lease.slots, strict=False):
            assert session.view(slot) == content(block_hash)
        return int(lease.hits)


def wait(found: Callable[[], Any], what: str) -> None:
    until = time.monotonic() + PATIENCE
    while not found():
        assert time.monotonic() < until, f"{what} did not come"
        time.sleep(0.01)


@pytest.fixture
def warm(start_daemon: Any) -> Any:
    return start_daemon(keep="true")


@pytest.fixture
def engine(warm: Any) -> Iterator[Session]:
    with Session.connect(warm.endpoint, engine="one", deadline=5.0) as session:
        yield session


def again(daemon: Any, start_daemon: Any, session: Session, **flags: Any) -> Any:
    """Start the next daemon, and wait until the session is with it."""
    following = start_daemon(endpoint=daemon.endpoint, keep="true", **flags)
    wait(lambda: session.up, "the session")
    return following


END = pytest.mark.parametrize("end", ["stop", "kill"])


@END
def test_cached_blocks_are_found_by_the_same_engine_and_by_others(
    warm: Any, engine: Session, start_daemon: Any, end: str
) -> None:
    namespace, hashes = engine.attach(SPEC, (0,)), run_of("a", 20)
    store(engine, namespace, hashes)
    mapped = engine.region
    getattr(warm, end)()
    wait(lambda: not engine.up, "the end")
    assert namespace.acquire(hashes).failed
    daemon = again(warm, start_daemon, engine)
    assert engine.region is mapped, "nothing is mapped, and so nothing page-locked, anew"
    assert engine.counters["sessions_resumed"] == 1
    assert holds(engine, namespace, hashes) == 20
    with Session.connect(daemon.endpoint, engine="two", deadline=5.0) as other:
        assert holds(other, other.attach(SPEC, (0,)), hashes) == 20
    assert daemon.status()["counters"]["blocks_recovered"] == 20


@END
def test_a_save_that_outlives_the_daemon_is_committed_to_the_next(
    warm: Any, engine: Session, start_daemon: Any, end: str
) -> None:
    namespace = engine.attach(SPEC, (0,))
    early, late = (namespace.reserve(run_of(name, 3)) for name in "el")
    write(engine, early, run_of("e", 3))
    getattr(warm, end)()
    wait(lambda: not engine.up, "the end")
    verdicts: list[Verdict] = []
    region = engine.region
    assert region is not None
    namespace.settle(early.id, Outcome.COMMITTED, region_id=region.id, then=verdicts.extend)
    daemon = again(warm, start_daemon, engine)
    wait(lambda: verdicts, "the verdict")
    assert verdicts == [Verdict.VISIBLE] * 3
    assert holds(engine, namespace, run_of("e", 3)) == 3
    write(engine, late, run_of("l", 3))
    assert late.commit() == [Verdict.VISIBLE] * 3
    assert holds(engine, namespace, run_of("l", 3)) == 3
    assert daemon.status()["pool"]["blocks_writing"] == 0


def test_leases_hold_across_the_restart(warm: Any, engine: Session, start_daemon: Any) -> None:
    namespace, hashes = engine.attach(SPEC, (0,)), run_of("a", 30)
    store(engine, namespace, hashes)
    lease, given_back = namespace.acquire(hashes[:10]), namespace.acquire(hashes)
    warm.kill()
    wait(lambda: not engine.up, "the end")
    given_back.release()
    daemon = again(warm, start_daemon, engine)
    assert engine.counters["leases_reclaimed"] == 1
    wait(lambda: not daemon.status()["grace"], "the end of the grace")
    assert engine.clear() == 30
    assert [bytes(engine.view(slot)) for slot in lease.slots] == list(map(content, hashes[:10]))
    lease.release()
    wait(lambda: daemon.status()["pool"]["pinned_bytes"] == 0, "the release")
    wait(lambda: daemon.status()["pool"]["used_bytes"] == 0, "the end of what was read")


def test_an_engine_that_died_with_the_daemon_holds_nothing_after_the_quarantine(
    warm: Any, engine: Session, start_daemon: Any
) -> None:
    code = (
        "import sys, time; from kvcache_client import *\n"
        "session = Session.connect(sys.argv[1], engine='dying', deadline=20.0)\n"
        "namespace = session.attach(NamespaceSpec(model='m', groups=[GroupSpec(16, 64 << 10)]), (0,))\n"
        "assert len(namespace.reserve([bytes([n]) * 32 for n in range(9)]).granted) == 9\n"
        "print('reserved', flush=True); time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", code, warm.endpoint], stdout=subprocess.PIPE) as dying:
        assert dying.stdout is not None and dying.stdout.readline() == b"reserved\n"
        warm.kill()
        dying.kill()
    daemon = start_daemon(endpoint=warm.endpoint, keep="true", quarantine=1.0)
    assert daemon.status()["counters"]["shards_dead"] == 9
    daemon.wait_status(lambda status: status["pool"]["blocks_quarantined"] == 0, "the end of the quarantine")
    assert daemon.status()["pool"]["used_bytes"] == 0


def test_a_stopped_engine_keeps_its_slots_until_it_is_fenced_off(warm: Any, start_daemon: Any) -> None:
    with a_stuck_engine(warm.endpoint) as stuck:
        stuck.send_signal(signal.SIGSTOP)
        warm.kill()
        daemon = start_daemon(endpoint=warm.endpoint, keep="true", quarantine=0.5, grace=0.5)
        status = daemon.wait_status(lambda status: not status["grace"], "the end of the grace")
        (away,) = status["away"]
        assert (away["engine"], away["reservations"]) == ("stuck", 1)
        assert status["pool"]["blocks_writing"] == 9
        command = [sys.executable, "-m", "kvcache_server", "session", "fence-off", "--endpoint", daemon.endpoint]
        done = subprocess.run([*command, str(away["id"])], capture_output=True, text=True, check=True)
        assert "1 reservations ended" in done.stdout
        daemon.wait_status(lambda status: status["pool"]["blocks_quarantined"] == 0, "the end of the quarantine")
        assert daemon.status()["away"] == []
        assert subprocess.run([*command, "4711"], capture_output=True).returncode == 1


def test_over_http_a_daemon_in_grace_is_not_ready_and_a_stuck_engine_is_fenced_off(
    warm: Any, start_daemon: Any
) -> None:
    def ask(daemon: Any, method: str, path: str) -> tuple[int, Any]:
        token = (daemon.folder / "kv.token").read_text().strip()
        connection = http.client.HTTPConnection(
            urlsplit(daemon.status()["daemon"]["http"]["address"]).netloc, timeout=20
        )
        with contextlib.closing(connection):
            connection.request(method, path, b'{"namespace": ""}', {"Authorization": f"Bearer {token}"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    with a_stuck_engine(warm.endpoint) as stuck:
        stuck.send_signal(signal.SIGSTOP)
        warm.kill()
        flags = {"endpoint": warm.endpoint, "keep": "true", "quarantine": 0.5, "grace": 3600, "http": "127.0.0.1:0"}
        daemon = start_daemon(**flags)
        status, told = ask(daemon, "GET", "/readyz")
        assert (status, told["code"]) == (503, "unavailable")
        assert ask(daemon, "GET", "/healthz")[0] == 200
        assert ask(daemon, "POST", "/api/v1/clear")[0] == 503
        (away,) = ask(daemon, "GET", "/api/v1/sessions")[1]["away"]
        assert (away["engine"], away["reservations"]) == ("stuck", 1)
        path = f"/api/v1/sessions/{away['id']}/fence-off"
        assert ask(daemon, "POST", path) == (200, {"session": away["id"], "reservations": 1})
        assert ask(daemon, "POST", path)[0] == 404
        wait(lambda: ask(daemon, "GET", "/readyz")[0] == 200, "the end of the grace")
        assert ask(daemon, "GET", "/api/v1/sessions")[1]["away"] == []


def test_a_welcome_that_was_never_read_costs_nothing(warm: Any, start_daemon: Any) -> None:
    """The daemon is killed after it has noted the resumption, and before its client hears of it: twice."""
    code = (
        "import sys, time; from kvcache_client import *\n"
        "session = Session.connect(sys.argv[1], engine='slow', deadline=5.0)\n"
        "namespace = session.attach(NamespaceSpec(model='m', groups=[GroupSpec(16, 64 << 10)]), (0,))\n"
        "reservation = namespace.reserve([bytes([n]) * 32 for n in range(3)])\n"
        "welcome = session.daemon.connection.handshake.welcome\n"
        "print(welcome.session, welcome.token.hex(), flush=True); sys.stdin.readline()\n"
        "while 'sessions_resumed' not in session.counters: time.sleep(0.01)\n"
        "print(*[verdict.name for verdict in reservation.commit()], flush=True)"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, warm.endpoint], **pipes) as slow:
        number, token = slow.stdout.readline().split()
        slow.send_signal(signal.SIGSTOP)
        last = Welcome(2, int(number), bytes.fromhex(token), GEOMETRY)
        daemon = warm
        for _ in range(2):
            daemon.kill()
            daemon = start_daemon(endpoint=warm.endpoint, keep="true")
            door = shake_hands(warm.endpoint, "slow", "", PATIENCE, None, last)
            assert (door.welcome.resumed, door.welcome.session) == (True, int(number))
            daemon.kill()
            for descriptor in (door.descriptor, door.lock, door.region):
                forks.close(descriptor)
        start_daemon(endpoint=warm.endpoint, keep="true")
        slow.send_signal(signal.SIGCONT)
        assert slow.communicate("go\n", timeout=PATIENCE)[0].split() == ["VISIBLE"] * 3


def test_fresh_discards_and_old_slots_are_void(warm: Any, engine: Session, start_daemon: Any) -> None:
    namespace, hashes = engine.attach(SPEC, (0,)), run_of("a", 5)
    store(engine, namespace, hashes)
    held, late = namespace.acquire(hashes), namespace.reserve(run_of("l", 2))
    warm.kill()
    wait(lambda: not engine.up, "the end")
    daemon = again(warm, start_daemon, engine, fresh=True)
    with pytest.raises(RegionError, match="another region"):
        engine.view(held.slots[0])
    held.release()
    assert late.commit() == []
    assert holds(engine, namespace, hashes) == 0
    store(engine, namespace, hashes)
    assert holds(engine, namespace, hashes) == 5
    assert daemon.status()["counters"].get("blocks_recovered", 0) == 0


def test_another_size_starts_empty_and_is_logged(warm: Any, engine: Session, start_daemon: Any) -> None:
    store(engine, engine.attach(SPEC, (0,)), run_of("a", 5))
    warm.stop()
    daemon = again(warm, start_daemon, engine, size="32MiB")
    assert "made for another size" in daemon.log
    assert daemon.status()["pool"]["blocks"] == 0


def state_of(daemon: Any) -> Path:
    return Path(socket_path(daemon.endpoint)[:-5] + ".state")


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        ("header", "torn region"),
        ("magic", "the magic is missing"),
        ("rows", "rows of format 77"),
        ("state", "torn state file"),
        ("other state", "belongs to another region"),
        ("cut", "a file of"),
    ],
)
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_a_region_that_cannot_be_trusted_is_put_aside_or_refused(
    warm: Any, start_daemon: Any, harm: str, told: str, strict: bool
) -> None:
    region = Path(warm.status()["daemon"]["region"])
    with Session.connect(warm.endpoint, engine="e1", deadline=10.0) as session:
        store(session, session.attach(SPEC, (0,)), run_of("a", 5))
    warm.stop()
    if "state" in harm:
        packed = bytearray(state_of(warm).read_bytes())
        if harm == "state":
            packed[12] ^= 0x40
        else:
            elsewhere = start_daemon(endpoint=f"ipc://{warm.folder}/other.sock", keep="true")
            elsewhere.stop()
            packed = bytearray(state_of(elsewhere).read_bytes())
        state_of(warm).write_bytes(packed)
    elif harm == "cut":
        os.truncate(region, region.stat().st_size - (2 << 20))
    else:
        with region.open("r+b") as file:
            file.seek({"header": 40, "magic": 0, "rows": 72}[harm])
            file.write((77).to_bytes(8, "little"))
    if strict:
        refused = start_daemon(endpoint=warm.endpoint, keep="true", strict="true", wait=False)
        assert refused.process.wait(PATIENCE) == 5
        assert told in refused.log and "--fresh" in refused.log and "Traceback" not in refused.log
        assert region.exists()
        start_daemon(endpoint=warm.endpoint, keep="true", fresh=True).stop()
        return
    for _ in range(2):
        daemon = start_daemon(endpoint=warm.endpoint, keep="true")
        status = daemon.status()
        daemon.stop()
        if status["counters"].get("regions_put_aside"):
            (said,) = (line for line in daemon.log.splitlines() if "put aside" in line)
            assert told in said and str(region) in said
            assert status["pool"]["blocks"] == 0
    assert status["counters"].get("regions_put_aside", 0) == 0, "the next one goes on with the one that was made"
    assert not region.exists()
    assert region.with_suffix(".aside").exists()
    assert state_of(warm).with_suffix(".state.aside").exists()
    start_daemon(endpoint=warm.endpoint, keep="true", fresh=True)
    assert not region.with_suffix(".aside").exists()


def test_memory_is_freed_by_discard_but_not_under_a_running_daemon(warm: Any) -> None:
    command = [sys.executable, "-m", "kvcache_server", "discard", "--endpoint", warm.endpoint]
    command += ["--region-dir", warm.region_dir]
    assert subprocess.run(command, capture_output=True).returncode == 3
    region = Path(warm.status()["daemon"]["region"])
    warm.stop()
    assert region.exists() and "kvcache-server discard" in warm.log
    for told in ("discarded", "nothing to discard"):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert told in done.stdout
    assert not region.exists()
    assert [path for path in warm.folder.iterdir() if path.suffix != ".log"] == []


def test_the_first_line_comes_before_memory_is_made(start_daemon: Any) -> None:
    daemon = start_daemon()
    assert daemon.log.index("preparing memory: 0") < daemon.log.index(" ready at ")


def test_a_region_without_a_daemon_that_takes_the_room_is_named(start_daemon: Any, tmp_path: Path) -> None:
    daemon = start_daemon(region_dir=str(tmp_path))
    with pytest.raises(RegionError) as running:
        check_room(str(tmp_path), 1 << 60)
    assert ".region" not in str(running.value)
    daemon.kill()
    (region,) = tmp_path.glob("*.region")
    with pytest.raises(RegionError) as left:
        check_room(str(tmp_path), 1 << 60)
    assert f"`rm {region}`" in str(left.value)
    assert f"of uid {os.geteuid()}" in str(left.value)
