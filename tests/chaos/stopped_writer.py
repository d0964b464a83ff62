"""The writer of a shared prefix is suspended in the middle of a block: `python stopped_writer.py --seconds 300`.

A second engine needs the same prefix. It never waits for longer than the deadline of a call, and writes the blocks
itself as soon as it may; a third engine hits them. The first engine keeps its slots: the pool is filled many times
meanwhile, and when the writer continues, it damages nothing, and is told that it was superseded.

With `--cut` the writer's handshake connection is closed while it is suspended. Its process is alive, so it keeps its
slots all the same, whatever the quarantine is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import blocks
from fleet import Broken, Daemon
from payload import BRANCHES, FAMILIES, LENGTH, prompt
from run import add_up, quiet

from kvcache_client import Session
from kvcache_proto.endpoint import handshake_path
from kvcache_proto.types import Verdict

SPEC = blocks.SPECS["small"]
SHARED = prompt(0, 0, 8)
DEADLINE = 0.25
PATIENT = 10.0  # the writer's: a commit that is not answered in time returns no verdict, and its verdict is the point
STEP = 0.01  # of the second engine
T = TypeVar("T")


def write(endpoint: str) -> None:
    """The writer: it stops itself, and says in the end what the daemon made of its blocks."""
    with Session.connect(endpoint, engine="stopped", deadline=PATIENT) as session:
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

    def read(self, hashes: list[bytes]) -> int:
        """Read what is cached of a prompt; return how many blocks that is."""
        assert self.session.region is not None
        with self.timed(lambda: self.namespace.acquire(hashes)) as lease:
            seen = blocks.read(self.session.region, SPEC, hashes[: lease.hits], lease.packed, [0])
        if seen.wrong or seen.gone:
            raise Broken(f"{seen}")
        self.verified += seen.right
        return lease.hits

    def step(self, hashes: list[bytes]) -> int:
        """Read what is cached of a prompt and write what may be written of the rest; return how many were cached."""
        assert self.session.region is not None
        hits = self.read(hashes)
        if hits < len(hashes):
            parent = hashes[hits - 1] if hits else None
            reservation = self.timed(lambda: self.namespace.reserve(hashes[hits:], parent))
            granted = [hashes[hits + position] for position in reservation.granted]
            blocks.write(self.session.region, SPEC, granted, reservation.packed, [0])
            self.timed(reservation.commit)
        return hits


@contextlib.contextmanager
def a_proxy(folder: Path, endpoint: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield another endpoint of the same daemon, and what cuts its doors."""
    front = f"ipc://{folder}/front.sock"
    command = [sys.executable, str(Path(__file__).with_name("proxy.py")), front, endpoint, "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as proxy:
        while not os.path.exists(handshake_path(front)):
            time.sleep(STEP)
        yield front, lambda: print("cut", file=proxy.stdin, flush=True)


def run(seconds: float, supersede_after: float, cut: bool = False) -> dict[str, Any]:
    """Raises Broken."""
    with contextlib.ExitStack() as stack:
        return _run(stack, seconds, supersede_after, cut)


def _run(stack: contextlib.ExitStack, seconds: float, supersede_after: float, cut: bool) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="chaos", dir="/tmp"))
    endpoint = f"ipc://{folder}/kv.sock"
    daemon = Daemon(endpoint, folder, size="2112KiB", supersede_after=supersede_after, quarantine=0.3)
    writer: subprocess.Popen[str] | None = None
    try:
        if not daemon.ready():
            raise Broken(f"it ended at its start:\n{daemon.log}")
        front, cut_it = stack.enter_context(a_proxy(folder, endpoint)) if cut else (endpoint, lambda: None)
        second, third = Engine(endpoint, "second"), Engine(endpoint, "third")  # a busy host takes its time for it
        writer = subprocess.Popen([sys.executable, __file__, "--write", front], stdout=subprocess.PIPE, text=True)
        os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WNOWAIT)
        cut_it()
        began = time.monotonic()
        steps = 1
        while second.step(SHARED) < len(SHARED):
            steps += 1
            time.sleep(STEP)
        cached_after = time.monotonic() - began
        if third.step(SHARED) != len(SHARED):
            raise Broken("the third engine does not hit")
        filled = 0
        while not filled or time.monotonic() < began + seconds:
            for family in range(1, FAMILIES):
                for branch in range(BRANCHES):
                    second.step(prompt(family, branch, LENGTH))
                    filled += 1
                third.step(SHARED)
        writer.send_signal(signal.SIGCONT)
        verdicts = json.loads(writer.communicate(timeout=30)[0])
        if not cut and set(verdicts) != {Verdict.SUPERSEDED.name}:
            raise Broken(f"the writer is told {verdicts}")
        if third.step(SHARED) != len(SHARED):
            raise Broken("what the third engine has hit is gone")
        for family in range(FAMILIES):  # whatever is cached now, the writer must not have touched it
            for branch in range(BRANCHES):
                third.read(prompt(family, branch, LENGTH))
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
            "writer_is_told": verdicts,
        }
    finally:
        if writer is not None:
            writer.kill()
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
        daemon.end(signal.SIGTERM)
        daemon.tidy()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--supersede-after", type=float, default=2.0)
    parser.add_argument("--write", metavar="ENDPOINT", help=argparse.SUPPRESS)
    parser.add_argument("--cut", action="store_true", help="close the writer's handshake connection meanwhile")
    options = parser.parse_args()
    if options.write:
        write(options.write)
    else:
        print(json.dumps(run(options.seconds, options.supersede_after, options.cut)))
