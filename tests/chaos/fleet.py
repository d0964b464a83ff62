"""The processes of a run: the daemon and its successors, the clients, the proxies. All are started and ended here."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parent.parent))

import conftest
import schedule
from tallies import NAMES, Tallies

from kvcache_proto.endpoint import handshake_path
from kvcache_proto.errors import KVCacheError

HERE = Path(__file__).parent
START_SECONDS = 30.0
LOOK = 0.02  # between two looks at a process
T = TypeVar("T")


class Broken(Exception):
    """Something that must always hold does not."""


class Daemon(conftest.Daemon):
    """One life of the daemon at `endpoint`, which keeps its region; `point` as in daemon_that_dies.py."""

    def __init__(self, endpoint: str, folder: Path, point: str = "", **flags: object) -> None:
        self.point = point
        if point:
            flags["program"] = (str(HERE / "daemon_that_dies.py"), "--point", point)
        super().__init__(folder, endpoint=endpoint, **{"keep": "true", **flags})

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def died_there(self) -> bool:
        """Whether its point ended it; a kill from outside sets `point` to nothing."""
        return bool(self.point) and self.process.poll() == -signal.SIGKILL

    def unless_dead(self, ask: Callable[[], T]) -> T | None:
        """Return the result of `ask`, which is tried again; None if the daemon dies. Raises Broken if it only fails."""
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                return ask()
            except (KVCacheError, OSError, AssertionError) as error:
                if not self.alive:
                    return None
                if time.monotonic() > until:
                    raise Broken(f"{error}\n{self.log}") from None
                time.sleep(LOOK)  # it may be busy, or about to die

    def ready(self) -> bool:
        """Wait until it answers; False where it ended before."""
        return self.unless_dead(self.wait_ready) is not None

    def wait(self, what: str, found: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
        """Return the first status for which `found` holds; None where it dies first."""
        return self.unless_dead(lambda: self.wait_status(found, what))

    def sound(self) -> bool:
        """Let it check what must always hold; False where it dies before it has said."""
        failures = self.unless_dead(self.integrity_failures)
        if failures:
            raise Broken(f"integrity:\n{self.log}")
        return failures is not None

    def end(self, signum: int) -> int:
        self.point = "" if self.alive else self.point
        if self.alive:
            self.process.send_signal(signum)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Broken(f"the daemon does not stop:\n{self.log}") from None


class Crowd:
    """The clients, each forked from one process that has imported all there is to import."""

    def __init__(self, folder: Path, endpoint: str, deadline: float) -> None:
        self.folder, self.endpoint, self.deadline = folder, endpoint, deadline
        self.members: dict[str, Member] = {}
        self.counts = {"kills": 0, "stops": 0}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "control"))
        self._listener.listen(64)
        self._listener.settimeout(20)
        self._proxies: dict[str, subprocess.Popen[str]] = {}
        self._log = (folder / "clients.log").open("wb")
        self._nursery = subprocess.Popen(
            [sys.executable, str(HERE / "client.py")], stdin=subprocess.PIPE, stderr=self._log, text=True
        )

    @property
    def log(self) -> str:
        return (self.folder / "clients.log").read_text(errors="replace")

    def add(self, *plans: schedule.Client) -> None:
        for plan in plans:
            endpoint = self._proxy(plan) if plan.proxied else self.endpoint
            where = {"endpoint": endpoint, "folder": str(self.folder), "deadline": self.deadline}
            line = json.dumps(asdict(plan) | where | {"control": str(self.folder / "control")})
            assert self._nursery.stdin is not None
            print(line, file=self._nursery.stdin, flush=True)
        by_name = {plan.name: plan for plan in plans}
        for _ in plans:
            connection, _ = self._listener.accept()
            name, pid = connection.makefile().readline().split()
            self.members[name] = Member(by_name[name], connection, int(pid), self.members.get(name))

    def look(self, replace: Callable[[schedule.Client], schedule.Client] | None) -> None:
        """Find stopped and killed processes; wake stopped ones in time, and replace killed ones."""
        gone = []
        for member in self.members.values():
            state = member.state()
            if state == "T":
                if not member.stopped_at:
                    member.stopped_at = time.monotonic()
                    self.counts["stops"] += 1
                elif time.monotonic() > member.stopped_at + member.plan.stopped_for:
                    member.wake()
            elif not state:
                gone.append(member)
        self.counts["kills"] += sum(member.alive for member in gone)
        for member in gone:
            member.alive = False
        if replace is not None and gone:
            self.add(*(replace(member.plan) for member in gone))

    def tell_proxies(self, line: str) -> None:
        for proxy in self._proxies.values():
            assert proxy.stdin is not None
            print(line, file=proxy.stdin, flush=True)

    def finish(self) -> None:
        """Let all of them end well. Raises Broken where one does not."""
        self.tell_proxies("clear")
        for member in self.members.values():
            member.wake()
            member.control.shutdown(socket.SHUT_WR)
        until = time.monotonic() + START_SECONDS
        while left := [member.plan.name for member in self.members.values() if member.state()]:
            for member in self.members.values():  # it may stop once more on its way out
                member.wake()
            if time.monotonic() > until:
                raise Broken(f"{left} do not end after {START_SECONDS} s")
            time.sleep(LOOK)

    def close(self) -> None:
        for member in self.members.values():
            if member.state():
                _signal(member.pid, signal.SIGKILL)
            member.control.close()
        for process in (self._nursery, *self._proxies.values()):
            assert process.stdin is not None
            process.stdin.close()
            process.kill()
            process.wait()
        self._listener.close()
        self._log.close()

    # What they have said.

    def totals(self) -> dict[str, int]:
        totals = dict.fromkeys(NAMES, 0)
        for path in self.folder.glob("*.tallies"):
            for name, count in Tallies(path).read().items():
                totals[name] += count
        return totals

    def journal(self, kind: str) -> list[tuple[str, list[str]]]:
        """Return (client, words) of each line of that kind."""
        return [
            (path.stem, line.split()[1:])
            for path in sorted(self.folder.glob("*.journal"))
            for line in path.read_text().splitlines()
            if line.split(" ", 1)[0] == kind
        ]

    def breaches(self) -> list[str]:
        """Return the calls that took too long although their process was not stopped."""
        found = []
        for name, (call, begin, end) in self.journal("B"):
            pauses = self.members[name].pauses
            if not any(first < float(end) and float(begin) < last for first, last in pauses):
                found.append(f"{name} {call} {float(end) - float(begin):.3f} s")
        return found

    def _proxy(self, plan: schedule.Client) -> str:
        front = f"ipc://{self.folder}/{plan.name}.sock"
        if plan.name not in self._proxies:
            command = [sys.executable, str(HERE / "proxy.py"), front, self.endpoint, str(plan.seed)]
            self._proxies[plan.name] = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
            while not os.path.exists(handshake_path(front)):
                time.sleep(LOOK)
        return front


class Member:
    """A client process in the driver; it replaces the previous one of that name."""

    def __init__(self, plan: schedule.Client, control: socket.socket, pid: int, former: Member | None) -> None:
        self.plan, self.control, self.pid = plan, control, pid
        self.alive = True
        self.stopped_at = 0.0
        self.pauses: list[tuple[float, float]] = former.pauses if former else []
        if former:
            former.control.close()

    def state(self) -> str:
        """Return the letter that the kernel gives to its state, or nothing where it is gone."""
        if select.select([self.control], [], [], 0)[0]:
            return ""  # it never says another word
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return ""
        return "" if state in "ZX" else state

    def stop(self) -> None:
        if self.state() not in ("", "T"):
            _signal(self.pid, signal.SIGSTOP)
            self.stopped_at = time.monotonic()

    def wake(self) -> None:
        if self.state() == "T":
            _signal(self.pid, signal.SIGCONT)
            self.pauses.append((self.stopped_at, time.monotonic()))
        self.stopped_at = 0.0

    def kill(self) -> None:
        if self.state():
            _signal(self.pid, signal.SIGKILL)


def _signal(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it went while we looked
        os.kill(pid, signum)
