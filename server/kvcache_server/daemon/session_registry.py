"""The open sessions with their tokens and files, and disconnected ones that may come back. A shell around the core."""

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

LOOKS = 64  # files of disconnected sessions checked in one sweep: 20 us each


class SessionRegistry:
    """The open and the disconnected sessions. `tokens` maps a token to its session's number."""

    def __init__(
        self, opened: WarmStart, disconnect: Callable[[int], None], failed: Callable[[int, Exception], object]
    ) -> None:
        """`disconnect(session)` closes a session's handshake connection."""
        self.tokens: dict[bytes, int] = {}
        self.opened = 0  # so far
        self._cache: Cache = opened.cache
        self._state, self._files = opened.state, opened.files
        # Sessions whose handshake connection has closed, but whose files are locked.
        self._disconnected = opened.disconnected
        self._entries: dict[int, SessionOpened] = {}  # records of the open sessions
        self._refused: set[int] = set()  # sessions whose refused attach was logged
        self._disconnect, self._failed = disconnect, failed

    def __len__(self) -> int:
        return len(self._entries)

    def refused(self, session: int, error: KVCacheError) -> None:
        """Log the reason that a session may not attach a namespace, once per session."""
        if session not in self._refused:
            self._refused.add(session)
            log.warning(
                "session %d may not attach a namespace: %s: %s",
                *(session, self.name(session), error),
                extra={"fields": {"event": "attach_refused", "session": session, "code": error.code}},
            )

    def name(self, session: int) -> str:
        return _name(self._entries[session])

    def open(self, hello: Hello, peer: Peer) -> Admission:
        """Open a session, or resume one if the client may. Raises Unavailable, BadArgument, NotPermitted."""
        if _held(self._entries.get(hello.resume), hello):
            self._disconnect(hello.resume)  # its client has closed that connection, which we have not noticed yet
        held = _held(self._disconnected.get(hello.resume), hello)
        now = time.monotonic()
        if held:
            session = hello.resume
            self._cache.resume_session(session, hello.label, now, peer.uid)
            del self._disconnected[session]
        else:
            # Only for root or the daemon's own user: any client may use this engine id.
            is_operator = hello.engine == OPERATOR and peer.uid in (0, os.geteuid())
            session = self._cache.open_session(hello.engine, hello.label, now, peer.uid, is_operator)
        token = secrets.token_bytes(16)
        try:
            file, file_name = self._files.make(session)
        except OSError as error:
            self._cache.end_session(session, now)
            raise Unavailable(f"no session file can be made: {error.strerror}") from None
        self.tokens[token] = session
        entry = SessionOpened(session, hello.engine, hello.label, token, file_name, *(held or (b"", "")), peer.uid)
        self._entries[session] = entry
        self._state.note(entry)
        self.opened += 1
        log.log(
            _level(entry),
            "session %d %s: %s, pid %d uid %d, %d open",
            *(session, "resumed" if held else "opened", _name(entry), peer.pid, peer.uid, len(self)),
            extra={"fields": {"event": "attach", "session": session, "engine": hello.engine, "pid": peer.pid}},
        )
        return Admission(session, token, file, bool(held))

    def leave(self, session: int) -> None:
        """Handle a closed handshake connection. Slots that the session's process may be writing stay reserved until its
        file is unlocked."""
        self._refused.discard(session)
        self._disconnected[session] = entry = self._entries.pop(session)
        del self.tokens[entry.token]
        try:
            self._cache.disconnect_session(session, time.monotonic())
        except Exception as error:  # noqa: BLE001 - an internal error is logged; other sessions are still served
            self._failed(0, error)
        self.look_after(session)
        log.log(
            _level(entry),
            "session %d ended: %s, %d open",
            *(session, _name(entry), len(self)),
            extra={"fields": {"event": "detach", "session": session}},
        )

    def sweep(self) -> None:
        """Check at most LOOKS of the disconnected sessions, those checked longest ago first."""
        for session in list(islice(self._disconnected, LOOKS)):
            self.look_after(session)

    def look_after(self, session: int) -> None:
        """End a disconnected session if its process is gone; clean up after one that was fenced off."""
        entry = self._disconnected.pop(session, None)
        if entry is None:
            return
        if session in self._cache.disconnected and any(map(self._files.locked, entry.files)):
            self._disconnected[session] = entry  # at the end
            return
        for name in entry.files:
            self._files.remove(name)
        if session in self._cache.disconnected:
            try:
                self._cache.end_session(session, time.monotonic())
            except Exception as error:  # noqa: BLE001 - an internal error is logged; other sessions are still served
                self._failed(0, error)


def _name(entry: SessionOpened) -> str:
    return f"engine {entry.engine}" + (f" ({entry.label})" if entry.label else "")


def _level(entry: SessionOpened) -> int:
    """Commands are logged at debug level: a monitor that reads the status every second should not fill the log."""
    return logging.DEBUG if entry.engine == OPERATOR else logging.INFO


def _held(entry: SessionOpened | None, hello: Hello) -> tuple[bytes, str] | tuple[()]:
    """Return the token and file by which the client of `hello` holds the session of `entry`; () if it does not."""
    if entry is not None and entry.engine == hello.engine:
        for token, file in ((entry.token, entry.file), (entry.former_token, entry.former_file)):
            if file and secrets.compare_digest(token, hello.secret):
                return token, file
    return ()
