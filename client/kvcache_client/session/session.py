"""A session with the daemon: what a failure of the daemon costs is decided here, and it is a miss.

The calls run on their caller's thread. One more thread, the keeper, watches the door, receives what nobody waits for,
probes a daemon that has missed a deadline, and comes back after the daemon did.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import zmq

from kvcache_client.session import forks
from kvcache_client.session.breaker import Backoff, Breaker
from kvcache_client.session.channel import Channel, Handler, Numbered
from kvcache_client.session.connection import Link
from kvcache_client.session.counters import Counters
from kvcache_client.session.handshake import Door, knock
from kvcache_client.session.namespace import Namespace
from kvcache_client.session.region import Region
from kvcache_client.session.settlements import Settlements
from kvcache_client.session.slots import Slot
from kvcache_client.session.supervisor import Keeper
from kvcache_client.session.telemetry import Telling
from kvcache_proto import messages as m
from kvcache_proto.endpoint import check_endpoint, default_endpoint, socket_path
from kvcache_proto.errors import ClientError, KVCacheError, RegionError, Unavailable, from_wire
from kvcache_proto.trust import server_uids
from kvcache_proto.types import NamespaceSpec

logger = logging.getLogger("kvcache_client")

DEADLINE = 0.05
CONNECT_TIMEOUT = 2.0
STEADY = 1.0  # seconds that a link must have held for the next knock to come soon after its end

T = TypeVar("T", bound=m.Reply)


class Session:
    """One attached process; its end, or the process's, ends all that it held.

    Make one by `connect`, which wants the daemon there, or by `open`, which also serves without one until it comes.
    Thread-safe. Not for forked children: they get a ClientError and make their own.
    """

    def __init__(
        self,
        endpoint: str | None,
        engine: str,
        label: str,
        deadline: float,
        connect_timeout: float,
        servers: Sequence[int | str] | str = (),
    ) -> None:
        """Not to be called: use `connect` or `open`."""
        self.endpoint = check_endpoint(endpoint) if endpoint else default_endpoint()
        self.engine, self.label = engine, label
        self.deadline, self.connect_timeout = deadline, connect_timeout
        self._servers = server_uids(servers)
        self.owner = forks.current()
        self.region: Region | None = None  # the mapping; stays when the daemon goes
        self.link: Link | None = None  # None while the daemon is gone; only the keeper changes it
        self._patient = False
        self._counters = Counters()
        self.breaker = Breaker()
        self.backoff = Backoff()
        self._namespaces: list[Namespace] = []
        self._region_callbacks: list[Callable[[Region], None]] = []
        self._change = threading.RLock()  # held by who changes region or link, or attaches
        self.away: Link | None = None  # the link whose daemon is gone, locked until there is another
        self._steady_at = 0.0
        self._why = "not connected yet"
        self._told: set[tuple[str, str]] = set()
        self._closing = False
        forks.adopt_peer(socket_path(self.endpoint))
        self._context: zmq.Context[Any] = zmq.Context(1)
        self._keeper = Keeper(self)
        self.settlements = Settlements(self)
        self.telling = Telling(self)

    @classmethod
    def connect(
        cls,
        endpoint: str | None = None,
        *,
        engine: str,
        label: str = "",
        deadline: float = DEADLINE,
        connect_timeout: float = CONNECT_TIMEOUT,
        server_uids: Sequence[int | str] | str = (),
    ) -> Session:
        """Return a session with the daemon at `endpoint`.

        Args:
            endpoint: `ipc:///path/to/kvcache.sock`; None takes KVCACHE_ENDPOINT or the default of this user.
            engine: the id that a scheduler and its ranks share.
            label: what `status` shows of this process.
            deadline: seconds that a lookup or a reservation may take; after one miss the breaker opens.
            connect_timeout: seconds for connecting, and for the requests that are on nobody's fast path.
            server_uids: users, by name or number, whose daemon may serve besides root's and this user's; none takes
                KVCACHE_SERVER_UIDS. Another user's gets nothing, NotPermitted says who it is.
        Raises ConfigError, Unavailable, NotPermitted, VersionMismatch, RegionError.
        """
        session = cls(endpoint, engine, label, deadline, connect_timeout, server_uids)
        try:
            session._establish()
            session._keeper.start()
            session.ping()
        except BaseException:
            session.close()
            raise
        return session

    @classmethod
    def open(
        cls,
        endpoint: str | None = None,
        *,
        engine: str,
        label: str = "",
        deadline: float = DEADLINE,
        connect_timeout: float = CONNECT_TIMEOUT,
        server_uids: Sequence[int | str] | str = (),
    ) -> Session:
        """Return a session whether or not a daemon is there; while none is, lookups miss and the keeper looks for one.

        Arguments as for `connect`. Raises ConfigError alone.
        """
        session = cls(endpoint, engine, label, deadline, connect_timeout, server_uids)
        session._patient = True
        session.look_for_daemon()
        session._keeper.start()
        return session

    # What a user asks.

    @property
    def closing(self) -> bool:
        return self._closing

    @property
    def up(self) -> bool:
        """Whether the door is open and the daemon answers in time."""
        link = self.link
        return link is not None and not link.channel.fault and self.breaker.closed and not self._closing

    @property
    def counters(self) -> dict[str, int]:
        """What failed, was refused or came too late, by name; counts that are 0 are left out."""
        return self._counters.snapshot()

    def attach(
        self,
        spec: NamespaceSpec,
        shards: Sequence[int] = (),
        ceiling_bytes: int = 0,
        wait: bool = True,
        insist: bool = False,
    ) -> Namespace:
        """Join a namespace as the writer and reader of `shards`; a scheduler, which touches no bytes, joins with none.

        `ceiling_bytes` bounds what this engine's saves may occupy; 0 is no bound. After a restart of the daemon the
        namespace is attached again. Raises what the daemon refuses (GeometryMismatch, BadArgument) and, on a session
        made by `connect`, Unavailable; one made by `open` attaches when the daemon is there. Without `wait` it returns
        at once and raises BadArgument alone: a refusal is logged and counted, and lookups miss until it is joined. With
        `insist` it does the same after the wait: `Namespace.refused` says why, and the next daemon is asked again.
        """
        forks.check(self.owner)
        namespace = Namespace(self, spec, tuple(shards), ceiling_bytes)
        with self._change:
            self._namespaces.append(namespace)  # first, for an answer may be here before `_attach_later` returns
            link = self.link
            try:
                if link is None:
                    raise Unavailable(self._why)
                if wait:
                    self._attach(link, namespace)
                else:
                    self._attach_later(link, namespace)
            except KVCacheError as error:
                if self._patient and isinstance(error, Unavailable):
                    self._counters.add("attaches_put_off")
                elif insist:
                    self._refused(namespace, str(error))
                else:
                    self._namespaces.remove(namespace)
                    raise
        return namespace

    def detach(self, namespace: Namespace) -> None:
        """Leave a namespace, without waiting; what is being read and written there goes on until it has ended."""
        with self._change:
            if namespace not in self._namespaces:
                return
            self._namespaces.remove(namespace)
            link = self.link
            number = link.namespaces.pop(namespace, None) if link is not None else None
        if number is not None:
            self.post(link, m.Detach(0, b"", number), "stale_detaches")

    def view(self, slot: Slot, shard: int = 0) -> memoryview:
        """Return the bytes of `shard` of `slot`, in the mapped region: writable under a reservation, else read-only.

        Raises BadArgument for a shard that the block does not have; RegionError where the slot is the block's no more,
        or lies in a region that this session has left.
        """
        forks.check(self.owner)
        if slot.region is not self.region:
            raise RegionError("the slot lies in another region: the daemon was restarted with a new one")
        return slot.view(shard)

    def on_region(self, callback: Callable[[Region], None]) -> None:
        """Call `callback` with each region that is mapped, the present one included.

        A later one comes on the keeper's thread, after a restart of the daemon with another region and before any
        namespace is attached there.
        """
        with self._change:
            self._region_callbacks.append(callback)
            if self.region is not None:
                callback(self.region)

    def stats(self) -> dict[str, Any]:
        """Return the daemon's statistics. Raises Unavailable, also where another thread is asking just now."""
        return self._ask(m.Stats(0, b""), m.Report).stats

    def clear(self, namespace: str = "") -> int:
        """Forget every READY, unleased block of the namespace with this id, or of all, and return how many."""
        return self._ask(m.Clear(0, b"", namespace), m.Cleared).blocks

    def ping(self) -> float:
        """Return the seconds that an answer took. Raises Unavailable."""
        start = time.monotonic()
        self._ask(m.Ping(0, b""), m.Pong)
        return time.monotonic() - start

    def close(self) -> None:
        """End the session and all that it holds, after what was sent has arrived, where the daemon answers."""
        if self.owner != forks.current():
            return
        with self._change:
            if self._closing:
                return
            self._closing = True
        try:
            if (link := self.link) is not None:
                self.telling.tell(link, at_once=True)
                # The last in the queue: all before it is handled. Again, for what those answers made us send.
                if link.channel.call(m.Ping(0, b""), self.connect_timeout, _ignore) is not None:
                    link.channel.call(m.Ping(0, b""), self.connect_timeout, _ignore)
        finally:  # a session that stays open, though nobody can use it, would keep its leases
            self._keeper.stop()
            self.leave("closed")
            self._unlock()
            self._context.term()
            self._keeper.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    # What the namespace's handles ask.

    def call(self, link: Link | None, request: Numbered, late: Handler) -> m.Reply | None:
        """Send and return the reply, or None where there is none within the deadline; `late` gets it then."""
        if link is None or link is not self.link:
            return None
        if not self.breaker.closed or link.channel.fault:
            self._counters.add("breaker_open")
            return None
        reply = link.channel.call(request, self.deadline, late)
        if reply is None and not (link.channel.closed or link.channel.fault):
            self.missed(f"no answer within {self.deadline * 1000:.0f} ms")
        return reply

    def post(self, link: Link | None, request: Numbered, stale: str, handler: Handler | None = None) -> bool:
        """Send without waiting. What belongs to a link that is over is not sent: counted as `stale`, returns False."""
        if self.owner != forks.current():
            return False
        posted = link is not None and link is self.link and link.channel.post(request, handler)
        self._counters.add(stale, not posted)
        return posted

    def pump(self) -> None:
        """Take in what has arrived; never waits."""
        if (link := self.link) is not None and self.owner == forks.current():
            link.channel.pump()

    def count(self, name: str, count: int = 1) -> None:
        self._counters.add(name, count)

    def distrust(self, what: str) -> None:
        """Note an answer that no sound daemon gives: the breaker opens, as for one that did not come."""
        self._counters.add("odd_replies")
        self.missed(f"it answered {what}")

    def log_refusal(self, what: str, error: m.Error) -> None:
        """Log it once a kind: a refusal of one step is often one of every step. They are all counted."""
        if (what, error.code) not in self._told:
            self._told.add((what, error.code))
            logger.warning("%s: %s: %s (counted from now on)", what, error.code, error.message)

    # Requests off the fast path: their caller may wait, others go on.

    def _ask(self, request: Numbered, kind: type[T], link: Link | None = None, heard: Handler | None = None) -> T:
        """Raises what the daemon answers, and Unavailable where it does not within the connect timeout.

        `heard` gets the answer of a link in use whenever it comes, on some thread.
        """
        forks.check(self.owner)
        link = link or self.link
        if link is None:
            raise Unavailable(self._why)
        if link is not self.link:  # not in use yet, so that nobody receives for us
            reply = link.channel.call(request, self.connect_timeout, _ignore)
        else:
            reply = self._wait(link, request, heard or _ignore)
        if isinstance(reply, m.Error):
            raise from_wire(reply.code, reply.message)
        if not isinstance(reply, kind):
            self._counters.add("requests_unanswered")
            raise Unavailable(f"the daemon at {self.endpoint} did not answer within {self.connect_timeout:g} s")
        return reply

    def _wait(self, link: Link, request: Numbered, heard: Handler) -> m.Reply | None:
        replies: queue.SimpleQueue[m.Reply | None] = queue.SimpleQueue()

        def answer(reply: m.Reply | None) -> None:
            heard(reply)
            replies.put(reply)

        with contextlib.suppress(queue.Empty):
            if link.channel.post(request, answer):
                return replies.get(timeout=self.connect_timeout)
        return None

    def _attach(self, link: Link, namespace: Namespace) -> None:
        joined = functools.partial(self._joined, link, namespace)
        joined(self._ask(namespace.attachment(), m.Attached, link, joined))

    def _attach_later(self, link: Link, namespace: Namespace) -> None:
        def joined(reply: m.Reply | None) -> None:
            self._joined(link, namespace, reply)
            if isinstance(reply, m.Error):
                self._refused(namespace, reply.message)

        self.post(link, namespace.attachment(), "stale_attaches", joined)

    def _joined(self, link: Link, namespace: Namespace, reply: m.Reply | None) -> None:
        """Take the answer to an attach: too late for who asked, perhaps, and yet it holds."""
        if isinstance(reply, m.Attached):
            if namespace in self._namespaces:
                link.namespaces[namespace], namespace.refused = reply.namespace, ""
            else:  # left before it was joined
                self.post(link, m.Detach(0, b"", reply.namespace), "stale_detaches")
        elif not isinstance(reply, m.Error):  # lost: without it the namespace stays unknown as long as the link lives
            link.channel.give_up("it did not answer an attach")

    # Coming and going. The keeper's, but for the first time.

    def _establish(self, interrupt: int | None = None) -> None:
        """Knock, map, attach what was attached before. Raises what `connect` raises; then nothing has changed."""
        last = self.away.door.welcome if self.away is not None else None
        door = knock(self.endpoint, self.engine, self.label, self.connect_timeout, interrupt, last, self._servers)
        link = self._enter(door)
        try:
            with self._change:
                self._adopt_region(link.region)
            tried: set[Namespace] = set()
            restated = link is not self.away
            while self.link is not link:  # a step that attaches or detaches does not wait for the daemon's answers
                with self._change:
                    left = [namespace for namespace in self._namespaces if namespace not in tried]
                    if not left and restated:
                        self.link = link
                for namespace in left:
                    try:
                        self._attach(link, namespace)
                    except ClientError as error:
                        self._refused(namespace, str(error))
                tried.update(left)
                if not restated:
                    self._restate(link)
                    restated = True
        except BaseException:
            link.close()
            if link is not self.away:
                link.unlock()
            raise
        if link is self.away:
            self.away = None
        else:
            self._unlock()
        self.settlements.pay(link)
        self._steady_at = time.monotonic() + STEADY
        self.breaker.answered()
        again = "connected again" if link.door.welcome.resumed else "connected"
        logger.info("%s to %s as %r, session %d", again, self.endpoint, self.engine, link.door.welcome.session)

    def _restate(self, link: Link) -> None:
        """Say what we hold, for the daemon is another one: leases, and the reservations that we were told of."""
        leases = list(link.leases.items())
        lost = self._ask(m.Restate(0, b"", link.heard, leases), m.Restated, link).lost
        self._counters.add("sessions_resumed")
        self._counters.add("leases_restated", len(leases) - len(lost))
        self._counters.add("leases_lost", len(lost))

    def _enter(self, door: Door) -> Link:
        geometry, token = door.welcome.geometry, door.welcome.token
        try:
            if self.region is not None and self.region.geometry == geometry:
                region = self.region  # and with it its registration with the device
            else:
                region = Region(door.region, geometry)
            channel = Channel(self._context, self.endpoint, token, self._counters, self._keeper.ring)
        except BaseException:
            forks.close(door.connection)
            forks.close(door.lock)
            raise
        finally:
            forks.close(door.region)
        if door.welcome.resumed and self.away is not None and self.away.region is region:
            self.away.go_on(door, channel)
            return self.away
        return Link(door, channel, region)

    def _adopt_region(self, region: Region) -> None:
        if region is self.region:
            return
        self.region = region
        for callback in self._region_callbacks:
            try:
                callback(region)
            except Exception:  # a caller's own code: it must not take along the session, nor the callbacks after it
                self._counters.add("region_callback_errors")
                logger.exception("a callback of on_region failed")

    def _refused(self, namespace: Namespace, why: str) -> None:
        self._counters.add("attaches_refused")
        namespace.refused = why
        logger.warning("namespace %s (%s) is refused: %s", namespace.id, namespace.spec.model, why)

    def look_for_daemon(self) -> None:
        try:
            self._establish(self._keeper.bell)
        except (KVCacheError, OSError, zmq.ZMQError) as error:
            self._counters.add("connects_failed")
            if str(error) != self._why:  # once, not at every knock
                self._why = str(error)
                logger.warning("no cache until the daemon is there: %s", self._why)

    def leave(self, why: str) -> None:
        """End the link, if there is one: who waits for an answer is told that there is none."""
        if (link := self.link) is None:
            return
        if not self._closing:
            self.away = link  # first: who settles something meanwhile finds one of the two
        self.link = None
        self._why = f"the session with the daemon at {self.endpoint} ended: {why}"
        if self._closing:
            link.unlock()  # nothing is under way any more: the daemon need not ask whether we live
        link.close()
        if time.monotonic() > self._steady_at:  # who lets us in and throws us out again is asked less and less
            self.backoff.reset()
        if not self._closing:
            self._counters.add("links_lost")
            logger.warning("%s; lookups miss until it is back", self._why)

    def _unlock(self) -> None:
        """Give up the session of a daemon that is gone: another one has taken its place, or we end."""
        away, self.away = self.away, None
        if away is not None:
            self._counters.add("stale_settles", len(away.owed))
            away.unlock()

    # The breaker.

    def missed(self, why: str) -> None:
        """Note a missed deadline: the breaker opens, and the keeper probes until an answer comes in time."""
        if self.breaker.failed(time.monotonic()):
            self._counters.add("breaker_opened")
            logger.warning("the daemon at %s is not well (%s): lookups miss until it answers", self.endpoint, why)
            self._keeper.ring()

    def probe(self, link: Link, now: float) -> None:
        """Ask a daemon that has missed a deadline whether it is well again."""
        self._counters.add("probes")
        link.channel.post(m.Ping(0, b""), functools.partial(self._probed, now))

    def _probed(self, sent: float, reply: m.Reply | None) -> None:
        now = time.monotonic()
        if not isinstance(reply, m.Pong):
            return
        if now - sent > self.deadline:
            self._counters.add("probes_late")
            self.breaker.answered_late(now)
            self._keeper.ring()
        elif self.breaker.answered():
            self._counters.add("breaker_closed")
            logger.info("the daemon at %s answers again", self.endpoint)


def _ignore(reply: m.Reply | None) -> None:
    """For an answer that is nobody's business any more."""
