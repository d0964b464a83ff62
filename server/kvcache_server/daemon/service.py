"""The running daemon: event loop, request socket, door, timers, and shutdown."""

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
from kvcache_server.core.effects import Change
from kvcache_server.daemon.answers import Answers
from kvcache_server.daemon.handshake import Admission, Door
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

TICK = 0.25
SUMMARY = 10.0
FILLING = 5.0  # seconds between two lines about memory that is being made
YOUNG_OBJECTS = 10_000  # allocations between two runs of the garbage collector


class Service:
    """Serves one cache at one endpoint until it is stopped."""

    def __init__(self, config: Config, opened: WarmStart, manager: ServiceManager, read: Callable[[], Config]) -> None:
        """Open the request socket and the door; the caller holds the endpoint's lock. Raises like Door.

        `manager` is notified of the state; `read()` reads the configuration again.
        """
        self._config = config
        self._manager = manager
        self._cache, self._state_file, self._region = opened.cache, opened.state, opened.region
        self._insight = Insight(opened.cache, self._figures)
        self._insight.misses.started(time.monotonic(), opened.empty_reason)
        self._loop = uvloop.new_event_loop()
        self._loop.set_exception_handler(self._callback_failed)
        self._sessions = SessionRegistry(opened, self._disconnect, lambda number, error: self._answers.failed(0, error))
        self._tiering = Tiering(opened.cache, os.geteuid())
        self._answers = Answers(
            *(self._loop, self._cache, self._insight, self._tiering, self._sessions, self._deliver, self._end_turn)
        )
        self._background = self._answers.background
        self._admin_ops = AdminOps(
            *(
                self._cache,
                self._insight,
                self._sessions.look_after,
                self._background.run,
                self._end_turn,
            )
        )
        self._lost = ""  # the path of a socket whose file was removed
        self._failure: KVCacheError | None = None  # the reason that it cannot go on
        self._reported_at = 0.0  # time of the last log line about the region's memory
        self._started, self._started_at = time.monotonic(), time.time()
        self._http: HttpApp | None = None
        self._publisher: Publisher | None = None
        self._followers: list[Callable[[list[Change]], None]] = [self._insight.follow, self._tiering.follow]
        with contextlib.ExitStack() as undo:  # a daemon that does not start leaves no socket behind
            undo.callback(self._loop.close)
            if config.http:
                from kvcache_server.http.app import (
                    HttpApp,  # aiohttp takes memory that a daemon without it can use
                )

                self._http = HttpApp(self._loop, config, self._admin_ops, self._answers.failed)
                undo.callback(self._http.close)
            self._request_socket = RequestSocket(
                *(self._loop, config.endpoint, self._sessions.tokens, self._answers.receive, self._end_turn),
                self._connection_lost,
            )
            undo.callback(self._request_socket.close)
            self._answers.connect(self._request_socket, self._admin_ops)
            if config.events:
                self._publisher = Publisher(self._loop, config, self._cache)
                self._followers.append(self._publisher.follow)
                undo.callback(self._publisher.close)
            self._door = Door(
                self._loop,
                config.endpoint,
                self._region.fd,
                self._region.geometry,
                self._admit,
                self._leave,
            )
            undo.callback(self._door.close)
            self._allow_users(config)
            undo.pop_all()
        self._tier_processes = TierProcesses(config.endpoint)
        self._reloading = Reload(config, read, self._cache, self._allow_users, self._tier_processes)

    def _allow_users(self, config: Config) -> None:
        """Allow only the users and groups in `config` to connect to the sockets. Raises OSError."""
        self._door.allow_users(config.allow_uids, config.allow_gids, rate_of(config))
        self._request_socket.allow_users(config.allow_uids, config.allow_gids)
        if self._publisher is not None:
            self._publisher.allow_users(config)

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then close door and sockets. Sessions continue with the next daemon.

        The caller has blocked SIGNALS; a pending one counts. Raises EndpointLost, after the same clean-up, if a socket
        of ours was removed, and RegionError if memory runs out before the region is complete.
        """
        loop = self._loop
        loop.call_soon(self._listen_to_signals)
        self._next_tick = loop.call_later(TICK, self._tick)
        loop.call_later(SUMMARY, self._summarise)
        # Millions of blocks are objects, and a full collection would take half a second. Only objects created since the
        # last collection are examined: older ones form no cycles (tests/chaos/churn.py), except those of HTTP, which
        # are collected there.
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, 1 << 30, 1 << 30)
        try:
            loop.run_forever()
        finally:
            signals.block()  # a second signal must not interrupt the clean-up
            self._next_tick.cancel()  # the loop runs once more, and a tick would find closed sockets
            self._manager.stopping()
            self._tier_processes.close()
            if self._http:
                self._http.close()
            self._door.close()
            self._request_socket.close()
            if self._publisher is not None:
                self._publisher.close()
            loop.close()
        if self._failure is not None:
            raise self._failure
        if self._lost:
            raise EndpointLost(f"{self._lost} was removed or replaced, so that no client could attach any more")

    def _listen_to_signals(self) -> None:
        """Start to handle signals; before the loop runs, its handlers would lose them."""
        for signum in STOP_SIGNALS:
            self._loop.add_signal_handler(signum, self._loop.stop)
        self._loop.add_signal_handler(signal.SIGHUP, self._reload)
        self._loop.add_signal_handler(signal.SIGUSR1, self._admin_ops.check_soon)
        self._manager.ready(self._state())
        self._tier_processes.apply(self._config.tier)
        self._tiering.expect([each.name for each in self._config.tier], time.monotonic())
        self._fill_region()
        signals.unblock()

    def _fill_region(self) -> None:
        """Make the rest of the region's memory while engines are served."""

        def in_loop(call: Callable[..., object]) -> Callable[..., None]:
            def soon(*arguments: object) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has stopped
                    self._loop.call_soon_threadsafe(call, *arguments)

            return soon

        self._reported_at = time.monotonic()
        self._region.fill(
            self._config.lock,
            self._config.huge_pages,
            in_loop(self._grow),
            in_loop(self._region_is_complete),
            in_loop(self._region_failed),
        )

    def _grow(self, made: int, total: int) -> None:
        self._cache.pool.grow(self._region.ready_pages)
        if time.monotonic() - self._reported_at >= FILLING and made < total:
            self._reported_at = time.monotonic()
            log.info("%s of %s are in memory", format_size(made), format_size(total))

    def _region_is_complete(self) -> None:
        for note in self._region.notes:
            log.warning("%s", note)
        log.info(
            "all %s are in memory, %s, after %.1f s",
            format_size(self._region.geometry.region_bytes),
            self._region.kind_of_memory,
            time.monotonic() - self._started,
            extra={"fields": {"event": "complete", "region_bytes": self._region.geometry.region_bytes}},
        )

    def _region_failed(self, error: KVCacheError) -> None:
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
        made = f"{format_size(self._region.present)} in memory so far, " if cache.pool.is_growing else ""
        return f"{format_size(cache.used)} of {format_size(cache.pool.capacity)} used, {made}{sessions}"

    def _deliver(self) -> None:
        """Deliver the core's reports: first to the state file, then to the followers of changes.

        An internal error of a follower is logged; clients are still answered.
        """
        if self._cache.effects:
            records, changes = self._cache.effects.take()
            for record in records:
                self._state_file.note(record)
            for follow in self._followers:
                try:
                    follow(changes)
                except Exception as error:  # noqa: BLE001 - the cache is intact, and clients are still served
                    self._answers.failed(0, error)

    def _end_turn(self) -> None:
        """Deliver the remaining reports after the replies of one turn of the loop, offer tiers work, and publish KV
        events."""
        self._deliver()
        self._background.schedule()
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
        self._door.disconnect_soon(session)

    def _leave(self, session: int) -> None:
        """End a session whose door has closed, after its earlier requests are done."""
        self._request_socket.drain(session, lambda: self._end(session))

    def _end(self, session: int) -> None:
        self._sessions.leave(session)
        self._answers.forget(session)
        self._end_turn()
        self._request_socket.leave(session)

    def _disconnect(self, session: int) -> None:
        """End the session now: its client has reconnected."""
        self._door.disconnect(session)
        self._request_socket.cut_short(session)

    # Timers.

    def _tick(self) -> None:
        for part in (
            self._sessions.sweep,
            lambda: self._cache.tick(time.monotonic()),
            lambda: self._insight.tick(time.monotonic()),
            self._end_turn,  # changes without a message
            self._http.collect if self._http else lambda: None,
            self._look_after_sockets,
            self._look_after_tiers,
            lambda: self._manager.tick(time.monotonic()),
        ):
            try:
                part()
            except Exception as error:  # noqa: BLE001 - as in _answer
                self._answers.failed(0, error)
        self._next_tick = self._loop.call_later(TICK, self._tick)

    def _look_after_sockets(self) -> None:
        """Stop if a socket's file was removed: clients cannot find the daemon; the next start creates it again."""
        for each in (self._request_socket.socket_file, self._door.socket_file):
            if not each.is_ours() and not self._lost:
                self._lost = each.path
                log.error("%s was removed or replaced: no client can attach any more; stopping", each.path)
                self._loop.stop()

    def _look_after_tiers(self) -> None:
        """End the processes of tiers that hang, and no longer wait for those that have ended."""
        for each in self._tier_processes.report():
            if each.ended:
                self._tiering.expect_no_more(each.name)
        for name in self._tiering.hanging(time.monotonic()):
            self._tier_processes.kill(name, "has asked for no work, or ended none, for too long")

    def _summarise(self) -> None:
        """Log one line about the events since the last one, if any."""
        self._loop.call_later(SUMMARY, self._summarise)
        self._manager.status(self._state())
        self._admin_ops.summarise(self._answers.messages, len(self._sessions))

    def _figures(self) -> Daemon:
        return Daemon(
            version=__version__,
            pid=os.getpid(),
            started_at=round(self._started_at, 3),
            uptime_s=round(time.monotonic() - self._started, 1),
            endpoint=self._config.endpoint,
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
            door_refused=dict(self._door.refused),
            connections=self._request_socket.figures(),
            integrity=self._admin_ops.integrity,
            http=self._http.figures() if self._http else None,
            tiers=self._tiering.report(),
            tier_processes=self._tier_processes.report(),
            events=self._publisher.report() if self._publisher else None,
        )
