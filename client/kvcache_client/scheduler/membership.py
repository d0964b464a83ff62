"""The namespace in which one engine shares its blocks, and how a reset of the engine's cache changes it.

After a reset, the engine may have other weights, and these are part of a namespace's identity.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping

from kvcache_client.scheduler.cache import CacheNamespace, CacheSession
from kvcache_client.scheduler.events import EngineEvents
from kvcache_client.settings import ConnectorSettings
from kvcache_proto.errors import KVCacheError
from kvcache_proto.types import NamespaceSpec

logger = logging.getLogger("vllm.kvcache.scheduler")


PATIENCE = 1.0  # seconds that requests wait for the digest, or for ranks to join, before they skip the cache


class CheckpointReading:
    """Reads the engine's checkpoint once, in the background, after a reset of the engine's cache.

    It begins when the engine has requests again: an engine is reset before it sleeps, and may wake with other files.
    `found` is the digest: None until it is known, "" if the checkpoint cannot be read.
    """

    def __init__(self, digest: Callable[[], str]) -> None:
        """`digest` returns the id of the checkpoint; it may read files, and raise."""
        self._digest = digest
        self._until = 0.0
        self.found: str | None = None

    def waits(self, now: float) -> bool:
        """Begin, at the first call; return True if requests are to wait for the digest."""
        if not self._until:
            self._until = now + PATIENCE
            threading.Thread(target=self._read, name="kvcache-checkpoint", daemon=True).start()
        return now < self._until

    def _read(self) -> None:
        began = time.monotonic()
        try:
            self.found = self._digest()
        except Exception as error:  # noqa: BLE001  # a checkpoint that cannot be read counts as a different one
            logger.warning("the checkpoint cannot be compared with the earlier one: %s", error)
            self.found = ""
        logger.debug("read the checkpoint in %.3f s", time.monotonic() - began)


class Membership:
    """The namespace of one engine, and the ranks that have joined it."""

    def __init__(
        self,
        session: CacheSession,
        spec: NamespaceSpec,
        settings: ConnectorSettings,
        checkpoint: Callable[[], str],
        events: EngineEvents | None,
        joining: Collection[int] = (),
        reports: bool = False,
    ) -> None:
        """`checkpoint` returns the present value of the spec's `checkpoint`, "" if unknown. `joining` are ranks.

        `reports`: the engine reports what its device is about to evict.
        """
        self._session, self._on_reset, self._events = session, settings.on_reset, events
        self._ceiling, self._reports = (
            settings.num_cpu_blocks * sum(group.block_bytes for group in spec.groups),
            reports,
        )
        self.namespace: CacheNamespace = session.attach(spec, (), self._ceiling, reports_leaving=reports)
        self.announced: NamespaceSpec | None = spec  # the ranks are to join it with the next plan
        self.weights_unknown = False  # after a reset, until the checkpoint has been compared
        self.lost = False  # whether it could not join a namespace after a reset, and shares nothing any more
        self.joining = set(joining)  # ranks that have not joined yet: they can only after the first plan
        self._joined_by = 0.0
        self.declined: dict[int, str] = {}  # by rank that takes no part in the cache, the reason
        self._read_checkpoint, self._weights_of = checkpoint, spec.identity.get("checkpoint", "")
        self._reading: CheckpointReading | None = None
        self._resets = 0

    @property
    def shares(self) -> bool:
        """Whether the engine's blocks are valid in the namespace, and all ranks take part."""
        return not (self.lost or self.declined or self.weights_unknown)

    def waits(self, now: float) -> bool:
        """Return True if requests are to wait briefly, for ranks to join or until the engine's weights are known."""
        if self.joining and self._session.up:
            self._joined_by = self._joined_by or now + PATIENCE
            return now < self._joined_by
        return self._reading is not None and self._reading.waits(now) and not self.compare_weights()

    def ranks_declined(self, changed: Mapping[int, str]) -> bool:
        """Note each rank's reason to take no part, "" if it does again. Return True if the engine stops sharing now.

        A block needs the shards of all ranks: while one takes no part, the engine looks nothing up and saves nothing.
        """
        self.joining.difference_update(changed)
        before = bool(self.declined)
        self.declined = {rank: reason for rank, reason in {**self.declined, **changed}.items() if reason}
        if self.declined and not before:
            rank, reason = min(self.declined.items())
            logger.error("this engine runs without the KV cache server: rank %d takes no part: %s", rank, reason)
        elif before and not self.declined:
            logger.info("every rank takes part again: this engine uses the KV cache server")
        return bool(self.declined) and not before

    def compare_weights(self) -> bool:
        """Return True if the engine's weights are known; if they have just become known, move if they have changed."""
        if self._reading is None:
            return True
        found = self._reading.found
        if found is None:
            return False
        self._reading, self.weights_unknown = None, False
        if found and found == self._weights_of:
            logger.info("cache reset: the checkpoint is unchanged, namespace %s is kept", self.namespace.id)
            return True
        self._weights_of = found
        return self._move(self.namespace.spec.with_unnamed_weights())

    def reset(self) -> bool:
        """Apply `on_reset` after a reset of the engine's cache; return True if the engine still shares blocks."""
        self._resets += 1
        if self._on_reset == "keep":
            self._reading, self.weights_unknown = CheckpointReading(self._read_checkpoint), True
            return True
        # A version stands for one state of the weights, which the next reset ends.
        spec, named = self.namespace.spec, self._on_reset != "new" and self._resets == 1
        return self._move(spec.with_weights(self._on_reset) if named else spec.with_unnamed_weights())

    def _move(self, spec: NamespaceSpec) -> bool:
        """Leave the namespace for `spec`, the namespace of other weights."""
        try:
            # Without waiting, because the engine's steps wait for this call: it is attached when the daemon answers.
            left = self.namespace
            self.namespace = self._session.attach(spec, (), self._ceiling, wait=False, reports_leaving=self._reports)
            self._session.detach(left)
        except KVCacheError as error:
            logger.error("the cache could not be reset, saves and loads stop: %s", error)
            self.lost = True
            return False
        self.announced = spec
        if self._events is not None:
            self._events.reset()
        logger.info("cache reset: this engine goes on in namespace %s, weights %s", spec.id, spec.identity["weights"])
        return True
