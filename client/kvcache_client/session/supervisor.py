"""A session's thread: it watches the door, receives what nobody waits for, and comes back after the daemon did."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from kvcache_client.session.handshake import readable

if TYPE_CHECKING:
    from kvcache_client.session.connection import Link
    from kvcache_client.session.session import Session

logger = logging.getLogger("kvcache_client")

GLIMPSE = 0.02  # seconds


class Keeper:
    """Decides nothing: it waits until something is due, and has the session do it. `bell` is what wakes it."""

    def __init__(self, session: Session) -> None:
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._session = session
        self._stopping = False
        self._thread = threading.Thread(target=self._keep, name="kvcache-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ring(self) -> None:
        """Have it look what is due."""
        os.eventfd_write(self.bell, 1)

    def stop(self) -> None:
        """End the thread, and return once it has ended."""
        self._stopping = True
        self.ring()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def close(self) -> None:
        os.close(self.bell)

    def _keep(self) -> None:
        while not self._stopping:
            try:
                if self._session.link is None:
                    self._come_back()
                else:
                    self._watch(self._session.link)
            except Exception:  # a session without its keeper would never come back, nor hear of late answers
                self._session.count("keeper_errors")
                logger.exception("the session's keeper met an error")
                self._wait([], self._session.backoff.longest)

    def _come_back(self) -> None:
        until = time.monotonic() + self._session.backoff.next()
        while not self._stopping and (left := until - time.monotonic()) > 0:
            self._wait([], left)
        if not self._stopping:
            self._session.look_for_daemon()

    def _watch(self, link: Link) -> None:
        """Wait until something is due at `link`, and do it."""
        session, channel = self._session, link.channel
        session.telling.tell(link)
        channel.watched = False  # before looking whether it is busy: who posts in between rings the bell
        channel.watched = watched = channel.busy
        probe_at = session.breaker.probe_at
        timeout = session.deadline if watched else session.telling.wait(link)
        if probe_at is not None:
            timeout = max(0.0, probe_at - time.monotonic())
        ready = self._wait([link.door.connection, *([channel.descriptor] if watched else [])], timeout)
        if link.door.connection in ready and not link.door.still_open():
            session.leave("the door closed")
        elif channel.fault:
            session.leave(channel.fault)
        else:
            if watched:
                channel.pump(GLIMPSE)  # a call that is under way receives for us: the door must not wait for its end
            now = time.monotonic()
            if channel.overdue(now, session.deadline):
                session.missed("an answer is overdue")
            if session.breaker.probe_due(now):
                session.probe(link, now)

    def _wait(self, descriptors: list[int], timeout: float | None) -> set[int]:
        ready = readable([*descriptors, self.bell], timeout)
        if self.bell in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.bell)
        return ready
