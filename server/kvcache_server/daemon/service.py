"""The daemon at work: one loop, the wire, the timers, the door, and the way down."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any

import uvloop

from kvcache_proto import __version__
from kvcache_proto.codec import decode_request, encode
from kvcache_proto.errors import BadFrame, BadToken, EndpointLost, KVCacheError, ServerError, Unavailable
from kvcache_proto.messages import (
    Acquire,
    Acquired,
    Attach,
    Attached,
    Cleared,
    Detach,
    Distrust,
    Distrusted,
    Error,
    Fenced,
    Release,
    Remark,
    Reply,
    Report,
    Request,
    Reserved,
    Tell,
)
from kvcache_server import logs, signals
from kvcache_server.config import Config, format_size
from kvcache_server.daemon.handshake import Door
from kvcache_server.daemon.long_work import Underway
from kvcache_server.daemon.reload import Settings, rate_of
from kvcache_server.daemon.requests import Connection, Wire
from kvcache_server.daemon.session_registry import Attendance
from kvcache_server.daemon.slow_queue import QUESTIONS, Questions
from kvcache_server.daemon.systemd import Manager
from kvcache_server.events.publisher import Events
from kvcache_server.http.admin_ops import Desk
from kvcache_server.insight.histogram import Histogram
from kvcache_server.signals import STOP_SIGNALS
from kvcache_server.storage.warm_start import Opened

if TYPE_CHECKING:
    from kvcache_server.http.app import Http

log = logging.getLogger(__name__)

TICK = 0.25
SUMMARY = 10.0
YOUNG_OBJECTS = 10_000  # between two looks of the garbage collector
ACQUIRE_SECONDS = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.02, 0.1)  # a bucket up to each

UNANSWERED = (Release, Detach, Tell, Remark)


class Service:
    """Serves one cache at one endpoint until it is told to stop."""

    def __init__(self, config: Config, opened: Opened, manager: Manager, read: Callable[[], Config]) -> None:
        """Open wire and door; the endpoint's lock is held by the caller. Raises as Door does.

        `manager` hears how it goes; `read()` reads the configuration again.
        """
        self._config = config
        self._manager = manager
        self._cache = opened.cache
        self._region = region = opened.region
        self._loop = uvloop.new_event_loop()
        self._loop.set_exception_handler(self._callback_failed)
        self._attendance = Attendance(opened, self._show_out, self._failed)
        self._tokens = self._attendance.tokens
        self._underway = Underway(*(self._loop, self._cache.chores, self._answer_in_order, self._publish, self._failed))
        self._desk = Desk(self._cache, self._attendance.look_after, self._report, self._underway.run)
        self._lost = ""  # the socket whose file has gone
        self._started, self._started_at = time.monotonic(), time.time()
        self._messages = 0
        self._errors: Counter[str] = Counter()  # by code, as answered
        self._drops: Counter[str] = Counter()  # replies that could not be delivered, by reason
        self._acquire = Histogram(ACQUIRE_SECONDS)
        self._shrinking = False
        self._questions = Questions(self._loop, self._answer_at_last)
        self._http: Http | None = None
        self._events: Events | None = None
        with contextlib.ExitStack() as undo:  # no socket stays of a daemon that does not start
            undo.callback(self._loop.close)
            if config.http:
                from kvcache_server.http.app import Http  # aiohttp takes memory that a daemon without it has a use for

                self._http = Http(self._loop, config, self._desk, self._failed)
                undo.callback(self._http.close)
            self._wire = Wire(
                *(self._loop, config.endpoint, self._tokens, self._hear, self._publish, self._connection_lost)
            )
            undo.callback(self._wire.close)
            if config.events:
                self._events = Events(self._loop, config, self._cache)
                undo.callback(self._events.close)
            self._changes = self._events.changes if self._events else []
            self._door = Door(
                self._loop,
                config.endpoint,
                region.fd,
                region.geometry,
                self._attendance.open,
                self._leave,
                allow_uids=config.allow_uids,
                allow_gids=config.allow_gids,
                rate=rate_of(config),
            )
            undo.callback(self._door.close)
            self._let_in(config)
            undo.pop_all()
        self._settings = Settings(config, read, self._cache, self._door, self._let_in)

    def _let_in(self, config: Config) -> None:
        """Let those users and groups connect, besides at the door, that `config` names. Raises OSError."""
        self._wire.let_in(config.allow_uids, config.allow_gids)
        if self._events is not None:
            self._events.let_in(config)

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then close door and sockets. Sessions go on with the next daemon.

        The caller has blocked SIGNALS; one that has come meanwhile counts. Raises EndpointLost, after the same
        tidying, where somebody has removed a socket of ours.
        """
        loop = self._loop
        loop.call_soon(self._listen_to_signals)
        self._next_tick = loop.call_later(TICK, self._tick)
        loop.call_later(SUMMARY, self._summarise)
        # Blocks are millions of objects, and looking through them all takes half a second. Only what is new since the
        # last look is looked through: nothing here forms cycles when it is older (tests/chaos/churn.py), but for what
        # HTTP leaves behind, which is collected there.
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, 1 << 30, 1 << 30)
        try:
            loop.run_forever()
        finally:
            signals.block()  # a second one must not cut the tidying short
            self._next_tick.cancel()  # the loop turns once more, and a tick would miss the sockets that are closed
            self._manager.stopping()
            if self._http:
                self._http.close()
            self._door.close()
            self._wire.close()
            if self._events is not None:
                self._events.close()
            loop.close()
        if self._lost:
            raise EndpointLost(f"{self._lost} was removed or replaced, so that nobody could attach any more")

    def _listen_to_signals(self) -> None:
        """Take signals from now on: before the loop runs, its handlers would lose them."""
        for signum in STOP_SIGNALS:
            self._loop.add_signal_handler(signum, self._loop.stop)
        self._loop.add_signal_handler(signal.SIGHUP, self._reload)
        self._loop.add_signal_handler(signal.SIGUSR1, self._desk.check_soon)
        self._manager.ready(self._state())
        signals.take()

    def _reload(self) -> None:
        if os.isatty(0):  # its terminal has gone
            self._loop.stop()
            return
        self._manager.reloading()
        try:
            self._settings.read_again()
        finally:
            self._manager.ready(self._state())

    def _state(self) -> str:
        """Return the line that the service manager shows."""
        used = self._cache.shares.used
        return f"{format_size(used)} of {format_size(self._cache.pool.capacity)} used, {len(self._attendance)} sessions"

    # Messages.

    def _hear(self, sender: Connection, message: bytes | BadFrame) -> None:
        self._messages += 1
        if isinstance(message, BadFrame):
            self._finish(sender, b"", 0, None, 0.0, None, message)
        else:
            self._answer(sender, message)

    def _publish(self) -> None:
        if self._changes and self._events is not None:
            self._events.flush()

    def _answer_at_last(self, sender: Connection, frame: bytes) -> None:
        """Answer a question that has waited for its turn."""
        self._answer(sender, frame, asked=True)
        self._publish()

    def _answer_in_order(self, sender: Connection, frame: bytes) -> None:
        """Answer what has waited behind an earlier request of its session."""
        self._answer(sender, frame, in_order=True)

    def _answer(self, sender: Connection, frame: bytes, asked: bool = False, in_order: bool = False) -> None:
        session, now = 0, 0.0
        request: Request | None = None
        reply: Reply | None = None
        error: Exception | None = None
        try:
            request = decode_request(frame)
            session = self._tokens[request.token]
            if session != sender.session:
                self._wire.bind(sender, session)
            now = time.monotonic()
            if self._underway and session in self._underway and not (in_order or asked):
                self._wait(session, sender, frame, request, now)
                return
            if type(request) in QUESTIONS and not asked:
                self._questions.add(session, sender, frame)
                return
            answer = self._cache.begin(session, request, now)
            if answer is None:
                return
            if type(answer) is not Acquired and isinstance(answer, Generator):
                go_on = self._questions.go_on if asked else partial(self._underway.begin, session)
                go_on(answer, partial(self._finish, sender, frame, session, request, now))
                return
            reply = answer
        except Exception as failure:  # noqa: BLE001 - as in _refusal
            error = failure
        try:
            self._finish(sender, frame, session, request, now, reply, error)
        finally:
            error = None  # its traceback has this frame, and with it the request: a circle that nobody looks for

    def _finish(
        self,
        sender: Connection,
        frame: bytes,
        session: int,
        request: Request | None,
        now: float,
        reply: Reply | None,
        error: Exception | None,
    ) -> None:
        """Answer a request: with the reply, or with what was wrong. `now` is when it came."""
        packed: bytes | None = None
        if error is None and reply is not None:
            try:
                packed = self._pack(session, request, reply, now)
            except Exception as failure:  # noqa: BLE001 - as in _refusal
                error = failure
        refused = error is not None
        if error is not None:
            packed = self._refusal(session, request, error)
            error = None  # as in _answer
        if packed is None:
            return
        if lost := sender.send(packed):
            self._drops[lost] += 1
            if not refused and reply is not None:
                self._undo(session, reply)
        if (
            type(reply) is Acquired
            and type(request) is Acquire
            and (reply.hits < len(request.hashes) or self._cache.traffic.on)
        ):
            self._remember(session, request, reply, frame, now)

    def _wait(self, session: int, sender: Connection, frame: bytes, request: Request, now: float) -> None:
        """Let a message wait for the session's long request. Raises Unavailable where it may not."""
        try:
            self._underway.wait(session, sender, frame)
        except Unavailable:
            if type(request) not in UNANSWERED:
                raise
            # Nobody would hear that it is refused. What it ends was told of before the long request came.
            self._drops["out_of_turn"] += 1
            if type(request) is not Remark:
                self._cache.handle(session, request, now)

    def _pack(self, session: int, request: Request | None, reply: Reply, now: float) -> bytes:
        """Return the reply's frame, with all that goes along with the reply done."""
        if type(reply) is Acquired:
            self._acquire.add(time.monotonic() - now)
        elif type(reply) is Attached:
            self._desk.attached(reply.namespace)
        elif type(reply) is Cleared:
            self._desk.cleared(getattr(request, "namespace", ""), reply.blocks, self._attendance.name(session))
        elif type(reply) is Fenced:
            self._desk.fenced_off(getattr(request, "session", 0), self._attendance.name(session))
        elif type(reply) is Distrusted and type(request) is Distrust:
            self._desk.distrusted(request, reply, session, self._attendance.name(session))
        elif type(reply) is Report:
            reply.stats["daemon"] = self._report()
        return encode(reply)

    def _refusal(self, session: int, request: Request | None, error: Exception) -> bytes | None:
        """Return the frame that says what is wrong; a defect of ours is answered and logged, the others are served on.

        None where a request without a reply came from nobody.
        """
        number = request.id if request is not None else 0
        if isinstance(error, KVCacheError):
            self._errors[error.code] += 1
            if type(request) is Attach:
                self._attendance.refused(session, error)
            return encode(Error(number, error.code, str(error)))
        if session or not isinstance(error, KeyError):
            return self._failed(number, error)
        self._errors[BadToken.code] += 1
        if type(request) in UNANSWERED:
            return None
        return encode(Error(number, BadToken.code, "no open session has this token: shake hands again"))

    def _remember(self, session: int, request: Acquire, reply: Acquired, frame: bytes, now: float) -> None:
        try:
            self._cache.remember(session, request, reply, frame, now)
        except Exception as error:  # noqa: BLE001 - as in _answer
            self._failed(0, error)

    def _failed(self, number: int, error: Exception) -> bytes:
        what = f"request {number}" if number else "work"
        log.error("%s failed inside the daemon: %s", what, error, exc_info=error)
        self._errors["internal"] += 1
        return encode(Error(number, ServerError.code, f"internal error: {type(error).__name__}: {error}"))

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._failed(0, context.get("exception") or ServerError(context["message"]))

    def _undo(self, session: int, reply: Reply) -> None:
        """Take back what nobody has been told of: it would be held until the session's end."""
        now = time.monotonic()
        if type(reply) is Acquired and reply.lease:
            self._cache.handle(session, Release(0, b"", [reply.lease]), now)
        elif type(reply) is Reserved and reply.reservation:
            self._cache.abandon(session, reply.reservation, now)

    def _connection_lost(self, session: int) -> None:
        """The session ends: nobody knows which of the last replies its client has read."""
        self._door.show_out_soon(session)

    def _leave(self, session: int) -> None:
        """The door has closed: what the session has asked before is done first."""
        self._wire.hear_out(session, lambda: self._underway.after(session, lambda: self._end(session)))

    def _end(self, session: int) -> None:
        self._attendance.leave(session)
        self._wire.leave(session)

    def _show_out(self, session: int) -> None:
        """Its client comes back: let it leave now."""
        self._door.show_out(session)
        self._wire.cut_short(session)
        self._underway.cut_short(session)

    # Timers.

    def _tick(self) -> None:
        for part in (
            self._attendance.sweep,
            lambda: self._cache.tick(time.monotonic()),
            self._shrink,
            self._publish,  # what somebody has done who has sent no message
            self._http.collect if self._http else lambda: None,
            self._underway.look,
            self._look_after_sockets,
            lambda: self._manager.tick(time.monotonic()),
        ):
            try:
                part()
            except Exception as error:  # noqa: BLE001 - as in _answer
                self._failed(0, error)
        self._next_tick = self._loop.call_later(TICK, self._tick)

    def _shrink(self) -> None:
        """Go on with a resize, one extent after the other."""
        # What is being locked would be taken again, and the thread that gives back is to keep up.
        if not self._shrinking and not self._region.being_locked and not self._region.giving_back:
            self._underway.run(self._cache.shrinking(time.monotonic())).add_done_callback(self._shrunk)
            self._shrinking = True

    def _shrunk(self, done: asyncio.Future[int | None]) -> None:
        self._shrinking = False
        extent = done.result()
        if extent is not None:
            self._region.give_back(extent)
            self._shrink()

    def _look_after_sockets(self) -> None:
        """Stop where a socket's file has gone: nobody finds us then, and who starts us again makes it anew."""
        for place in (self._wire.place, self._door.place):
            if not place.is_ours() and not self._lost:
                self._lost = place.path
                log.error("%s was removed or replaced: nobody can attach any more, stopping", place.path)
                self._loop.stop()

    def _summarise(self) -> None:
        """Log one line of what happened since the last one, if anything did."""
        self._loop.call_later(SUMMARY, self._summarise)
        self._manager.status(self._state())
        self._desk.summarise(self._messages, len(self._attendance))

    def _report(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "pid": os.getpid(),
            "started_at": round(self._started_at, 3),
            "uptime_s": round(time.monotonic() - self._started, 1),
            "endpoint": self._config.endpoint,
            "region": self._region.path,
            "region_bytes": self._region.geometry.region_bytes,
            "locked": self._region.locked,
            "draining": False,  # no more, and yet `status` of 0.1.0 asks for it
            "messages": self._messages,
            "sessions_opened": self._attendance.opened,
            "max_sessions": self._settings.config.max_sessions,
            "acquire": self._acquire.figures(),
            "errors": dict(self._errors),
            "drops": dict(self._drops),
            "door_refused": dict(self._door.refused),
            "connections": self._wire.figures(),
            "integrity": dict(self._desk.integrity),
            "log_level": logs.level(),
            "http": self._http.figures() if self._http else None,
            "events": self._events.report() if self._events is not None else {},
        }
