"""What the service manager is told: that the daemon is ready, what it does, that its loop still turns. sd_notify(3).

It is one datagram of lines; the libraries for it want libsystemd, or are no longer kept. Where nobody listens, without
NOTIFY_SOCKET, each call does nothing.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Mapping

from kvcache_server.config import format_size
from kvcache_server.storage.region_file import Progress

log = logging.getLogger(__name__)

STEP = 1.0  # seconds between two lines while the region is being prepared
MORE_TIME = 60.0  # seconds that one such line asks for, and the end
_UNSENT = 16


class ServiceManager:
    """The service manager, as far as this process can speak to it. It is never waited for."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Find it by NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID in `environ`."""
        address = environ.get("NOTIFY_SOCKET", "")
        self._name = address
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address.startswith(("/", "@")):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        elif address:
            log.warning("NOTIFY_SOCKET %r is no path: nobody is told that the daemon is ready", address)
        self._unsent: deque[str] = deque(maxlen=_UNSENT)
        self._status = ""
        self._deaf = False
        self._apart = _watchdog(environ) / 2
        self._petted = 0.0

    def tell(self, *lines: str) -> None:
        """Send `lines` together, after what could not be sent yet."""
        if self._socket is None:
            return
        self._unsent.append("\n".join(lines))
        self._send()

    def preparing(self, progress: Progress | None = None) -> Progress:
        """Return `progress` such that the manager hears of it as well, and waits for as long as it goes on."""
        told = 0.0

        def tell(done: int, total: int) -> None:
            nonlocal told
            if progress is not None:
                progress(done, total)
            now = time.monotonic()
            if now - told >= STEP:
                told = now
                status = f"STATUS=preparing memory: {format_size(done)} of {format_size(total)}"
                self.tell(status, _extend(MORE_TIME))

        return tell

    def ready(self, status: str) -> None:
        self._status = status
        self.tell("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """`ready` ends it."""
        # MONOTONIC_USEC: which reload this is, for units of Type=notify-reload.
        self.tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", "STATUS=reading the configuration")

    def stopping(self) -> None:
        self.tell("STOPPING=1", "STATUS=stopping", _extend(MORE_TIME))

    def failed(self, error: Exception) -> None:
        self.tell(f"STATUS={error}")

    def status(self, status: str) -> None:
        """Say how it goes, where that has changed."""
        if status != self._status and not self._unsent:
            self._status = status
            self.tell(f"STATUS={status}")

    def tick(self, now: float) -> None:
        """Pet the watchdog when it is time. For the service's loop alone: a loop that hangs must not be petted."""
        if self._unsent:
            self._send()
        elif self._apart and now - self._petted >= self._apart:
            self._petted = now
            self.tell("WATCHDOG=1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self) -> None:
        assert self._socket is not None
        while self._unsent:
            try:
                # By address each time: a manager that executes itself anew has a new socket there.
                self._socket.sendto(self._unsent[0].encode(), self._address)
            except BlockingIOError:
                return  # its queue is full; the next tick tries again
            except OSError as error:
                if not self._deaf:
                    log.warning("the service manager cannot be told anything: %s: %s", self._name, error)
                self._deaf = True
            else:
                self._deaf = False
            self._unsent.popleft()


def _watchdog(environ: Mapping[str, str]) -> float:
    """Return the seconds within which the manager wants to be petted, 0 for none."""
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0  # meant for another process, which has started this one
    try:
        return int(environ.get("WATCHDOG_USEC", "0")) / 1e6
    except ValueError:
        log.warning("WATCHDOG_USEC %r is no number: the watchdog is not petted", environ["WATCHDOG_USEC"])
        return 0.0


def _extend(seconds: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}"
