"""The writer of a shared prefix is stopped in the middle of a block: `python stopped_writer.py --seconds 300`.

A second engine, which wants the same prefix, is never kept waiting for longer than a call's deadline; it writes the
blocks itself once it may. A third one hits them. The first one's slots stay its own: meanwhile the pool is filled many
times over, and when the writer goes on, it spoils nothing, and is told that it was superseded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parent))

import blocks
from fleet import Broken, Daemon
from payload import FAMILIES, LENGTH, prompt
from run import EXTENT, add_up, quiet

from kvcache_client import Session
from kvcache_proto.types import Verdict

SPEC = blocks.SPECS["small"]
SHARED = prompt(0, 0, 8)
DEADLINE = 0.25
STEP = 0.01  # of the second engine
T = TypeVar("T")


def write(endpoint: str) -> None:
    """The writer: it stops itself, and says in the end what the daemon made of its blocks."""
    with Session.connect(endpoint, engine="stopped") as session:
        reservation = session.attach(SPEC, [0]).reserve(SHARED)
        assert session.region is not None
        stop = lambda: os.kill(os.getpid(), signal.SIGSTOP)  # noqa: E731
        blocks.write(session.region, SPEC, SHARED, reservation.packed, [0], stop)
        print(json.dumps([verdict.name for verdict in reservation.commit()]), flush=True)


class Engine:
    """A whole engine whose longest call is remembered."""

    def __init__(self, endpoint: str, name: str) -> None:
        self.session = Session.connect(endpoint, engine=name, deadline=DEADLINE)
        self.namespace = self.session.attach(SPEC, [0])
        self.longest = 0.0
        self.verified = 0

    def timed(self, call: Callable[[], T]) -> T:
        begin = time.monotonic()
        try:
            return call()
        finally:
            self.longest = max(self.longest, time.monotonic() - begin)

    def step(self, hashes: list[bytes]) -> int:
        """Read what is cached of a prompt and write what may be written of the rest; return the hits."""
        assert self.session.region is not None
        with self.timed(lambda: self.namespace.acquire(hashes)) as lease:
            hits = lease.hits
            seen = blocks.read(self.session.region, SPEC, hashes[:hits], lease.packed, [0])
            if seen.wrong or seen.gone:
                raise Broken(f"{seen}")
            self.verified += seen.right
            if hits == len(hashes):
                return hits
            reservation = self.timed(lambda: self.namespace.reserve(hashes[hits:], hashes[hits - 1] if hits else None))
            granted = [hashes[hits + position] for position in reservation.granted]
            blocks.write(self.session.region, SPEC, granted, reservation.packed, [0])
            self.timed(reservation.commit)
            return hits


def run(seconds: float, supersede_after: float) -> dict[str, Any]:
    """Raises Broken."""
    folder = Path(tempfile.mkdtemp(prefix="chaos", dir="/tmp"))
    endpoint = f"ipc://{folder}/kv.sock"
    daemon = Daemon(endpoint, folder, size="2MiB", extent_size=EXTENT, supersede_after=supersede_after)
    writer: subprocess.Popen[str] | None = None
    try:
        daemon.ready()
        writer = subprocess.Popen([sys.executable, __file__, "--write", endpoint], stdout=subprocess.PIPE, text=True)
        os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WNOWAIT)
        began = time.monotonic()
        second, third = Engine(endpoint, "second"), Engine(endpoint, "third")
        steps = 1
        while second.step(SHARED) < len(SHARED):
            steps += 1
            time.sleep(STEP)
        cached_after = time.monotonic() - began
        if third.step(SHARED) != len(SHARED):
            raise Broken("the third engine does not hit")
        filled = 0
        while time.monotonic() < began + seconds:
            for family in range(1, FAMILIES):
                for branch in range(3):
                    second.step(prompt(family, branch, LENGTH))
                    filled += 1
                third.step(SHARED)
        writer.send_signal(signal.SIGCONT)
        verdicts = json.loads(writer.communicate(timeout=30)[0])
        if set(verdicts) != {Verdict.SUPERSEDED.name}:
            raise Broken(f"the writer is told {verdicts}")
        if third.step(SHARED) != len(SHARED):
            raise Broken("what the third engine has hit is gone")
        for engine in (second, third):
            engine.session.close()
        status = daemon.wait("the end of all that was held", quiet)
        assert status is not None
        add_up(status)
        daemon.sound()
        return {
            "stopped_s": round(time.monotonic() - began, 1),
            "second_engine_steps_until_cached": steps,
            "second_engine_cached_after_s": round(cached_after, 2),
            "longest_call_s": round(max(second.longest, third.longest), 4),
            "prompts_meanwhile": filled,
            "evicted_meanwhile": status["counters"].get("blocks_evicted", 0),
            "verified": second.verified + third.verified,
            "writer_is_told": verdicts[0],
        }
    finally:
        if writer is not None:
            writer.kill()
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
        daemon.end(signal.SIGTERM)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--supersede-after", type=float, default=2.0)
    parser.add_argument("--write", metavar="ENDPOINT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write(options.write)
    else:
        print(json.dumps(run(options.seconds, options.supersede_after)))
