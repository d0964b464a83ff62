"""Reports readiness, status and watchdog keep-alives to the service manager, as sd_notify(3) describes.

Without NOTIFY_SOCKET, every call does nothing. The libraries for it only send one datagram: if the manager's queue is
full, none keeps the notification to send it later without blocking the loop.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Mapping

from kvcache_proto.sizes import format_size

log = logging.getLogger(__name__)

STEP = 1.0  # seconds between two notifications while the region is being prepared
MORE_TIME = "EXTEND_TIMEOUT_USEC=60000000"  # sent with each notification, and with the final one
_UNSENT = 16


class ServiceManager:
    """The service manager, as seen from this process, which never waits for it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Find it by NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID in `environ`."""
        address = environ.get("NOTIFY_SOCKET", "")
        self._name = address
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address.startswith(("/", "@")):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        elif address:
            log.warning("NOTIFY_SOCKET %r is not a path: the service manager is not notified", address)
        self._unsent: deque[str] = deque(maxlen=_UNSENT)
        self._status = ""
        self._failing = False
        self._keep_alive_every = _watchdog(environ) / 2
        self._kept_alive = self._progressed = 0.0  # times of the last notifications

    def notify(self, *lines: str) -> None:
        """Send `lines` in one notification, after those that could not be sent yet."""
        if self._socket is None:
            return
        self._unsent.append("\n".join(lines))
        self._send()

    def preparing(self, done: int, total: int) -> None:
        """Report the progress of the start, at most once per STEP, and extend its timeout."""
        now = time.monotonic()
        if now - self._progressed >= STEP:
            self._progressed = now
            self.notify(f"STATUS=preparing memory: {format_size(done)} of {format_size(total)}", MORE_TIME)

    def ready(self, status: str) -> None:
        self._status = status
        self.notify("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Report the start of a reload; `ready` ends it."""
        # Units of Type=notify-reload tell reloads apart by MONOTONIC_USEC.
        self.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", "STATUS=reading the configuration")

    def stopping(self) -> None:
        self.notify("STOPPING=1", "STATUS=stopping", MORE_TIME)

    def failed(self, error: Exception) -> None:
        self.notify(f"STATUS={error}")

    def status(self, status: str) -> None:
        """Report `status` if it has changed."""
        if status != self._status and not self._unsent:
            self._status = status
            self.notify(f"STATUS={status}")

    def tick(self, now: float) -> None:
        """Notify the watchdog when due. Call it only from the loop: if that hangs, the watchdog must fire."""
        if self._unsent:
            self._send()
        elif self._keep_alive_every and now - self._kept_alive >= self._keep_alive_every:
            self._kept_alive = now
            self.notify("WATCHDOG=1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self) -> None:
        assert self._socket is not None
        while self._unsent:
            try:
                # Not connected: a manager that re-executes itself binds a new socket at the address.
                self._socket.sendto(self._unsent[0].encode(), self._address)
            except BlockingIOError:
                return  # its queue is full; the next tick tries again
            except OSError as error:
                if not self._failing:
                    log.warning("cannot notify the service manager at %s: %s", self._name, error)
                self._failing = True
            else:
                self._failing = False
            self._unsent.popleft()


def _watchdog(environ: Mapping[str, str]) -> float:
    """Return the watchdog's timeout in seconds, 0 for none."""
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0  # meant for the process that started this one
    try:
        return int(environ.get("WATCHDOG_USEC", "0")) / 1e6
    except ValueError:
        log.warning("WATCHDOG_USEC %r is not a number: no keep-alives are sent", environ["WATCHDOG_USEC"])
        return 0.0
