"""A Redis server that answers one command of an honest conversation as no server should.

`python hostile_redis.py [SHARE]` tries every such answer to every command (or a share of them), and prints figures.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from hostile import Meter

from kvcache_tiers.backend import Failed, Value
from kvcache_tiers.redis import _START, open_tier

TIMEOUT = 0.2  # seconds, of the tier
BLOCK = 256 << 10  # bytes; two values are large enough that heads which lie cost something
HEADER = b"header of a block"
Answer = Callable[[socket.socket, bytes], None]

_EXTREMES = (0, 1, 255, (1 << 16) - 1, BLOCK - 1, BLOCK, BLOCK + 1, (1 << 32) - 1, (1 << 64) - 1)


def fixed(reply: bytes) -> Answer:
    return lambda connection, _: connection.sendall(reply)


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


def endless(connection: socket.socket, _: bytes) -> None:
    for _ in range(4096):
        connection.sendall(b"+" + b"a" * 65535)


def dripping(connection: socket.socket, _: bytes) -> None:
    for _ in range(100):
        connection.sendall(b"+")
        time.sleep(TIMEOUT / 4)


def closing_it(connection: socket.socket, _: bytes) -> None:
    connection.shutdown(socket.SHUT_RDWR)


def half(connection: socket.socket, honest: bytes) -> None:
    connection.sendall(honest[: len(honest) // 2])
    connection.shutdown(socket.SHUT_RDWR)


def without_end(connection: socket.socket, honest: bytes) -> None:
    connection.sendall(honest[:-2] + b"xx")


def with_field(field: int, value: int) -> Answer:
    """The honest reply, but with one field of a value's head at an extreme; and only a byte of data."""

    def answer(connection: socket.socket, honest: bytes) -> None:
        data = honest.partition(b"\r\n")[2][:-2]
        if len(data) < _START.size:
            connection.sendall(honest)
            return
        facts = list(_START.unpack(data[: _START.size]))
        size = struct.calcsize("<" + "HIQ"[field - 1])
        facts[field] = min(value, (1 << 8 * size) - 1)
        head = _START.pack(*facts)
        connection.sendall(bulk(head + data[_START.size : _START.size + len(HEADER)] + b"x"))

    return answer


def answers() -> dict[str, Answer]:
    found: dict[str, Answer] = {
        "endless": endless, "dripping": dripping, "closed": closing_it, "half": half, "without end": without_end,
        "error of 5 MB": fixed(b"-ERR " + b"e" * (5 << 20) + b"\r\n"), "wrong type": fixed(b"-WRONGTYPE not it\r\n"),
        "value of 40 MB": fixed(bulk(bytes(40 << 20))),
    }  # fmt: skip
    for kind in (b"$", b"*", b":", b"+", b"-", b"%", b"?", b""):
        for rest in (b"", b"abc", b"-1", b"-2", b"0", b"1", b"12000000000", b"9" * 30, b"\0", b"\xff\xfe"):
            found[repr(kind + rest)] = fixed(kind + rest + b"\r\n")
    for field, name in ((1, "length"), (2, "parts"), (3, "total")):
        for value in _EXTREMES:
            found[f"{name} {value}"] = with_field(field, value)
    return found


class Store:
    """Answers honestly, but for the command number `bad`."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.bad, self.answer, self.seen = -1, fixed(b""), 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file, contextlib.suppress(OSError, ValueError):
            while line := file.readline():
                command = []
                for _ in range(int(line[1:])):
                    size = int(file.readline()[1:])
                    command.append(file.read(size + 2)[:-2])
                honest = self._honest(command)
                number, self.seen = self.seen, self.seen + 1
                if number == self.bad:
                    self.answer(connection, honest)
                else:
                    connection.sendall(honest)

    def _honest(self, command: list[bytes]) -> bytes:
        name, *rest = command
        if name == b"SET":
            self.values[rest[0]] = rest[1]
        elif name == b"EXISTS":
            return b":%d\r\n" % (rest[0] in self.values)
        elif name == b"UNLINK":
            return b":%d\r\n" % (self.values.pop(rest[0], None) is not None)
        elif name in (b"GET", b"GETEX"):
            value = self.values.get(rest[0])
            return b"$-1\r\n" if value is None else bulk(value)
        return b"+OK\r\n"


def content(number: int) -> bytes:
    return bytes([number]) * BLOCK


def converse(tier: Any) -> Iterator[int]:
    """Put, find, read and remove values, whatever fails; yield the number of wrong bytes after each step."""
    keys = [b"key %d" % number for number in range(2)]
    values = [Value(HEADER, memoryview(content(number))) for number in range(2)]
    buffers = [memoryview(bytearray(BLOCK)) for _ in keys]
    with contextlib.suppress(Failed):
        tier.put(keys, values)
    yield 0
    with contextlib.suppress(Failed):
        tier.contains(keys)
    yield 0
    with contextlib.suppress(Failed):
        for header in tier.get(keys, buffers):
            # What a store forges in the data itself only the checksums of the header show, which the caller compares.
            if header is not None and header != HEADER:
                yield len(header)
    yield 0
    with contextlib.suppress(Failed):
        tier.remove(keys)
    yield 0


def attack(share: float = 1.0) -> str:
    """Return figures. `share` is the part of all answers that is tried."""
    kinds = answers().items()
    with closing(Store()) as store:
        url = f"redis://127.0.0.1:{store.port}?timeout={TIMEOUT}&max_value=128KiB"
        with closing(open_tier(url, memoryview(b""))) as tier:
            opening, store.seen = store.seen, 0
            assert not sum(converse(tier))
            commands = opening + store.seen

        def work(bad: int, answer: Answer) -> int:
            store.values.clear()
            store.seen, store.bad, store.answer = 0, bad, answer
            wrong = 0
            with contextlib.suppress(Failed), closing(open_tier(url, memoryview(b""))) as tier:
                wrong = sum(converse(tier))
                store.bad = -1
                assert sum(tier.put([b"after"], [Value(HEADER, memoryview(content(7)))])) == 1, "it recovers"
            return wrong

        cases = [(bad, name, answer) for bad in range(commands) for name, answer in kinds]
        meter = Meter()
        for bad, name, answer in cases[:: max(1, round(1 / share))]:
            meter.case(
                lambda name=name, bad=bad: f"{name} as reply {bad}", lambda bad=bad, answer=answer: work(bad, answer)
            )
    return meter.report()


if __name__ == "__main__":
    print(attack(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0))
