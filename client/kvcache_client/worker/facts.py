"""What a rank is like, as far as its work depends on it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache_client.worker.places import RankTable


@dataclass(frozen=True)
class RankFacts:
    """Facts of a rank of an engine.

    Attributes:
        block_bytes: what the rank stores for one block of the engine.
        blocks_per_slot: blocks of the engine per cached block.
        experts: whether the model routes tokens to experts.
        groups: what is in the slots of each group of the namespace, for an engine that has other groups than one of
            full attention; `block_bytes` is then what is stored for the tokens of a block hash in the first one.
        joins_later: whether the namespace comes with a plan. Until then, only the sizes of this rank's shard are right
            in the one that it is given.
    """

    block_bytes: int
    blocks_per_slot: int = 1
    experts: bool = False
    groups: Sequence[Sequence[RankTable]] = ()
    joins_later: bool = False
