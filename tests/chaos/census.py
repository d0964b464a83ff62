"""A daemon that counts its objects: `python census.py FILE serve ...` writes FILE, a JSON object, at each SIGUSR2.

objects     the collector's objects that are in use, by type
cycles      those that only each other held, by type: what no reference count has freed
allocated   blocks of memory that the interpreter has given out; small objects without the collector are among them
anonymous   bytes that are the process's own
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

from kvcache_server.http import connection_limiter

# What the daemon remembers has bounds; here they are reached within some rounds. The collector looks through what is
# new so often that all that lives a little survives it.
BOUNDS = {
    "insight.miss_log": {"LOOKUPS": 1 << 14, "GENERATION": 1 << 8, "NOTES": 16, "SPACES": 32},
    "insight.lookup_tap": {"KEPT": 1 << 8},
    "insight.stats": {"_SAMPLES": 16},
    "daemon.service": {"YOUNG_OBJECTS": 50},
}


def count(path: Path) -> None:
    gc.collect(0)  # what the daemon does by itself
    gc.unfreeze()
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    cycles = Counter(map(name, gc.garbage))
    gc.garbage.clear()
    gc.collect()
    objects, allocated = Counter(map(name, gc.get_objects())), sys.getallocatedblocks()
    (anonymous,) = (
        int(line.split()[1]) << 10
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon:")
    )
    told = path.with_suffix(".new")
    told.write_text(json.dumps({"objects": objects, "cycles": cycles, "allocated": allocated, "anonymous": anonymous}))
    os.replace(told, path)


def name(thing: object) -> str:
    if isinstance(thing, FrameType):
        return f"frame of {Path(thing.f_code.co_filename).stem}.{thing.f_code.co_name}"
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def count_when_told(path: Path) -> None:
    """Count in the first tick after a SIGUSR2 without connections: then the daemon has finished its work."""
    told: list[int] = []
    signal.signal(signal.SIGUSR2, lambda signum, _: told.append(signum))
    collect = connection_limiter.ConnectionLimiter.collect

    def collect_and_count(self: connection_limiter.ConnectionLimiter) -> None:
        collect(self)
        if told and not self._open and not self._acceptor.coming and not self._wait:
            told.clear()
            count(path)

    connection_limiter.ConnectionLimiter.collect = collect_and_count


def main() -> None:
    count_when_told(Path(sys.argv.pop(1)))
    for module, bounds in BOUNDS.items():
        for bound, value in bounds.items():
            assert hasattr(importlib.import_module(f"kvcache_server.{module}"), bound), f"{module}.{bound} is no more"
            setattr(sys.modules[f"kvcache_server.{module}"], bound, value)
    from kvcache_server.cli import main as daemon

    daemon()


if __name__ == "__main__":
    main()
