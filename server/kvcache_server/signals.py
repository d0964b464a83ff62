"""The signals that a daemon takes: blocked until its loop runs, for none may interrupt what is half made. And how a
command that has started processes ends.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from threading import Thread
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (*STOP_SIGNALS, signal.SIGHUP, signal.SIGUSR1)
ENDINGS = (signal.SIGTERM, signal.SIGHUP)


def block() -> None:
    """Let none of them interrupt this thread, nor those that it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def unblock() -> None:
    """Take them from now on, first those that came meanwhile. Their handlers are there."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def stop_is_pending() -> bool:
    """Return whether one that ends the daemon has come while it was blocked."""
    return not signal.sigpending().isdisjoint(STOP_SIGNALS)


def start_thread(name: str, work: Callable[..., None], *args: object) -> Thread:
    """Run `work` on a thread that takes none of them, nor keeps the process from ending.

    It inherits what is blocked: to block them itself would be too late for a signal that comes before.
    """
    thread = Thread(target=work, args=args, name=name, daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return thread


def exit_cleanly_when_told() -> None:
    """Let SIGTERM and SIGHUP end this process by an exception, so that it takes away what it has made."""

    def end(signum: int, frame: FrameType | None) -> None:
        for each in ENDINGS:  # a second one would cut the tidying short
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + signum)

    for each in ENDINGS:
        if signal.getsignal(each) is signal.SIG_DFL:  # nohup has it ignored
            signal.signal(each, end)
