"""Which prefixes are hot: what lookups found last. Tiers keep the list for the next daemon. Pure."""

from __future__ import annotations

from collections import OrderedDict

from kvcache_proto.messages import MAX_HOT, Runs
from kvcache_server.core.index import GONE, Block

MOST_ENDS = 1024  # chains that are remembered


class HotPrefixes:
    """The hot prefixes of a group.

    Attributes: `changes` is how often it has changed.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._ends: OrderedDict[bytes, Block] = OrderedDict()  # the last block of each chain found, the latest one last

    def found(self, end: Block) -> None:
        """Note that a lookup has found the chain that ends in a block."""
        self.changes += 1
        self._ends[end.hash] = end
        self._ends.move_to_end(end.hash)
        if len(self._ends) > MOST_ENDS:
            self._ends.popitem(last=False)

    def runs(self) -> Runs:
        """Return the blocks of the chains that are cached, at most MAX_HOT, the hottest chains first."""
        runs: Runs = []
        seen: set[bytes] = set()
        for end in reversed(self._ends.values()):
            if end.pins == GONE:
                continue
            parent, new = b"", []
            for block in end.ancestors():
                if block.hash in seen:
                    parent = block.hash
                    break
                new.append(block.hash)
            if new := new[: -1 - MAX_HOT + len(seen) : -1]:  # the first ones: the others are of no use without them
                seen.update(new)
                runs.append((parent, new))
            if len(seen) == MAX_HOT:
                break
        return runs
