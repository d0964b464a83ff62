"""What both sides of the connector have, and the values that they send each other through vLLM."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvcache_client.engines.vllm.identity import Share
from kvcache_client.engines.vllm.running_engine import retire
from kvcache_client.engines.vllm.setup import Setup, read_setup
from kvcache_client.engines.vllm.stats import CacheStats, Feed
from kvcache_client.session.session import Session
from kvcache_client.step_plan import NOTHING, Report, StepPlan

logger = logging.getLogger("vllm.kvcache")


@dataclass
class StepMetadata(KVConnectorMetadata):
    """A step's plan, in the wrapper that vLLM sends to its ranks."""

    plan: StepPlan = field(default=NOTHING)
    idle: bool = False  # the step computes nothing


@dataclass
class RankShare(KVConnectorHandshakeMetadata):
    """A rank's share of a slot, if the scheduler's side cannot know it."""

    share: Share


@dataclass
class RankReport(KVConnectorWorkerMetadata):
    """The report of ranks, in the wrapper that vLLM sends to the scheduler's side."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReport:
        return RankReport(self.report.merged(other.report)) if isinstance(other, RankReport) else self


class Side(ABC):
    """One side of a connector. Its methods have the names of vLLM's hooks, and may raise."""

    in_scheduler: bool

    def __init__(self) -> None:
        self.session: Session | None = None
        self.feed: Feed | None = None  # for vLLM's metrics
        self.fault = ""  # why it was given up, until the other side knows

    def start(self, vllm_config: Any, kv_cache: Any) -> None:
        """Begin to use the cache if this engine can be cached, and no other connector does."""
        setup = read_setup(self, self.in_scheduler, vllm_config, kv_cache)
        if setup is not None:
            self.open(setup)

    @abstractmethod
    def open(self, setup: Setup) -> None: ...

    @abstractmethod
    def give_up(self, fault: str) -> None:
        """Load and save nothing more, because of `fault`. Does not raise."""

    @abstractmethod
    def close(self) -> None: ...

    def shutdown(self) -> None:
        self.close()
        retire(self)

    def get_kv_connector_stats(self) -> CacheStats | None:
        return self.feed.take() if self.feed is not None else None


def close_later(*parts: Any, then: Callable[[], None] = lambda: None) -> None:
    """Close the parts of a side that was given up, those that are not None, on a thread, and call `then`.

    Ending a session needs answers from the daemon, and ending copies takes time: no step waits for either.
    """

    def close() -> None:
        try:
            for part in parts:
                try:
                    if part is not None:
                        part.close()
                except Exception as error:  # noqa: BLE001 - it may fail again, and the rest must be closed
                    logger.debug("an error while a failed connector was closed: %s", error, exc_info=error)
        finally:
            then()

    threading.Thread(target=close, name="kvcache-give-up", daemon=True).start()
