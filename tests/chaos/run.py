"""Run seeds: `python tests/chaos/run.py --seeds 0..199`. One line of JSON per seed; exit code 1 if one of them failed.

A seed determines what goes wrong and when; the result also depends on the machine. These must hold:

* No byte is wrong in a block whose generations were current after it was copied, so no block was half written.
* No slot under a lease of a living session is given to another block.
* A block that was acknowledged as visible, and did not have to be evicted, is found with the right bytes, as long as
  the region exists: that is only one daemon if each begins empty (`--no-survivors`).
* The daemon finds its own state consistent, after each start and at the end, and its counters add up.
* No call of a client takes longer than its deadline. Only delays of more than SLACK are counted, because a busy machine
  is not a defect; `hung` are those of more than HUNG.
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
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blocks
import schedule
from fleet import LOOK, Broken, Crowd, Daemon
from payload import prompt

from kvcache_client import Session

TAIL = 0.5  # seconds of honest work after the last fault
HUNG = 5.0
GRACE = 4.0  # seconds for which a daemon waits for sessions: longer than any client is stopped
REGION_ERROR = 5  # the exit code of a daemon that cannot have its region


class Run:
    """One seed. `survivors`: whether blocks outlive the daemon."""

    def __init__(self, plan: schedule.Schedule, survivors: bool, deadline: float) -> None:
        self.plan, self.survivors = plan, survivors
        self.folder = Path(tempfile.mkdtemp(prefix="chaos", dir="/tmp"))
        self.deadline = deadline
        self.region_dir = "/dev/shm"
        self.found: Counter[str] = Counter()
        self.daemon: Daemon | None = None
        self.region_id = ""  # of the region that the next daemon must find
        self.seconds = 0.0

    def go(self) -> None:
        """Raises Broken."""
        began = time.monotonic()
        crowded = any(life.crowded_mount for life in self.plan.lives)
        with _mount(self.folder) if crowded else contextlib.nullcontext("/dev/shm") as self.region_dir:
            folder = self.folder if self.region_dir == "/dev/shm" else self.region_dir
            self.endpoint = (
                f"ipc://{folder}/kv.sock"  # what the daemon notes down lies beside it, and runs out of room too
            )
            self.crowd = Crowd(self.folder, self.endpoint, self.deadline)
            try:
                self.crowd.add(*self.plan.clients)  # some of them before there is a daemon
                for number, life in enumerate(self.plan.lives):
                    self.live(life, fresh=life.fresh and number > 0)
                self.end()
            finally:
                self.tidy()
                self.seconds = time.monotonic() - began

    # A life of the daemon.

    def start(self, point: str = "", fresh: bool = False, size: str = "") -> bool:
        """Start the daemon; False where it died on the way."""
        self.daemon = Daemon(
            *(self.endpoint, self.folder, point),
            fresh=fresh and self.survivors,
            size=size or (schedule.ROOMY if self.plan.roomy else schedule.TIGHT),
            region_dir=self.region_dir,
            quarantine=self.plan.quarantine,
            supersede_after=self.plan.supersede_after,
            **({"grace": GRACE} if self.survivors else {}),
        )
        if fresh or size or not self.survivors:
            self.region_id = ""
        ready = self.daemon.ready()
        self.found["lives"] += 1
        if not ready and not self.daemon.died_there and self.daemon.process.returncode != REGION_ERROR:
            raise Broken(f"the daemon does not start: {self.daemon.process.returncode}\n{self.daemon.log}")
        return ready

    def live(self, life: schedule.Life, fresh: bool) -> None:
        if life.crowded_mount:
            with _ballast(self.region_dir) as size:
                self.found["refused_mounts"] += not self.start(size=size)
            if self.daemon is not None:
                self.daemon.end(signal.SIGKILL)
        if self.start(life.point, fresh) and self.daemon is not None:
            self.daemon.sound() and self.audit()
            self.work(life)
            if life.crowded_mount and self.region_dir != "/dev/shm":
                with _ballast(self.region_dir):
                    self.work(life)
            self.daemon.sound()
        assert self.daemon is not None
        self.found["died_there"] += self.daemon.died_there
        code = self.daemon.end(life.end)
        if life.end == signal.SIGTERM and code not in (0, -signal.SIGKILL):
            raise Broken(f"the daemon ended with {code}:\n{self.daemon.log}")
        for act, which in life.meanwhile:
            member = self.crowd.members[self.plan.clients[which].name]
            member.kill() if act == "kill" else member.stop()
        self.watch(life.down)

    def work(self, life: schedule.Life) -> None:
        begin, told = time.monotonic(), 0
        until, (stop_at, stopped_for) = begin + life.seconds, life.stopped
        while time.monotonic() < until and self.daemon is not None and self.daemon.alive:
            since = time.monotonic() - begin
            while told < len(life.proxy) and since > life.proxy[told][0]:
                self.crowd.tell_proxies(life.proxy[told][1])
                told += 1
            if stopped_for and since > stop_at:
                self.daemon.process.send_signal(signal.SIGSTOP)
                self.watch(stopped_for)
                self.daemon.process.send_signal(signal.SIGCONT)
                stopped_for = 0.0
            self.watch(LOOK)

    def watch(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            self.crowd.look(schedule.again)
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(LOOK, left))

    # What is to be found.

    def audit(self) -> None:
        """Look for every block that this region has acknowledged; where it had to evict none, all must be there."""
        status = self.daemon.unless_dead(self.daemon.status) if self.daemon else None
        if status is None:
            return
        region_id = status["pool"]["region_id"]
        if self.region_id not in ("", region_id) and self.plan.theme != "full":  # there, no room for notes is a reason
            raise Broken(f"the region {self.region_id} was given up: {self.daemon.log if self.daemon else ''}")
        self.region_id = region_id
        if not self.plan.roomy:
            return
        deepest: dict[tuple[str, int, int], int] = {}
        for _, (region, kind, *numbers) in self.crowd.journal("V"):
            family, branch, depth = map(int, numbers)
            if region == region_id:
                deepest[kind, family, branch] = max(depth, deepest.get((kind, family, branch), 0))
        with Session.open(self.endpoint, engine="auditor", deadline=3.0) as session:
            spaces = {kind: session.attach(spec, range(spec.shards)) for kind, spec in blocks.SPECS.items()}
            for (kind, family, branch), depth in deepest.items():
                hashes = prompt(family, branch, depth + 1)
                with spaces[kind].acquire(hashes) as lease:
                    if lease.failed or session.region is None or lease.region_id not in (b"", session.region.id):
                        self.found["audits_cut_short"] += 1
                        return
                    if lease.hits < len(hashes):
                        raise Broken(f"lost: {kind} {family}/{branch} has {lease.hits} of {len(hashes)} blocks")
                    spec = spaces[kind].spec
                    seen = blocks.read(session.region, spec, hashes, lease.packed, range(spec.shards))
                    if seen.wrong or (seen.gone and session.up):
                        raise Broken(f"audit: {seen}")
                    self.found["audited"] += len(hashes)
        self.found["audits"] += 1

    def end(self) -> None:
        """An honest end: all faults over, everyone leaves, and the sums must be right."""
        if not self.start() or self.daemon is None:
            raise Broken(f"the last daemon does not start:\n{self.daemon.log if self.daemon else ''}")
        self.crowd.tell_proxies("clear")
        until = time.monotonic() + TAIL
        while time.monotonic() < until:
            self.crowd.look(lambda plan: schedule.last(schedule.again(plan)))
            time.sleep(LOOK)
        self.crowd.finish()
        if "Traceback" in self.crowd.log:
            raise Broken(f"a client failed:\n{self.crowd.log}")
        status = self.daemon.wait("the end of all that was held", quiet)
        self.daemon.sound()
        self.audit()
        assert status is not None
        add_up(status)
        self.judge()
        if code := self.daemon.end(signal.SIGTERM):
            raise Broken(f"the daemon ended with {code}:\n{self.daemon.log}")
        for log in self.folder.glob("daemon-*.log"):
            if "failed inside the daemon" in (text := log.read_text()):
                raise Broken(f"{log.name}:\n{text}")

    def judge(self) -> None:
        totals = self.crowd.totals()
        wrong = [" ".join(words) for _, words in self.crowd.journal("W")]
        if totals["wrong"]:
            raise Broken(f"{totals['wrong']} wrong blocks: {wrong[:5]}")
        proxied = any(client.proxied for client in self.plan.clients)
        if totals["torn_leases"] and not proxied:
            raise Broken(f"{totals['torn_leases']} slots under a lease were given away")
        for who, words in self.crowd.journal("E"):
            what = " ".join(words)
            # Who reserves while a rank is away is told so.
            told = "shards are attached by sessions" in what
            if not (who.startswith("scheduler") and told) and not proxied:
                raise Broken(f"{who}: {what}")
        hung = [breach for breach in self.crowd.breaches() if float(breach.split()[-2]) > HUNG]
        if hung:
            raise Broken(f"calls that hung: {hung}")

    def tidy(self) -> None:
        self.crowd.close()
        if self.daemon is not None:
            self.daemon.kill()
            self.daemon.tidy()

    def line(self) -> dict[str, Any]:
        totals = {name: count for name, count in self.crowd.totals().items() if count}
        found = {name: count for name, count in self.found.items() if count}
        breaches = self.crowd.breaches()
        return {
            "seed": self.plan.seed,
            "theme": self.plan.theme,
            "roomy": self.plan.roomy,
            "seconds": round(self.seconds, 1),
            "breaches": len(breaches),
            "longest": max(breaches, key=lambda breach: float(breach.split()[-2]), default=""),
            **found,
            **self.crowd.counts,
            **Counter(f"at {' '.join(words)}" for _, words in self.crowd.journal("P")),
            **totals,
        }


def quiet(status: dict[str, Any]) -> bool:
    """Whether no session is open, and nothing is held."""
    pool, held = status["pool"], ("blocks_writing", "blocks_hidden", "blocks_quarantined", "pinned_bytes")
    return not status["sessions"] and not status.get("away") and not any(pool[name] for name in held)


def add_up(status: dict[str, Any]) -> None:
    """Raise Broken unless every block of this life of the daemon is accounted for; only where nobody writes.

        reserved + resumed    = committed + failed + superseded + orphaned
        committed + recovered = evicted + cleared + unreachable + present

    `resumed` are those that were being written when the last daemon ended; of the `failed` a shard failed, was never
    started, or died with its writer; the `unreachable` were whole when a block above them failed.
    """
    counters = Counter({name.removeprefix("blocks_"): count for name, count in status["counters"].items()})
    present = status["pool"]["blocks"]
    for come, gone in (
        (counters["reserved"] + counters["resumed"], ("committed", "failed", "superseded", "orphaned")),
        (counters["committed"] + counters["recovered"] - present, ("evicted", "cleared", "unreachable")),
    ):
        if come != sum(counters[why] for why in gone):
            raise Broken(f"counters: {come} is not the sum of {gone}: {dict(counters)}, {present} present")
    if status["pool"]["used_bytes"] != sum(space["bytes"] for space in status["namespaces"]):
        raise Broken(f"bytes: {status['pool']} is not the sum of {status['namespaces']}")


@contextlib.contextmanager
def _mount(folder: Path) -> Iterator[str]:
    """A small tmpfs of our own, with room for the regions that clients of earlier lives still map.

    Who may not mount takes /dev/shm.
    """
    where = folder / "shm"
    where.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "chaos", where]).returncode:
        yield "/dev/shm"
        return
    try:
        yield str(where)
    finally:
        subprocess.run(["umount", "--lazy", where], check=True)


@contextlib.contextmanager
def _ballast(folder: str) -> Iterator[str]:
    """Fill the tmpfs, where it is ours; else yield a size that is too large for it."""
    room = os.statvfs(folder)
    if folder == "/dev/shm":
        yield str(2 * room.f_blocks * room.f_frsize)
        return
    path = Path(folder, "ballast")
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)
    try:
        yield ""
    finally:
        path.unlink()


def one(plan: schedule.Schedule, survivors: bool, deadline: float, keep: bool = False) -> tuple[dict[str, Any], str]:
    """Run a seed; return its line and what broke, if anything did."""
    run, broken = Run(plan, survivors, deadline), ""
    try:
        try:
            run.go()
        except Broken as error:
            broken = str(error)
        return run.line(), broken
    finally:
        if not (broken and keep):
            shutil.rmtree(run.folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0..17", help="FIRST..LAST, or a single seed")
    parser.add_argument("--minutes", type=float, default=0, help="stop after this time; 0: after the last seed")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--themes", default=",".join(schedule.THEMES), help="the faults; seeds take turns at them")
    parser.add_argument("--deadline", type=float, default=0.25, help="deadline of lookups and reservations, in seconds")
    parser.add_argument("--pace", type=float, default=1.0, help="factor for the time until the daemon is killed")
    parser.add_argument("--lives", type=int, default=0, help="daemons per seed; 0: 2 or 3")
    parser.add_argument("--no-survivors", action="store_true", help="for a daemon that begins empty")
    parser.add_argument("--keep", action="store_true", help="keep the folder of a seed that failed")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # mounts and processes are tidied up on the way out
    first, _, last = options.seeds.partition("..")
    themes = tuple(options.themes.split(","))
    until = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    sums: Counter[str] = Counter()
    failures = 0
    for seed in range(int(first), int(last or first) + 1):
        if time.monotonic() > until:
            break
        plan = schedule.make(seed, options.clients, themes, options.pace, options.lives)
        line, broken = one(plan, not options.no_survivors, options.deadline, options.keep)
        print(json.dumps(line | ({"broken": broken} if broken else {})), flush=True)
        sums.update({name: count for name, count in line.items() if type(count) is int and name != "seed"})
        sums["seeds"] += 1
        if broken:
            failures += 1
            replay = f"--seeds {seed} --clients {options.clients} --deadline {options.deadline} --pace {options.pace}"
            replay += f" --lives {options.lives} --themes {options.themes} --keep"
            replay += " --no-survivors" if options.no_survivors else ""
            print(f"seed {seed} broke: {broken}\nreplay: python {sys.argv[0]} {replay}", file=sys.stderr)
    print(json.dumps({"total": sums, "broken": failures}), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
