"""kill -9 an engine whose saves are queued on the device, and find when the last byte of the region changes.

    python tests/bench/kill_instant.py [--device cuda|cpu] [--repeats 5] [--mib 1024] [--delay 1.0] [--json FILE]

There is a real daemon, a victim (kill_victim.py) with a real session and device, whose saves wait behind a kernel of
`delay` seconds, and an observer (kill_observer.py) that fills the slots with a pattern and reads one word per fragment
again and again. The victim is killed in three situations: while the kernel runs; during the copy, as soon as a word has
changed; and the same during the first of several jobs.

Reported relative to the kill: the end of a socket that the victim opened immediately after its handshake connection;
the daemon's log line that the session has ended, when the quarantine begins; the end of the session file's lock; and
the end of the process. Each event lies between two observations, and the later one is reported; if one event is
reported after another, it was certainly later. On a CPU, copies to other memory replace the kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from kill_observer import SLOT, clock

from kvcache_proto.errors import KVCacheError
from kvcache_server.admin_client import AdminClient
from kvcache_server.config import Config

GIB = 1 << 30
RUNNING, AMID, SEVERAL = PHASES = ("kernel running", "amid the copy", "amid several")
ENDS = {"door": "the door's end", "notice": "the daemon's word", "lock": "the lock's end", "process": "waitpid"}
WITHOUT_UVLOOP = "import asyncio, sys; sys.modules['uvloop'] = asyncio; from kvcache_server.cli import main; main()"


class Trouble(Exception):
    """What did not come, and from whom."""


class Child:
    """A process that speaks JSON, a line a message."""

    def __init__(self, role: str, *arguments: str) -> None:
        self.role = role
        command = [sys.executable, str(Path(__file__).with_name(f"kill_{role}.py")), *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin and self.process.stdout
        self.stdin, self.stdout = self.process.stdin, self.process.stdout.fileno()
        os.set_blocking(self.stdout, False)
        self.heard = b""

    def tell(self, **what: Any) -> None:
        self.stdin.write(json.dumps(what).encode() + b"\n")
        self.stdin.flush()

    def listen(self) -> dict[str, Any] | None:
        """Return the next message, None as long as there is none. Never waits."""
        with contextlib.suppress(BlockingIOError):
            self.heard += os.read(self.stdout, 1 << 20)
        if b"\n" not in self.heard:
            return None
        line, self.heard = self.heard.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def hear(self, seconds: float, what: str) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = self.listen()
            if found is not None:
                return found
            if self.process.poll() is not None:
                raise Trouble(f"the {self.role} ended with {self.process.returncode} where it was {what}")
            select.select([self.stdout], [], [], 0.05)
        raise Trouble(f"the {self.role} was still {what} after {seconds:.0f} s")

    def is_dead(self) -> bool:
        """Whether waitpid returns; `Popen` takes the status later."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()


