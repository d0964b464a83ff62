"""Answers messages from the cache or from insight; at once, or in turn.

Records are delivered before the reply is sent, so that no client knows more than the state file. Changes are delivered
to their followers at the end of the turn, or before a request to insight, so no client waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Generator
from functools import partial

from kvcache_proto import messages as m
from kvcache_proto.codec import decode_request, encode
from kvcache_proto.errors import BadFrame, BadToken, KVCacheError, ServerError
from kvcache_server.core.cache import Cache
from kvcache_server.daemon.background import SLOW, Background, SlowQueue
from kvcache_server.daemon.delivery import Delivery
from kvcache_server.daemon.request_socket import Connection, RequestSocket
from kvcache_server.daemon.session_registry import SessionRegistry
from kvcache_server.http.admin_ops import AdminOps
from kvcache_server.insight.insight import Insight
from kvcache_server.slices import Steps
from kvcache_server.status import Histogram
from kvcache_server.storage.state_file import StateFile
from kvcache_server.tiering.tiering import Tiering

log = logging.getLogger(__name__)

ACQUIRE_SECONDS = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.02, 0.1)  # upper bounds of buckets
UNANSWERED = (m.Release, m.Detach, m.ReportClient, m.ReportDevice, m.ReportMisses, m.JobResults)
HELD = 0.5  # seconds for which a tier's request for work waits for a job


class Answers:
    """Counters: `messages` received, `errors` by code, and `drops` of replies by reason."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        cache: Cache,
        insight: Insight,
        tiering: Tiering,
        sessions: SessionRegistry,
        state_file: StateFile,
        end_turn: Callable[[], None],
    ) -> None:
        """`end_turn()` is called after each turn of work."""
        self.messages = 0
        self.errors: Counter[str] = Counter()
        self.drops: Counter[str] = Counter()
        self.acquire = Histogram.of(ACQUIRE_SECONDS)
        self.background = Background(loop, cache, end_turn, self.failed)
        self._slow_queue = SlowQueue(loop, self._answer_in_turn)
        self._cache, self._insight, self._tiering, self._sessions = cache, insight, tiering, sessions
        self._held: dict[int, tuple[Connection, bytes, m.PollJobs, float]] = {}  # requests for work, by session
        self.delivery = Delivery(cache, state_file, self.failed)
        self._end_turn = end_turn
        self._tokens = sessions.tokens
        self._request_socket: RequestSocket
        self._operations: AdminOps

    def connect(self, request_socket: RequestSocket, operations: AdminOps) -> None:
        """Set the parts that in turn depend on this object."""
        self._request_socket, self._operations = request_socket, operations

    def receive(self, sender: Connection, message: bytes | BadFrame) -> None:
        """Answer a message, now or later."""
        self.messages += 1
        if isinstance(message, BadFrame):
            self._finish(sender, b"", 0, None, 0.0, None, message)
        else:
            self._answer(sender, message)

    def failed(self, number: int, error: Exception) -> bytes:
        """Log an internal error, and return the error reply to request `number`."""
        what = f"request {number}" if number else "work"
        log.error("%s failed inside the daemon: %s", what, error, exc_info=error)
        self.errors["internal"] += 1
        return encode(m.Error(number, ServerError.code, f"internal error: {type(error).__name__}: {error}"))

    # Requests.

    def _answer_in_turn(self, sender: Connection, frame: bytes) -> None:
        """Answer a request from the slow queue."""
        self._answer(sender, frame, in_turn=True)
        self._end_turn()

    def _answer(self, sender: Connection, frame: bytes, in_turn: bool = False) -> None:
        session, now = 0, 0.0
        request: m.Request | None = None
        reply: m.Reply | None = None
        error: Exception | None = None
        try:
            request = decode_request(frame)
            session = self._tokens[request.token]
            if session != sender.session:
                self._request_socket.bind(sender, session)
            now = time.monotonic()
            if not in_turn and type(request) in SLOW:
                self._slow_queue.add(session, sender, frame)
                return
            answer = self._begin(session, request, now)
            if answer is None:
                if type(request) is m.PollJobs:
                    self._hold(session, sender, frame, request, now)
                return
            if type(answer) is not m.Acquired and isinstance(answer, Generator):
                self._slow_queue.go_on(answer, partial(self._finish, sender, frame, session, request, now))
                return
            reply = answer
        except Exception as failure:  # noqa: BLE001 - as in _refusal
            error = failure
        try:
            self._finish(sender, frame, session, request, now, reply, error)
        finally:
            error = None  # its traceback refers to this frame: a cycle that is never collected

    def _begin(self, session: int, request: m.Request, now: float) -> m.Reply | None | Steps[m.Reply | None]:
        if type(request) in Insight.requests:
            self.delivery.deliver()
            return self._insight.begin(session, request, now)
        if type(request) in Tiering.requests:
            self._tiering.begin(session, request, now)
            return None
        return self._cache.answer(session, request, now)

    def _hold(self, session: int, sender: Connection, frame: bytes, request: m.PollJobs, now: float) -> None:
        """Keep a tier's request for work until there is a job, and answer an earlier request."""
        earlier = self._held.pop(session, None)
        self._held[session] = sender, frame, request, now
        if earlier is not None:
            self._finish(*earlier[:2], session, *earlier[2:], m.Jobs(earlier[2].id), None)

    def offer_work(self) -> None:
        """Answer the requests for work that can be answered now, or have waited long enough."""
        if not self._held:
            return
        now = time.monotonic()
        for session, (sender, frame, request, came) in list(self._held.items()):
            jobs, error = None, None
            try:
                jobs = self._tiering.jobs(session, request.id, now)
            except Exception as failure:  # noqa: BLE001 - as in _refusal
                error = failure
            if jobs is None and error is None and now - came < HELD:
                continue
            del self._held[session]
            self._finish(sender, frame, session, request, came, jobs or m.Jobs(request.id), error)
            if error is not None:
                self._tiering.take_back_jobs(session)
                error = None  # as in _answer

    def forget(self, session: int) -> None:
        """Drop the request held for a session that has left."""
        self._held.pop(session, None)

    # Replies.

    def _finish(
        self,
        sender: Connection,
        frame: bytes,
        session: int,
        request: m.Request | None,
        now: float,
        reply: m.Reply | None,
        error: Exception | None,
    ) -> None:
        """Answer a request with the reply or the error. `now` is the time at which the request came."""
        packed: bytes | None = None
        if self._cache.effects.records:
            self.delivery.deliver()
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
            self.drops[lost] += 1
            if not refused and reply is not None:
                self._undo(session, reply)
        if type(reply) is m.Acquired and type(request) is m.Acquire and self._insight.wants(request, reply):
            self._looked_up(session, request, reply, frame, now)

    def _pack(self, session: int, request: m.Request | None, reply: m.Reply, now: float) -> bytes:
        """Return the reply's frame; do the logging and counting for it."""
        operations = self._operations
        if type(reply) is m.Acquired:
            self.acquire.add(time.monotonic() - now)
        elif type(reply) is m.Attached:
            operations.attached(reply.namespace)
        elif type(reply) is m.Cleared:
            cleared = operations.cleared if self._cache.sessions[session].is_operator else operations.cleared_by_engine
            cleared(getattr(request, "namespace", ""), reply.blocks, self._sessions.name(session))
        elif type(reply) is m.Fenced:
            operations.fenced_off(getattr(request, "session", 0), self._sessions.name(session))
        elif type(reply) is m.Invalidated and type(request) is m.Invalidate:
            operations.invalidated(request, reply, session, self._sessions.name(session))
        return encode(reply)

    def _refusal(self, session: int, request: m.Request | None, error: Exception) -> bytes | None:
        """Return the frame of the error reply. An internal error is also logged; other sessions are still served.

        Returns None for an unknown token in a request that has no reply.
        """
        number = request.id if request is not None else 0
        if isinstance(error, KVCacheError):
            self.errors[error.code] += 1
            if type(request) is m.Attach:
                self._sessions.refused(session, error)
            return encode(m.Error(number, error.code, str(error)))
        if session or not isinstance(error, KeyError):
            return self.failed(number, error)
        self.errors[BadToken.code] += 1
        if type(request) in UNANSWERED:
            return None
        return encode(m.Error(number, BadToken.code, "no open session has this token: shake hands again"))

    def _looked_up(self, session: int, request: m.Acquire, reply: m.Acquired, frame: bytes, now: float) -> None:
        self.delivery.deliver()  # its misses may be of blocks removed since the last turn
        try:
            self._insight.looked_up(session, request, reply, frame, now, self._tiering.explain_misses)
        except Exception as error:  # noqa: BLE001 - as in _answer
            self.failed(0, error)

    def _undo(self, session: int, reply: m.Reply) -> None:
        """Release the grants of a dropped reply: otherwise they would be held until the end of the session."""
        now = time.monotonic()
        if type(reply) is m.Acquired and reply.lease:
            self._cache.handle(session, m.Release(0, b"", [reply.lease]), now)
        elif type(reply) is m.Reserved and reply.reservation:
            self._cache.abandon(session, reply.reservation, now)
        elif type(reply) is m.Jobs:
            self._tiering.take_back_jobs(session)
