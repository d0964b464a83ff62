"""Reads the digest of an engine's checkpoint after a reset of the cache, beside the engine's steps."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("vllm.kvcache.scheduler")

PATIENCE = 1.0  # seconds that requests wait for the digest; then they are served without the cache until it is known


class CheckpointReading:
    """One reading. It begins when the engine has requests again: an engine is reset before it sleeps, and may wake with
    other files.

    `found` is the digest: None until it is known, "" if it cannot be read.
    """

    def __init__(self, digest: Callable[[], str]) -> None:
        """`digest` returns the id of the checkpoint; it may read files, and raise."""
        self._digest = digest
        self._until = 0.0
        self.found: str | None = None

    def waits(self, now: float) -> bool:
        """Begin if not begun yet; return whether requests are to wait for the digest."""
        if not self._until:
            self._until = now + PATIENCE
            threading.Thread(target=self._look, name="kvcache-checkpoint", daemon=True).start()
        return now < self._until

    def _look(self) -> None:
        began = time.monotonic()
        try:
            self.found = self._digest()
        except Exception as error:  # noqa: BLE001  # a checkpoint that cannot be read counts as a different one
            logger.warning("the checkpoint cannot be compared with the earlier one: %s", error)
            self.found = ""
        logger.debug("read the checkpoint in %.3f s", time.monotonic() - began)
