"""Who is attached: tokens, doors and files of sessions, and which may come back. A thin shell over the cache."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from itertools import islice

from kvcache_proto.errors import KVCacheError, Unavailable
from kvcache_proto.messages import Hello
from kvcache_server.core.cache import Cache
from kvcache_server.core.journal import SessionOpened
from kvcache_server.core.limits import OPERATOR
from kvcache_server.daemon.handshake import Admission
from kvcache_server.storage.warm_start import WarmStart
from kvcache_server.transport.sockets import Peer

log = logging.getLogger(__name__)

LOOKS = 64  # at the files of sessions without a door, in one sweep: each takes 20 us


class SessionRegistry:
    """The open sessions and those that are away. `tokens` leads from a token to its session's number."""

    def __init__(
        self,
        opened: WarmStart,
        disconnect: Callable[[int], None],
        failed: Callable[[int, Exception], object],
    ) -> None:
        """`disconnect()` closes a door."""
        self.tokens: dict[bytes, int] = {}
        self.opened = 0  # so far
        self._cache: Cache = opened.cache
        self._state, self._files = opened.state, opened.files
        self._disconnected = opened.disconnected  # sessions without a door whose files are locked
        self._entries: dict[int, SessionOpened] = {}  # what the manifest has of the others
        self._names: dict[int, str] = {}
        self._refused: set[int] = set()  # sessions of which it was logged that they may not join
        self._disconnect, self._failed = disconnect, failed

    def __len__(self) -> int:
        return len(self._names)

    def refused(self, session: int, error: KVCacheError) -> None:
        """Log why a session may not join a namespace, once a session: nobody else knows whom it was refused for."""
        if session not in self._refused:
            self._refused.add(session)
            log.warning(
                "session %d may not join a namespace: %s: %s",
                *(session, self._names[session], error),
                extra={"fields": {"event": "attach_refused", "session": session, "code": error.code}},
            )

    def name(self, session: int) -> str:
        """Return how the log calls an open session."""
        return self._names[session]

    def open(self, hello: Hello, peer: Peer) -> Admission:
        """Let the client in, to go on where it was if it may. Raises Unavailable, BadArgument, NotPermitted."""
        if _held(self._entries.get(hello.resume), hello):
            self._disconnect(hello.resume)  # its client has given that door up; we have not seen it yet
        held = _held(self._disconnected.get(hello.resume), hello)
        now = time.monotonic()
        if held:
            session = hello.resume
            self._cache.resume_session(session, hello.label, now, peer.uid)
            del self._disconnected[session]
        else:
            # By root or the daemon's own user alone: anybody may call itself so.
            is_operator = hello.engine == OPERATOR and peer.uid in (0, os.geteuid())
            session = self._cache.open_session(hello.engine, hello.label, now, peer.uid, is_operator)
        token = secrets.token_bytes(16)
        try:
            file, file_name = self._files.make(session)
        except OSError as error:
            self._cache.end_session(session, now)
            raise Unavailable(f"no session file can be made: {error.strerror}") from None
        self.tokens[token] = session
        self._entries[session] = SessionOpened(
            session, hello.engine, hello.label, token, file_name, *(held or (b"", "")), peer.uid
        )
        self._state.note(self._entries[session])
        name = f"engine {hello.engine}" + (f" ({hello.label})" if hello.label else "")
        self._names[session] = name
        self.opened += 1
        log.log(
            self._level(name),
            "session %d %s: %s, pid %d uid %d, %d open",
            session,
            "resumed" if held else "opened",
            name,
            peer.pid,
            peer.uid,
            len(self._names),
            extra={"fields": {"event": "attach", "session": session, "engine": hello.engine, "pid": peer.pid}},
        )
        return Admission(session, token, file, bool(held))

    def leave(self, session: int) -> None:
        """The door has closed. What the session's process may still be writing waits until its file is unlocked."""
        name = self._names.pop(session)
        self._refused.discard(session)
        self._disconnected[session] = entry = self._entries.pop(session)
        del self.tokens[entry.token]
        try:
            self._cache.disconnect_session(session)
        except Exception as error:  # noqa: BLE001 - a defect of ours is logged, the others are served on
            self._failed(0, error)
        self.look_after(session)
        log.log(
            self._level(name),
            "session %d ended: %s, %d open",
            session,
            name,
            len(self._names),
            extra={"fields": {"event": "detach", "session": session}},
        )

    def sweep(self) -> None:
        """Look after the sessions without a door, those first that were looked after longest ago; LOOKS at most."""
        for session in list(islice(self._disconnected, LOOKS)):
            self.look_after(session)

    def look_after(self, session: int) -> None:
        """End a session without a door if its process is gone; tidy up behind one that was fenced off."""
        entry = self._disconnected.pop(session, None)
        if entry is None:
            return
        if session in self._cache.registry.disconnected and any(map(self._files.locked, entry.files)):
            self._disconnected[session] = entry  # behind all others
            return
        for name in entry.files:
            self._files.remove(name)
        if session in self._cache.registry.disconnected:
            try:
                self._cache.end_session(session, time.monotonic())
            except Exception as error:  # noqa: BLE001 - a defect of ours is logged, the others are served on
                self._failed(0, error)

    @staticmethod
    def _level(name: str) -> int:
        """A monitor that asks for the status each second should not fill the log."""
        return logging.DEBUG if name.startswith(f"engine {OPERATOR} ") else logging.INFO


def _held(entry: SessionOpened | None, hello: Hello) -> tuple[bytes, str] | tuple[()]:
    """Return token and file by which the client behind `hello` holds the session of `entry`; () where it does not."""
    if entry is not None and entry.engine == hello.engine:
        for token, file in ((entry.token, entry.file), (entry.former_token, entry.former_file)):
            if file and secrets.compare_digest(token, hello.secret):
                return token, file
    return ()
