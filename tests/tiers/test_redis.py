"""Redis and Valkey as a tier, with real servers."""

from __future__ import annotations

import subprocess
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest
import redis_servers
from redis_servers import KINDS, Server, Servers, wait_until

from kvcache_proto.errors import ConfigError
from kvcache_tiers.backend import Failed, Value
from kvcache_tiers.conformance import BackendSuite, Open, Region, data, header, key
from kvcache_tiers.redis import _START, RedisTier
from kvcache_tiers.redis import open_tier as open_redis
from kvcache_tiers.redis_settings import PASSWORD, SENTINEL_PASSWORD, read_url

SECRET = "s3cret/@#:?"
TIMEOUT = 0.5  # seconds, where a server does not answer
PATIENCE = 20.0  # seconds, after which something does not end at all


def opened(url: str) -> RedisTier:
    return open_redis(url, memoryview(b""))


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    redis_servers.binary(request.param)
    return str(request.param)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with closing(Servers(tmp_path)) as servers:
        yield servers


@pytest.fixture(scope="module")
def shared(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with closing(Servers(tmp_path_factory.mktemp(kind))) as servers:
        yield servers.start(kind)


@pytest.fixture
def server(shared: Server) -> Server:
    """A server without special options, empty."""
    with shared.client() as client:
        client.flushall()
    return shared


@pytest.fixture(scope="module")
def nodes(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with closing(Servers(tmp_path_factory.mktemp(kind))) as servers:
        yield servers.start_cluster(kind)


@pytest.fixture
def values() -> BackendSuite:
    """Puts values of SIZE bytes, and looks at them."""
    values = BackendSuite()
    values.buffers = Region()
    return values


class TestOneServer(BackendSuite):
    @pytest.fixture(params=["whole", "in-parts", "unix", "forever"])
    def open_tier(self, request: pytest.FixtureRequest, server: Server) -> Open:
        urls = {
            "whole": server.url,
            "in-parts": f"{server.url}/1?max_value=5000",
            "unix": f"unix://{server.path}?db=2",
            "forever": f"{server.url}?ttl=0",
        }
        return lambda: opened(urls[request.param])


class TestCluster(BackendSuite):
    @pytest.fixture(params=["whole", "in-parts"])
    def open_tier(self, request: pytest.FixtureRequest, nodes: list[Server]) -> Open:
        for each in nodes:
            with each.client() as client:
                client.flushall()
        parts = "&max_value=5000" * (request.param == "in-parts")
        return lambda: opened(f"{nodes[0].url},{nodes[1].where}?cluster=on{parts}")


def test_nodes_share_the_values(nodes: list[Server], values: BackendSuite) -> None:
    with closing(opened(f"{nodes[2].url}?cluster=on")) as tier:
        values.put(tier, *range(60))
        for each in nodes:
            with each.client() as client:
                assert client.dbsize() > 5


def test_a_slot_that_moved(nodes: list[Server], values: BackendSuite) -> None:
    with closing(opened(f"{nodes[0].url}?cluster=on")) as tier:
        (name,) = [write[1] for write in tier._writes(key(1), Value(header(1), memoryview(data(1))))]
        clients = [each.client() for each in nodes]
        slot = clients[0].execute_command("CLUSTER", "KEYSLOT", name)
        owner = 3 * slot // 16384
        values.put(tier, 1)
        clients[owner].flushall()
        other = clients[(owner + 1) % 3].execute_command("CLUSTER", "MYID")
        for client in clients:
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", other)
        assert values.stored(tier, 1) == [False]
        assert values.put(tier, 1, 2) == [True, True] and values.stored(tier, 1, 2) == [True, True]
        assert clients[(owner + 1) % 3].exists(name)
        for client in clients:
            client.close()


# How values are stored.


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_part_is_a_lost_value(server: Server, values: BackendSuite, lost: int) -> None:
    with closing(opened(f"{server.url}?max_value=5000")) as tier, server.client() as client:
        values.put(tier, 1, 2)
        name = tier._name(key(1), lost)
        assert client.delete(name) == 1
        assert values.stored(tier, 1, 2) == [False, True]
        assert tier.contains([key(1), key(2)]) == [False, True]
        assert tier.counts["lost_parts"] == (lost > 0)
        assert values.put(tier, 1) == [True] and values.stored(tier, 1) == [True]


def test_parts_of_two_values_are_not_mixed(server: Server, values: BackendSuite) -> None:
    """Two hosts have computed a block, and got other bits."""
    with closing(opened(f"{server.url}?max_value=5000")) as tier, server.client() as client:
        values.put(tier, 1, 2)
        client.copy(tier._name(key(2), 1), tier._name(key(1), 1), replace=True)
        assert values.stored(tier, 1, 2) == [False, True]


def test_hosts_may_split_values_in_different_ways(server: Server, values: BackendSuite) -> None:
    urls = [f"{server.url}?max_value={size}" for size in (4000, 6000, 100_000)]
    for writer in urls:
        for reader in urls:
            with closing(opened(writer)) as one, closing(opened(reader)) as other:
                assert values.put(one, 1) == [True] and values.stored(other, 1) == [True]


def test_what_others_keep_there(server: Server, values: BackendSuite) -> None:
    with closing(opened(server.url)) as tier, server.client() as client:
        client.set(tier._name(key(1)), b"x")
        client.set(tier._name(key(2)), b"x" * 100)
        assert values.stored(tier, 1, 2) == [False, False]
        assert tier.counts["unknown"] == 2
        tier.remove([key(1)])
        assert tier.contains([key(1)]) == [False]


def test_removing_leaves_no_parts(server: Server, values: BackendSuite) -> None:
    with closing(opened(f"{server.url}?max_value=5000")) as tier, server.client() as client:
        values.put(tier, 1)
        assert client.dbsize() == 3
        tier.remove([key(1)])
        assert client.dbsize() == 0


def test_names_begin_with_the_prefix(server: Server, values: BackendSuite) -> None:
    urls = [f"{server.url}?prefix={prefix}" for prefix in ("one", "other")]
    with closing(opened(urls[0])) as one, closing(opened(urls[1])) as other, server.client() as client:
        values.put(one, 1)
        assert values.stored(other, 1) == [False]
        assert [*client.scan_iter()] == [b"one{%b}" % key(1).hex().encode()]


def test_values_end(server: Server, values: BackendSuite) -> None:
    with closing(opened(f"{server.url}?ttl=1&max_value=5000")) as tier, server.client() as client:
        values.put(tier, 1)
        wait_until(lambda: tier.contains([key(1)]) == [False], "the value stays for ever")
        assert values.stored(tier, 1) == [False]
        wait_until(lambda: client.dbsize() == 0, "parts stay for ever")


def test_reading_makes_values_stay(server: Server, values: BackendSuite) -> None:
    with closing(opened(f"{server.url}?ttl=1000&max_value=5000")) as tier, server.client() as client:
        values.put(tier, 1)
        for name in client.scan_iter():
            client.expire(name, 10)
        tier.contains([key(1)])
        assert all(client.ttl(name) <= 10 for name in client.scan_iter())
        values.stored(tier, 1)
        assert all(client.ttl(name) > 900 for name in client.scan_iter())


def test_values_without_an_end(server: Server, values: BackendSuite) -> None:
    with closing(opened(f"{server.url}?ttl=0")) as tier, server.client() as client:
        values.put(tier, 1)
        assert values.stored(tier, 1) == [True]
        assert [client.ttl(name) for name in client.scan_iter()] == [-1]


# Memory.


def test_a_full_server_refuses_values(kind: str, servers: Servers, values: BackendSuite) -> None:
    full = servers.start(kind, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    with closing(opened(f"{full.url}?max_value=128KiB")) as tier, full.client() as client:
        stored = [values.put(tier, number, size=1 << 20)[0] for number in range(12)]
        assert stored[0] and not stored[-1]
        assert tier.counts["no_room"] == stored.count(False) and not tier.counts["failures"]
        assert values.stored(tier, *range(12), size=1 << 20) == stored
        assert client.dbsize() == 8 * sum(stored), "parts of refused values are left"
        assert values.put(tier, 20, 21, 22, size=3 << 20).count(False) >= 2
        assert client.dbsize() % 8 == 0
        tier.remove([key(0), key(1)])
        wait_until(lambda: values.put(tier, 30, size=1 << 20) == [True], "no room in a server that has some")


def test_a_server_that_evicts(kind: str, servers: Servers, values: BackendSuite) -> None:
    """It evicts parts, in no certain order."""
    full = servers.start(kind, "--maxmemory", "16mb", "--maxmemory-policy", "allkeys-lru")
    with closing(opened(f"{full.url}?max_value=128KiB")) as tier:
        for number in range(40):
            assert values.put(tier, number, size=1 << 20) == [True]
        stored = [values.stored(tier, number, size=1 << 20) == [True] for number in range(40)]
        assert 0 < sum(stored) < 16
        seem = tier.contains([key(number) for number in range(40)])
        assert not any(seems and not is_there for seems, is_there in zip(seem, stored, strict=True))
        assert tier.counts["lost_parts"] and not tier.counts["failures"]


# Failures.


def test_a_server_that_ends(kind: str, servers: Servers, values: BackendSuite) -> None:
    server = servers.start(kind)
    with closing(opened(server.url)) as tier:
        values.put(tier, 1)
        server.stop()
        for call in (lambda: values.put(tier, 1), lambda: values.stored(tier, 1), lambda: tier.remove([key(1)])):
            with pytest.raises(Failed, match=server.where):
                call()
        assert tier.counts["failures"] == 3
        server.start()
        assert tier.contains([key(1)]) == [False]
        assert values.put(tier, 1) == [True] and values.stored(tier, 1) == [True]
        server.stop()
        server.start()
        assert values.stored(tier, 1) == [False], "the connection is an old one"


def test_a_server_that_pauses(kind: str, servers: Servers, values: BackendSuite) -> None:
    server = servers.start(kind)
    with closing(opened(f"{server.url}?timeout={TIMEOUT}")) as tier:
        values.put(tier, 1)
        with server.paused():
            begin = time.monotonic()
            with pytest.raises(Failed):
                values.put(tier, *range(10), size=4 << 20)
            with pytest.raises(Failed):
                values.stored(tier, 1)
            with pytest.raises(Failed):
                opened(f"{server.url}?timeout={TIMEOUT}")
            assert time.monotonic() - begin < PATIENCE
        assert values.stored(tier, 1) == [True], "a reply to something else was read"


def test_a_node_that_pauses(kind: str, servers: Servers, values: BackendSuite) -> None:
    nodes = servers.start_cluster(kind)
    with closing(opened(f"{nodes[0].url}?cluster=on&timeout={TIMEOUT}")) as tier:
        values.put(tier, *range(20))
        with nodes[1].paused():
            begin = time.monotonic()
            for _ in range(2):
                with pytest.raises(Failed):
                    values.put(tier, *range(20))
            assert time.monotonic() - begin < PATIENCE
        wait_until(lambda: _stored(values, tier, *range(20)), "the node is back")


def test_a_flushed_server(server: Server, values: BackendSuite) -> None:
    with closing(opened(server.url)) as tier, server.client() as client:
        values.put(tier, 1)
        client.flushall()
        assert values.stored(tier, 1) == [False] and tier.contains([key(1)]) == [False]
        assert values.put(tier, 1) == [True] and values.stored(tier, 1) == [True]


def test_a_key_of_another_type_is_a_miss(server: Server, values: BackendSuite) -> None:
    with closing(opened(server.url)) as tier, server.client() as client:
        client.rpush(tier._name(key(1)), "no string")
        values.put(tier, 2)
        assert values.stored(tier, 1, 2) == [False, True] and tier.counts["unknown"] == 1
        tier.remove([key(1)])
        assert not client.exists(tier._name(key(1)))


@pytest.mark.parametrize("parts", [BackendSuite.size, 1 << 32])
def test_a_head_that_names_more_parts_than_there_can_be(server: Server, values: BackendSuite, parts: int) -> None:
    with closing(opened(server.url)) as tier, server.client() as client:
        client.set(tier._name(key(1)), _START.pack(b"kvr\1", 0, parts % (1 << 32) or parts - 1, values.size) + b"x")
        tracemalloc.start()
        try:
            assert values.stored(tier, 1) == [False]
            tier.remove([key(1)])
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()
        assert not client.exists(tier._name(key(1)))


def test_nobody_is_there() -> None:
    port = redis_servers.free_port()
    for url in ("redis://127.0.0.1:{}", "redis://127.0.0.1:{}?cluster=on", "redis://127.0.0.1:{}?sentinel=one"):
        with pytest.raises(Failed, match=str(port)):
            opened(url.format(port))
    with pytest.raises(Failed, match="/nowhere"):
        opened("unix:///nowhere")


def test_no_cluster(server: Server) -> None:
    with pytest.raises(Failed, match=server.where):
        opened(f"{server.url}?cluster=on")


# Sentinels.


def test_a_master_that_ends(kind: str, servers: Servers, values: BackendSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD, SECRET)
    monkeypatch.setenv(SENTINEL_PASSWORD, "other")
    login = ("--requirepass", SECRET, "--masterauth", SECRET)
    master = servers.start(kind, *login, "--repl-diskless-sync-delay", "0")
    replica = servers.start(kind, *login, "--replicaof", "127.0.0.1", str(master.port))
    lines = (f'sentinel auth-pass tiers "{SECRET}"', 'requirepass "other"')
    sentinel = servers.start_sentinel(kind, master, "tiers", *lines)
    with replica.client(password=SECRET) as client:
        wait_until(lambda: client.info()["master_link_status"] == "up", "the replica has no master")
    with sentinel.client(password="other") as client:
        wait_until(lambda: len(client.sentinel_slaves("tiers")) == 1, "the sentinel knows no replica")
    nobody = redis_servers.free_port()
    with closing(opened(f"redis://127.0.0.1:{nobody},{sentinel.where}?sentinel=tiers&timeout=1")) as tier:
        values.put(tier, 1)
        master.stop()
        with pytest.raises(Failed):
            values.put(tier, 2)
        wait_until(lambda: _stored(values, tier, 1), "no other master")
        assert values.put(tier, 2) == [True] and values.stored(tier, 2) == [True]


def test_a_master_that_becomes_a_replica(kind: str, servers: Servers, values: BackendSuite) -> None:
    master = servers.start(kind)
    sentinel = servers.start_sentinel(kind, master, "tiers")
    with closing(opened(f"redis://{sentinel.where}?sentinel=tiers")) as tier, master.client() as client:
        values.put(tier, 1)
        other = servers.start(kind)
        client.replicaof("127.0.0.1", other.port)
        with pytest.raises(Failed, match="READONLY"):
            values.put(tier, 2)
        with sentinel.client() as asked:
            asked.sentinel_remove("tiers")
            asked.sentinel_monitor("tiers", "127.0.0.1", other.port, 1)
        wait_until(lambda: _stored(values, tier, 2), "the connection to the old master is used")


def _stored(values: BackendSuite, tier: RedisTier, *numbers: int) -> bool:
    """Store values if they are not there; return whether that was possible."""
    try:
        return all(values.put(tier, *numbers)) and all(values.stored(tier, *numbers))
    except Failed:
        return False


# Passwords and TLS.


def test_passwords(kind: str, servers: Servers, values: BackendSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    server = servers.start(kind, "--requirepass", SECRET)
    with server.client(password=SECRET) as client:
        client.acl_setuser("kv", enabled=True, passwords=["+other"], categories=["+@all"], keys=["*"])
    for login in (f":{quote(SECRET, safe='')}", f"default:{quote(SECRET, safe='')}", "kv:other"):
        with closing(opened(f"redis://{login}@{server.where}")) as tier:
            assert values.put(tier, 1) == [True] and values.stored(tier, 1) == [True]
    for login in ("", "wr0ng@", ":wr0ng@", "kv:wr0ng@"):
        with pytest.raises(Failed, match=server.where) as caught:
            opened(f"redis://{login}{server.where}")
        assert "wr0ng" not in str(caught.value) or login == "wr0ng@"
    monkeypatch.setenv(PASSWORD, SECRET)
    with closing(opened(server.url)) as tier:
        assert values.stored(tier, 1) == [True]
    with pytest.raises(Failed):
        opened(f"redis://:wr0ng@{server.where}")


def test_a_server_that_quotes_the_password(kind: str, servers: Servers) -> None:
    server = servers.start(kind, "--requirepass", SECRET, "--rename-command", "AUTH", "")
    with pytest.raises(Failed, match=server.where) as caught:
        opened(f"redis://:{quote(SECRET, safe='')}@{server.where}")
    assert SECRET not in str(caught.value)
    assert "***" in str(caught.value) or kind == "valkey"  # which answers that a password is needed


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and its key."""
    cert, secret = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(secret), "-out", str(cert)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl")
    return cert, secret


def test_tls(kind: str, servers: Servers, values: BackendSuite, certificate: tuple[Path, Path]) -> None:
    cert, secret = certificate
    port = str(redis_servers.free_port())
    tls = [
        "--tls-port",
        port,
        "--tls-cert-file",
        str(cert),
        "--tls-key-file",
        str(secret),
        "--tls-ca-cert-file",
        str(cert),
    ]
    try:
        server = servers.start(kind, *tls)
    except RuntimeError as error:
        if "tls" not in str(error):
            raise
        pytest.skip(f"{kind} was built without TLS")
    with closing(opened(f"rediss://127.0.0.1:{port}?ca={cert}&cert={cert}&key={secret}")) as tier:
        assert values.put(tier, 1, 2, size=1 << 20) == [True, True]
        assert values.stored(tier, 1, 2, size=1 << 20) == [True, True]
    with pytest.raises(Failed, match="certificate"):  # of an authority that nobody knows
        opened(f"rediss://127.0.0.1:{port}?cert={cert}&key={secret}")
    with pytest.raises(Failed, match=r"(?i)mismatch|not match"):
        opened(f"rediss://localhost:{port}?ca={cert}&cert={cert}&key={secret}")
    with pytest.raises(Failed):  # this server wants a certificate of ours
        opened(f"rediss://127.0.0.1:{port}?ca={cert}")
    with pytest.raises(Failed):
        opened(f"redis://127.0.0.1:{port}")
    with pytest.raises(Failed):
        opened(f"rediss://{server.where}?ca={cert}")


# URLs.


def test_a_url() -> None:
    found = read_url("rediss://me:p%40ss@[::1]:7000/3?ttl=60&max_value=1MiB&timeout=0.5&prefix=a%40b")
    assert found.hosts == (("::1", 7000),) and found.database == 3 and found.tls
    assert (found.user, found.password, found.prefix) == ("me", "p@ss", "a@b")
    assert (found.ttl, found.max_value, found.timeout) == (60, 1 << 20, 0.5)
    assert found.name == "rediss://[::1]:7000" and "p@ss" not in repr(found)
    assert read_url("redis://one").hosts == (("one", 6379),)
    assert read_url("redis://one,two:9?sentinel=m").hosts == (("one", 26379), ("two", 9))
    assert read_url("unix:///run/redis%20s?db=4").path == "/run/redis s"
    assert read_url("unix://:pass@/run/redis?db=4").password == "pass"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis:", "host"),
        ("redis://", "host"),
        ("redis://:s3cret", "host"),
        ("redis://one:0", "host"),
        ("redis://one:70000", "host"),
        ("redis://one,two", "cluster=on"),
        ("redis://[one", "URL"),
        ("redis://one/x", "database"),
        ("redis://one/1?cluster=on", "database"),
        ("redis://one?db=1", "redis://host/1"),
        ("redis://one?cluster=yes", "on or off"),
        ("redis://one?cluster=on&sentinel=m", "sentinels"),
        ("redis://one?ttl=-1", "ttl"),
        ("redis://one?ttl=1h", "ttl"),
        ("redis://one?timeout=0", "timeout"),
        ("redis://one?timeout=nan", "timeout"),
        ("redis://one?max_value=10", "max_value"),
        ("redis://one?max_value=1GiB", "max_value"),
        ("redis://one?max_value=big", "size"),
        ("redis://:s3cret@one?size=1", "unknown option size"),
        ("redis://one?ca=/dev/null/x", "rediss"),
        ("rediss://one?ca=/dev/null/x", "no file"),
        ("redis://me:s3cret@one/x", "database"),
        ("redis://me:1/s3cret@one", "%XX"),
        ("redis://me:1?s3cret@one", "%XX"),
        ("redis://me:1#s3cret@one", "%XX"),
        ("redis://me:s3cret#x@one", "%XX"),
        ("redis://:s3cret\u2100@one", "URL"),
        ("unix://one/path", "socket"),
        ("unix:", "socket"),
        ("unix:///path?cluster=on", "socket"),
    ],
)
def test_a_bad_url(url: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        read_url(url)
    assert "s3cret" not in str(caught.value)
