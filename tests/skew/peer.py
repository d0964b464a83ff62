"""A client of the version in PYTHONPATH: JSON lines in, JSON lines out. It uses what both versions have.

{"op": "open", "endpoint": ..., "engine": ...}
{"op": "save", "hashes": [hex, ...]}    each block filled with what its hash says
{"op": "load", "hashes": [hex, ...]}    -> hits, and whether every byte is right
{"op": "hint", "hashes": [hex, ...]}    -> whether hints were sent; only for versions that have them
{"op": "detach"}, {"op": "up"}, {"op": "log"}
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import kvcache_client
from kvcache_client import GroupSpec, NamespaceSpec, Session

SIZES = (4096, 100, 8192)
SPEC = NamespaceSpec(model="skew", groups=[GroupSpec(16, SIZES)])
PATIENCE = 30.0

said: list[str] = []


class Said(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        said.append(f"{record.levelname} {record.getMessage()}")


class Peer:
    def __init__(self) -> None:
        self.session: Session | None = None
        self.namespace: Any = None
        self.leases: list[Any] = []

    def open(self, endpoint: str, engine: str) -> dict[str, Any]:
        self.session = Session.open(endpoint, engine=engine, label="skew", deadline=5.0)
        self.namespace = self.session.attach(SPEC, shards=(0, 1, 2))
        return {"version": kvcache_client.__version__, "from": kvcache_client.__file__, "up": self.session.up}

    def save(self, hashes: list[str]) -> dict[str, Any]:
        run = [bytes.fromhex(each) for each in hashes]
        reservation = self.namespace.reserve(run)
        for at, slot in zip(reservation.granted, reservation.slots, strict=True):
            for shard, size in enumerate(SIZES):
                self.session.view(slot, shard)[:] = content(run[at], shard, size)
        verdicts = reservation.commit()
        return {"granted": len(reservation.granted), "visible": sum(verdict == 0 for verdict in verdicts)}

    def load(self, hashes: list[str], keep: bool = False) -> dict[str, Any]:
        run = [bytes.fromhex(each) for each in hashes]
        lease = self.namespace.acquire(run)
        right = all(
            bytes(self.session.view(slot, shard)) == content(each, shard, size)
            for each, slot in zip(run, lease.slots, strict=False)
            for shard, size in enumerate(SIZES)
        )
        current = bool(self.session.region.current(lease.packed).all()) if lease.hits else True
        if keep:
            self.leases.append(lease)
        else:
            lease.release()
        return {"hits": lease.hits, "right": right and current, "failed": lease.failed}

    def hint(self, hashes: list[str]) -> dict[str, Any]:
        run = [bytes.fromhex(each) for each in hashes]
        return {"retain": self.namespace.retain(run), "drop": self.namespace.drop(run)}

    def detach(self) -> dict[str, Any]:
        self.session.detach(self.namespace)
        return {}

    def up(self, wanted: bool) -> dict[str, Any]:
        """Wait until the session is up, or down."""
        until = time.monotonic() + PATIENCE
        while (self.session.up and self.namespace.attached) != wanted and time.monotonic() < until:
            time.sleep(0.01)
        return {"up": self.session.up and self.namespace.attached}

    def tries(self, count: int) -> dict[str, Any]:
        """Wait until so many attempts to connect have failed."""
        until = time.monotonic() + PATIENCE
        while self.session.counters.get("connects_failed", 0) < count and time.monotonic() < until:
            time.sleep(0.01)
        return {"failed": self.session.counters.get("connects_failed", 0)}

    def log(self) -> dict[str, Any]:
        return {"said": said}


def content(block: bytes, shard: int, size: int) -> bytes:
    return (bytes([shard]) + block * (size // len(block) + 1))[:size]


def main() -> None:
    logger = logging.getLogger("kvcache_client")
    logger.addHandler(Said(logging.WARNING))
    peer = Peer()
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(peer, command.pop("op"))(**command)), flush=True)
    if peer.session is not None:
        peer.session.close()


if __name__ == "__main__":
    main()
