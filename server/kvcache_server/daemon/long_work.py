"""Long work in the daemon's loop: a slice in each turn, of one piece after the other, and what waits behind it.

The messages of one session are answered in their order: while a long one is under way, the later ones wait here.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvcache_proto.errors import Unavailable
from kvcache_server.core.slices import SLICE_SECONDS, Chores, Result, Steps, advance

WAITING, WAITING_BYTES = 1024, 8 << 20  # messages of a session, and their bytes; the protocol tells of it

Message = tuple[Any, bytes]  # whoever sent it, and the frame


class _Piece:
    """What is done for one session: steps, then the messages that have waited, then whatever comes `after`."""

    def __init__(self) -> None:
        self.steps: Steps[object] | None = None
        self.done: Callable[[Any, Exception | None], object] = lambda result, error: None
        self.waiting: deque[Message] = deque()
        self.bytes = 0
        self.after: Callable[[], object] | None = None

    def take(self) -> Message:
        message = self.waiting.popleft()
        self.bytes -= len(message[1])
        return message


class LongWork:
    """`chores` are the cache's; what else there is comes by `begin`, for a session, and by `run`, for the daemon."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        chores: Chores,
        answer: Callable[[Any, bytes], object],
        answered: Callable[[], object],
        failed: Callable[[int, Exception], object],
    ) -> None:
        """`answer(sender, frame)` takes a message that has waited, `answered()` follows each turn, `failed(0, error)`
        notes a defect of ours."""
        self._loop, self._chores, self._failed = loop, chores, failed
        self._answer, self._answered = answer, answered
        self._pieces: dict[object, _Piece] = {}  # by session; those of the daemon by themselves
        self._scheduled = False

    def __contains__(self, session: int) -> bool:
        return session in self._pieces

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def begin(
        self, session: int, steps: Steps[Result], done: Callable[[Result | None, Exception | None], object]
    ) -> None:
        """Go on with `steps` for `session`, which has no others; `done` is called with their result, or their error."""
        piece = self._pieces.setdefault(session, _Piece())
        piece.steps, piece.done = steps, done
        self.look()

    def run(self, steps: Steps[Result]) -> asyncio.Future[Result]:
        """Go on with `steps` of the daemon's own. Who gives the future up does not end them."""
        future: asyncio.Future[Result] = self._loop.create_future()

        def done(result: object, error: Exception | None) -> None:
            if future.cancelled():
                if error is not None:
                    self._failed(0, error)
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        piece = _Piece()
        piece.steps, piece.done = steps, done
        self._pieces[piece] = piece
        self.look()
        return future

    def wait(self, session: int, sender: Any, frame: bytes) -> None:
        """Let a message wait behind the session's work. Raises Unavailable where too many do: it is not taken."""
        piece = self._pieces[session]
        if len(piece.waiting) >= WAITING or piece.bytes + len(frame) > WAITING_BYTES:
            raise Unavailable("an earlier request of this session takes long, and too many wait behind it")
        piece.waiting.append((sender, frame))
        piece.bytes += len(frame)

    def after(self, session: int, then: Callable[[], object]) -> None:
        """Call `then` once nothing is under way for `session`: at once, or later."""
        if session in self._pieces:
            self._pieces[session].after = then
        else:
            then()

    def cut_short(self, session: int) -> None:
        """Let what was to come after the session's work come now. What is begun goes on, and nobody hears of it."""
        piece = self._pieces.get(session)
        while piece is not None and (piece.steps is not None or piece.waiting):
            if piece.steps is not None:
                self._chores.do(piece.steps)
                piece.steps = None
            if piece.waiting:
                self._answer(*piece.take())
        if piece is not None:
            del self._pieces[session]
            if piece.after is not None:
                piece.after()

    def look(self) -> None:
        """See to it that what there is to do is done."""
        if not self._scheduled and (self._pieces or self._chores):
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        until = time.monotonic() + SLICE_SECONDS
        try:
            if self._chores:
                self._do_chores(until)
            if self._pieces:
                key, piece = next(iter(self._pieces.items()))
                self._take_further(piece, until)
                if piece.steps is None and not piece.waiting:
                    del self._pieces[key]
                    if piece.after is not None:
                        piece.after()
                else:
                    self._pieces[key] = self._pieces.pop(key)  # the others first
        finally:
            self.look()
            self._answered()

    def _do_chores(self, until: float) -> None:
        try:
            while self._chores.go_on() and time.monotonic() < until:
                pass
        except Exception as error:  # noqa: BLE001 - a defect of ours is logged, the others are served on
            self._failed(0, error)

    def _take_further(self, piece: _Piece, until: float) -> None:
        """Take it one step further at least."""
        while True:
            if piece.steps is not None:
                steps, piece.steps = piece.steps, None
                if advance(steps, piece.done):
                    piece.steps = steps
            elif piece.waiting:
                self._answer(*piece.take())
            else:
                return
            if time.monotonic() >= until:
                return
