"""How fast a tier moves values to and from its store, beside a plain client of the same store. For tiers.py.

A plain client is a Backend, too: `kvcache_tiers.bench` gives it the same values, batches and threads. It stores only
the data: no header, no checksum, no lifetime.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import select
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parent.parent / folder) for folder in (".", "tiers")]

from mooncake_servers import MooncakeStore  # noqa: E402
from mooncake_servers import missing as mooncake_missing  # noqa: E402
from redis_servers import KINDS, Server, Servers  # noqa: E402

from kvcache_proto.sizes import format_size  # noqa: E402
from kvcache_tiers import mooncake, redis  # noqa: E402
from kvcache_tiers.backend import Backend, Failed, Value  # noqa: E402
from kvcache_tiers.bench import HEADER, Bench  # noqa: E402
from kvcache_tiers.disk import DiskTier  # noqa: E402
from kvcache_tiers.process import READERS, WRITERS  # noqa: E402
from kvcache_tiers.segments import PAGE  # noqa: E402

LMCACHE_THREADS = 8  # the default of LMCache's adapter


class Amount(NamedTuple):
    """Values of `size` bytes, `total` bytes of them, in each of `rounds` rounds."""

    size: int
    total: int
    rounds: int

    @property
    def values(self) -> int:
        return max(1, self.total // self.size)

    def __str__(self) -> str:
        return f"{format_size(self.total)} in values of {format_size(self.size)}, medians of {self.rounds} rounds"


# Turns.


class Contestant(Protocol):
    def prepare(self) -> None:
        """Do what need not be measured, before a round."""
        ...

    def write(self) -> float:
        """Write all values; return bytes per second."""
        ...

    def read(self) -> float:
        """Read them; return bytes per second."""
        ...


class ByBackend:
    """Writes new values in each round, and removes them once they have been read."""

    def __init__(self, backend: Backend, region: memoryview, amount: Amount) -> None:
        self._make = functools.partial(Bench, backend, region, amount.size, amount.values)

    def prepare(self) -> None:
        self._bench = self._make()

    def write(self) -> float:
        return self._bench.put()

    def read(self) -> float:
        rate = self._bench.get()
        self._bench.remove()
        return rate


def by_turns(contestants: Mapping[str, Contestant], rounds: int, rest: float = 0.0) -> list[dict[str, Any]]:
    """Return bytes per second of each round. What comes before the first one, such as new files, is not counted.

    Seconds of `rest` come before all that is measured. Disks of virtual machines are often limited to a rate, but
    faster for a moment after they were idle: all contestants should find them so.
    """
    found = []
    names = list(contestants)
    for number in range(-1, rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            contestants[name].prepare()
            for what in ("write", "read"):
                time.sleep(rest)
                rate = getattr(contestants[name], what)()
                if number >= 0:
                    found.append({"who": name, "what": what, "round": number, "bytes_per_second": rate})
    return found


def table(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each contestant: the first one is the tier, whose rate is divided by that of each other."""
    names = list(dict.fromkeys(each["who"] for each in samples))

    def rate(who: str, what: str) -> float:
        return statistics.median(s["bytes_per_second"] for s in samples if (s["who"], s["what"]) == (who, what))

    lines = [f"{'':<34}{'write':>14}{'tier is':>10}{'read':>14}{'tier is':>10}"]
    for name in names:
        line = f"{name:<34}"
        for what in ("write", "read"):
            line += f"{format_size(rate(name, what)) + '/s':>14}"
            line += f"{rate(names[0], what) / rate(name, what):>8.2f} x" if name != names[0] else " " * 10
        lines.append(line.rstrip())
    return lines


def make_region(least: int) -> memoryview:
    return memoryview(mmap.mmap(-1, max(READERS, WRITERS) * max(least, 32 << 20)))


# A disk.


