"""The protocols that the scheduler's side needs of a session with the daemon and of the objects it returns. Pure.

`kvcache_client.session` implements them; tests of decisions have in-memory implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kvcache_proto.messages import MissNote, Run
from kvcache_proto.types import NamespaceSpec, Outcome, Resume


class CacheLease(Protocol):
    """The answer to a lookup; see `kvcache_client.Lease`."""

    id: int
    hits: int
    pending: int
    withheld: int
    coming: int
    eta: float
    divergence: int
    tail: int
    packed: bytes
    sums: bytes
    failed: bool
    region_id: bytes

    def release(self) -> None: ...


class CacheReservation(Protocol):
    """The answer to a reservation; see `kvcache_client.Reservation`."""

    id: int
    region_id: bytes
    granted: list[int]
    refused: dict[int, str]
    packed: bytes
    failed: bool


class CachePendingReservation(Protocol):
    """A reservation that is not answered yet; see `kvcache_client.PendingReservation`."""

    def poll(self) -> CacheReservation | None: ...

    def wait(self, timeout: float) -> CacheReservation: ...

    def cancel(self) -> None: ...


class CacheNamespace(Protocol):
    """See `kvcache_client.Namespace`."""

    id: str
    spec: NamespaceSpec

    @property
    def attached(self) -> bool: ...

    def acquire(
        self,
        hashes: Sequence[bytes],
        *,
        verify: bool = False,
        request: str = "",
        tokens: int = 0,
        salted: bool = False,
        resume: Resume = ...,
    ) -> CacheLease: ...

    def prefetch(
        self,
        hashes: Sequence[bytes],
        *,
        request: str = "",
        tokens: int = 0,
        salted: bool = False,
        then: Callable[[int, int], None] | None = None,
    ) -> bool: ...

    def reserve_runs_later(self, runs: Sequence[Run]) -> CachePendingReservation: ...

    def settle(
        self, reservation: int, outcome: Outcome, positions: Sequence[int], shards: Sequence[int], region_id: bytes
    ) -> None: ...

    def retain(
        self,
        hashes: Sequence[bytes],
        seconds: float,
        *,
        request: str = "",
        then: Callable[[int, str], None] | None = None,
    ) -> bool: ...

    def drop(self, hashes: Sequence[bytes], after: int, *, request: str = "") -> bool: ...

    def report_device(self, kept: Sequence[bytes], evicted: Sequence[bytes]) -> bool: ...

    def report_misses(self, notes: list[MissNote]) -> bool: ...


class CacheSession(Protocol):
    """See `kvcache_client.Session`."""

    engine: str

    @property
    def up(self) -> bool: ...

    @property
    def deadline(self) -> float: ...

    def attach(
        self,
        spec: NamespaceSpec,
        shards: Sequence[int],
        ceiling_bytes: int,
        wait: bool = True,
        *,
        reports_leaving: bool = False,
    ) -> CacheNamespace: ...

    def detach(self, namespace: Any) -> None:
        """Leave a namespace that `attach` returned."""

    def add_counts(self, source: Callable[[], Mapping[str, int]]) -> None: ...

    def close(self) -> None: ...


class Counts(Protocol):
    """Counts decisions by name; see `kvcache_client.session.counters`."""

    def add(self, name: str, count: int = 1) -> None: ...

    def warn(self, name: str, line: str) -> None:
        """Count, and log `line` now and then."""
