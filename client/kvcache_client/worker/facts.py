"""The properties of a rank that its work depends on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache_client.worker.places import RankTable


@dataclass(frozen=True)
class RankFacts:
    """Facts about a rank of an engine.

    Attributes:
        block_bytes: bytes that the rank stores per block of the engine.
        blocks_per_slot: blocks of the engine per cached block.
        experts: whether the model routes tokens to experts.
        groups: the tables in the slots of each group of the namespace, unless the engine has only one group, of full
            attention; `block_bytes` are then the bytes for the tokens of a block hash in the first group.
        joins_later: whether the namespace comes with a plan. Until then, only this rank's shard sizes are right in the
            given one.
    """

    block_bytes: int
    blocks_per_slot: int = 1
    experts: bool = False
    groups: Sequence[Sequence[RankTable]] = ()
    joins_later: bool = False
