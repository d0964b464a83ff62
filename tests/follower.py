"""Who follows KV events: keeps a number for each topic, asks again where one is missing, and so knows what is there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import zmq

MakeSocket = Callable[[int], Any]
PATIENCE = 20.0
END = (-1).to_bytes(8, "big", signed=True)
Known = set[tuple[int | None, int | bytes]]
Message = tuple[bytes, int, bytes]  # topic, number, payload


class Follower:
    """`known` holds (group, hash) of what is cached, by topic.

    `replay(start, topic)` returns what a replay tells; `decode` makes events of a payload: by default, whatever their
    schema, their fields by name.
    """

    def __init__(
        self, replay: Callable[[int, bytes], Iterable[Message]], decode: Callable[[bytes], list[dict[str, Any]]]
    ) -> None:
        self.known: dict[bytes, Known] = {}
        self.last: dict[bytes, int] = {}
        self.gaps = 0
        self._replay, self._decode = replay, decode

    def hear(self, topic: bytes, number: int, payload: bytes) -> None:
        """Take one message; fill the gap before it first."""
        last = self.last.get(topic, -1)
        if last >= 0 and number > last + 1:
            self.gaps += 1
            self.catch_up(topic)
        if number > self.last.get(topic, -1):
            self._take(topic, number, payload)

    def catch_up(self, topic: bytes) -> None:
        """Ask for all that this follower has not heard of, from the very first where it has heard nothing."""
        for name, number, payload in self._replay(self.last.get(topic, -1) + 1, topic):
            if number > self.last.get(name, -1):
                self._take(name, number, payload)

    def _take(self, topic: bytes, number: int, payload: bytes) -> None:
        known = self.known.setdefault(topic, set())
        for event in self._decode(payload):
            kind = event["type"]
            if kind == "AllBlocksCleared":
                known.clear()
                continue
            assert event["medium"] == "CPU"
            blocks = {(event["group_idx"], name) for name in event["block_hashes"]}
            assert blocks, "an event of no block"
            if kind == "BlockStored":
                known |= blocks
            else:
                assert kind == "BlockRemoved"
                known -= blocks
        self.last[topic] = number


def maps(payload: bytes) -> list[dict[str, Any]]:
    """Decode events that are maps."""
    _, events, rank = msgspec.msgpack.decode(payload)
    assert rank is None
    return list(events)


@contextlib.contextmanager
def sockets() -> Iterator[MakeSocket]:
    """`with sockets() as socket`: `socket(kind)` makes one, which is closed at the end."""
    context: zmq.Context[Any] = zmq.Context()
    made = []

    def make(kind: int) -> Any:
        made.append(context.socket(kind))
        return made[-1]

    try:
        yield make
    finally:
        context.destroy(linger=0)


class Subscriber(Follower):
    """A SUB and, for what is missing, a DEALER: a REQ would take one answer alone."""

    def __init__(
        self,
        socket: MakeSocket,
        report: dict[str, Any],
        topic: bytes = b"",
        decode: Callable[[bytes], list[dict[str, Any]]] = maps,
        **options: int,
    ) -> None:
        super().__init__(self._ask, decode)
        self.sub, self.dealer = socket(zmq.SUB), socket(zmq.DEALER)
        for name, value in options.items():
            self.sub.setsockopt(getattr(zmq, name), value)
        self.sub.setsockopt(zmq.SUBSCRIBE, topic)
        self.sub.connect(report["endpoint"])
        self.dealer.connect(report["replay"])

    def _ask(self, start: int, topic: bytes) -> Iterator[Message]:
        self.dealer.send_multipart([b"", start.to_bytes(8, "big"), topic])
        while True:
            assert self.dealer.poll(PATIENCE * 1000), "the replay does not end"
            empty, topic, number, payload = self.dealer.recv_multipart()
            assert not empty
            if number == END:
                assert not payload
                return
            yield topic, int.from_bytes(number, "big"), payload

    def read_until(self, found: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + PATIENCE
        while not found():
            assert time.monotonic() < until, f"{what} did not come: {self.known}"
            if self.sub.poll(20):
                topic, number, payload = self.sub.recv_multipart()
                self.hear(topic, int.from_bytes(number, "big"), payload)
