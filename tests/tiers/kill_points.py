"""Processes that kill themselves, once, at a point of their work that a test names."""

from __future__ import annotations

from pathlib import Path

from tiered import patched, wait_for

_START = """\
import os, signal, sys, time

ARMED = {armed!r}


def die(point, after=0.0):
    try:
        with open(ARMED) as file:
            if file.read() != point:
                return
        os.unlink(ARMED)
    except FileNotFoundError:  # not armed, or another thread was faster
        return
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGKILL)


def around(owner, name, point, after=0.0):
    work = getattr(owner, name)

    def dying(*args, **kwargs):
        die("before " + point)
        result = work(*args, **kwargs)
        die("after " + point, after)
        return result

    is_static = isinstance(vars(owner)[name], staticmethod)
    setattr(owner, name, staticmethod(dying) if is_static else dying)


"""

_TIER = """\
if "kvcache_tiers" in sys.orig_argv:
    from kvcache_client.session.namespace import Namespace
    from kvcache_tiers import disk, moves, process, segments

    around(moves.Moves, "look", "a look")
    around(Namespace, "reserve", "a reservation")
    around(moves.Moves, "bring", "a read")
    around(process.TierProcess, "_settle", "a settlement", 0.1)  # a thread of its own sends it
    around(moves.Moves, "write_out", "a write")
    around(segments.Segment, "enter", "an entry")
    around(segments.Segment, "clear", "an eviction")
    move_all = disk._move_all

    def half(file, view, offset, reads):
        rest = view.nbytes // 2 // 4096 * 4096
        move_all(file, view[:rest], offset, reads)
        die("amid a read" if reads else "amid a write")
        move_all(file, view[rest:], offset + rest, reads)

    disk._move_all = half
else:
    from kvcache_server.daemon import tier_processes

    tier_processes.FIRST_PAUSE = tier_processes.LONGEST_PAUSE = 0.1
"""

_DAEMON = """\
if "serve" in sys.orig_argv:
    from kvcache_server.daemon.answers import Answers
    from kvcache_server.tiering.tiering import Tiering

    finish, begin = Answers._finish, Tiering.begin

    def finish_and_die(self, sender, frame, session, request, now, reply, error):
        kinds = [kind for kind in ("exists", "fetches", "stores") if getattr(reply, kind, ())]
        for kind in [*kinds, type(reply).__name__]:
            die("before an answer: " + kind)
        finish(self, sender, frame, session, request, now, reply, error)
        for kind in [*kinds, type(reply).__name__]:
            die("after an answer: " + kind)

    def begin_and_die(self, session, request, now):
        kinds = [kind for kind in ("exists", "fetched", "stored") if getattr(request, kind, ())]
        for kind in kinds:
            die("before a report: " + kind)
        begin(self, session, request, now)
        for kind in kinds:
            die("after a report: " + kind)

    Answers._finish, Tiering.begin = finish_and_die, begin_and_die
"""


class KillPoint:
    """`environ` is for the daemon, and so for its tiers. Once `arm` was called, one process dies at that point."""

    def __init__(self, folder: Path, of: str) -> None:
        """Of the processes of tiers if `of` is "tier", of the daemon's if it is "daemon"."""
        self._armed = folder / "armed"
        code = _START.format(armed=str(self._armed)) + {"tier": _TIER, "daemon": _DAEMON}[of]
        self.environ = patched(folder, code)

    def arm(self, point: str) -> None:
        new = self._armed.with_suffix(".new")
        new.write_text(point)
        new.rename(self._armed)

    @property
    def passed(self) -> bool:
        return not self._armed.exists()

    def wait(self) -> None:
        wait_for(lambda: self.passed, f"{self._armed.read_text() if self._armed.exists() else 'the point'}")
