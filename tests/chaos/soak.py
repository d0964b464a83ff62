"""Clients at full speed on a pool that is always full: `python tests/chaos/soak.py --minutes 30 --clients 8`.

There is one line of JSON per period: the daemon's own memory (without the region, which is shared), the duration of the
clients' calls (median and 99th percentile, to a fifth of an octave), and what was evicted and verified. The last line
has the slope of the memory over the second half, and says whether the counters add up.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import schedule
from fleet import Broken, Crowd, Daemon, discard
from run import add_up, quiet
from tallies import Tallies, quantile


def soak(minutes: float, clients: int, period: float, size: str = schedule.TIGHT) -> dict[str, Any]:
    """Run it, print the periods, and return the last line. Raises Broken."""
    folder = Path(tempfile.mkdtemp(prefix="chaos", dir="/tmp"))
    endpoint = f"ipc://{folder}/kv.sock"
    daemon = Daemon(endpoint, folder, size=size, quarantine=0.5)
    crowd = Crowd(folder, endpoint, deadline=0.25)
    lines: list[dict[str, Any]] = []
    try:
        daemon.ready()
        crowd.add(*(schedule.whole(f"soak-{number}", number) for number in range(clients)))
        times, began = _times(folder), time.monotonic()
        while time.monotonic() < began + 60 * minutes:
            time.sleep(period)
            before, times = times, _times(folder)
            new = (np.array(times) - np.array(before)).tolist()
            status = daemon.status()
            if status is None:
                raise Broken(f"the daemon died:\n{daemon.log}")
            pool, totals = status["pool"], crowd.totals()
            line = {
                "minute": round((time.monotonic() - began) / 60, 2),
                "daemon_kib": _own_memory(daemon.process.pid),
                "calls": sum(new),
                "p50_us": round(quantile(new, 0.5) * 1e6),
                "p99_us": round(quantile(new, 0.99) * 1e6),
                "full": round(pool["used_bytes"] / pool["bytes"], 3),
                "blocks": pool["blocks"],
                **{name: status["counters"].get(f"blocks_{name}", 0) for name in ("reserved", "evicted")},
                **{name: totals[name] for name in ("verified", "wrong", "torn_leases")},
            }
            lines.append(line)
            print(json.dumps(line), flush=True)
        crowd.finish()
        status = daemon.wait("the end of all that was held", quiet)
        daemon.sound()
        assert status is not None
        add_up(status)
        totals = crowd.totals()
        if totals["wrong"] or totals["torn_leases"] or crowd.journal("E") or "Traceback" in crowd.log:
            raise Broken(f"{totals} {crowd.journal('W')[:3]} {crowd.journal('E')[:3]} {crowd.log}")
        late = lines[len(lines) // 2 :]
        slope = np.polyfit([each["minute"] for each in late], [each["daemon_kib"] for each in late], 1)[0]
        total = {"slope_kib_a_minute": round(float(slope), 1), "breaches": len(crowd.breaches()), **totals}
        return total | {"counters": "add up"}
    finally:
        crowd.close()
        daemon.end(signal.SIGTERM)
        discard(endpoint)
        shutil.rmtree(folder, ignore_errors=True)


def _times(folder: Path) -> list[int]:
    return np.sum([Tallies(path).times() for path in folder.glob("*.tallies")], axis=0).tolist()


def _own_memory(pid: int) -> int:
    """Return the process's private memory in KiB."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--period", type=float, default=60.0, help="seconds per line of output")
    options = parser.parse_args()
    print(json.dumps(soak(options.minutes, options.clients, options.period)))
