"""Which engines' devices hold a cached block, and how likely one of these engines requests it next. Pure.

As long as a block is on the device of the engine that will request it next, its copy in host memory is not needed. It
is evicted first, and the engine saves the block again before its device evicts it. That takes time: blocks that a
request is using may be gone from the device as soon as it ends, so only the others count.

`Block.held` is a bit set of engines. It is kept only at the last block of each chain that a device holds: it has all
blocks before it, too, because engines evict the end of a chain first. When a leaf is removed, its parent inherits the
bits. Only engines that report what their devices evict have a bit; it is lost with their last session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcache_server.core.index import Block, Share

LEAST = 1 / 64  # factor of the worth of a block that is sure to be found on a device: old ones still go first
_BITS = 62  # engines of a namespace that are told apart; bits of those that are gone are used again
_PRIOR = 4.0  # imaginary requests, each by an engine drawn at random
_COUNTED = 64.0  # requests; then all counts are halved
_WALKED = 1 << 14  # blocks, in one estimate: some milliseconds


@dataclass(slots=True)
class _Routing:
    """The engines of a namespace: `live` are the bits of those that report evictions, `stays` and `moves` requests that
    came from the only engine that held the blocks, and from another one."""

    shares: set[Share] = field(default_factory=set)
    live: int = 0
    stays: float = 0.0
    moves: float = 0.0
    joined: int = 0

    @property
    def sticky(self) -> float:
        """The probability that an engine that holds a block, and no other does, is the next one to request it."""
        return (self.stays + _PRIOR / max(len(self.shares), 1)) / (self.stays + self.moves + _PRIOR)


class Holders:
    """Attributes: `reports` is whether any engine reports what its device evicts; if not, nothing is known."""

    def __init__(self) -> None:
        self.reports = False
        self._namespaces: dict[int, _Routing] = {}

    def update(self, share: Share, reports: bool) -> None:
        """Note that a session has joined the namespace, or that the engine has left it if the share is not live.

        `reports`: the session reports what the engine's device evicts. Its ranks do not.
        """
        routing = self._namespaces.setdefault(share.namespace, _Routing())
        if not share.live:
            routing.shares.discard(share)
            share.device = 0  # its device's blocks are unknown if it comes back
        else:
            routing.shares.add(share)
            if reports and not share.device:
                share.device = self._bit(routing)
        routing.live = 0
        for each in routing.shares:
            routing.live |= each.device
        if not routing.shares:
            del self._namespaces[share.namespace]
        self.reports = any(routing.live for routing in self._namespaces.values())

    @staticmethod
    def _bit(routing: _Routing) -> int:
        """Return the free bit that was used the longest time ago; 0 if there is none."""
        for _ in range(_BITS):
            bit = 1 << routing.joined % _BITS
            routing.joined += 1
            if not bit & routing.live:
                return bit
        return 0

    @staticmethod
    def hold(share: Share, block: Block) -> None:
        """Note that the engine's device has a block and those above it, and that no request uses them."""
        if share.device:
            block.held |= share.device

    @staticmethod
    def let_go(share: Share, block: Block) -> None:
        """Note that the engine's device evicts a block."""
        block.held &= ~share.device

    def requested(self, share: Share, block: Block | None, on_device: bool) -> None:
        """Learn from a request of an engine for a chain of which the last cached block is `block`; `on_device` is
        whether its device has more of the chain."""
        routing = self._namespaces.get(share.namespace)
        if routing is None:
            return
        held = block.held & routing.live if block is not None else 0
        if block is not None:
            block.held &= ~share.device  # from now on, a request uses it
        if on_device or held == share.device != 0:
            routing.stays += 1
        elif held and not held & held - 1:
            routing.moves += 1
        if routing.stays + routing.moves > _COUNTED:
            routing.stays, routing.moves = routing.stays / 2, routing.moves / 2

    def elsewhere(self, held: int, namespace: int) -> float:
        """Return the probability that the next request for a block comes from an engine that does not hold it, at least
        LEAST; `held` is its bit set."""
        routing = self._namespaces.get(namespace)
        held &= routing.live if routing is not None else 0
        if not held or routing is None:
            return 1.0
        others, holders = len(routing.shares) - 1, held.bit_count()
        if holders > others:
            return LEAST
        return max((1 - routing.sticky) * (others + 1 - holders) / others, LEAST)

    def doubled(self, blocks: Sequence[Block]) -> float:
        """Return the fraction of `blocks`, a sample, that devices keep; the first ones of them if a walk is long."""
        left, kept, seen = _WALKED, 0, 0
        for block in blocks:
            routing = self._namespaces.get(block.account.share.namespace)
            live = routing.live if routing is not None else 0
            at: Block | None = block if live else None
            while at is not None and left and not at.held & live:
                at, left = at.child, left - 1
            if not left:
                break
            seen, kept = seen + 1, kept + (at is not None)
        return kept / max(seen, 1)
