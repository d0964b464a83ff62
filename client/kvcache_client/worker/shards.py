"""Which rank writes each shard of a block, and which ranks read it. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Shards(NamedTuple):
    """How the ranks of an engine hold a block: `number` shards.

    Each rank holds `parts` consecutive shards, and `replicas` consecutive ranks hold the same ones. A part is a KV
    head, or else a stripe of the rank's bytes.
    """

    number: int
    replicas: int
    parts: int = 1
    by_head: bool = False

    def of_rank(self, rank: int) -> tuple[range, tuple[int, ...]]:
        """Return the shards that `rank` reads, and those of them that it writes: its replicas share the work."""
        first = rank // self.replicas * self.parts
        writes = range(rank % self.replicas, self.parts, self.replicas)
        return range(first, first + self.parts), tuple(first + part for part in writes)
