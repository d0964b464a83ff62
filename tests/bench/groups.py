"""Compare lookups of two KV cache groups with those of one, in turns, with one daemon: each is one round trip and a
release, with hits only.

    python tests/bench/groups.py [--turns 400]
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time

from rig import one_daemon

from kvcache_client import Session
from kvcache_client.session.namespace import Namespace
from kvcache_proto.messages import Run
from kvcache_proto.types import MAX_BLOCKS, SUFFIX, GroupSpec, NamespaceSpec

WIDTHS = (64, 1024)
FULL_GROUP = GroupSpec(16, 4096)
KINDS = {
    "full attention": (FULL_GROUP,),
    "and a window of 8 blocks": (FULL_GROUP, GroupSpec(16, 4096, SUFFIX, 8)),
    "and a state": (FULL_GROUP, GroupSpec(16, 4096, SUFFIX, 1)),
}


def store(namespace: Namespace, groups: tuple[GroupSpec, ...], hashes: list[bytes]) -> None:
    runs = [
        Run(hashes[at : at + MAX_BLOCKS], hashes[at - 1] if at else None) for at in range(0, len(hashes), MAX_BLOCKS)
    ]
    for number, group in enumerate(groups[1:], 1):
        runs += [Run(hashes[width - group.window_blocks : width], None, number) for width in WIDTHS]
    for run in runs:
        reservation = namespace.reserve_runs_later([run]).wait(10)
        assert reservation is not None and not reservation.refused
        reservation.commit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=400)
    options = parser.parse_args()
    hashes = [hashlib.sha256(str(number).encode()).digest() for number in range(max(WIDTHS))]
    took: dict[tuple[str, int], list[float]] = {(kind, width): [] for kind in KINDS for width in WIDTHS}
    with one_daemon(size="64MiB") as daemon, Session.connect(daemon.endpoint, engine="bench", deadline=5.0) as session:
        namespaces = {}
        for kind, groups in KINDS.items():
            namespaces[kind] = session.attach(NamespaceSpec(kind, groups), (0,))
            store(namespaces[kind], groups, hashes)
        for _ in range(options.turns):
            for (kind, width), times in took.items():
                asked = hashes[:width]
                begin = time.perf_counter()
                lease = namespaces[kind].acquire(asked)
                lease.release()
                times.append(time.perf_counter() - begin)
                assert lease.hits == width, (kind, width, lease.hits)
    one = next(iter(KINDS))
    for (kind, width), times in took.items():
        ratio = statistics.median(times) / statistics.median(took[one, width])
        print(f"{width:5} hashes, {kind:26} p50 {statistics.median(times) * 1e6:6.0f} us, {ratio:.2f} x")


if __name__ == "__main__":
    main()
