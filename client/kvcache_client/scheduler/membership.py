"""The namespace in which one engine shares its blocks, and how a reset of the engine's cache changes it.

A reset may come with new weights, and a namespace names the weights. Other engines stay in their namespaces.
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


PATIENCE = 1.0  # seconds that requests wait for the digest; then they are served without the cache until it is known


class CheckpointReading:
    """One reading of the engine's checkpoint after a reset of its cache, beside the engine's steps.

    It begins when the engine has requests again: an engine is reset before it sleeps, and may wake with other files.
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


class Membership:
    def __init__(
        self,
        session: CacheSession,
        spec: NamespaceSpec,
        settings: ConnectorSettings,
        checkpoint: Callable[[], str],
        events: EngineEvents | None,
        joining: Collection[int] = (),
    ) -> None:
        """`checkpoint` returns the present value of the spec's `checkpoint`; "" if that is not known."""
        self._session, self._on_reset, self._events = session, settings.on_reset, events
        self._ceiling = settings.num_cpu_blocks * sum(group.block_bytes for group in spec.groups)
        self.namespace: CacheNamespace = session.attach(spec, (), self._ceiling)
        self.announced: NamespaceSpec | None = spec  # which the ranks are to join with the next plan
        self.unsettled = False  # whether it is unknown, after a reset, which weights the engine has
        self.lost = False  # whether it could not join a namespace after a reset, and shares nothing any more
        self.joining = set(joining)  # ranks that have not joined yet, because they cannot before a plan names it
        self._joined_by = 0.0
        self.declined: dict[int, str] = {}  # the reason, by rank, of those that take no part in the cache
        self._read_checkpoint, self._weights_of = checkpoint, spec.identity.get("checkpoint", "")
        self._reading: CheckpointReading | None = None
        self._resets = 0

    @property
    def shares(self) -> bool:
        """Whether the blocks of this engine are those of the namespace."""
        return not (self.lost or self.declined or self.unsettled)

    def waits(self, now: float) -> bool:
        """Return True if requests are to wait a little: for ranks to join, or until the engine's weights are known."""
        if self.joining and self._session.up:
            self._joined_by = self._joined_by or now + PATIENCE
            return now < self._joined_by
        return self._reading is not None and self._reading.waits(now) and not self.settle()

    def ranks_declined(self, changed: Mapping[int, str]) -> bool:
        """Note the ranks that take no part, with the reason; "" for one that does again. Return whether the engine
        shares nothing from now on.

        A block is whole with the shards of all ranks: while one takes no part, the engine looks nothing up and saves
        nothing.
        """
        self.joining.difference_update(changed)
        before = bool(self.declined)
        self.declined = {rank: why for rank, why in {**self.declined, **changed}.items() if why}
        if self.declined and not before:
            rank, why = min(self.declined.items())
            logger.error("this engine runs without the KV cache server: rank %d takes no part: %s", rank, why)
        elif before and not self.declined:
            logger.info("every rank takes part again: this engine uses the KV cache server")
        return bool(self.declined) and not before

    def settle(self) -> bool:
        """Return True if it is known which weights the engine has; act on it if it has just become known."""
        if self._reading is None:
            return True
        found = self._reading.found
        if found is None:
            return False
        self._reading, self.unsettled = None, False
        if found and found == self._weights_of:
            logger.info("cache reset: the checkpoint is what it was, namespace %s is kept", self.namespace.id)
            return True
        self._weights_of = found
        return self._move(self.namespace.spec.with_unnamed_weights())

    def reset(self) -> bool:
        """Continue according to `on_reset`; return whether the engine still shares blocks."""
        self._resets += 1
        if self._on_reset == "keep":
            self._reading, self.unsettled = CheckpointReading(self._read_checkpoint), True
            return True
        # A version names one state of the weights, and the engine leaves that with its next reset.
        spec, named = self.namespace.spec, self._on_reset != "new" and self._resets == 1
        return self._move(spec.with_weights(self._on_reset) if named else spec.with_unnamed_weights())

    def _move(self, spec: NamespaceSpec) -> bool:
        """Leave the namespace for `spec`, the namespace of other weights."""
        try:
            # The engine's steps wait for this call: if the daemon is slow to answer, the namespace is joined later.
            left, self.namespace = self.namespace, self._session.attach(spec, (), self._ceiling, wait=False)
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