class Fio:
    """fio with as many threads as the tier has, each in a part of one file of its own."""

    def __init__(self, folder: Path, amount: Amount, direct: bool) -> None:
        self._path, self._amount, self._direct = folder / "fio", amount, direct
        with self._path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, amount.values * amount.size)

    def prepare(self) -> None:
        """The file is there."""

    def write(self) -> float:
        return self._run("write", WRITERS)

    def read(self) -> float:
        return self._run("read", READERS)

    def _run(self, what: str, jobs: int) -> float:
        part = max(1, self._amount.values // jobs) * self._amount.size
        command = ["fio", "--name=plain", f"--filename={self._path}", f"--rw={what}", f"--bs={self._amount.size}"]
        command += [f"--numjobs={jobs}", f"--size={part}", f"--offset_increment={part}", "--thread", "--ioengine=psync"]
        command += [f"--direct={int(self._direct)}", "--group_reporting", "--output-format=json"]
        if not self._direct and what == "write":
            command.append("--fdatasync=1")  # as the tier does
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        (job,) = json.loads(output)["jobs"]
        return float(job[what]["bw_bytes"])


def disk(folder: Path, amount: Amount, direct: bool, rest: float) -> Iterator[str]:
    """Yield lines about the disk tier beside fio, both in `folder`."""
    if not shutil.which("fio"):
        yield "disk is left out: no fio on the PATH (apt-get install fio)"
        return
    region = make_region(amount.size)
    tier = DiskTier(folder / "tier", 2 * amount.values * amount.size, direct)
    try:
        contestants: dict[str, Contestant] = {
            "disk tier": ByBackend(tier, region, amount),
            "fio": Fio(folder, amount, direct),
        }
        samples = by_turns(contestants, amount.rounds, rest)
    finally:
        tier.close()
    yield f"disk: {amount}; {WRITERS} threads write, {READERS} read{'' if direct else '; through the page cache'}"
    yield from table(samples)
    if tier.counts:
        yield f"the tier counted: {dict(tier.counts)}"


def disk_restart(folder: Path, values: int, rounds: int) -> Iterator[str]:
    """Yield how long it takes to open a disk tier that has `values` values, until it has found all of them."""
    folder = folder / "restart"
    keys = [number.to_bytes(50, "big") for number in range(values)]
    tier = DiskTier(folder, 2 * values * PAGE)
    data = memoryview(mmap.mmap(-1, PAGE))
    batches = [keys[at : at + 64] for at in range(0, values, 64)]
    with ThreadPoolExecutor(8) as pool:
        stored = pool.map(lambda batch: tier.put(batch, [Value(HEADER, data)] * len(batch)), batches)
        assert all(map(all, stored)), tier.counts
    tier.close()
    taken = []
    for _ in range(rounds):
        _drop_from_page_cache(folder)
        begin = time.perf_counter()
        tier = DiskTier(folder, 2 * values * PAGE)
        found = tier.contains(keys)
        seconds = time.perf_counter() - begin
        tier.close()
        assert all(found), f"{found.count(False)} of {values} values are gone"
        taken.append(seconds)
    yield f"a disk tier finds {values:,} values again in {statistics.median(taken):.2f} s, at most {max(taken):.2f} s"


def _drop_from_page_cache(folder: Path) -> None:
    os.sync()
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# Redis and Valkey.


class PlainRedis:
    """redis-py with hiredis: a pipeline per batch, whose replies are copied to where they belong."""

    def __init__(self, server: Server, batch_bytes: int) -> None:
        self.counts: Counter[str] = Counter()
        self.batch_bytes = batch_bytes
        self._client = server.client()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [bool(each) for each in self._run("exists", [(key,) for key in keys])]

    def put(self, keys: Sequence[bytes], values: Sequence[Value]) -> list[bool]:
        commands = [(key, value.data) for key, value in zip(keys, values, strict=True)]
        return [bool(each) for each in self._run("set", commands)]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bytes | None]:
        replies = self._run("get", [(key,) for key in keys])
        for reply, buffer in zip(replies, buffers, strict=True):
            if reply is not None:
                buffer[:] = reply
        return [None if reply is None else HEADER for reply in replies]

    def remove(self, keys: Sequence[bytes]) -> None:
        self._run("unlink", [(key,) for key in keys])

    def close(self) -> None:
        self._client.close()

    def _run(self, name: str, commands: Sequence[tuple[bytes | memoryview, ...]]) -> list[Any]:
        with self._client.pipeline(transaction=False) as pipeline:
            for arguments in commands:
                getattr(pipeline, name)(*arguments)
            return list(pipeline.execute())


class LMCacheClient:
    """What LMCache's L2 adapter `resp` calls: native threads, each with a connection, which share out each batch.

    The adapter itself, which only turns keys into text and objects into buffers, is left out: it needs LMCache's pools.
    """

    def __init__(self, native: Any, batch_bytes: int) -> None:
        self.counts: Counter[str] = Counter()
        self.batch_bytes = batch_bytes
        self._native = native
        self._lock = threading.Lock()
        self._running: dict[int, Future[list[bool] | None]] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._take_answers)
        self._thread.start()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        found = self._run(self._native.submit_batch_exists, keys)
        return list(map(bool, found or ()))

    def put(self, keys: Sequence[bytes], values: Sequence[Value]) -> list[bool]:
        self._run(self._native.submit_batch_set, keys, [value.data for value in values])
        return [True] * len(keys)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bytes | None]:
        found = self._run(self._native.submit_batch_get, keys, list(buffers)) or [True] * len(keys)
        return [HEADER if each else None for each in found]

    def remove(self, keys: Sequence[bytes]) -> None:
        self._run(self._native.submit_batch_delete, keys)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._native.close()

    def _run(self, submit: Callable[..., int], keys: Sequence[bytes], *rest: object) -> list[bool] | None:
        """Return the answers for each key, None where there are none. Raises Failed."""
        answer: Future[list[bool] | None] = Future()
        with self._lock:  # else its end could come before its number is known
            self._running[submit([key.hex() for key in keys], *rest)] = answer
        return answer.result()

    def _take_answers(self) -> None:
        with select.epoll() as poll:
            poll.register(self._native.event_fd(), select.EPOLLIN)
            while not self._closing.is_set():
                if not poll.poll(0.1):
                    continue
                with self._lock:
                    ended = [(self._running.pop(number), *rest) for number, *rest in self._native.drain_completions()]
                for answer, good, error, flags in ended:
                    if good:
                        answer.set_result(flags)
                    else:
                        answer.set_exception(Failed(str(error)))


