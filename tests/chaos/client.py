"""Engines that save and load under faults: `python client.py` forks a process for each plan, a line of JSON, it reads.

A process connects to its plan's `control` socket and says its pid; it goes on until that socket closes. What it counts
lies in its tallies, and what it must remember beyond its own kill in its journal, one line each:

    V region kind family branch depth
                          the daemon has acknowledged this block, and so all above it, as visible
    B call begin end      a call took longer than its deadline and the slack
    E what                a call raised
    W what                wrong bytes
    P point signal        it has killed or stopped itself there
    X                     it has ended well
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import blocks
from payload import BRANCHES, FAMILIES, LENGTH, prompt
from tallies import Tallies

from kvcache_client import Session
from kvcache_client.session.grants import Lease, Reservation
from kvcache_client.session.region import Region
from kvcache_proto.errors import KVCacheError
from kvcache_proto.types import Outcome, Verdict

SLACK = 0.25  # seconds that a machine of two busy cores may add to a deadline
IDLE = 0.005  # between steps while there is no daemon
HELD = 4  # leases, and jobs of ranks, at one time
T = TypeVar("T")


class Prompt(NamedTuple):
    family: int
    branch: int
    hashes: list[bytes]


class Client:
    """One process of an engine. `plan["point"]` is where a signal hits it: [name, each how many times, signal]."""

    def __init__(self, plan: dict[str, Any], control: socket.socket) -> None:
        self.plan, self.control = plan, control
        self.draw = random.Random(plan["seed"])
        folder = Path(plan["folder"])
        self.tallies = Tallies(folder / f"{plan['name']}.tallies")
        self.journal = os.open(folder / f"{plan['name']}.journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.spec = blocks.SPECS[plan["kind"]]
        self.shards: list[int] = plan["shards"]
        self.deadline: float = plan["deadline"]
        self.arrivals = 0
        self.open()

    def open(self) -> None:
        self.session = Session.open(
            self.plan["endpoint"], engine=self.plan["engine"], label=self.plan["name"], deadline=self.deadline
        )
        self.namespace = self.session.attach(self.spec, self.shards)
        self.tallies.add("sessions")
        self.point("attached")

    def note(self, kind: str, *what: object) -> None:
        os.write(self.journal, (" ".join([kind, *map(str, what)]) + "\n").encode())

    def point(self, name: str) -> None:
        where, count, signum = self.plan["point"] or ("", 0, 0)
        if name == where:
            self.arrivals += 1
            if self.arrivals % count == 0:
                self.note("P", name, signum)
                os.kill(os.getpid(), signum)

    def timed(self, name: str, call: Callable[[], T]) -> T | None:
        """Make a call that has a deadline; None where it raised."""
        begin = time.monotonic()
        try:
            return call()
        except KVCacheError as error:
            self.note("E", name, type(error).__name__, error)
            return None
        finally:
            end = time.monotonic()
            if end - begin > self.deadline + SLACK:
                self.note("B", name, begin, end)

    def choose(self) -> Prompt:
        family = min(int(self.draw.expovariate(4 / FAMILIES)), FAMILIES - 1)
        branch = self.draw.randrange(BRANCHES)
        return Prompt(family, branch, prompt(family, branch, self.draw.randint(1, LENGTH)))

    def mapped(self, region_id: bytes) -> Region | None:
        """Return the region that an answer speaks of, where it is still the one that is mapped."""
        region = self.session.region
        return region if region is not None and region.id == region_id else None

    def load(self, region_id: bytes, hashes: list[bytes], packed: bytes, midway: Callable[[], None]) -> int:
        """Read and check; return how many slots had been given to other blocks."""
        region = self.mapped(region_id)
        if region is None:
            return 0
        seen = blocks.read(region, self.spec, hashes, packed, self.shards, midway)
        self.tallies.add("verified", seen.right)
        self.tallies.add("wrong", len(seen.wrong))
        self.tallies.add("gone", seen.gone)
        for what in seen.wrong:
            self.note("W", f"{what}; session up {self.session.up}, region {region_id.hex()[:8]}")
        return seen.gone

    def judged(self, region: Region, what: Prompt, depths: list[int], verdicts: list[Verdict]) -> None:
        """Remember what the daemon has said of blocks that were written."""
        visible = [depth for depth, verdict in zip(depths, verdicts, strict=False) if verdict is Verdict.VISIBLE]
        self.tallies.add("visible", len(visible))
        self.tallies.add("not_visible", len(verdicts) - len(visible))
        self.tallies.add("unanswered", len(depths) - len(verdicts))
        if visible:
            self.note("V", region.id.hex(), self.plan["kind"], what.family, what.branch, max(visible))

    def leave(self) -> None:
        for name in ("sessions_resumed", "leases_lost", "settles_sent_again"):
            self.tallies.add(name, self.session.counters.get(name, 0))
        self.session.close()

    def called_off(self) -> bool:
        return bool(select.select([self.control], [], [], 0)[0])

    def run(self) -> None:
        while not self.called_off():
            self.tallies.add("steps")
            self.step()
            if not self.session.up:
                time.sleep(IDLE)
        self.finish()
        self.leave()
        self.note("X")

    def step(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError

    # What schedulers and whole engines share.

    def acquire(self, what: Prompt) -> Lease | None:
        lease = self.timed("acquire", lambda: self.namespace.acquire(what.hashes))
        self.tallies.add("lookups")
        if lease is None or lease.failed:
            self.tallies.add("failed_calls")
            return None
        self.tallies.add("hits", lease.hits)
        return lease

    def reserve(self, what: Prompt, hits: int) -> Reservation | None:
        if hits == len(what.hashes):
            return None
        parent = what.hashes[hits - 1] if hits else None
        reservation = self.timed("reserve", lambda: self.namespace.reserve(what.hashes[hits:], parent))
        if reservation is None or reservation.failed:
            self.tallies.add("failed_calls")
            return None
        self.tallies.add("granted", len(reservation.granted))
        self.tallies.add("refused", len(reservation.refused))
        return reservation if reservation.granted else None


class Whole(Client):
    """An engine of one process: it decides, reads and writes."""

    def __init__(self, plan: dict[str, Any], control: socket.socket) -> None:
        self.held: list[tuple[object, Lease, Prompt]] = []
        super().__init__(plan, control)

    def step(self) -> None:
        chance = self.draw.random()
        if self.plan["restless"] and chance < 0.005:
            self.finish()
            self.leave()
            self.open()
        what = self.choose()
        lease = self.acquire(what)
        if lease is None:
            return
        self.held.append((self.session.daemon.connection, lease, what))
        self.point("lease held")
        while len(self.held) > (HELD if chance < 0.2 else 0):
            self.let_go()
        self.save(what, lease.hits)

    def let_go(self) -> None:
        connection, lease, what = self.held.pop(0)
        gone = self.load(lease.region_id, what.hashes[: lease.hits], lease.packed, lambda: self.point("mid-read"))
        lost = self.session.counters.get("leases_lost", 0)
        if gone and connection is not None and connection is self.session.daemon.connection and not lost:
            self.tallies.add("torn_leases", gone)
        lease.release()

    def save(self, what: Prompt, hits: int) -> None:
        reservation = self.reserve(what, hits)
        if reservation is None:
            return
        self.point("reserved")
        depths = [hits + position for position in reservation.granted]
        region, chance = self.mapped(reservation.region_id), self.draw.random()
        if region is None or chance < 0.05:
            reservation.abort()
            return
        hashes = [what.hashes[depth] for depth in depths]
        blocks.write(region, self.spec, hashes, reservation.packed, self.shards, lambda: self.point("half written"))
        self.point("written")
        if chance < 0.1:
            self.namespace.settle(reservation.id, Outcome.FAILED, region_id=region.id)
            return
        self.judged(region, what, depths, self.timed("commit", reservation.commit) or [])

    def finish(self) -> None:
        while self.held:
            self.let_go()


class Scheduler(Client):
    """The scheduler, which decides; its ranks, which come and go at any time, read and write."""

    def __init__(self, plan: dict[str, Any], control: socket.socket) -> None:
        super().__init__(plan, control)
        self.listener = _listen(Path(plan["folder"]) / f"{plan['engine']}.ranks")
        self.ranks: dict[int, Peer] = {}
        self.jobs: dict[int, tuple[set[int], Lease | None]] = {}  # who has not answered yet, what is pinned meanwhile
        self.last_job = 0

    def step(self) -> None:
        self.listen(0.02 if len(self.jobs) >= HELD or not self.ranks else 0.0)
        if len(self.jobs) >= HELD:
            return
        what = self.choose()
        lease = self.acquire(what)
        if lease is None:
            return
        self.point("lease held")
        if lease.hits:
            self.ship("load", what, range(lease.hits), lease.region_id, lease.packed, lease=lease)
        reservation = self.reserve(what, lease.hits)
        if reservation is None:
            return
        self.point("reserved")
        if not self.ranks:
            reservation.abort()
            return
        depths = [lease.hits + position for position in reservation.granted]
        self.ship("save", what, depths, reservation.region_id, reservation.packed, reservation=reservation.id)

    def ship(
        self,
        act: str,
        what: Prompt,
        depths: Any,
        region_id: bytes,
        packed: bytes,
        lease: Lease | None = None,
        reservation: int = 0,
    ) -> None:
        self.last_job += 1
        job = [self.last_job, act, what.family, what.branch, list(depths), region_id.hex(), packed.hex(), reservation]
        told = {number for number, rank in self.ranks.items() if rank.tell(job)}
        self.jobs[self.last_job] = told, lease
        self.settle_jobs()

    def listen(self, patience: float) -> None:
        ready, _, _ = select.select([self.listener, *self.ranks], [], [], patience)
        for each in ready:
            if each is self.listener:
                connection, _ = self.listener.accept()
                self.ranks[connection.fileno()] = Peer(connection)
                continue
            answers = self.ranks[each].hear()
            for number in answers or []:
                self.jobs[number][0].discard(each)
            if answers is None:
                self.ranks.pop(each).close()
                for waiting, _ in self.jobs.values():
                    waiting.discard(each)
        self.settle_jobs()

    def settle_jobs(self) -> None:
        for number in [number for number, (waiting, _) in self.jobs.items() if not waiting]:
            _, lease = self.jobs.pop(number)
            if lease is not None:
                lease.release()

    def finish(self) -> None:
        while self.jobs:
            self.listen(1.0)
        for rank in self.ranks.values():
            rank.close()


class Rank(Client):
    """Reads and writes its shards as its scheduler says, and settles them itself."""

    def __init__(self, plan: dict[str, Any], control: socket.socket) -> None:
        super().__init__(plan, control)
        self.scheduler: Peer | None = None

    def step(self) -> None:
        if self.scheduler is None:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(Path(self.plan["folder"]) / f"{self.plan['engine']}.ranks"))
            except OSError:
                connection.close()
                time.sleep(IDLE)
                return
            self.scheduler = Peer(connection)
        if not select.select([self.scheduler.connection], [], [], 0.05)[0]:
            return
        jobs = self.scheduler.hear()
        for job in jobs or []:
            self.do(*job)
            self.scheduler.tell(job[0])
        if jobs is None:
            self.scheduler.close()
            self.scheduler = None

    def do(
        self, number: int, act: str, family: int, branch: int, depths: list[int], region: str, packed: str, of: int
    ) -> None:
        what = Prompt(family, branch, prompt(family, branch, LENGTH))
        hashes, region_id = [what.hashes[depth] for depth in depths], bytes.fromhex(region)
        if act == "load":
            self.point("lease held")
            self.load(region_id, hashes, bytes.fromhex(packed), lambda: self.point("mid-read"))
            return
        self.point("reserved")
        mapped = self.mapped(region_id)
        if mapped is None:
            return
        blocks.write(mapped, self.spec, hashes, bytes.fromhex(packed), self.shards, lambda: self.point("half written"))
        self.point("written")
        outcome = Outcome.FAILED if self.draw.random() < 0.05 else Outcome.COMMITTED
        self.namespace.settle(
            of, outcome, region_id=region_id, then=lambda verdicts: self.judged(mapped, what, depths, verdicts)
        )

    def finish(self) -> None:
        until = time.monotonic() + 10
        while self.scheduler is not None and time.monotonic() < until:
            self.step()


class Peer:
    """One end of a line between scheduler and rank: JSON, a line each."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.heard = b""

    def tell(self, what: object) -> bool:
        try:
            self.connection.sendall(json.dumps(what).encode() + b"\n")
        except OSError:
            return False
        return True

    def hear(self) -> list[Any] | None:
        """Return what has come; None where the other side has gone."""
        try:
            data = self.connection.recv(1 << 16)
        except OSError:
            return None
        if not data:
            return None
        *lines, self.heard = (self.heard + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self.connection.close()


def _listen(path: Path) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(8)
    return listener


ROLES = {"whole": Whole, "scheduler": Scheduler, "rank": Rank}


def live(plan: dict[str, Any]) -> None:
    control = socket.socket(socket.AF_UNIX)
    control.connect(plan["control"])
    control.sendall(f"{plan['name']} {os.getpid()}\n".encode())
    ROLES[plan["role"]](plan, control).run()


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            os.close(0)
            try:
                live(json.loads(line))
            except BaseException:  # noqa: BLE001 - the driver looks for it in the log
                traceback.print_exc()
            finally:
                os._exit(0)
