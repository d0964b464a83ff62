"""The running daemon: event loop, request socket, handshakes, timers, and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import uvloop

from kvcache_proto import __version__
from kvcache_proto.errors import EndpointLost, KVCacheError, ServerError
from kvcache_proto.messages import Hello
from kvcache_proto.sizes import format_size
from kvcache_server import logs, signals
from kvcache_server.config import Config
from kvcache_server.daemon.answers import Answers
from kvcache_server.daemon.handshake import Admission, HandshakeServer
from kvcache_server.daemon.region_filling import fill_region
from kvcache_server.daemon.reload import Reload, rate_of
from kvcache_server.daemon.request_socket import RequestSocket
from kvcache_server.daemon.session_registry import SessionRegistry
from kvcache_server.daemon.systemd import ServiceManager
from kvcache_server.daemon.tier_processes import TierProcesses
from kvcache_server.events.publisher import Publisher
from kvcache_server.http.admin_ops import AdminOps
from kvcache_server.insight.insight import Insight
from kvcache_server.signals import STOP_SIGNALS
from kvcache_server.status import Daemon
from kvcache_server.storage.warm_start import WarmStart
from kvcache_server.tiering.tiering import Tiering
from kvcache_server.transport.sockets import Peer

if TYPE_CHECKING:
    from kvcache_server.http.app import HttpApp

log = logging.getLogger(__name__)

TICK = 0.25  # seconds between two ticks
SUMMARY_SECONDS = 10.0  # between two lines of the log
YOUNG_OBJECTS = 10_000  # allocations between two runs of the garbage collector


class Service:
    """Serves one cache at one endpoint until it is stopped."""

    def __init__(self, config: Config, opened: WarmStart, manager: ServiceManager, read: Callable[[], Config]) -> None:
        """Open both sockets; the caller holds the endpoint's lock. Raises the errors of HandshakeServer.

        `manager` is notified of the state; `read()` reads the configuration again.
        """
        self._manager = manager
        self._cache, self._region = opened.cache, opened.region
        self._insight = Insight(opened.cache, self._figures)
        self._insight.misses.started(time.monotonic(), opened.empty_reason)
        self._loop = uvloop.new_event_loop()
        self._loop.set_exception_handler(self._callback_failed)
        self._sessions = SessionRegistry(opened, self._disconnect, lambda number, error: self._answers.failed(0, error))
        self._tiering = Tiering(opened.cache, os.geteuid())
        self._answers = Answers(
            *(self._loop, self._cache, self._insight, self._tiering, self._sessions, opened.state, self._end_turn)
        )
        self._answers.delivery.followers += [self._insight.follow, self._tiering.follow]
        self._admin_ops = AdminOps(
            *(self._cache, self._insight, self._sessions.look_after),
            *(self._answers.background.run, self._end_turn),
        )
        self._failure: KVCacheError | None = None  # the reason that the daemon stops
        self._started, self._started_at = time.monotonic(), time.time()
        self._http: HttpApp | None = None
        self._publisher: Publisher | None = None
        with contextlib.ExitStack() as opened_so_far:  # a daemon that does not start leaves no socket behind
            opened_so_far.callback(self._loop.close)
            if config.http:  # first: a wrong address or token file must not disturb engines that connect
                from kvcache_server.http.app import HttpApp  # here: a daemon without HTTP saves aiohttp's memory

                self._http = HttpApp(self._loop, config, self._admin_ops, self._answers.failed)
                opened_so_far.callback(self._http.close)
            if config.events:
                self._publisher = Publisher(self._loop, config, self._cache)
                opened_so_far.callback(self._publisher.close)
                self._answers.delivery.followers.append(self._publisher.follow)
            self._request_socket = RequestSocket(
                *(self._loop, config.endpoint, self._sessions.tokens, self._answers.receive, self._end_turn),
                self._connection_lost,
            )
            opened_so_far.callback(self._request_socket.close)
            self._answers.connect(self._request_socket, self._admin_ops)
            geometry = self._region.geometry
            self._handshake = HandshakeServer(
                self._loop, config.endpoint, self._region.fd, geometry, self._admit, self._leave
            )
            opened_so_far.callback(self._handshake.close)
            self._allow_users(config)
            self._open = opened_so_far.pop_all()  # closed in reverse order
        self._tier_processes = TierProcesses(config.endpoint)
        self._reloading = Reload(config, read, self._cache, self._allow_users, self._tier_processes)

    def _allow_users(self, config: Config) -> None:
        """Allow only the users and groups in `config` to connect to the sockets. Raises OSError."""
        self._handshake.allow_users(config.allow_uids, config.allow_gids, rate_of(config))
        self._request_socket.listener.allow_users(config.allow_uids, config.allow_gids)
        if self._publisher is not None:
            self._publisher.allow_users(config.allow_uids, config.allow_gids)

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then close the sockets. Sessions continue with the next daemon.

        The caller has blocked SIGNALS; pending ones are handled. Raises EndpointLost if a socket of ours was removed,
        and RegionError if memory runs out before the region is complete, both after the same clean-up.
        """
        loop = self._loop
        loop.call_soon(self._listen_to_signals)
        self._next_tick = loop.call_later(TICK, self._tick)
        loop.call_later(SUMMARY_SECONDS, self._summarise)
        # With millions of blocks, a full collection would take half a second. Only objects created since the last
        # collection are examined: older ones form no cycles (tests/chaos/churn.py), except those of HTTP, which
        # HttpApp.collect examines.
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, 1 << 30, 1 << 30)
        try:
            loop.run_forever()
        finally:
            signals.block()  # a second signal must not interrupt the clean-up
            self._next_tick.cancel()  # the loop runs once more, and a tick would find closed sockets
            self._manager.stopping()
            self._tier_processes.apply(())  # without waiting
            self._open.close()
        if self._failure is not None:
            raise self._failure

    def _listen_to_signals(self) -> None:
        """Handle signals from now on. Handlers that are added before the loop runs would lose them."""
        for signum in STOP_SIGNALS:
            self._loop.add_signal_handler(signum, self._loop.stop)
        self._loop.add_signal_handler(signal.SIGHUP, self._reload)
        self._loop.add_signal_handler(signal.SIGUSR1, self._admin_ops.check_soon)
        self._manager.ready(self._state())
        self._tier_processes.apply(self._reloading.config.tier)
        self._tiering.expect([each.name for each in self._reloading.config.tier], time.monotonic())
        fill_region(self._loop, self._cache, self._region, self._reloading.config, self._started, self._stop)
        signals.unblock()

    def _stop(self, error: KVCacheError) -> None:
        self._failure = error
        self._loop.stop()

    def _reload(self) -> None:
        if os.isatty(0):  # the terminal was closed
            self._loop.stop()
            return
        self._manager.reloading()
        try:
            self._reloading.read_again()
        finally:
            self._manager.ready(self._state())

    def _state(self) -> str:
        """Return the line that the service manager shows."""
        cache, sessions = self._cache, f"{len(self._sessions)} sessions"
        progress = f"{format_size(self._region.present)} in memory so far, " if cache.is_growing else ""
        return f"{format_size(cache.used)} of {format_size(cache.capacity)} used, {progress}{sessions}"

    def _end_turn(self) -> None:
        """After the replies of one turn of the loop: deliver reports, offer jobs to tiers, and publish KV events."""
        self._answers.delivery.deliver()
        self._answers.background.schedule()
        self._answers.offer_work()
        if self._publisher is not None:
            self._publisher.flush()

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._answers.failed(0, context.get("exception") or ServerError(context["message"]))

    # Sessions.

    def _admit(self, hello: Hello, peer: Peer) -> Admission:
        try:
            return self._sessions.open(hello, peer)
        finally:
            self._end_turn()

    def _connection_lost(self, session: int) -> None:
        """End the session: its client may not have read the last replies."""
        self._handshake.disconnect_soon(session)

    def _leave(self, session: int) -> None:
        """End a session whose handshake connection has closed, after its earlier requests are done."""
        self._request_socket.drain(session, lambda: self._end(session))

    def _end(self, session: int) -> None:
        self._sessions.leave(session)
        self._answers.forget(session)
        self._end_turn()
        self._request_socket.leave(session)

    def _disconnect(self, session: int) -> None:
        """End the session now: its client has reconnected."""
        self._handshake.disconnect(session)
        self._request_socket.cut_short(session)

    # Timers.

    def _tick(self) -> None:
        for part in (
            self._sessions.sweep,
            lambda: self._cache.tick(time.monotonic()),
            lambda: self._insight.tick(time.monotonic()),
            self._end_turn,  # delivers changes that no message caused
            self._http.collect if self._http else lambda: None,
            self._check_sockets,
            self._check_tiers,
            lambda: self._manager.tick(time.monotonic()),
        ):
            try:
                part()
            except Exception as error:  # noqa: BLE001 - an internal error must not stop the timer
                self._answers.failed(0, error)
        self._next_tick = self._loop.call_later(TICK, self._tick)

    def _check_sockets(self) -> None:
        """Stop if a socket's file was removed: clients cannot find it, and the next start creates it again."""
        for each in (self._request_socket.listener, self._handshake.listener):
            if not each.is_ours() and self._failure is None:
                loss = f"{each.path} was removed or replaced"
                log.error("%s: no client can attach any more; stopping", loss)
                self._stop(EndpointLost(f"{loss}, so that no client could attach any more"))

    def _check_tiers(self) -> None:
        """Kill the processes of tiers that hang, and stop waiting for tiers whose processes have ended."""
        for each in self._tier_processes.report():
            if each.ended:
                self._tiering.expect_no_more(each.name)
        for name in self._tiering.turn_off_hanging(time.monotonic()):
            self._tier_processes.kill(name, "has not requested jobs, or finished none, for too long")

    def _summarise(self) -> None:
        """Log one line about the events since the last line, if there are any."""
        self._loop.call_later(SUMMARY_SECONDS, self._summarise)
        self._manager.status(self._state())
        self._admin_ops.summarise(self._answers.messages, len(self._sessions))

    def _figures(self) -> Daemon:
        return Daemon(
            version=__version__,
            pid=os.getpid(),
            started_at=round(self._started_at, 3),
            uptime_s=round(time.monotonic() - self._started, 1),
            endpoint=self._reloading.config.endpoint,
            region=self._region.path,
            region_bytes=self._region.geometry.region_bytes,
            present_bytes=self._region.present,
            locked=self._region.locked,
            log_level=logs.level(),
            messages=self._answers.messages,
            sessions_opened=self._sessions.opened,
            max_sessions=self._reloading.config.max_sessions,
            acquire=self._answers.acquire,
            errors=dict(self._answers.errors),
            drops=dict(self._answers.drops),
            handshakes_refused=dict(self._handshake.refused),
            connections=self._request_socket.figures(),
            integrity=self._admin_ops.integrity,
            http=self._http.figures() if self._http else None,
            tiers=self._tiering.report(),
            tier_processes=self._tier_processes.report(),
            events=self._publisher.report() if self._publisher else None,
        )
