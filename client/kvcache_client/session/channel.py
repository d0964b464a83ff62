"""The ZeroMQ half of a connection: requests out, replies in, from any thread.

The thread that holds the lock owns the socket: it sends the messages in the outbox, receives for all threads, and runs
the handlers after it has released the lock. So a call polls on its own thread, a post never waits, and neither is lost.
Of several simultaneous calls one leads, with the lock; the rest follow: each waits for its reply from the leader, or
for its turn to lead.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq
import zmq.backend

from kvcache_client.session.counters import Counters
from kvcache_proto.codec import decode_reply, encode
from kvcache_proto.endpoint import routing_id
from kvcache_proto.errors import BadFrame, BadToken
from kvcache_proto.messages import Error, Pong, Reply, Request, Reserved

logger = logging.getLogger("kvcache_client.session")

Handler = Callable[[Reply | None], object]  # None: the channel ended without an answer

MAX_OUTBOX = 1 << 16
MAX_OWED = 1 << 16  # answers that the daemon may owe
MAX_UNASKED = 1000  # unrequested answers, before the channel is given up
RECEIVE_QUEUE = 128  # replies that wait in memory; more wait on the daemon's side
SHARED = 10.0  # seconds after calls have overlapped, in which a leader also polls for others' requests
SLICE_MS = 20  # how often a call checks whether its channel has ended, which the supervisor notices
TURN = 1024  # replies that are received before other threads may go on


class _Follower:
    """A call whose reply another thread receives."""

    __slots__ = ("inbox", "late", "queued", "waits")

    def __init__(self, late: Handler) -> None:
        self.late = late
        self.inbox: queue.SimpleQueue[Reply | _Follower | None] = queue.SimpleQueue()  # itself: its turn to lead
        self.waits = threading.Lock()  # held once it stops waiting, or is answered: whichever comes first
        self.queued = False

    def take(self, reply: Reply | None) -> bool:
        """Hand over the reply, None if there will be none; return False if it comes too late."""
        in_time = self.waits.acquire(blocking=False)
        if in_time:
            self.inbox.put(reply)
        return in_time

    def end(self) -> Reply | None:
        """Stop waiting; return the reply if it has come after all."""
        return None if self.waits.acquire(blocking=False) else self.taken()

    def taken(self) -> Reply | None:
        """Return the reply that has been, or is being, handed over."""
        while (found := self.inbox.get()) is self:
            pass
        return found  # type: ignore[return-value]


class _Followers(deque[_Follower]):
    """Calls that wait, in the order in which they lead."""

    shared_until = 0.0  # when leaders may stop to poll for others' requests

    def pass_on(self, lock: threading.Lock) -> None:
        """Let the next one lead, if no thread has `lock`."""
        while self and not lock.locked():
            try:
                follower = self.popleft()
            except IndexError:
                return
            follower.queued = False
            if not follower.waits.locked():
                follower.inbox.put(follower)
                return


class _Unanswered(dict[int, "Handler | _Follower"]):
    """The requests that the daemon has not answered, by number, and who waits for each answer."""

    quiet_since = 0.0  # time of the last answer, or of the first request since all were answered

    def expect(self, number: int, handler: Handler | _Follower) -> None:
        if not self:
            self.quiet_since = time.monotonic()
        self[number] = handler


class _Leader(enum.Enum):
    """What the call that owns the socket does: nothing (also if there is none), receive, or poll for others, too."""

    IDLE = enum.auto()
    RECEIVES = enum.auto()
    POLLS = enum.auto()


class Channel:
    """A DEALER socket to the daemon. `wake` has the supervisor handle due work.

    `fault` is the reason that the channel must be given up: only that returns resources that may have been lost.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        token: bytes,
        counters: Counters,
        wake: Callable[[], None],
    ) -> None:
        self._token = token
        self._counters = counters
        self._wake = wake
        self._lock = threading.Lock()
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.routing_id = routing_id(token)
        self._socket.rcvhwm = RECEIVE_QUEUE
        self._timeout_ms = -1
        self._socket.connect(endpoint)
        self.descriptor: int = self._socket.getsockopt(zmq.FD)  # readable when there is something to do
        self._ids = itertools.count(1)
        self._outbox: deque[bytes] = deque()
        self._waiting = _Unanswered()
        self._unasked = 0
        self._done: deque[tuple[Handler, Reply | None]] = deque()
        self._followers = _Followers()
        self._outbox_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # the outbox has a new message
        self._leader = _Leader.IDLE
        self._order = threading.Lock()  # numbers rise in the order of sending
        self.closed = False
        self.newest_reservation = 0  # highest one in any answer, noted before its use
        self.fault = ""
        self.watched = False  # whether the supervisor polls `descriptor`

    @property
    def busy(self) -> bool:
        """Whether replies are due, messages are unsent, or handlers have not run."""
        return bool(self._waiting or self._outbox or self._done)

    @property
    def roomy(self) -> bool:
        """Whether few enough messages are unsent and unanswered for old messages to follow the new ones."""
        return len(self._waiting) < MAX_OWED // 2 and len(self._outbox) < MAX_OUTBOX // 2

    def overdue(self, now: float, deadline: float) -> bool:
        """Whether the daemon owes an answer, and has not answered anything for `deadline` seconds."""
        return bool(self._waiting) and now - self._waiting.quiet_since > deadline

    def call(self, request: Request, deadline: float, late: Handler) -> Reply | None:
        """Send and return the reply; None if there is none within `deadline` seconds.

        `late` gets a reply that comes later. A request that could not be sent in time is still sent later. Calls of
        several threads overlap.
        """
        until = time.monotonic() + deadline
        if not self._lock.acquire(blocking=False):
            return self._follow(request, deadline, late)
        reply: Reply | None = None
        number = 0
        try:
            if not self.closed:
                number = self._enqueue(request, None)
                self._flush()
                reply = self._await(number, until)
        finally:
            if number and reply is None:
                self._expect(number, late)
            self._let_go()
        if number and reply is None and not self.watched:
            self._wake()
        return reply

    def post(self, request: Request, handler: Handler | None) -> bool:
        """Send without waiting, and return whether the channel was open. `handler` gets the reply, on some thread."""
        if self.closed:
            return False
        number = self._enqueue(request, handler)
        if self.closed and self._waiting.pop(number, None):  # it closed meanwhile, perhaps before our entry
            return False
        self.pump()
        if self._outbox:
            self._call_leader()
        if self.busy and not self.watched:
            self._wake()
        return True

    def pump(self, patience: float = 0.0) -> None:
        """Send and receive as much as possible; wait at most `patience` seconds for a thread that already does so."""
        if self._done:
            self._finish()  # replies received by a leader that still waits for its own
        while self._lock.acquire(timeout=patience) if patience else self._lock.acquire(blocking=False):
            may_send = False
            try:
                if not self.closed:
                    may_send = self._flush()
                    self._drain()
                    # Receiving consumes the notification on `descriptor` that there is room again.
                    may_send = may_send or bool(self._socket.getsockopt(zmq.EVENTS) & zmq.POLLOUT)
            finally:
                self._lock.release()
            if self._followers:
                self._followers.pass_on(self._lock)
            self._finish()
            if not (may_send and self._outbox):
                return

    def give_up(self, fault: str) -> None:
        """Have the supervisor end this channel because of `fault`: something was lost, or soon will be."""
        if not self.closed:
            self.fault = fault
            self._wake()

    def close(self) -> None:
        """End: handlers that still wait get None. Waits for a call in progress."""
        self.closed = True
        with self._lock:
            self._socket.close()
            waiting, self._waiting = self._waiting, _Unanswered()
            self._counters.add("unsent", len(self._outbox))
            self._outbox.clear()
            with self._order:
                event, self._outbox_event = self._outbox_event, -1
            if event >= 0:
                os.close(event)
        for handler in waiting.values():
            self._hand_over(handler, None)
        self._finish()

    # Calls that follow.

    def _follow(self, request: Request, deadline: float, late: Handler) -> Reply | None:
        """Call while another thread has the lock: wait for the reply, or for the lock, whichever comes first."""
        follower, until = _Follower(late), time.monotonic() + deadline
        if self._leader is not _Leader.IDLE:
            # Polling costs a leader some microseconds, receiving with a short timeout more: a leader that does not poll
            # yet sends our request when its slice is over, and the deadline counts from then.
            until += 0.0 if self._leader is _Leader.POLLS else SLICE_MS / 1000
            self._followers.shared_until = time.monotonic() + SHARED
        number = self._enqueue(request, follower)
        if self.closed and self._waiting.pop(number, None) is not None:
            request.id = 0  # never sent
            return None
        reply = self._wait_behind(number, follower, until)
        self._followers.pass_on(self._lock)  # our turn may have come just now
        if reply is None and not self.watched:
            self._wake()
        return reply

    def _wait_behind(self, number: int, follower: _Follower, until: float) -> Reply | None:
        while (left := until - time.monotonic()) > 0:
            if not follower.queued:
                follower.queued = True
                self._followers.append(follower)
            # Only after that: a thread that releases the lock from now on sees us.
            if self._lock.acquire(blocking=False):
                return self._lead(number, follower, until)
            self._call_leader()
            try:
                found = follower.inbox.get(timeout=left)
            except queue.Empty:
                break
            if found is not follower:
                return found  # type: ignore[return-value]
        return follower.end()

    def _lead(self, number: int, follower: _Follower, until: float) -> Reply | None:
        """Continue with the lock. As long as we have it, no other thread can answer us."""
        reply: Reply | None = None
        try:
            if self._waiting.pop(number, None) is None:
                return follower.taken()
            follower.end()
            self._flush()
            reply = self._await(number, until)
            if reply is None:
                self._expect(number, follower.late)
            return reply
        finally:
            self._let_go()

    def _call_leader(self) -> None:
        """Have a polling leader send the outbox."""
        if self._leader is _Leader.POLLS:
            with self._order:
                if self._outbox_event >= 0:
                    os.eventfd_write(self._outbox_event, 1)

    # Under the lock, but for the first three.

    def _enqueue(self, request: Request, handler: Handler | _Follower | None) -> int:
        request.token = self._token
        with self._order:
            request.id = next(self._ids)
            if handler is not None:
                self._expect(request.id, handler)
            self._outbox.append(encode(request))
        if len(self._outbox) > MAX_OUTBOX:
            self.give_up(f"{MAX_OUTBOX} messages are unsent")
        return request.id

    def _expect(self, number: int, handler: Handler | _Follower) -> None:
        self._waiting.expect(number, handler)
        if len(self._waiting) > MAX_OWED:
            self.give_up(f"it owes {MAX_OWED} answers")

    def _flush(self) -> bool:
        """Send the outbox; return False if the socket's buffer is full."""
        outbox = self._outbox
        while outbox:
            try:
                self._socket.send(outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                self._counters.add("socket_full")
                return False
            outbox.popleft()
        return True

    def _await(self, number: int, until: float) -> Reply | None:
        slow = False
        try:
            while not self.fault and not self.closed and (left := until - (now := time.monotonic())) > 0:
                polls = slow or now < self._followers.shared_until
                self._leader = _Leader.POLLS if polls else _Leader.RECEIVES
                # Messages that the socket had no room for go as room comes: our own request may be the last one.
                full = bool(self._outbox) and not self._flush()
                timeout_ms = 1 if full else min(SLICE_MS, int(left * 1000) + 1)
                if self._done and polls:
                    self._wake()  # others wait for replies received meanwhile
                try:
                    frame = self._poll(timeout_ms) if polls else self._receive(timeout_ms)
                except zmq.Again:
                    slow = True
                    continue
                reply = self._read(frame, number)
                if reply is not None and reply.id == number:
                    return reply
        finally:
            self._leader = _Leader.IDLE
        return None

    def _receive(self, timeout_ms: int) -> bytes:
        if timeout_ms != self._timeout_ms:
            self._socket.rcvtimeo = self._timeout_ms = timeout_ms
        frame: bytes = self._socket.recv()
        return frame

    def _poll(self, timeout_ms: int) -> bytes:
        """Receive; raise zmq.Again if nothing comes in time, or the outbox has a new message."""
        zmq.backend.zmq_poll([(self._socket, zmq.POLLIN), (self._outbox_event, zmq.POLLIN)], timeout_ms)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._outbox_event)
        frame: bytes = self._socket.recv(zmq.NOBLOCK)
        return frame

    def _drain(self) -> None:
        # If no answer is due, receiving would cost a system call. A daemon that never stops sending must not keep us
        # here.
        for _ in range(TURN):
            if not self._waiting or self.fault:
                return
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._read(frame)

    def _read(self, frame: bytes, awaited: int = 0) -> Reply | None:
        """Process one frame; return its reply if it answers a request of ours; the request `awaited` has no handler."""
        try:
            reply = decode_reply(frame)
        except BadFrame as error:
            # Its content is unknown, and it may have granted a lease: only the session's end gives that back.
            self._counters.add("bad_frames")
            self.give_up(f"it sent a frame that is no reply: {error}")
            return None
        if type(reply) is Error and reply.code == BadToken.code:
            self.give_up(reply.message)
        handler = self._waiting.pop(reply.id, None)
        if handler is None and reply.id != awaited:
            self._counters.add("answers_unasked")
            self._unasked += 1
            if self._unasked > MAX_UNASKED:
                self.give_up(f"it sent {self._unasked} answers to nothing that was asked")
            return None
        self._waiting.quiet_since = time.monotonic()
        if type(reply) is Reserved:
            self.newest_reservation = max(self.newest_reservation, reply.reservation)
        if handler is not None:
            self._hand_over(handler, reply)
        if type(reply) is Pong:
            self._forget_before(reply.id)
        return reply

    def _forget_before(self, number: int) -> None:
        """Requests are handled in order: an unanswered one that was sent before an answered ping never gets an
        answer."""
        for lost in [each for each in list(self._waiting) if each < number]:
            self._counters.add("answers_lost")
            self._hand_over(self._waiting.pop(lost), None)

    def _hand_over(self, handler: Handler | _Follower, reply: Reply | None) -> None:
        """Pass the reply to the waiting handler or call; None (there will be none) also goes to a call's late
        handler."""
        if isinstance(handler, _Follower):
            if handler.take(reply) and reply is not None:
                return
            handler = handler.late
        self._done.append((handler, reply))

    def _let_go(self) -> None:
        """Release the lock; send messages that came into the outbox meanwhile: their owners have gone on."""
        if self._waiting:
            self._drain()
        self._lock.release()
        if self._followers:
            self._followers.pass_on(self._lock)
        if self._done:
            self._finish()
        if self._outbox:
            self.pump()

    def _finish(self) -> None:
        """Run the handlers of arrived replies, without the lock: they may send."""
        while self._done:
            try:
                handler, reply = self._done.popleft()
            except IndexError:
                return
            try:
                handler(reply)
            except Exception:  # it must not affect the other answers, nor the thread that happened to receive
                self._counters.add("handler_errors")
                logger.exception("a handler of a reply failed")
