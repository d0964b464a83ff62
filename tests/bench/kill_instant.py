"""kill -9 an engine whose saves are queued on the device, and find when the last byte of the region changes.

    python tests/bench/kill_instant.py [--device cuda|cpu] [--repeats 5] [--mib 1024] [--delay 1.0]

There is a real daemon, a victim with a real session and device, whose saves wait behind a kernel of `delay` seconds,
and an observer that fills the slots with a pattern and reads one word per fragment again and again. The victim is
killed in three situations: while the kernel runs; during the copy, as soon as a word has changed; and the same during
the first of several jobs. On a CPU, copies to other memory replace the kernel.

Reported relative to the kill: the end of a socket that the victim opened immediately after its handshake connection;
the daemon's log line that the session has ended, when the quarantine begins; the end of a lock like that of the session
file; and the end of the process. Each event lies between two observations, and the later one is reported.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import mmap
import os
import signal
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from rig import Child, Daemon, one_daemon

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_client.devices import Device, Job, open_device
from kvcache_client.devices.layout import block_fragments
from kvcache_client.devices.self_test import check_copies
from kvcache_client.worker.kv_layout import describe_tensor
from kvcache_server.config import Config

LAYERS, FRAGMENT = 64, 64 << 10  # keys and values apart
SLOT = 2 * LAYERS * FRAGMENT
PATTERN, SAVED = 0x11, 0x81  # every byte of the slots before; of the first job's blocks, the next job's is one more
RUNNING, AMID, SEVERAL = PHASES = ("kernel running", "amid the copy", "amid several")
ENDS = {"socket": "the socket's end", "notice": "the daemon's notice", "lock": "the lock's end", "process": "waitpid"}
Seen = tuple[int, int]  # an observation before an event, and one after it, in nanoseconds

clock = time.monotonic_ns  # CLOCK_MONOTONIC, the same in every process


# The victim.


class Cuda:
    """Work that the saves wait for, on the stream that computes."""

    def __init__(self) -> None:
        import torch

        self.cuda = torch.cuda
        torch.zeros(1, device="cuda")  # makes the context
        torch.cuda._sleep(20_000_000)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(200_000_000)
        end.record()
        end.synchronize()
        self.cycles_a_second = 200_000_000 / (begin.elapsed_time(end) / 1000)

    def prepare(self, device: Device, blocks: Any) -> None:
        self.cuda.synchronize()

    def delay(self, seconds: float) -> None:
        self.cuda._sleep(int(seconds * self.cycles_a_second))


class Cpu:
    """Copies into memory that nobody looks at."""

    def prepare(self, device: Device, blocks: Any) -> None:
        self.device, self.blocks = device, blocks
        self.buffer = memoryview(mmap.mmap(-1, len(blocks) * SLOT))
        array = np.frombuffer(self.buffer, np.uint8)
        self.address, self.bytes = int(array.ctypes.data), len(array)
        for _ in range(2):  # the first makes the pages
            begin = time.monotonic()
            self.copy()
            assert device.drain(60)
            self.seconds = time.monotonic() - begin

    def copy(self) -> None:
        self.device.save(Job(self, self.blocks, np.arange(len(self.blocks)) * SLOT, lambda job: None))

    def delay(self, seconds: float) -> None:
        for _ in range(round(seconds / self.seconds)):
            self.copy()


def reserve(session: Session, name: str, count: int) -> Any:
    """Return where in the region the slots are. Waits for room: the slots of victims before are in quarantine."""
    namespace = session.attach(NamespaceSpec("kill", (GroupSpec(16, SLOT),)), (0,))
    hashes = [hashlib.sha256(f"{name} {number}".encode()).digest() for number in range(count)]
    until = time.monotonic() + 30
    while True:
        reservation = namespace.reserve(hashes)
        if len(reservation.granted) == count:
            assert all(len(slot.views()) == 1 for slot in reservation.slots), "blocks of one size lie in one piece"
            return np.array([slot.ref.offset for slot in reservation.slots], np.int64)
        reservation.abort()
        assert time.monotonic() < until, f"{len(reservation.granted)} slots: {set(reservation.refused.values())}"
        time.sleep(0.1)


def be_victim(pipe: Connection, kind: str) -> None:
    """Queue saves, and settle none. Says when all is imported, when all is ready, and when all is queued."""
    import torch

    pipe.send("imported")
    order = pipe.recv()
    rig = Cuda() if kind == "cuda" else Cpu()  # an engine connects when its model is on the device
    session = Session.connect(order["endpoint"], engine=order["name"], deadline=5.0, connect_timeout=10.0)
    twin = socket.socket(socket.AF_UNIX)
    twin.connect(order["twin"])
    lock = os.open(order["lock"], os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    count, jobs = order["slots"], order["jobs"]
    tensors = [torch.empty(2, count * jobs, FRAGMENT, dtype=torch.uint8, device=kind) for _ in range(LAYERS)]
    for tensor in tensors:
        for job in range(jobs):
            tensor[:, job * count : (job + 1) * count].fill_(SAVED + job)
    places = block_fragments(map(describe_tensor, tensors), count * jobs, SLOT)
    device = open_device(kind, places, count * jobs, tensors)
    check_copies(device, places, count * jobs)
    connection, region = session.daemon.connection, session.region
    assert connection is not None and region is not None
    session.on_region(device.register)
    offsets = reserve(session, order["name"], count)
    until = time.monotonic() + 30
    while not device.registered()[0] and time.monotonic() < until:
        time.sleep(0.001)
    blocks = np.random.default_rng(0).permutation(count).astype(np.int64)
    rig.prepare(device, blocks)
    pipe.send((connection.handshake.welcome.session, offsets, device.registered()[1]))
    pipe.recv()
    rig.delay(order["delay"])
    for job in range(jobs):
        device.save(Job(region, blocks + job * count, offsets, lambda job: None))
    pipe.send(clock())
    pipe.recv()  # which never comes


# The observer.


def be_observer(pipe: Connection) -> None:
    """For each order, fill the slots, watch them until there is another message, and report."""
    words: Any = None
    while True:
        region, offsets, jobs, pid = pipe.recv()
        if words is None:
            with open(region, "r+b") as file:
                words = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint64)
        slots = [words[at // 8 : (at + SLOT) // 8].view(np.uint8) for at in offsets]
        for slot in slots:
            slot[:] = PATTERN
        seen = watch(words, offsets, pipe, pid)
        known = [PATTERN, *(SAVED + job for job in range(jobs))]
        pipe.send(seen | {"foreign": sum(SLOT - int(np.isin(slot, known).sum()) for slot in slots)})


def watch(words: Any, offsets: Any, pipe: Connection, pid: int) -> dict[str, Any]:
    """Return the first and the last change. As soon as anything changes, kill the process `pid`, if it is not 0."""
    begins = (np.array(offsets)[:, None] + np.arange(0, SLOT, FRAGMENT)).ravel() // 8
    # Anywhere in a fragment is as good, and words at one place in each would fall on few sets of the CPU's caches.
    index = begins + np.random.default_rng(0).integers(0, FRAGMENT // 8, len(begins))
    before, after = np.empty(len(index), np.uint64), np.empty(len(index), np.uint64)
    for _ in range(2):  # the first one meets the pages
        low = clock()
        words.take(index, out=before, mode="clip")
    seen: dict[str, Any] = {"first": None, "last": None, "killed": 0}
    passes = longest = 0
    pristine = before.copy()
    pipe.send("watching")
    while passes % 16 or not pipe.poll():
        start = clock()
        words.take(index, out=after, mode="clip")
        end = clock()
        if not np.array_equal(after, before):
            seen["last"] = (low, end)
            if seen["first"] is None:
                seen["first"] = (low, end)
                if pid:
                    seen["killed"] = clock()
                    os.kill(pid, signal.SIGKILL)
            before, after = after, before
        longest = max(longest, end - low) if passes else 0
        low = start
        passes += 1
    pipe.recv()
    return seen | {"gap_ms": longest / 1e6, "changed": float(np.mean(before != pristine))}


# The trials.


def is_dead(victim: Child) -> bool:
    """Whether waitpid returns; `multiprocessing` takes the status later."""
    return os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class Trials:
    """One after the other: a victim per trial, one daemon and one observer for all."""

    def __init__(self, options: argparse.Namespace, daemon: Daemon, observer: Child) -> None:
        self.options, self.daemon, self.observer = options, daemon, observer
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(daemon.folder / "twin"))
        self.listener.listen()
        self.listener.settimeout(30)

    def run(self, phase: str, number: int, victim: Child) -> dict[str, Any]:
        """Return what was seen of one kill; events are (earliest, latest) seconds since it, or None."""
        daemon, early, jobs = self.daemon, phase == RUNNING, self.options.jobs if phase == SEVERAL else 1
        delay = self.options.delay if early else self.options.delay / 4
        lock_path = daemon.folder / f"lock-{number}"
        order = {"endpoint": daemon.endpoint, "name": f"victim-{number}", "jobs": jobs, "delay": delay}
        order |= {"slots": max(4, (self.options.mib << 20) // SLOT)}
        victim.pipe.send(order | {"twin": str(daemon.folder / "twin"), "lock": str(lock_path)})
        session, offsets, registered = victim.hear()
        dead = self._dead_shards()
        with self.listener.accept()[0] as twin, lock_path.open("r+b") as lock:
            twin.setblocking(False)
            region = daemon.status()["daemon"]["region"]
            self.observer.pipe.send((region, offsets, jobs, 0 if early else victim.pid))
            self.observer.hear()
            looks: dict[str, Callable[[], bool]] = {
                "socket": lambda: has_ended(twin),
                "notice": lambda: f"session {session} ended" in daemon.log,
                "lock": lambda: is_free(lock.fileno()),
                "process": lambda: is_dead(victim),
            }
            victim.pipe.send("go")
            found, killed = self._follow(victim, looks, 0.3 * delay if early else None, delay + 30)
        time.sleep(1.0 + (delay if early else 0.0))  # all that could still come, and then some
        self.observer.pipe.send("stop")
        seen = self.observer.hear()
        killed = killed or seen["killed"]
        assert killed, f"{phase}: the victim ended before anything had changed"
        if early and seen["first"]:
            assert seen["first"][1] > killed, f"{phase}: the copy began before the kill, see --delay"
        events = {**found, "first": seen["first"], "last": seen["last"]}
        return {
            "phase": phase,
            **{name: at and tuple((each - killed) / 1e9 for each in at) for name, at in events.items()},
            **{name: seen[name] for name in ("changed", "foreign", "gap_ms")},
            "quarantined": self._dead_shards() - dead,
            "registered": registered,
        }

    def _dead_shards(self) -> int:
        return int(self.daemon.status()["counters"].get("shards_dead", 0))

    def _follow(
        self, victim: Child, looks: dict[str, Callable[[], bool]], kill_after: float | None, seconds: float
    ) -> tuple[dict[str, Seen], int]:
        """Look at everything in turn until all has ended; kill `kill_after` seconds after the saves are queued."""
        found: dict[str, Seen] = {}
        open_at = dict.fromkeys(looks, clock())
        killed, queued, until = 0, None, clock() + int(seconds * 1e9)
        while len(found) < len(looks):
            for name in looks.keys() - found.keys():
                at = clock()
                if looks[name]():
                    found[name] = open_at[name], clock()
                else:
                    open_at[name] = at
            if queued is None and not found and victim.pipe.poll():
                queued = victim.pipe.recv()
            if kill_after is not None and not killed and queued and clock() > queued + kill_after * 1e9:
                killed = clock()
                os.kill(victim.pid, signal.SIGKILL)
            assert clock() < until, f"not within {seconds:.0f} s: {looks.keys() - found.keys()}, queued {queued}"
        return found, killed


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


def report(trials: list[dict[str, Any]]) -> None:
    def row(title: str, cell: Callable[[list[dict[str, Any]]], str]) -> None:
        cells = [[t for t in trials if t["phase"] == phase] for phase in PHASES]
        print(f"  {title:42s}" + "".join(f"{cell(each) if each else '-':>20s}" for each in cells))

    def times(name: str, since: str = "") -> Callable[[list[dict[str, Any]]], str]:
        """The latest instant of `name`, since the earliest of `since` or since the kill."""

        def cell(some: list[dict[str, Any]]) -> str:
            found = [(t[name][1] - (t[since][0] if since else 0.0)) * 1e3 for t in some if t[name]]
            return f"{statistics.median(found):.2f} / {max(found):.2f}" if found else "nothing changed"

        return cell

    print(f"  {'milliseconds, median / most':42s}" + "".join(f"{phase:>20s}" for phase in PHASES))
    for name, what in ENDS.items():
        row(f"kill to {what}", times(name))
    row("kill to the last changed byte", times("last"))
    for name in ("socket", "notice", "lock"):
        row(f"{ENDS[name]} to the last changed byte", times("last", name))
    row("part of the slots that changed", lambda some: f"{max(t['changed'] for t in some):.0%}")
    print(f"  the quarantine lasts {Config(endpoint='ipc:///tmp/kv.sock').quarantine:g} s from the daemon's notice on")
    print(f"  the longest time between two looks: {max(t['gap_ms'] for t in trials):.2f} ms")
    print(f"  slots in quarantine after each kill: {sorted({t['quarantined'] for t in trials})}")
    print(f"  bytes that no save wrote: {sum(t['foreign'] for t in trials)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of each phase")
    parser.add_argument("--mib", type=int, default=1024, help="MiB per job")
    parser.add_argument("--jobs", type=int, default=8, help="jobs in flight in the last phase, all to the same slots")
    parser.add_argument("--delay", type=float, default=1.0, help="seconds of the kernel; a quarter during the copy")
    parser.add_argument("--region-dir", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    plan = [phase for _ in range(options.repeats) for phase in PHASES]
    size = 8 * (options.mib << 20)  # the slots of those before rest in quarantine
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(one_daemon(size=size, region_dir=options.region_dir))
        # All at once, so that none is being loaded while another is watched; they have not touched the device yet.
        victims = [Child(be_victim, options.device) for _ in plan]
        observer = Child(be_observer)
        for child in (*victims, observer):
            stack.callback(child.end)
        for child in victims:
            child.hear()
        trials = Trials(options, daemon, observer)
        stack.callback(trials.listener.close)
        found = []
        for number, (phase, child) in enumerate(zip(plan, victims, strict=True)):
            found.append(trials.run(phase, number, child))
            child.end()
            print(f"{number + 1} of {len(plan)}: {phase}", flush=True)
        print(f"jobs of {options.mib} MiB, {found[0]['registered'] >> 20:,} MiB of the region page-locked")
        report(found)


if __name__ == "__main__":
    main()