def lmcache_client(folder: str | None) -> Any:
    """Return the class of LMCache's native client of Redis, or why there is none."""
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    if folder:
        sys.path.append(folder)
    try:
        from lmcache.lmcache_redis import LMCacheRedisClient
    except ImportError as error:
        how = "pip install --no-deps --target FOLDER lmcache, then --lmcache FOLDER"
        return f"LMCache is left out: {error} ({how})"
    return LMCacheRedisClient


def redis_and_valkey(folder: Path, amount: Amount, lmcache: str | None) -> Iterator[str]:
    """Yield lines about the tier of Redis beside redis-py and LMCache, with each kind of server."""
    native = lmcache_client(lmcache)
    if isinstance(native, str):
        yield native
    region = make_region(amount.size)
    for kind in KINDS:
        servers = Servers(folder / kind)
        try:
            server = servers.start(kind)
            samples = _by_clients(server, native, region, amount)
        except pytest.skip.Exception as error:
            yield f"{kind} is left out: {error}"
            continue
        finally:
            servers.close()
        yield f"{kind}: {amount}; {WRITERS} threads write, {READERS} read"
        yield from table(samples)


def _by_clients(server: Server, native: Any, region: memoryview, amount: Amount) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        tier = redis.open_tier(server.url, region)
        clients: dict[str, Backend] = {f"tier of {server.kind}": tier, "redis-py": PlainRedis(server, tier.batch_bytes)}
        if not isinstance(native, str):
            for threads in (WRITERS, READERS, LMCACHE_THREADS):
                client = native(server.address, server.port, threads)
                clients[f"LMCache's client, {threads} threads"] = LMCacheClient(client, tier.batch_bytes)
        for each in clients.values():
            stack.callback(each.close)
        return by_turns({name: ByBackend(each, region, amount) for name, each in clients.items()}, amount.rounds)


# Mooncake.


class PlainMooncake:
    """The library's own calls for memory that is registered."""

    def __init__(self, store: Any, batch_bytes: int) -> None:
        self.counts: Counter[str] = Counter()
        self.batch_bytes = batch_bytes
        self._store = store

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [code == 1 for code in self._store.batch_is_exist([key.hex() for key in keys])]

    def put(self, keys: Sequence[bytes], values: Sequence[Value]) -> list[bool]:
        codes = self._store.batch_put_from([key.hex() for key in keys], *_places([value.data for value in values]))
        return [code == 0 for code in codes]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bytes | None]:
        codes = self._store.batch_get_into([key.hex() for key in keys], *_places(buffers))
        return [HEADER if code == len(buffer) else None for code, buffer in zip(codes, buffers, strict=True)]

    def remove(self, keys: Sequence[bytes]) -> None:
        self._store.batch_remove([key.hex() for key in keys], True)

    def close(self) -> None:
        """The store is the tier's."""


def _places(buffers: Sequence[memoryview]) -> tuple[list[int], list[int]]:
    return [np.frombuffer(each, np.uint8).ctypes.data for each in buffers], [len(each) for each in buffers]


def mooncake_store(folder: Path, amount: Amount) -> Iterator[str]:
    """Yield lines about the tier of Mooncake beside the library itself, by the same client of the store."""
    why = mooncake_missing()
    if why:
        yield f"mooncake is left out: {why}"
        return
    region = make_region(amount.size)
    with _mooncake_store(folder, 2 * amount.total) as url:
        tier = mooncake.open_tier(url, region)
        try:
            plain = PlainMooncake(tier.store, tier.batch_bytes)
            contestants: dict[str, Contestant] = {"tier of Mooncake": ByBackend(tier, region, amount)}
            contestants["batch_put_from, batch_get_into"] = ByBackend(plain, region, amount)
            samples = by_turns(contestants, amount.rounds)
        finally:
            tier.close()
    yield f"mooncake: {amount}; {WRITERS} threads write, {READERS} read"
    yield from table(samples)
    if tier.counts:
        yield f"the tier counted: {dict(tier.counts)}"


@contextmanager
def _mooncake_store(folder: Path, least: int) -> Iterator[str]:
    """Run a store with memory for `least` bytes; yield its URL."""
    store = MooncakeStore(folder)
    try:
        store.add_node(f"{max(least >> 20, 512)} MB")
        yield store.url
    finally:
        store.close()