class Daemon:
    """A real one, whose log the parent reads as it is written."""

    def __init__(self, folder: str, region_dir: str, size: int) -> None:
        self.endpoint = f"ipc://{folder}/kv.sock"
        start = ["-m", "kvcache_server"] if importlib.util.find_spec("uvloop") else ["-c", WITHOUT_UVLOOP]
        flags = {"keep": "false", "endpoint": self.endpoint, "size": size, "region-dir": region_dir}
        command = [
            sys.executable,
            *start,
            "serve",
            "--keep=false",
            *(f"--{name}={value}" for name, value in flags.items()),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert self.process.stderr
        self.stderr = self.process.stderr.fileno()
        os.set_blocking(self.stderr, False)
        self.log = b""

    def said(self, what: str) -> bool:
        with contextlib.suppress(BlockingIOError):
            self.log += os.read(self.stderr, 1 << 16)
        return what.encode() in self.log

    def wait_ready(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.said(" ready at "):
            if self.process.poll() is not None or time.monotonic() > until:
                raise Trouble(f"the daemon is not ready:\n{self.log.decode()}")
            time.sleep(0.02)

    def status(self) -> dict[str, Any]:
        with AdminClient(self.endpoint, "kill") as admin:
            found: dict[str, Any] = msgspec.to_builtins(admin.status())
            return found

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Trials:
    """One after the other: a victim a trial, one daemon and one observer for all."""

    def __init__(self, options: argparse.Namespace, folder: str, daemon: Daemon, observer: Child) -> None:
        self.options, self.folder, self.daemon, self.observer = options, folder, daemon, observer
        self.slots = max(4, (options.mib << 20) // SLOT)
        self.region = daemon.status()["daemon"]["region"]
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"{folder}/twin")
        self.listener.listen()
        self.listener.settimeout(30)

    def run(self, phase: str, number: int, victim: Child) -> dict[str, Any]:
        """Return what was seen of one kill; instants are seconds since it, [earliest, latest]. Raises Trouble."""
        daemon, early, jobs = self.daemon, phase == RUNNING, self.options.jobs if phase == SEVERAL else 1
        delay = self.options.delay if early else self.options.delay / 4
        order = {"endpoint": daemon.endpoint, "name": f"victim-{number}", "slots": self.slots, "jobs": jobs}
        order |= {"delay": delay, "door_first": self.options.door_first}
        twin_path, own_lock = f"{self.folder}/twin", f"{self.folder}/lock-{number}"
        victim.tell(**order, twin=twin_path, lock=own_lock)
        ready = victim.hear(90, "getting ready")
        dead = self._dead_shards()
        with contextlib.ExitStack() as stack:
            twin = stack.enter_context(self.listener.accept()[0])
            twin.setblocking(False)
            lock, whose = open_lock(victim.process.pid, ready["descriptors"]["lock"], own_lock)
            stack.callback(os.close, lock)
            target = 0 if early else victim.process.pid
            self.observer.tell(region=self.region, offsets=ready["offsets"], jobs=jobs, kill=target)
            self.observer.hear(30, "filling the slots")
            looks: dict[str, Callable[[], bool]] = {
                "door": lambda: has_ended(twin),
                "notice": lambda: daemon.said(f"session {ready['session']} ended"),
                "lock": lambda: is_free(lock),
                "process": victim.is_dead,
            }
            victim.tell(go=True)
            found, killed = self._follow(victim, looks, 0.3 * delay if early else None, delay + 30)
        time.sleep(self.options.watch + (delay if early else 0.0))  # all that could still come, and then some
        self.observer.tell(stop=True)
        seen = self.observer.hear(30, "counting bytes")
        killed = killed or seen["killed"]
        if not killed:
            raise Trouble(f"{phase}: the victim ended before anything had changed")
        if early and seen["first"] and seen["first"][1] < killed:
            raise Trouble(f"{phase}: the copy began before the kill: the kernel was too short, see --delay")
        found |= {"first": seen["first"], "last": seen["last"]}
        return {
            "phase": phase,
            **{name: at and [(each - killed) / 1e9 for each in at] for name, at in found.items()},
            "after": {name: after(seen["last"], found[name]) for name in ENDS},
            "changed": seen["changed"],
            "bytes_of_each_job": seen["written"],
            "foreign_bytes": seen["alien"],
            "shards_dead": self._dead_shards() - dead,
            "look_ms": seen["pass_ns"] / 1e6,
            "longest_gap_ms": seen["longest_ns"] / 1e6,
            "lock_of": whose,
            **{name: ready[name] for name in ("name", "torch", "descriptors", "registered", "region")},
        }

    def _dead_shards(self) -> int:
        return int(self.daemon.status()["counters"].get("shards_dead", 0))

    def _follow(
        self, victim: Child, looks: dict[str, Callable[[], bool]], kill_after: float | None, seconds: float
    ) -> tuple[dict[str, Any], int]:
        """Look at everything in turn until all has ended; kill `kill_after` seconds after the saves are queued."""
        found: dict[str, Any] = {}
        open_at = dict.fromkeys(looks, clock())
        killed, queued, until = 0, None, clock() + int(seconds * 1e9)
        while len(found) < len(looks):
            for name in looks.keys() - found.keys():
                at = clock()
                if looks[name]():
                    found[name] = [open_at[name], clock()]
                else:
                    open_at[name] = at
            if queued is None and not found:
                queued = victim.listen()
            if kill_after is not None and not killed and queued and clock() > queued["queued"] + kill_after * 1e9:
                killed = clock()
                victim.process.send_signal(signal.SIGKILL)
            if clock() > until:
                missing = ", ".join(ENDS[name] for name in looks.keys() - found.keys())
                raise Trouble(f"not within {seconds:.0f} s: {missing}" + ("" if queued else "; nothing was queued"))
        return found, killed


def open_lock(pid: int, descriptor: int, own: str) -> tuple[int, str]:
    """Return a descriptor of the victim's session file; where /proc gives none, of the file `own`, locked likewise."""
    with contextlib.suppress(OSError):
        found = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        if not is_free(found):
            return found, "the session file"
        os.close(found)  # a kernel that makes this the victim's own description
    return os.open(own, os.O_RDWR | os.O_CLOEXEC), "a file beside it"


def is_free(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(lock, fcntl.LOCK_UN)
    return True


def has_ended(twin: socket.socket) -> bool:
    try:
        return not twin.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def after(change: list[int] | None, end: list[int]) -> str:
    """Whether a byte changed after `end`; both lie between two looks."""
    if change is None or change[1] <= end[0]:
        return "no"
    return "yes" if change[0] >= end[1] else "unclear"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return what was found; where a trial fails, what was found until then, and why."""
    plan = [phase for _ in range(options.repeats) for phase in PHASES]
    size = int(options.size * GIB) or 8 * (options.mib << 20)  # the slots of those before rest in quarantine
    found: dict[str, Any] = {"trouble": "", "trials": []}
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="kv", dir="/tmp")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            daemon = Daemon(folder, options.region_dir or region_folder(size), size)
            stack.callback(daemon.end)
            # All at once, so that none is being loaded while another is watched; they have not touched the device yet.
            victims = [Child("victim", options.device) for _ in plan]
            observer = Child("observer")
            for child in (*victims, observer):
                stack.callback(child.end)
            for child in victims:
                child.hear(120, "importing")
            daemon.wait_ready(60)
            trials = Trials(options, folder, daemon, observer)
            stack.callback(trials.listener.close)
            for number, (phase, child) in enumerate(zip(plan, victims, strict=True)):
                found["trials"].append(trials.run(phase, number, child))
                child.end()
                print(f"{number + 1} of {len(plan)}: {phase}", file=sys.stderr, flush=True)
        except (Trouble, KVCacheError, OSError) as error:
            found["trouble"] = f"{type(error).__name__}: {error}"
        signal.alarm(0)
    uvloop = importlib.util.find_spec("uvloop")
    found |= {"kernel": os.uname().release, "driver": driver(), "loop": "uvloop" if uvloop else "asyncio"}
    return found | {"quarantine": Config(endpoint="ipc:///tmp/kv.sock").quarantine, "options": vars(options)}


def region_folder(size: int) -> str:
    for folder in ("/dev/shm", tempfile.gettempdir()):
        if os.path.isdir(folder) and shutil.disk_usage(folder).free > size * 1.05:
            return folder
    raise Trouble(f"no room for a region of {size / GIB:.1f} GiB: less --mib, or --region-dir")


def driver() -> str:
    """Return driver and persistence mode: without the latter a GPU is shut down with its last user."""
    command = ["nvidia-smi", "--query-gpu=driver_version,persistence_mode", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    return lines[0] if lines else "unknown"


# The report.


def by_phase(title: str, cell: Callable[[list[dict[str, Any]]], str], trials: list[dict[str, Any]]) -> str:
    cells = [[t for t in trials if t["phase"] == phase] for phase in PHASES]
    return f"  {title:40s}" + "".join(f"{cell(each) if each else '-':>20s}" for each in cells)


def table(found: dict[str, Any]) -> Iterator[str]:
    trials: list[dict[str, Any]] = found["trials"]

    def instant(name: str, of: str = "") -> Callable[[dict[str, Any]], float | None]:
        """The latest instant of `name`, since the earliest of `of` or since the kill."""
        return lambda t: t[name] and (t[name][1] - (t[of][0] if of else 0.0)) * 1000

    def median_and_most(pick: Callable[[dict[str, Any]], float | None], some: list[dict[str, Any]]) -> str:
        values = [value for t in some if (value := pick(t)) is not None]
        return f"{statistics.median(values):.2f} / {max(values):.2f}" if values else "nothing changed"

    def told(name: str, some: list[dict[str, Any]]) -> str:
        words = [t["after"][name] for t in some]
        return f"{words.count('yes')} of {len(words)}" + (f", {n} unclear" if (n := words.count("unclear")) else "")

    yield "  milliseconds, median / most             " + "".join(f"{phase:>20s}" for phase in PHASES)
    rows = {f"kill to {what}": instant(name) for name, what in ENDS.items()}
    rows["kill to the last changed byte"] = instant("last")
    rows |= {f"last byte less {ENDS[name]}": instant("last", name) for name in ("door", "notice", "lock")}
    for title, pick in rows.items():
        yield by_phase(title, lambda some, pick=pick: median_and_most(pick, some), trials)
    for name in ("door", "notice", "lock"):
        yield by_phase(f"a byte changed after {ENDS[name]}", lambda some, name=name: told(name, some), trials)
    yield by_phase("of the slots, changed in the end", lambda some: f"{max(t['changed'] for t in some):.0%}", trials)

    def times(what: str, pick: Callable[[dict[str, Any]], float | None]) -> str:
        most = max((value for t in trials if (value := pick(t)) is not None), default=-1.0)
        return f"{found['quarantine'] * 1000 / most:,.0f} x {what} ({most:.2f} ms)" if most > 0 else f"{what}: none"

    yield f"  the quarantine in force, {found['quarantine']:g} s from the daemon's word on, is"
    yield "    " + times("the longest from the kill to the last byte", instant("last"))
    yield "    " + times("the longest from the daemon's word to the last byte", instant("last", "notice"))
    yield "    " + times("the longest from the kill to waitpid", instant("process"))
    whose = trials[0]["lock_of"]
    looks, gap = statistics.median(t["look_ms"] for t in trials), max(t["longest_gap_ms"] for t in trials)
    yield f"  looks of {looks:.2f} ms at a word of each fragment, the longest gap {gap:.2f} ms; lock: {whose}"
    dead, foreign = {t["shards_dead"] for t in trials}, sum(t["foreign_bytes"] for t in trials)
    yield f"  put into quarantine at each kill: {sorted(dead)} slots; bytes that no save wrote: {foreign}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of each phase")
    parser.add_argument("--mib", type=int, default=1024, help="MiB per job")
    parser.add_argument("--jobs", type=int, default=8, help="jobs in flight in the last phase, all to the same slots")
    parser.add_argument("--delay", type=float, default=1.0, help="seconds of the kernel; a quarter during the copy")
    parser.add_argument("--watch", type=float, default=1.0, help="seconds to observe after everything has ended")
    parser.add_argument("--size", type=float, default=0, help="GiB of the region, all page-locked; default: 8 jobs")
    parser.add_argument("--region-dir", default="", help="default: /dev/shm, if it has room")
    parser.add_argument("--door-first", action="store_true", help="the victim connects before it opens the device")
    parser.add_argument("--limit", type=int, default=300, help="give up after this number of seconds")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()

    def give_up(*_: object) -> None:
        raise Trouble(f"not done after {options.limit} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(options.limit)
    found = measure(options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2, default=str))
    if found["trials"]:
        first = found["trials"][0]
        print(f"{first['name']}, driver {found['driver']}, torch {first['torch']}, kernel {found['kernel']}")
        locked = f"{first['registered'] / GIB:.1f} of {first['region'] / GIB:.1f} GiB page-locked"
        print(f"{len(found['trials'])} kills, jobs of {options.mib} MiB, {locked}, the daemon on {found['loop']}")
        for line in table(found):
            print(line)
    if found["trouble"]:
        raise SystemExit(found["trouble"])


if __name__ == "__main__":
    main()
