"""The properties of an engine that its decisions depend on. Pure."""

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
    """Facts about an engine, and callbacks into it.

    Attributes:
        block_tokens: tokens per block of the engine; if it has `groups`, tokens per block hash.
        blocks_per_slot: how many of these make one cached block.
        saves, loads: whether the engine saves to the cache, and loads from it.
        volatile: cached blocks at the end of a hit that are computed anyway.
        groups: the groups of the namespace, unless the engine has only one group, of full attention.
        table_tokens: tokens per block of each of the engine's groups; by default, one group of `block_tokens`.
        joining: ranks that do not know the namespace before they get a plan.
        step_tokens: the most tokens that a step schedules.
        ranks: number of ranks that copy.
        device_blocks: for an engine that could wait forever for requests that load (see `admission`), else 0.
        lookahead, in_order: for such an engine, as in `Admission`.
        describe: returns the events' fields for a request and its blocks. Without it, there are no events.
        checkpoint: returns the present id of the checkpoint, "" if it is unknown.
        evicted_next: returns the given number of device blocks that the engine gives away next, in order. Without it,
            saves are eager.
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
        """Tokens per block of each of the engine's groups."""
        return self.table_tokens or (self.block_tokens,)

    def group(self, spec: NamespaceSpec, settings: ConnectorSettings) -> FullAttention | SeveralGroups:
        """Return the rules by which the engine's blocks are matched, loaded and saved."""
        only_prompts = settings.save == "prompt"
        if not self.groups:
            return FullAttention(self.block_tokens, self.blocks_per_slot, self.volatile, only_prompts)
        return SeveralGroups(
            self.groups, spec.groups, self.block_tokens, only_prompts, settings.checkpoint_tokens, self.volatile
        )

    def lazy(self, settings: ConnectorSettings, group: FullAttention, counters: Counts) -> Lazy | None:
        """Return the object that delays saves until their blocks are about to be evicted; None if saves are eager."""
        if settings.save_mode != "lazy" or self.evicted_next is None:
            return None
        # The blocks that the next step may give away, and as many again: a save takes a step.
        ahead = 2 * self.step_tokens // self.block_tokens
        return Lazy(group, ahead, self.evicted_next, self.hash_of, counters)
