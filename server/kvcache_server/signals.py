"""The daemon's signals, blocked until its loop runs so that none interrupts a half-done start; and the orderly exit of
commands that have started processes.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from threading import Thread
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (*STOP_SIGNALS, signal.SIGHUP, signal.SIGUSR1)
EXIT_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def block() -> None:
    """Block SIGNALS in this thread and in those that it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def unblock() -> None:
    """Unblock SIGNALS; those that have arrived meanwhile are handled first. Install the handlers beforehand."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def stop_is_pending() -> bool:
    """Return True if a stop signal has arrived while it was blocked."""
    return not signal.sigpending().isdisjoint(STOP_SIGNALS)


def start_thread(name: str, work: Callable[..., None], *args: object) -> Thread:
    """Run `work` on a daemon thread in which SIGNALS are blocked.

    It inherits the blocked signals: if it blocked them itself, one could arrive before that.
    """
    thread = Thread(target=work, args=args, name=name, daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return thread


def exit_cleanly_when_told() -> None:
    """Make SIGTERM and SIGHUP raise SystemExit, so that the process cleans up before it ends."""

    def end(signum: int, frame: FrameType | None) -> None:
        for each in EXIT_SIGNALS:  # a second one would cut the clean-up short
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + signum)

    for each in EXIT_SIGNALS:
        if signal.getsignal(each) is signal.SIG_DFL:  # unless ignored, as by nohup
            signal.signal(each, end)
