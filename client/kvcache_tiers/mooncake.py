"""A Mooncake Store as a tier: `mooncake://master-host:50051/?protocol=rdma&device=mlx5_0`.

The store's nodes hold the values in their memory, its master knows their places, and the bytes go directly between a
node's memory and the region. The store itself decides which values give way.

- `segment` is the size of the memory that this host adds to the store; none by default, so that another process has to
  add some, such as `mooncake_client`. Its values are lost when this process ends.
- `metadata` is the URL of a metadata server, as in http://master-host:8080/metadata, from which nodes learn how to
  reach each other. By default they ask each other.
- `protocol` is tcp (the default) or rdma, and `device` the devices for rdma, separated by commas.
- `hostname` is the address at which the other nodes reach this one, by default the one that faces the master; name it
  if that is localhost and there are other hosts.
- `local_buffer` is memory that the library copies through if it cannot transfer directly; 16 MiB by default.
- `timeout` is the number of seconds that a master or a node may be silent; 5 by default. A call for up to 64 values
  lasts at most about four times that. If nothing listens at the master's address any more, it is about 4.3 s
  regardless. For rdma, the devices' own retries decide how long a node may be silent: a transfer that was given up
  could still write into the region.

The library listens on two TCP ports of all addresses, whatever `hostname` and MC_TCP_BIND_ADDRESS are, and without
authentication: with tcp, anyone who reaches them can read and write the region. Use it in a network that you trust, or
behind a firewall. It is native code that can crash or hang its process.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import queue
import socket
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from kvcache_proto.errors import ConfigError
from kvcache_proto.sizes import parse_size
from kvcache_tiers.backend import Backend, Failed, Value
from kvcache_tiers.urls import options, seconds, shown, split_url

PORT = 50051  # the master's own default
BATCH = 64  # values in one call of the library
CALLS = 8  # at the same time; further calls wait

# A value is the slot's data and then a room with the header: a read has to name the exact size of the value, and does
# not know the header's size. Nearly all headers fit the small room.
#
# The checksum is of data, header and key. If a value is removed during a read, its memory goes to another one at once,
# and the reader would not notice.
_FIXED = struct.Struct("<QI")  # checksum, bytes of the header
ROOMS = (1 << 10, (16 << 10) + 64)  # bytes

# The library's codes. A value that is shorter than the buffers is also "not reached".
_NO_ROOM, _TOO_LARGE, _NOT_READY, _NOT_FOUND, _EXISTS, _NOT_REACHED = -200, -600, -703, -704, -705, -800
_MASTER = range(-1099, -899)  # it does not answer, or does not serve
_REASONS = {_NO_ROOM: "no_room", _NOT_READY: "not_ready", _NOT_REACHED: "transfers_failed"}


class Options(NamedTuple):
    """The options in a URL; sizes in bytes, `timeout` in seconds."""

    master: str
    port: int
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device: str = ""
    segment: int = 0
    local_buffer: int = 16 << 20
    hostname: str = ""
    timeout: float = 5.0


def parse(url: str) -> Options:
    """Return the options in a tier's URL. Raises ConfigError."""
    split = split_url(url)
    try:
        port = split.port or PORT
    except ValueError as error:
        raise ConfigError(f"{shown(split)}: {error}") from error
    given: dict[str, Any] = {**options(split, *Options._fields[2:])}
    if not split.hostname or split.path not in ("", "/") or "@" in split.netloc:
        raise ConfigError(f"{shown(split)}: a master, as in mooncake://master-host:{PORT}/")
    for name in given.keys() & {"segment", "local_buffer"}:
        given[name] = parse_size(given[name])
    if "timeout" in given:
        given["timeout"] = seconds(split, "timeout", given["timeout"], float, 0.1, 60.0)
    found = Options(split.hostname, port, **given)
    if found.protocol not in ("tcp", "rdma") or (found.device and found.protocol == "tcp"):
        raise ConfigError(f"{shown(split)}: protocol is tcp or rdma, and device is for rdma")
    return found


