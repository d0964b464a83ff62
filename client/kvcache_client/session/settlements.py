"""Settlements on their way to the daemon: none is lost with one that is gone, where the next one knows the session."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvcache_client.session import forks
from kvcache_client.session.channel import Channel, Handler
from kvcache_client.session.connection import Debt, Link
from kvcache_proto.messages import Reply, Settle

if TYPE_CHECKING:
    from kvcache_client.session.session import Session


class Settlements:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._paying = threading.Lock()

    def send(self, link: Link | None, request: Settle, answer: Handler) -> None:
        """Send a settlement without waiting; while the daemon is away it is kept, for the next one to hear of it."""
        session = self._session
        if session.owner != forks.current():
            return
        channel = link.channel if link is not None and link is session.link else None

        def heard(reply: Reply | None) -> None:
            self.heard(link, channel, request, answer, reply)

        if channel is None or not channel.post(request, heard):
            heard(None)

    def heard(
        self, link: Link | None, channel: Channel | None, request: Settle, answer: Handler, reply: Reply | None
    ) -> None:
        """Take the answer that came by `channel`. Where none did, from a daemon that is gone, the next one is told."""
        session = self._session
        if reply is not None or link is None or (channel is not None and not channel.closed):
            answer(reply)
            if reply is not None and link is not None and link.owed:
                self.pay(link)
        elif link in (session.link, session.away) and not session.closing:
            link.owed.append(Debt(request, answer))
            self.pay(link)
        else:
            session.count("stale_settles")

    def pay(self, link: Link) -> None:
        """Send what is owed, where the session goes on: not all at once, or that alone would end the session again."""
        # Whoever fails to get the lock has its debt looked at by who holds it, after the release.
        while link.owed and link is self._session.link and link.channel.roomy and self._paying.acquire(blocking=False):
            try:
                debt = link.owed.popleft() if link.owed else None
                if debt is not None:
                    self._session.count("settles_sent_again")
                    self.send(link, debt.settle, debt.answer)
            finally:
                self._paying.release()
