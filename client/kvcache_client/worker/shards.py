"""Which rank writes, and which ranks read, each shard of a block. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Shards(NamedTuple):
    """How the ranks of an engine hold a block: `number` shards, each held by `replicas` consecutive ranks."""

    number: int
    replicas: int

    def of_rank(self, rank: int) -> tuple[int, bool]:
        """Return the shard that `rank` reads, and whether it is the one that writes it."""
        return rank // self.replicas, rank % self.replicas == 0
