"""Whether an engine's checkpoint is still what it was: asked after a reset of the cache, beside the engine's steps."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("vllm.kvcache.scheduler")

PATIENCE = 1.0  # seconds that requests wait for the answer; then they are served without the cache until it is there


class CheckpointReading:
    """One question. The files are read when the engine has requests again, not at the reset itself: an engine is reset
    before it sleeps, and may wake up with other files."""

    def __init__(self, digest: Callable[[], str]) -> None:
        """`digest` returns what names the checkpoint; it may read files, and raise."""
        self._digest = digest
        self._until = 0.0
        self.found: str | None = None  # None until it is known; "" where it cannot be

    def waits(self, now: float) -> bool:
        """Begin, if that has not been done; return whether requests are to wait for the answer."""
        if not self._until:
            self._until = now + PATIENCE
            threading.Thread(target=self._look, name="kvcache-checkpoint", daemon=True).start()
        return now < self._until

    def _look(self) -> None:
        began = time.monotonic()
        try:
            self.found = self._digest()
        except Exception as error:  # noqa: BLE001  # what cannot be compared is not the same
            logger.warning("the checkpoint cannot be compared with what it was: %s", error)
            self.found = ""
        logger.debug("looked at the checkpoint for %.3f s", time.monotonic() - began)
