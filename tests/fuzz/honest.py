"""An honest engine beside the fuzzer: `honest.py ENDPOINT`. For each line it reads, it sends lookups for a while.

It prints the median of acquire and release of 64 hashes that are all hits, in microseconds.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

from kvcache_proto import messages as m
from kvcache_proto.types import GroupSpec, NamespaceSpec, Outcome
from kvcache_server.admin_client import AdminClient

SPEC = NamespaceSpec("honest", (GroupSpec(16, 4096),))
HASHES = [number.to_bytes(32, "big") for number in range(64)]
PAUSE = 0.001  # between two questions: an engine's steps are no shorter


def main(endpoint: str) -> None:
    with AdminClient(endpoint, engine="honest", timeout=20.0) as engine:
        namespace = engine.ask(m.Attach(0, b"", SPEC, (0,))).namespace

        def store() -> None:
            reserved = engine.ask(m.Reserve(0, b"", namespace, [m.Run(HASHES)]))
            engine.ask(m.Settle(0, b"", engine.geometry.region_id, reserved.reservation, (0,), Outcome.COMMITTED))

        store()
        print(len(HASHES), flush=True)
        for line in sys.stdin:
            until, took = time.monotonic() + float(line), []
            while time.monotonic() < until:
                begin = time.perf_counter()
                lease = engine.ask(m.Acquire(0, b"", namespace, HASHES))
                if not lease.hits:  # the fuzzer has cleared all there is
                    store()
                    continue
                took.append(time.perf_counter() - begin)
                assert lease.hits == len(HASHES), lease
                engine.tell(m.Release(0, b"", [lease.lease]))
                time.sleep(PAUSE)
            print(json.dumps([len(took), statistics.median(took) * 1e6]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
