"""A small synchronous client for the command line and the benchmark: one session, one request at a time, no mapping."""

from __future__ import annotations

import itertools
import os
import socket
from typing import Any, TypeVar

import msgspec
import zmq

from kvcache_proto import __version__, handshake
from kvcache_proto.codec import decode_reply, encode
from kvcache_proto.endpoint import routing_id
from kvcache_proto.errors import Unavailable, VersionMismatch, from_wire
from kvcache_proto.messages import PROTOCOL_VERSION, Clear, Error, Fence, Hello, Ping, Request, Stats, Welcome, Why
from kvcache_proto.trust import check_server, server_uids
from kvcache_server.core.limits import OPERATOR
from kvcache_server.miss_report import Answer
from kvcache_server.status import Status

T = TypeVar("T")


class AdminClient:
    """A session of an operator, or of `engine`. Use it as a context manager.

    Raises Unavailable if no daemon answers within `timeout` seconds, NotPermitted if this user may not attach or the
    wrong user serves the endpoint, and any error that the daemon sends.
    """

    def __init__(self, endpoint: str, label: str = "admin", timeout: float = 5.0, engine: str = OPERATOR) -> None:
        self.endpoint = endpoint
        self._timeout = timeout
        self._ids = itertools.count(1)
        self._handshake = socket.socket(socket.AF_UNIX)
        self._handshake.settimeout(timeout)
        try:
            handshake.connect(self._handshake, endpoint)
            check_server(self._handshake, endpoint, server_uids())
            welcome = self._shake_hands(Hello(PROTOCOL_VERSION, engine, label, f"kvcache-server {__version__}"))
        except (TimeoutError, ConnectionError) as error:
            self._handshake.close()
            raise Unavailable(
                f"the daemon at {endpoint} does not complete the handshake ({error or 'timed out'})"
            ) from None
        except BaseException:
            self._handshake.close()
            raise
        self.session = welcome.session
        self.geometry = welcome.geometry
        self._token = welcome.token
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._dealer()
        self._socket.setsockopt(zmq.ROUTING_ID, routing_id(self._token))
        self._socket.setsockopt(zmq.RCVTIMEO, int(timeout * 1000))
        self._socket.connect(endpoint)

    def _dealer(self) -> zmq.Socket[bytes]:
        return self._context.socket(zmq.DEALER)

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._handshake.close()

    def status(self) -> Status:
        """Return the daemon's figures, without this session. Raises VersionMismatch if they cannot be read."""
        status = self._decode(self.ask(Stats(0, b"")).stats, Status)
        status.sessions = [session for session in status.sessions if session.id != self.session]
        return status

    def why(self, request: str) -> Answer:
        """Return the reasons that blocks of a request were no hits. Raises as `status` does."""
        return self._decode(self.ask(Why(0, b"", request)).answer, Answer)

    def _decode(self, packed: msgspec.Raw, kind: type[T]) -> T:
        try:
            return msgspec.msgpack.decode(packed, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise VersionMismatch(f"the daemon at {self.endpoint} is of another version: {error}") from None

    def clear(self, namespace: str = "") -> int:
        """Forget every block of `namespace`, or of all, and return the number of blocks."""
        blocks: int = self.ask(Clear(0, b"", namespace)).blocks
        return blocks

    def ping(self) -> None:
        """Wait for the daemon to answer."""
        self.ask(Ping(0, b""))

    def fence_off(self, session: int) -> int:
        """Give up a session whose process lives but does not reconnect; return the number of its reservations that
        ended."""
        reservations: int = self.ask(Fence(0, b"", session)).reservations
        return reservations

    def ask(self, request: Request) -> Any:
        """Fill in the id and token of `request`, send it and return the reply. Raises the error sent in reply."""
        number = self.tell(request)
        try:
            while True:
                reply = decode_reply(self._socket.recv())
                if reply.id in (number, 0):
                    break
        except zmq.Again:
            raise Unavailable(f"the daemon at {self.endpoint} did not answer within {self._timeout:g} s") from None
        if isinstance(reply, Error):
            raise from_wire(reply.code, reply.message)
        return reply

    def tell(self, request: Request) -> int:
        """Send `request` without waiting for a reply, and return its id."""
        request.id, request.token = number, _ = next(self._ids), self._token
        self._socket.send(encode(request))
        return number

    def _shake_hands(self, hello: Hello) -> Welcome:
        handshake.send_hello(self._handshake, hello)
        received = b""
        while wanted := handshake.missing(received):
            data, descriptors, _, _ = socket.recv_fds(self._handshake, wanted, 2)
            for descriptor in descriptors:
                os.close(descriptor)
            if not data:
                raise ConnectionError("it closed")
            received += data
        return handshake.read_welcome(received)
