"""A Mooncake Store as a tier. The library can crash: a test that ends without a word has met that."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from mooncake_servers import MooncakeStore, Process, free_port, kill, missing

from kvcache_proto.errors import ConfigError
from kvcache_tiers.backend import Failed, Value
from kvcache_tiers.conformance import BackendSuite, Open, Region, data, key
from kvcache_tiers.mooncake import ROOMS, MooncakeTier, key_name, open_tier, parse

needs_store = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeStore]:
    with closing(MooncakeStore(tmp_path_factory.mktemp("mooncake"))) as store:
        store.add_node()
        yield store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MooncakeStore]:
    """A store of the test's own, which has no memory yet."""
    with closing(MooncakeStore(tmp_path)) as store:
        yield store


@pytest.fixture(scope="module")
def cleaner(shared_store: MooncakeStore) -> Iterator[MooncakeTier]:
    with closing(open_tier(shared_store.url, memoryview(bytearray(4096)))) as tier:
        yield tier


@needs_store
class TestMooncake(BackendSuite):
    @pytest.fixture
    def open_tier(self, shared_store: MooncakeStore, cleaner: MooncakeTier, region: Region) -> Open:
        cleaner.remove([key(number) for number in range(200)])
        return lambda: open_tier(shared_store.url, region.whole)

    def test_headers_of_any_length(self, tier: MooncakeTier) -> None:
        """A read does not know the length; that of most headers is less than 1 KiB."""
        headers = [bytes([length % 251]) * length for length in (0, 1, 1000, 1012, 1013, 5000, 16 << 10)]
        keys = [key(number) for number in range(len(headers))]
        values = [Value(each, self.buffers.filled(data(number))) for number, each in enumerate(headers)]
        buffers = [self.buffers.cut(self.size) for _ in keys]
        assert all(tier.put(keys, values))
        assert tier.get(keys, buffers) == headers
        assert [bytes(buffer) for buffer in buffers] == [data(number) for number in range(len(keys))]

    def test_the_same_length_with_other_data(self, tier: MooncakeTier) -> None:
        """What is read is as long as what is there, but begins and ends elsewhere."""
        short, long = ROOMS
        assert tier.put([key(1)], [Value(b"h" * short, self.buffers.filled(data(1)))]) == [True]
        buffer = self.buffers.cut(self.size + long - short)
        assert tier.get([key(1)], [buffer]) == [None]
        assert tier.counts["not_whole"] == 1

    def test_bytes_that_are_not_whole(self, tier: MooncakeTier) -> None:
        """A value that is removed while it is read gives its memory to another one: both are found in the buffer."""
        self.put(tier, 1, 2)
        first, second = (tier.store.get(key_name(key(number))) for number in (1, 2))
        for number, there in {
            3: first,  # all of another one
            4: first[: self.size // 2] + second[self.size // 2 :],
            5: first[: self.size] + second[self.size :],
            6: bytes([first[0] ^ 1]) + first[1:],
        }.items():
            assert tier.store.put(key_name(key(number)), there) == 0
        assert self.stored(tier, *range(7)) == [False, True, True, False, False, False, False]
        assert tier.counts["not_whole"] == 4

    def test_what_was_just_read_can_be_removed(self, tier: MooncakeTier) -> None:
        """The store protects it from its own eviction for some seconds."""
        self.put(tier, 1)
        assert self.stored(tier, 1) == [True]
        tier.remove([key(1)])
        assert self.stored(tier, 1) == [False] and not tier.counts["code_-706"]

    def test_more_values_than_fit_a_call(self, tier: MooncakeTier) -> None:
        assert all(self.put(tier, *range(150), size=100))
        assert self.stored(tier, *range(150), 199, size=100) == [True] * 150 + [False]

    def test_two_processes_share_values(self, tier: MooncakeTier, shared_store: MooncakeStore) -> None:
        self.put(tier, 1)
        elsewhere(
            shared_store.url,
            "assert suite.stored(tier, 1, 2) == [True, False]",
            "assert suite.put(tier, 1, 2) == [True, True]",
        )
        assert self.stored(tier, 1, 2) == [True, True]


@pytest.fixture
def suite() -> BackendSuite:
    """Puts values and looks at their bytes."""
    return with_buffers()


def with_buffers() -> BackendSuite:
    suite = BackendSuite()
    suite.buffers = Region()
    return suite


def elsewhere(url: str, *lines: str) -> None:
    """Run `lines` in a process of its own, with a `suite` and a `tier`."""
    script = f"""
        from contextlib import closing
        from kvcache_tiers.mooncake import open_tier
        from test_mooncake import with_buffers
        suite = with_buffers()
        with closing(open_tier({url!r}, suite.buffers.whole)) as tier:
            {"; ".join(lines)}
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment, check=True)


def works(call: Callable[[], bool]) -> Callable[[], bool]:
    """Return a call that is false while the store fails: nobody knows how long it takes to be itself again."""

    def attempt() -> bool:
        try:
            return call()
        except Failed:
            return False

    return attempt


def stop(process: Process) -> None:
    """Stop a process; return when all of its threads have: one of them could still answer."""
    process.send_signal(signal.SIGSTOP)
    threads = Path(f"/proc/{process.pid}/task")
    while any("\nState:\tT" not in (each / "status").read_text() for each in threads.iterdir()):
        time.sleep(0.001)


@needs_store
@pytest.mark.timeout(120)  # a call takes some times the timeout of 3 s at most; one that hangs takes forever
class TestFailures:
    def test_no_memory_in_the_store(self, store: MooncakeStore, suite: BackendSuite) -> None:
        with closing(open_tier(store.url, suite.buffers.whole)) as tier:
            assert suite.put(tier, 1) == suite.stored(tier, 1) == [False]
            assert tier.counts["no_room"] == 1

    def test_memory_of_a_process_goes_with_it(self, store: MooncakeStore, suite: BackendSuite) -> None:
        with closing(open_tier(store.url, suite.buffers.whole)) as tier:
            elsewhere(f"{store.url}&segment=64MiB", "assert suite.put(tier, 1) == suite.stored(tier, 1) == [True]")
            assert suite.stored(tier, 1) == suite.put(tier, 1) == [False]

    def test_a_full_store(self, store: MooncakeStore, suite: BackendSuite) -> None:
        """The store takes more values than it has room for, or says that it does not; none is wrong."""
        store.add_node("64 MB")
        with closing(open_tier(store.url, suite.buffers.whole)) as tier:
            there = [suite.put(tier, number, size=2 << 20)[0] for number in range(48)]
            found = suite.stored(tier, *range(48), size=2 << 20)
            assert 0 < sum(found) <= 32 and tier.counts["no_room"] == there.count(False)

    def test_the_master_is_killed_and_started_again(self, store: MooncakeStore, suite: BackendSuite) -> None:
        store.add_node()
        with closing(open_tier(store.url, suite.buffers.whole)) as tier:
            suite.put(tier, 1)
            kill(store.master)
            for call in (
                lambda: suite.stored(tier, 1),
                lambda: suite.put(tier, 2),
                lambda: tier.contains([key(1)]),
                lambda: tier.remove([key(1)]),
            ):
                with pytest.raises(Failed, match="master"):
                    call()
            assert tier.counts["master_failed"] == 4
            store.start_master()
            store.wait(works(lambda: suite.put(tier, 3) == [True]))  # when the node has come back
            assert suite.stored(tier, 1, 2, 3) == [False, False, True]

    def test_the_master_stops_for_a_while(self, store: MooncakeStore, suite: BackendSuite) -> None:
        store.add_node()
        with closing(open_tier(store.url, suite.buffers.whole)) as tier:
            suite.put(tier, 1)
            stop(store.master)
            with pytest.raises(Failed, match="master"):
                suite.stored(tier, 1)
            store.master.send_signal(signal.SIGCONT)
            store.wait(works(lambda: suite.stored(tier, 1) == suite.put(tier, 1) == [True]))

    def test_the_node_with_the_values_is_killed(self, store: MooncakeStore, suite: BackendSuite) -> None:
        node = store.add_node()
        with closing(open_tier(store.url, suite.buffers.whole)) as tier:
            suite.put(tier, 1, 2)
            kill(node)
            assert tier.contains([key(1)]) == [True]  # the master has not noticed
            assert suite.stored(tier, 1, 2) == suite.put(tier, 3, 4) == [False, False]
            assert tier.counts["transfers_failed"] == 4
            store.add_node()
            store.wait(works(lambda: suite.put(tier, 5) == suite.stored(tier, 5) == [True]))
            assert suite.stored(tier, 1, 2) == [False, False]

    def test_the_node_with_the_values_stops(self, store: MooncakeStore, suite: BackendSuite) -> None:
        node = store.add_node()
        with closing(open_tier(store.url, suite.buffers.whole)) as tier:
            suite.put(tier, *range(16))
            stop(node)
            assert not any(suite.stored(tier, *range(16)))
            node.send_signal(signal.SIGCONT)
            store.wait(works(lambda: suite.put(tier, 20) == suite.stored(tier, 20) == [True]))


@needs_store
class TestOpening:
    @pytest.mark.timeout(60)
    def test_nobody_answers(self, suite: BackendSuite) -> None:
        with pytest.raises(Failed, match="no master"):
            open_tier(f"mooncake://127.0.0.1:{free_port()}/", suite.buffers.whole)
        with pytest.raises(Failed, match="no master"):
            open_tier("mooncake://no.such.host.invalid/", suite.buffers.whole)

    @pytest.mark.timeout(90)
    def test_somebody_accepts_and_says_nothing(self, suite: BackendSuite) -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            url = f"mooncake://127.0.0.1:{mute.getsockname()[1]}/?timeout=3"
            with pytest.raises(Failed, match="could not join"):
                open_tier(url, suite.buffers.whole)

    def test_a_metadata_server_that_does_not_answer(self, store: MooncakeStore, suite: BackendSuite) -> None:
        url = f"{store.url}&metadata=http://127.0.0.1:{free_port()}/metadata"
        with pytest.raises(Failed, match="could not join"):
            open_tier(url, suite.buffers.whole)


def test_a_library_that_cannot_be_imported(suite: BackendSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match=r"kvcache-server\[mooncake\]'.* libibverbs1"):
        open_tier("mooncake://127.0.0.1/", suite.buffers.whole)


def test_what_a_url_says() -> None:
    plain = parse("mooncake://master/")
    assert (plain.master, plain.port, plain.metadata, plain.protocol) == ("master", 50051, "P2PHANDSHAKE", "tcp")
    assert (plain.segment, plain.local_buffer, plain.timeout) == (0, 16 << 20, 5.0)
    url = "mooncake://[::1]:99?protocol=rdma&device=mlx5_0,mlx5_1&segment=2GiB&metadata=http://m:8080/metadata"
    full = parse(url + "&hostname=10.0.0.1&timeout=0.5&local_buffer=0")
    assert full == ("::1", 99, "http://m:8080/metadata", "rdma", "mlx5_0,mlx5_1", 2 << 30, 0, "10.0.0.1", 0.5)


@pytest.mark.parametrize(
    ("rest", "names"),
    [
        ("", "a master"),
        ("///", "a master"),
        ("//master/folder", "a master"),
        ("//user@master/", "a master"),
        ("//master:port/", "port"),
        ("//master:70000/", "range"),
        ("//[::1/", "not a URL"),
        ("//master/?protocol=udp", "tcp or rdma"),
        ("//master/?device=mlx5_0", "for rdma"),
        ("//master/?segment=much", "size 'much'"),
        ("//master/?timeout=soon", "number of seconds"),
        ("//master/?timeout=nan", "number of seconds"),
        ("//master/?timeout=0", "number of seconds"),
        ("//master/?size=1GiB", "unknown option size"),
    ],
)
def test_a_url_that_says_nothing(rest: str, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        parse(f"mooncake:{rest}")
