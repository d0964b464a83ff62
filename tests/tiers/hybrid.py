"""A toy engine of a model with windows or states."""

from __future__ import annotations

import random
from collections.abc import Callable

from conftest import Daemon
from scattered import write
from tiered import wait_for

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_proto.types import FULL, SUFFIX

WINDOW, STATE = GroupSpec(16, (8192, 4096), SUFFIX, 3), GroupSpec(16, (16384, 512), SUFFIX, 1)
MODELS = {
    "both": (GroupSpec(16, (32768, 8192)), WINDOW, STATE),
    "followed": (GroupSpec(16, (32768, 8192), needs_next_block=True), WINDOW),
    "windows alone": (WINDOW,),
    "states alone": (STATE,),
}


def content(name: bytes, group: int, shard: int, size: int) -> bytes:
    return random.Random(name + bytes([group, shard])).randbytes(size)


class HybridEngine:
    """Saves full blocks, and windows and states at the end of a prompt; compares every loaded byte."""

    def __init__(self, endpoint: str, groups: tuple[GroupSpec, ...]) -> None:
        self.session = Session.connect(endpoint, engine="hybrid", deadline=5.0)
        self.namespace = self.session.attach(NamespaceSpec(model="hybrid", groups=groups), range(2))
        self.groups = groups

    def save(self, names: list[bytes], end: int | None = None) -> int:
        """Save the blocks of a prompt, and what the suffix groups need after `end` of them; return how many were
        stored."""
        end, stored = end or len(names), 0
        for number, group in enumerate(self.groups):
            wanted = names if group.kind == FULL else names[end - group.needed(end) : end]
            reservation = self.namespace.reserve(wanted, group=number)
            for at, slot in zip(reservation.granted, reservation.slots, strict=True):
                for shard, size in enumerate(group.shards):
                    write(slot, content(wanted[at], number, shard, size), shard)
            stored += len(reservation.commit())
        return stored

    def load(self, names: list[bytes], request: str = "") -> int:
        with self.namespace.acquire(names, request=request) as lease:
            assert not lease.failed
            begin = 0
            for group, count in lease.parts:
                first = 0 if group.kind == FULL else lease.hits - count
                for name, slot in zip(names[first : first + count], lease.slots[begin : begin + count], strict=True):
                    for shard, size in enumerate(group.shards):
                        assert slot.view(shard) == content(name, self.groups.index(group), shard, size), "wrong bytes"
                begin += count
            return lease.hits

    def load_all(self, names: list[bytes], hits: int) -> None:
        wait_for(lambda: self.load(names) == hits, f"{hits} hits")


ConnectHybrid = Callable[[Daemon, str], HybridEngine]
