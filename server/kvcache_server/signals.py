"""The signals that a daemon takes: blocked until it can, and those that end it."""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (*STOP_SIGNALS, signal.SIGHUP, signal.SIGUSR1)


def block() -> None:
    """Let none of them interrupt this thread, nor those that it starts. Every thread but the main one does it first: a
    signal that the main thread blocks would be taken by another one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
