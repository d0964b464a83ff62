"""Object storage as a tier: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `az://CONTAINER/PREFIX`.

Each `put` writes its values as one object, a pack (packs.py), because stores answer in tens of milliseconds and bill
requests. There are no objects per key: each process has an index of all packs in memory. It reads their heads when it
opens the tier, and then looks for the packs of other hosts every few seconds. Hosts need no other coordination.

The tier has no limit of its size: the bucket's lifecycle rules remove packs by age. They should also remove incomplete
multipart uploads, which dying hosts leave behind. Credentials come from the environment variables that the stores'
tools read, such as AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS and AZURE_STORAGE_ACCOUNT_NAME, or from the host's
role.

obstore has no HDFS; `opendal` has, and a backend for HDFS would use that.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from kvcache_proto.errors import ConfigError
from kvcache_tiers import packs
from kvcache_tiers.backend import Backend, Failed, Value
from kvcache_tiers.packs import K, Run
from kvcache_tiers.urls import options, seconds, shown, split_url

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ClientConfig, RetryConfig

FOLDER = "packs"
PART = 8 << 20  # bytes of a request that writes; one pack has up to 8 at once
LONGEST_READ = 8 << 20  # bytes of a request that reads, and of the memory that it needs
READERS = 16  # concurrent requests of all callers that read values
FINDERS = 32  # concurrent requests that read heads
AT_ONCE = 1024  # heads that are requested together
MOST_PACKS = 1 << 20  # that are listed, and
LONGEST_LISTING = 120.0  # seconds that this may take: a server may repeatedly report that there are more
OVERLAP = 60_000  # milliseconds; see _look
RELIST = 600  # seconds between listings of all packs

Store = S3Store | GCSStore | AzureStore
T = TypeVar("T")
R = TypeVar("R")

_KINDS: dict[str, tuple[type[Store], dict[str, str]]] = {  # with the names that obstore has for their options
    "s3": (S3Store, {"endpoint": "endpoint", "region": "region"}),
    "gs": (GCSStore, {"endpoint": "base_url"}),
    "az": (AzureStore, {"endpoint": "endpoint"}),
}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_ENDPOINT = re.compile(r"https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(:[0-9]{1,5})?(/[A-Za-z0-9._/-]*)?")


def open_tier(url: str, region: memoryview) -> ObjectTier:
    """Open `s3://BUCKET/PREFIX?endpoint=URL&region=NAME&refresh=SECONDS&timeout=SECONDS`; gs and az have no region.

    `refresh` is the time between two looks for other hosts' packs. A request whose answer makes no progress for
    `timeout` seconds fails. That includes its upload: the link must carry a pack of 64 MiB in this time.

    Raises ConfigError or Failed.
    """
    split = split_url(url)
    name = shown(split)
    if "@" in split.netloc + split.query:  # comes first, because its message does not repeat the URL
        raise ConfigError(f"a tier of {split.scheme}: credentials belong in the environment, not in the URL")
    kind, names = _KINDS[split.scheme]
    given = options(split, *names, "refresh", "timeout")
    if not _BUCKET.fullmatch(split.netloc):
        raise ConfigError(f"{name}: a bucket and a prefix, as in {split.scheme}://bucket/kvcache")
    endpoint = given.get("endpoint", "")
    if endpoint and not _ENDPOINT.fullmatch(endpoint):
        raise ConfigError(f"{name}: the endpoint is a URL, as in http://host:9000")
    refresh, timeout = (
        seconds(split, each, given.get(each, "5"), float, 0.01, 3600.0) for each in ("refresh", "timeout")
    )
    stall = timedelta(seconds=timeout)
    client: ClientConfig = {"connect_timeout": stall, "read_timeout": stall, "timeout": 6 * stall}
    if endpoint.startswith("http:"):
        client["allow_http"] = True
    # A request that timed out is not tried again: `retry_timeout` counts from its beginning.
    retry: RetryConfig = {"max_retries": 2, "retry_timeout": stall}
    config: Any = {names[each]: value for each, value in given.items() if each in names and value}
    prefix = unquote(split.path).strip("/")
    try:
        store = kind(split.netloc, prefix=prefix, config=config, client_options=client, retry_config=retry)
    except (BaseError, OSError, ValueError) as error:  # also for wrong settings in the environment
        raise ConfigError(f"{name}: {_text(error)}") from None
    return ObjectTier(store, name, refresh)


class ObjectTier(Backend):
    """Counters: `counts`, by name. `len` is the number of values that are known."""

    batch_bytes = packs.MOST_DATA

    def __init__(self, store: Store, name: str, refresh: float) -> None:
        """Read the heads of all packs. `name` appears in errors; `refresh` is in seconds. Raises Failed."""
        self.counts: Counter[str] = Counter()
        self._store, self._name = store, name
        self._lock = threading.Lock()  # of the index, the ignored packs and the counters
        self._removing = threading.Lock()
        self._index = packs.Index()
        self._ignored: set[str] = set()
        self._newest = 0  # milliseconds since 1970
        self._look(0)
        self._closing = threading.Event()
        self._readers = ThreadPoolExecutor(READERS, "kvcache-objects")
        self._finder = threading.Thread(target=self._keep_looking, args=(refresh,), name="kvcache-packs", daemon=True)
        self._finder.start()

    def __len__(self) -> int:
        return len(self._index)

    # The protocol.

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._index for key in keys]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bytes | None]:
        headers: list[bytes | None] = [None] * len(keys)

        def read(run: Run[int]) -> list[int]:
            """Copy the values of a run to their buffers; return the numbers of those that turned out to be gone."""
            found = self._fetch(run)
            for number, value in found.items():
                buffers[number].cast("B")[:] = value.data
                headers[number] = value.header
            return [number for number, _ in run if number not in found]

        rest = list(range(len(keys)))
        while rest:  # another pack may have the values of one that is gone
            with self._lock:
                places = [(number, self._index.find(keys[number])) for number in rest]
            wanted = [(n, place) for n, place in places if place is not None and place.size == buffers[n].nbytes]
            rest = [number for gone in _all(self._readers, read, packs.runs(wanted, LONGEST_READ)) for number in gone]
        return headers

    def put(self, keys: Sequence[bytes], values: Sequence[Value]) -> list[bool]:
        with self._lock:
            new = {key: value for key, value in zip(keys, values, strict=True) if key not in self._index}
        pack: dict[bytes, Value] = {}
        head, size = packs.LEAST_HEAD, 0
        for key, value in new.items():
            row, length = packs.row_bytes(key, value.header), value.data.nbytes
            if pack and (head + row > packs.MOST_HEAD or size + length > self.batch_bytes):
                self._write(pack)
                pack, head, size = {}, packs.LEAST_HEAD, 0
            pack[key], head, size = value, head + row, size + length
        if pack:
            self._write(pack)
        return [True] * len(keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Write the packs that have these values again without them, and delete the old ones. Raises Failed.

        If two hosts remove different values of one pack at the same time, these values may stay.
        """
        with self._removing:
            with self._lock:
                found = self._index.packs_with(keys)
            for pack in found:
                self._write_without(pack, set(keys))

    def close(self) -> None:
        self._closing.set()
        self._finder.join()
        self._readers.shutdown()

    # Packs.

    def _fetch(self, run: Run[K]) -> dict[K, Value]:
        """Return the values of a run; none if its pack is gone, which is then forgotten. Raises Failed."""
        (_, first), (_, last) = run[0], run[-1]
        data = self._read(first.pack, first.offset, last.offset + last.size)
        if data is None:
            with self._lock:
                self.counts["packs_gone"] += self._index.drop(first.pack)
            return {}
        rest = data  # the values follow one another without a gap
        found = {}
        for name, place in run:
            found[name], rest = Value(place.header, rest[: place.size]), rest[place.size :]
        return found

    def _read(self, pack: str, begin: int, end: int) -> memoryview | None:
        """Return a range of bytes; None if the pack is not there, or shorter. Raises Failed."""
        try:
            with self._call():
                data = _body(self._store.get(f"{FOLDER}/{pack}", options={"range": (begin, end)}), end - begin)
        except _Gone:
            return None
        return data if len(data) == end - begin else None

    def _write(self, values: dict[bytes, Value]) -> None:
        """Write a pack. Raises Failed."""
        head = packs.make_head((key, value.header, value.data.nbytes) for key, value in values.items())
        pack = packs.make_name(time.time_ns() // 1_000_000, head, secrets.randbits(64))
        size = len(head) + sum(value.data.nbytes for value in values.values())
        with self._call():
            self._store.put(
                f"{FOLDER}/{pack}",
                (head, *(value.data for value in values.values())),
                use_multipart=size > PART,  # a small pack takes one request instead of three
                chunk_size=PART,
                max_concurrency=self.batch_bytes // PART,
            )
        places = packs.read_head(pack, head, size)
        assert places is not None
        with self._lock:
            self._index.add(pack, places)

    def _write_without(self, pack: str, keys: set[bytes]) -> None:
        with self._lock:
            kept = {key: place for key, place in self._index.values(pack).items() if key not in keys}
        values: dict[bytes, Value] = {}
        for run in packs.runs(kept.items(), LONGEST_READ):
            found = self._fetch(run)
            if not found:
                return
            values |= found
        if values:
            self._write(values)
        with self._lock:
            self._ignored.add(pack)  # a listing that is in progress may still have it
        try:
            with contextlib.suppress(_Gone), self._call():
                self._store.delete(f"{FOLDER}/{pack}")
        except Failed:
            with self._lock:
                self._ignored.discard(pack)  # so that it can be removed later
            raise
        with self._lock:
            self._index.drop(pack)

    # The packs of other hosts.

    def _keep_looking(self, refresh: float) -> None:
        relisted = time.monotonic()
        while not self._closing.wait(refresh):
            now = time.monotonic()
            everything = now - relisted >= RELIST
            try:
                self._look(0 if everything else self._newest - OVERLAP)
            except Failed:
                with self._lock:
                    self.counts["looks_failed"] += 1
            else:
                relisted = now if everything else relisted

    def _look(self, since: int) -> None:
        """Find packs that were added or removed, among those whose names have a time from `since` on. Raises Failed.

        A name has the time when the writing began, by the clock of the host that wrote it, and the pack appears when it
        ends. So packs do not appear in the order of their names. If one appears OVERLAP after a newer one, it is found
        when all are listed again.
        """
        with self._lock:
            known = list(self._index.packs)
        listed = self._list(since)
        gone = [pack for pack in known if pack >= packs.first_name(since) and pack not in listed]
        with self._lock:
            self.counts["packs_gone"] += sum(self._index.drop(pack) for pack in gone)
            new = [pack for pack in listed if pack not in self._index.packs and pack not in self._ignored]
        with ThreadPoolExecutor(FINDERS, "kvcache-packs") as finders:
            for begin in range(0, len(new), AT_ONCE):
                _all(finders, lambda pack: self._add(pack, listed[pack]), new[begin : begin + AT_ONCE])
        newest = max(map(packs.written_at, listed), default=0)
        self._newest = min(newest, time.time_ns() // 1_000_000)  # a clock may be fast

    def _list(self, since: int) -> dict[str, int]:
        """Return the sizes of packs by name. Raises Failed, also for a listing that does not end."""
        listed: dict[str, int] = {}

        async def collect() -> None:
            async for page in self._store.list(FOLDER, offset=f"{FOLDER}/{packs.first_name(since)}", chunk_size=1000):
                for each in page:
                    name = each["path"].removeprefix(f"{FOLDER}/")
                    if packs.head_bytes(name) is not None:
                        listed[name] = each["size"]
                if len(listed) > MOST_PACKS:
                    raise Failed(f"{self._name}: there are more than {MOST_PACKS:,} packs")

        with self._call():
            try:
                asyncio.run(asyncio.wait_for(collect(), LONGEST_LISTING))
            except asyncio.TimeoutError:  # also of pages without objects, which obstore does not return
                raise Failed(f"{self._name}: the list of packs has no end after {LONGEST_LISTING:g} s") from None
        return listed

    def _add(self, pack: str, size: int) -> None:
        """Add a pack of `size` bytes to the index, unless it is not whole. Raises Failed."""
        length = packs.head_bytes(pack)
        assert length is not None
        head = self._read(pack, 0, length) if length <= size else b""
        if head is None:
            return  # it is already gone
        places = packs.read_head(pack, bytes(head), size)
        with self._lock:
            if places is None:
                self._ignored.add(pack)
                self.counts["packs_ignored"] += 1
            elif pack not in self._ignored:
                self._index.add(pack, places)

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Turn the errors of obstore into Failed."""
        try:
            yield
        except FileNotFoundError as error:
            raise _Gone(f"{self._name}: {_text(error)}") from None
        except (BaseError, OSError, ValueError) as error:
            with self._lock:
                self.counts["calls_failed"] += 1
            raise Failed(f"{self._name}: {_text(error)}") from None


class _Gone(Failed):
    """The object is not there."""


def _all(pool: ThreadPoolExecutor, call: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return the results of the calls, which run at the same time. Raises the first error once all have ended."""
    futures = [pool.submit(call, item) for item in items]
    wait(futures)
    return [future.result() for future in futures]


def _body(found: GetResult, most: int) -> memoryview:
    """Return the body of an answer, or more than `most` bytes of a longer one, whatever length the server announces."""
    return memoryview(next(iter(found.stream(min_chunk_size=most + 1)), b""))


def _text(error: Exception) -> str:
    """Return the first part of the error, up to the status, and the store's own name of it.

    Azure's URLs have the signature in the query, and the rest of the error may have it too.
    """
    text = str(error).partition("\n\nDebug source")[0]
    code = re.search(r"<Code>(\w+)</Code>", text)
    text = re.sub(r"\?\S*", "", text.partition("<")[0]).strip(" :")
    return f"{text} ({code[1]})" if code else text
