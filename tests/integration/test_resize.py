"""A daemon returns memory to the host while engines use it."""

from __future__ import annotations

import http.client
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvcache_client import GroupSpec, NamespaceSpec, Session

MIB = 1 << 20
SPEC = NamespaceSpec(model="m", groups=[GroupSpec(16, 256 << 10)])
PATIENCE = 20.0


def hashes(count: int) -> list[bytes]:
    return [number.to_bytes(32, "little") for number in range(count)]


def store(session: Session, namespace: Any, run: list[bytes]) -> None:
    reservation = namespace.reserve(run)
    for at, slot in zip(reservation.granted, reservation.slots, strict=True):
        session.view(slot)[:] = run[at] * (SPEC.groups[0].block_bytes // 32)
    reservation.commit()


def resize(daemon: Any, size: int) -> int:
    address = urlsplit(daemon.status()["daemon"]["http"]["address"])
    token = (daemon.folder / "kv.token").read_text().strip()
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=PATIENCE)
    body, headers = json.dumps({"bytes": size}), {"Authorization": f"Bearer {token}"}
    connection.request("POST", "/api/v1/resize", body, headers)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return int(answer["bytes"])


def memory_of(daemon: Any) -> int:
    return Path(daemon.status()["daemon"]["region"]).stat().st_blocks * 512


def until(daemon: Any, most: int) -> None:
    late = time.monotonic() + PATIENCE
    while memory_of(daemon) > most:
        assert time.monotonic() < late, f"{memory_of(daemon)} bytes are not given back"
        time.sleep(0.02)


def test_a_resize_returns_memory_and_the_rest_survives_a_restart(start_daemon: Any) -> None:
    flags = {"size": "64MiB", "extent_size": "4MiB", "keep": "true", "pin_quota": 1, "http": "127.0.0.1:0"}
    daemon = start_daemon(**flags)
    with Session.connect(daemon.endpoint, engine="one", deadline=5.0) as session:
        namespace = session.attach(SPEC, (0,))
        store(session, namespace, hashes(100))
        assert memory_of(daemon) > 64 * MIB
        with namespace.acquire(hashes(10)) as lease:
            assert resize(daemon, 17 * MIB) == 16 * MIB
            daemon.wait_status(lambda status: status["pool"]["bytes"] == 16 * MIB, "the smaller pool")
            until(daemon, 19 * MIB)
            views = [bytes(session.view(slot)) for slot in lease.slots]
            assert views == [each * (SPEC.groups[0].block_bytes // 32) for each in hashes(10)]
        with namespace.acquire(hashes(100)) as lease:
            left = lease.hits
        assert 40 <= left <= 60
        daemon.kill()
        daemon = start_daemon(endpoint=daemon.endpoint, **flags)
        daemon.wait_status(lambda status: status["sessions"], "the engine")
        while not session.up:  # it has yet to say what it holds
            time.sleep(0.01)
        assert daemon.status()["pool"]["bytes"] == 16 * MIB
        assert "64.0 MiB; `serve --fresh` starts with all of it" in daemon.log
        with namespace.acquire(hashes(100)) as lease:
            assert lease.hits == left
        store(session, namespace, hashes(60))
        assert memory_of(daemon) < 19 * MIB
        with Session.connect(daemon.endpoint, engine="two", deadline=5.0) as other:
            assert other.region is not None
            assert sum(size for _, size in other.region.holes) == 48 * MIB
