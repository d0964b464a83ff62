"""The loads of one engine that run, and the requests that wait for what another's load brings. Pure.

Requests of one prefix that come together would each load it, and the bus would carry it as often. The first one loads;
the others are asked for again until that load has ended, and then find the blocks in the device's own cache: the
engine caches what a load brought in the schedule after its end, before or after it asks for those that wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcache_client.scheduler.request_state import Tracked
from kvcache_client.session.lease import Lease

PATIENCE = 1.0  # seconds that a request waits for others' loads, all together


@dataclass(slots=True)
class Load:
    """`hashes` are those of the cached blocks that it brings whole."""

    lease: Lease | None
    blocks: set[int]
    hashes: frozenset[bytes]
    failed: bool = False


class Loads:
    """`ended` counts the loads that have ended."""

    def __init__(self) -> None:
        self.ended = 0
        self._running: dict[str, Load] = {}
        self._landed: dict[str, Load] = {}  # ended well, and perhaps not yet in the device's own cache

    def __bool__(self) -> bool:
        return bool(self._running)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to wait for."""
        return not (self._running or self._landed)

    def begin(self, request: str, lease: Lease | None, blocks: Iterable[int], hashes: Iterable[bytes]) -> None:
        self._running[request] = Load(lease, set(blocks), frozenset(hashes if lease is not None else ()))

    def fail(self, invalid: set[int]) -> None:
        """Note that the device blocks `invalid` did not arrive."""
        for load in self._running.values():
            load.failed |= not invalid.isdisjoint(load.blocks)

    def end(self, request: str) -> Load | None:
        """Return the load of a request, which has ended on every rank; None where it has none."""
        load = self._running.pop(request, None)
        if load is not None:
            self.ended += 1
            if not load.failed:
                self._landed[request] = load
        return load

    def scheduled(self) -> None:
        """A schedule is over: what had landed before it is in the device's own cache by now."""
        self._landed.clear()

    def forget(self) -> None:
        """The weights have changed: nobody waits for what was computed with the old ones."""
        self._landed.clear()
        for load in self._running.values():
            load.hashes = frozenset()

    def follow(self, state: Tracked, start: int, hashes: Sequence[bytes], now: float) -> bool:
        """Return whether `state` is to wait for another's load rather than load `hashes` from block `start` on itself.

        Only where one load brings the first of them and half of all at least, and never longer than PATIENCE in all.
        """
        if state.follow_until and now >= state.follow_until:
            return False
        for request, load in (*self._running.items(), *self._landed.items()):
            if hashes[0] in load.hashes and request != state.id:
                brought = next((at for at, name in enumerate(hashes) if name not in load.hashes), len(hashes))
                if 2 * brought >= len(hashes):
                    state.follow_until = state.follow_until or now + PATIENCE
                    state.follows, state.follow_start = request, start
                    return True
        return False

    def following(self, state: Tracked, start: int, now: float) -> bool:
        """Return whether `state`, which begins at device block `start` now, goes on waiting."""
        if not state.follows:
            return False
        if (
            start == state.follow_start  # else it has found some in the device's own cache
            and now < state.follow_until
            and (state.follows in self._running or state.follows in self._landed)
        ):
            return True
        state.follows = ""
        return False