def open_tier(url: str, region: memoryview) -> MooncakeTier:
    """Open `mooncake://HOST:PORT/`, and register the region with the library. Raises ConfigError or Failed.

    For rdma the whole region is pinned, which requires `ulimit -l unlimited`.
    """
    given = parse(url)
    for name, value in environment(given.timeout).items():
        os.environ.setdefault(name, value)
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ConfigError(
            f"a tier of mooncake: {error}; pip install 'kvcache-server[mooncake]', and the system's libibverbs1"
        ) from error
    facing = _reach(given)
    master = f"[{given.master}]:{given.port}" if ":" in given.master else f"{given.master}:{given.port}"
    store = MooncakeDistributedStore()
    code = store.setup(
        given.hostname or facing,
        given.metadata,
        given.segment,
        given.local_buffer,
        given.protocol,
        given.device,
        master,
    )
    if code:
        raise Failed(f"{url}: the library could not join the store (code {code}); its log above says why")
    try:
        return MooncakeTier(store, master, region)
    except ConfigError:
        store.close()
        raise


def environment(timeout: float) -> dict[str, str]:
    """Return the settings that the library takes only from the environment, some of them when it is imported.

    The user's settings stay. `timeout` is in seconds.
    """
    seconds, milliseconds = str(math.ceil(timeout)), str(math.ceil(1000 * timeout))
    return {
        "MC_RPC_TIMEOUT_MS": milliseconds,
        "MC_RPC_CONNECT_TIMEOUT_MS": milliseconds,
        "MC_HANDSHAKE_CONNECT_TIMEOUT": seconds,
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        # Requests queued for a silent node fail one after another on each connection (lane). With 4 lanes and a long
        # queue, the defaults, 16 values take ten timeouts.
        "MC_TCP_LANES_PER_PEER": "16",
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "16",
        "MC_TCP_ADMISSION_TIMEOUT_MS": milliseconds,  # to the queue
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # else opening takes 20 times as long without a master
        "MC_LOG_LEVEL": "WARNING",
    }


