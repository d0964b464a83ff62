"""An engine that saves some blocks, and tells at each line it reads how many of them it finds: `engine.py ENDPOINT`.

After `N` it waits until it finds N of them, and prints "found N", or how many there were after half a minute.
"""

from __future__ import annotations

import sys
import time

from kvcache_client import GroupSpec, NamespaceSpec, Session

BLOCK = 1 << 20
SPEC = NamespaceSpec(model="llama", groups=[GroupSpec(16, (BLOCK,))])
HASHES = [bytes([n + 1]) * 32 for n in range(8)]


def main() -> None:
    with Session.connect(sys.argv[1], engine="engine", deadline=1.0) as session:
        namespace = session.attach(SPEC, shards=(0,))
        reservation = namespace.reserve(HASHES, parent=None)
        for at, slot in zip(reservation.granted, reservation.slots, strict=True):
            session.view(slot)[:] = bytes([at + 1]) * BLOCK
        reservation.commit()
        print("saved", len(reservation.granted), flush=True)
        for line in sys.stdin:
            until = time.monotonic() + 30
            while True:
                with namespace.acquire(HASHES) as lease:
                    sound = all(bytes(session.view(s)) == bytes([n + 1]) * BLOCK for n, s in enumerate(lease.slots))
                    hits = lease.hits
                if hits == int(line) or time.monotonic() > until:
                    break
                time.sleep(0.02)
            print("found" if sound else "spoilt", hits, flush=True)


if __name__ == "__main__":
    main()
