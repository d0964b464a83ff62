"""Who follows KV events: keeps a number for each topic, asks again where one is missing, and so knows what is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

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