class MooncakeTier(Backend):
    """Counters: `counts`, by name. `store` is the library's client.

    A call raises Failed while the master does not answer, and works again when it does: the library reconnects. A
    restarted master knows no values. The values of a node that is gone are misses; until the master notices (10 s by
    default), `contains` still reports them, and a value that would be put there is left out.
    """

    batch_bytes = 32 << 20

    def __init__(self, store: Any, master: str, region: memoryview) -> None:
        """Take a `store` that is set up. Raises ConfigError if the region cannot be registered."""
        self.counts: Counter[str] = Counter()
        self.store, self._master, self._region = store, master, region
        self._scratch = mmap.mmap(-1, CALLS * BATCH * ROOMS[-1])  # for the headers of each call
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(CALLS):
            self._free.put(number * BATCH * ROOMS[-1])
        for view in (region, memoryview(self._scratch)):
            code = store.register_buffer(_address(view), view.nbytes)
            if code:
                raise ConfigError(
                    f"{master}: the library cannot register {view.nbytes} bytes of memory (code {code}); "
                    "rdma takes `ulimit -l unlimited`"
                )

    # The protocol.

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        codes = self._call("batch_is_exist", keys)
        for code in codes:
            self._count(code, 0, 1)
        return [code == 1 for code in codes]

    def put(self, keys: Sequence[bytes], values: Sequence[Value]) -> list[bool]:
        codes: list[int] = []
        for begin in range(0, len(keys), BATCH):
            chosen, batch = keys[begin : begin + BATCH], values[begin : begin + BATCH]
            with self._headers() as headers:
                buffers, sizes = [], []
                for key, (header, data), (address, place) in zip(chosen, batch, headers, strict=False):
                    packed = _FIXED.pack(_checksum(key, header, data), len(header)) + header
                    room = ROOMS[len(packed) > ROOMS[0]]
                    place[:room] = packed.ljust(room, b"\0")
                    buffers.append([_address(data), address])
                    sizes.append([data.nbytes, room])
                codes += self._call("batch_put_from_multi_buffers", chosen, buffers, sizes)
        for code in codes:
            self._count(code, 0, _EXISTS)
        return [code in (0, _EXISTS) for code in codes]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bytes | None]:
        headers: list[bytes | None] = [None] * len(keys)
        rest = list(range(len(keys)))
        for room in ROOMS:
            batches = [rest[begin : begin + BATCH] for begin in range(0, len(rest), BATCH)]
            rest = []
            for numbers in batches:
                chosen = [keys[each] for each in numbers], [buffers[each] for each in numbers]
                for number, code, header in zip(numbers, *self._get(*chosen, room), strict=True):
                    headers[number] = header
                    if code == _TOO_LARGE:
                        rest.append(number)
        self.counts["other_size"] += len(rest)
        return headers

    def remove(self, keys: Sequence[bytes]) -> None:
        # By force, since a value that was read or looked for is protected for 10 s.
        for code in self._call("batch_remove", keys, True):
            self._count(code, 0, _NOT_FOUND)

    def close(self) -> None:
        if self.store.close():
            self.counts["close_failed"] += 1

    # The library.

    def _get(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], room: int
    ) -> tuple[list[int], list[bytes | None]]:
        """Read values whose headers are in rooms of this size. Return the library's codes, and the headers found."""
        found: list[bytes | None] = []
        with self._headers() as headers:
            places = [place for place, _ in zip(headers, buffers, strict=False)]
            codes = self._call(
                "batch_get_into_multi_buffers",
                keys,
                [[_address(data), address] for data, (address, _) in zip(buffers, places, strict=True)],
                [[data.nbytes, room] for data in buffers],
            )
            for key, code, data, (_, place) in zip(keys, codes, buffers, places, strict=True):
                header = None
                if code < 0:
                    self._count(code, _NOT_FOUND, _TOO_LARGE)
                else:
                    checksum, length = _FIXED.unpack_from(place)
                    header = bytes(place[_FIXED.size : _FIXED.size + length])
                    if code != data.nbytes + room or checksum != _checksum(key, header, data):
                        self.counts["not_whole"] += 1
                        header = None
                found.append(header)
        return codes, found

    def _call(self, name: str, keys: Sequence[bytes], *rest: object) -> list[int]:
        """Return the library's code for each key. Raises Failed if the master fails."""
        if not keys:
            return []
        codes: list[int] = getattr(self.store, name)([key_name(key) for key in keys], *rest)
        for code in codes:
            if code in _MASTER:
                self.counts["master_failed"] += 1
                raise Failed(f"{self._master}: the master does not answer (code {code})")
        if len(codes) != len(keys):
            self.counts["bad_answers"] += 1
            raise Failed(f"{self._master}: {len(codes)} answers for {len(keys)} keys")
        return codes

    def _count(self, code: int, *fine: int) -> None:
        if code not in fine:
            self.counts[_REASONS.get(code, f"code_{code}")] += 1

    @contextlib.contextmanager
    def _headers(self) -> Iterator[list[tuple[int, memoryview]]]:
        """Lend places for the headers of a call, each with its address."""
        begin = self._free.get()
        try:
            room, view = ROOMS[-1], memoryview(self._scratch)
            address = _address(view)
            offsets = range(begin, begin + BATCH * room, room)
            yield [(address + offset, view[offset : offset + room]) for offset in offsets]
        finally:
            self._free.put(begin)


def _reach(given: Options) -> str:
    """Return the address from which this host reaches the master. Raises Failed.

    The library itself would try for a long time, and not report the cause.
    """
    try:
        with socket.create_connection((given.master, given.port), given.timeout) as connection:
            return str(connection.getsockname()[0])
    except (OSError, UnicodeError) as error:  # Unicode: a name that cannot be a host's
        raise Failed(f"{given.master}:{given.port}: no master of a Mooncake Store: {error}") from error


def key_name(key: bytes) -> str:
    """Return the name of a key in the store, which other programs may use, too."""
    return f"kvcache/{key.hex()}"


def _checksum(key: bytes, header: bytes, data: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data, seed=xxhash.xxh3_64_intdigest(key + header))


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
