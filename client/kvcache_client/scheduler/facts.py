"""What an engine is like, as far as its decisions depend on it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from kvcache_client.scheduler.cache import Counts
from kvcache_client.scheduler.events import Describe
from kvcache_client.scheduler.groups import FullAttention, Group, SeveralGroups
from kvcache_client.scheduler.lazy import Lazy
from kvcache_client.settings import ConnectorSettings
from kvcache_proto.types import NamespaceSpec


@dataclass(frozen=True)
class EngineFacts:
    """Facts of an engine, and functions that it answers questions with.

    Attributes:
        block_tokens: tokens of a block of the engine; if it has `groups`, tokens of a block hash.
        blocks_per_slot: how many of these belong to a cached block.
        saves, loads: whether the engine saves to the cache, and loads from it.
        volatile: cached blocks at the end of a hit that are computed all the same.
        groups: the groups of the namespace, for an engine that has other groups than one of full attention.
        table_tokens: tokens of a block of each of the engine's groups; by default, it has one of `block_tokens`.
        joining: ranks that do not know the namespace before they get a plan.
        step_tokens: most tokens that a step schedules.
        ranks: how many ranks copy.
        device_blocks: for an engine that could wait for ever for requests that load (see `admission`), else 0.
        lookahead, in_order: for such an engine, as there.
        describe: returns what events say of a request and its blocks. Without it, there are no events.
        checkpoint: returns the id of the checkpoint as it is now, "" if it is not known.
        evicted_next: returns the device blocks, in order, of which the engine gives away the given number next. Without
            it, saves are eager.
        hash_of: returns the hash of a device block in the engine's own prefix cache, b"" if it is not there.
    """

    block_tokens: int
    blocks_per_slot: int = 1
    saves: bool = True
    loads: bool = True
    volatile: int = 0
    groups: Sequence[Group] = ()
    table_tokens: Sequence[int] = ()
    joining: Collection[int] = ()
    step_tokens: int = 0
    ranks: int = 1
    device_blocks: int = 0
    lookahead: int = 0
    in_order: bool = True
    describe: Describe | None = None
    checkpoint: Callable[[], str] = lambda: ""
    evicted_next: Callable[[int], Iterable[int]] | None = None
    hash_of: Callable[[int], bytes] = lambda block: b""

    @property
    def tables(self) -> Sequence[int]:
        """Tokens of a block of each of the engine's groups."""
        return self.table_tokens or (self.block_tokens,)

    def group(self, spec: NamespaceSpec, settings: ConnectorSettings) -> FullAttention | SeveralGroups:
        """Return how the engine's blocks are matched, loaded and saved."""
        only_prompts = settings.save == "prompt"
        if not self.groups:
            return FullAttention(self.block_tokens, self.blocks_per_slot, self.volatile, only_prompts)
        return SeveralGroups(
            self.groups, spec.groups, self.block_tokens, only_prompts, settings.checkpoint_tokens, self.volatile
        )

    def lazy(self, settings: ConnectorSettings, group: FullAttention, counters: Counts) -> Lazy | None:
        """Return what delays saves until the engine is about to evict their blocks; None if saves are eager."""
        if settings.save_mode != "lazy" or self.evicted_next is None:
            return None
        # What the next step may give away, and as much again: a save takes a step.
        ahead = 2 * self.step_tokens // self.block_tokens
        return Lazy(group, ahead, self.evicted_next, self.hash_of, counters)
