"""The daemon, killed at an instruction: `python daemon_that_dies.py --point store:137 serve ...`.

It runs the unchanged product and observes it from outside, with `sys.settrace`. A point is a name of POINTS and a
number: when it is reached for that time, the process sends itself SIGKILL. `store` is reached after each single store
to a row of the region, `before-reply` and `after-reply` around each reply, and the others before each line of the
functions that they name. At `clock` the process does not die: its wall clock jumps by up to a day, back and forth, each
time that it is read.
"""

from __future__ import annotations

import dis
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

DAY = 86400
STORE = dis.opmap["STORE_SUBSCR"]


class Where(NamedTuple):
    """Functions of one module of the daemon, by name; none means all of them."""

    module: str
    functions: frozenset[str] = frozenset()

    def has(self, code: CodeType) -> bool:
        inside = code.co_filename.endswith(f"/{self.module}.py")
        return inside and (not self.functions or code.co_name in self.functions)


def _in(module: str, *functions: str) -> Where:
    return Where(f"kvcache_server/{module}", frozenset(functions))


ROWS = Where("kvcache_proto/region")
POINTS: dict[str, tuple[Where, ...]] = {
    "store": (ROWS,),
    "before-reply": (_in("daemon/answers", "_finish"),),
    "after-reply": (_in("daemon/answers", "_finish"),),
    "grant": (
        _in("core/reservations", "_grant", "_grant_run", "_supersede"),
        _in("core/pool", "vacate", "place"),
        _in("core/pool", "take"),
    ),
    "settle": (
        _in("core/reservations", "_settle_shards", "_show_some", "doom", "_give_back"),
        _in("core/index", "show"),
    ),
    "evict": (
        _in("core/eviction/policy", "_evict_from", "_evicted", "_forget"),
        _in("core/index", "remove"),
        _in("core/pool", "give_back"),
    ),
    "session": (
        _in("daemon/handshake", "_welcome"),
        _in("daemon/session_registry", "open", "leave", "sweep"),
        _in("core/cache", "end_session"),
        _in("core/registry", "disconnect", "forget"),
    ),
    "start": (_in("storage/region_file"), _in("storage/region_names"), _in("storage/folder")),
    "rebuild": (
        _in("core/recovery/read_rows"),
        _in("core/recovery/restore"),
        _in("storage/warm_start"),
        _in("core/journal", "read", "apply"),
        _in("core/pool", "adopt", "resume"),
    ),
    "notes": (_in("storage/state_file"), _in("storage/session_locks"), _in("core/journal", "pack", "records")),
}
CLOCK = "clock"
BY_STORE = {"store"}
BY_CALL = {"before-reply", "after-reply"}


class Watch:
    """Counts arrivals at a point and dies at the last one."""

    def __init__(self, point: str, count: int) -> None:
        self.where, self.left = POINTS[point], count
        self.local = self._stores if point in BY_STORE else self._lines
        self._wanted: dict[CodeType, bool] = {}
        self._code: dict[CodeType, bytes] = {}  # `co_code` is made anew each time
        self._stored: set[int] = set()  # frames whose last instruction was a store

    def arrive(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def calls(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        """What settrace calls for each function that begins."""
        code = frame.f_code
        wanted = self._wanted.get(code)
        if wanted is None:
            wanted = self._wanted[code] = any(where.has(code) for where in self.where)
        if not wanted:
            return None
        if self.local == self._stores:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.local

    def _lines(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event == "line":
            self.arrive()
        return self._lines

    def _stores(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if id(frame) in self._stored:  # whatever comes now, the store is done
            self._stored.discard(id(frame))
            self.arrive()
        if event == "opcode":
            code = self._code.get(frame.f_code) or self._code.setdefault(frame.f_code, frame.f_code.co_code)
            if code[frame.f_lasti] == STORE:
                self._stored.add(id(frame))
        return self._stores


def watch_replies(watch: Watch, before: bool) -> None:
    """Let `watch` see each reply of the daemon."""
    from kvcache_server.daemon.request_socket import Connection

    send = Connection.send

    def sending(self: Connection, packed: bytes) -> str:
        if before:
            watch.arrive()
        lost = send(self, packed)
        if not before:
            watch.arrive()
        return lost

    Connection.send = sending  # type: ignore[method-assign]


def let_the_clock_leap(seed: int) -> None:
    draw, real, real_ns = random.Random(seed), time.time, time.time_ns
    time.time = lambda: real() + draw.uniform(-1, 1) * DAY
    time.time_ns = lambda: real_ns() + int(draw.uniform(-1, 1) * DAY) * 10**9


def main() -> None:
    assert sys.argv[1] == "--point"
    name, _, count = sys.argv[2].partition(":")
    sys.argv[1:3] = []
    if name == CLOCK:  # before the daemon takes what it needs of `time`
        let_the_clock_leap(int(count))
    from kvcache_server.cli import main as daemon

    if name == CLOCK:
        daemon()
    watch = Watch(name, int(count))
    if name in BY_CALL:
        watch_replies(watch, name == "before-reply")
    else:
        sys.settrace(watch.calls)
    daemon()


if __name__ == "__main__":
    main()
