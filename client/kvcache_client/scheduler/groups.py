"""The rules by which an engine's blocks are matched, loaded and saved. Pure.

Each cached block consists of `blocks_per_slot` engine blocks, and has one slot. An engine with several KV cache groups,
or with one that is not full attention, has suffix groups: see `HybridGroups`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from kvcache_client.scheduler.views import BlockTables, Group, RequestView
from kvcache_client.settings import CHECKPOINT_TOKENS, CHECKPOINT_TOKENS_ALONE
from kvcache_client.step_plan import LoadJob
from kvcache_proto.types import FULL, MAX_HASHES, REF_BYTES, GroupSpec

_COMPLEMENT = bytes(range(255, -1, -1))  # a table for `bytes.translate`


class Found(NamedTuple):
    """The slots that a lookup has returned and leased."""

    region: bytes  # id of the region that they are in
    packed: bytes  # their references: those of the first group, then those of each suffix group
    hits: int  # how many cached blocks the lookup has found
    had: int = 0  # for how many of these, from the first one on, it has returned no suffix groups
    sums: bytes = b""  # the slots' checksums, in the same order; b"" for none
    tail: int = 0  # blocks of the engine up to the end of the last one's tokens if that is a tail, else 0

    def part(self, begin: int, end: int) -> tuple[bytes, bytes]:
        """Return the references and the checksums of slots `begin` to `end`."""
        width = len(self.sums) // (len(self.packed) // REF_BYTES) if self.packed else 0
        return self.packed[begin * REF_BYTES : end * REF_BYTES], self.sums[begin * width : end * width]


class FullAttention:
    """Full attention and MLA: a block is useful only below all blocks before it.

    A prefix is matched from its root on, up to the first miss, and every full block is saved.
    """

    has_full = True  # whether blocks are useful only below all blocks before them
    suffixes: tuple[int, ...] = ()  # the other groups, by number

    def __init__(self, block_tokens: int, blocks_per_slot: int, volatile: int = 0, prompt_only: bool = False) -> None:
        """Of each lookup's blocks, the last `volatile` ones are computed anyway: a drafter's KV in them depends on the
        token after them. With `prompt_only`, no generated tokens are saved."""
        self.block_tokens, self.blocks_per_slot = block_tokens, blocks_per_slot
        self.slot_tokens = block_tokens * blocks_per_slot  # tokens of a cached block
        self.align = block_tokens  # tokens after which a hit in the engine's own cache may end
        self.prompt_only, self.volatile = prompt_only, volatile
        # Tokens that are left to compute. vLLM computes the last token again if the whole prompt was loaded. It has no
        # state before that token, nor a drafter's KV.
        self._left = int(volatile > 0)

    def keys(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Return the hashes of the cached blocks: the chained hash of the last engine block covers those before it."""
        return hashes if self.blocks_per_slot == 1 else hashes[self.blocks_per_slot - 1 :: self.blocks_per_slot]

    def prompt_keys(self, request: RequestView) -> Sequence[bytes]:
        """Return the hashes of the cached blocks that the prompt fills."""
        return self.keys(request.hashes)[: request.prompt_tokens // self.slot_tokens]

    def loadable(self, request: RequestView) -> int:
        """Return how many cached blocks the request may load."""
        tokens = max(request.tokens - self._left, 0)
        return min(tokens // self.slot_tokens, len(request.hashes) // self.blocks_per_slot, MAX_HASHES - self.volatile)

    def farthest(self, request: RequestView) -> int:
        """Return how many blocks of its own the engine must have for the rest to be computed rather than loaded."""
        return min(max(request.tokens - 1, 0) // self.slot_tokens, self.loadable(request)) * self.blocks_per_slot

    def tails(self, request: RequestView) -> tuple[Sequence[bytes], int]:
        """Return the names of the tails after each number of the engine's blocks that the request may load, from 0 on,
        and their number per cached block: see Acquire."""
        return (), 0

    def tail_name(self, request: RequestView, end: int) -> bytes:
        """Return the name of the tail after `end` of the engine's blocks, b"" if not all tokens that it needs are
        known."""
        return b""

    def names(self, request: RequestView, start: int, end: int, tail: int = 0) -> Sequence[bytes]:
        """Return the names of the cached blocks with the engine's blocks from `start` to `end`, and of the tail that
        ends there if `tail`."""
        return self.keys(request.hashes)[start // self.blocks_per_slot : end // self.blocks_per_slot]

    def usable(self, hits: int) -> int:
        """Return how many of `hits` cached blocks may be loaded."""
        return max(0, hits - self.volatile)

    def full(self, request: RequestView, computed: int) -> int:
        """Return the number of cached blocks that are full and to be saved once `computed` tokens are computed."""
        full = self._hashed(request, computed)
        return min(full, request.prompt_tokens // self.slot_tokens) if self.prompt_only else full

    def _hashed(self, request: RequestView, computed: int) -> int:
        # Only known tokens have hashes: placeholders of tokens still being sampled do not count, even if `computed`
        # includes them.
        return min(len(request.hashes), computed // self.block_tokens) // self.blocks_per_slot

    def unsaved(self, request: RequestView, saved: int, computed: int) -> Sequence[bytes]:
        """Return the hashes of full cached blocks beyond the first `saved`, generated ones included."""
        full = self._hashed(request, computed)
        return self.keys(request.hashes)[saved:full] if full > saved else ()

    def references(self, keys: Sequence[bytes], hits: int, had: int) -> Sequence[bytes]:
        """Return the hash of each slot that a lookup of `keys` returns; the engine has the suffix groups of the first
        `had`."""
        return keys[:hits]

    def counts(self, hits: int, had: int) -> Sequence[int]:
        """Return the number of slots of each group that a lookup returns for `hits`, as `references`."""
        return (hits,)

    def columns(self, number: int) -> int:
        """Return the number of device blocks in a slot of a group."""
        return self.blocks_per_slot

    def slot_blocks(self, tables: BlockTables, first: int, end: int) -> list[int]:
        """Return the device blocks of the full group's slots from `first` to `end`, fewer if some are missing."""
        return list(tables[0][first * self.blocks_per_slot : end * self.blocks_per_slot])

    def cut_loads(self, request: str, found: Found, tables: BlockTables, first: int, count: int) -> list[LoadJob]:
        """Return the jobs that load `count` of the engine's blocks from `first` on; [] if the slots do not suffice.

        `tables` are all device blocks of the request, by group of the engine; 0 is none.
        """
        slot = first // self.blocks_per_slot
        end = -(-(first + count) // self.blocks_per_slot)
        refs, sums = found.part(slot, end)
        blocks = list(tables[0][first : first + count])
        return [LoadJob(request, found.region, refs, blocks, first - slot * self.blocks_per_slot, sums)]


class HybridGroups(FullAttention):
    """A full group, if there is one, and suffix groups: an engine continues a prefix with only the last blocks of each
    suffix group.

    All have slots of the same tokens, with the same hashes. Where `FullAttention` says blocks of the engine, the blocks
    of its hashes are meant here.

    An engine with states may continue within a block, where a prompt has ended. There, a tail is saved: a block of each
    group, whose tokens end at that boundary, as a child of the last whole block before it. It is named by the hash at
    the boundary. If a drafter reads the next token, it is named by the next hash, which proves that token; if that is
    the name of a whole block, by the complement.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        specs: Sequence[GroupSpec],
        hash_tokens: int,
        prompt_only: bool = False,
        checkpoint_tokens: int | None = 0,
        volatile: int = 0,
        tails: bool = False,
    ) -> None:
        """`checkpoint_tokens` is the distance of the boundaries in a prompt whose suffix groups are saved; 0: only at
        its divergence and its end; None: the best distance for these groups. `tails`: hits may end within a block.

        Generated tokens are saved as they come: the engine does not keep a window until it is known where a request
        ends.
        """
        slot_tokens = specs[0].block_tokens
        super().__init__(hash_tokens, slot_tokens // hash_tokens, volatile, prompt_only)
        self._groups, self._specs = groups, specs
        self.align = math.lcm(*(table.block_tokens for group in groups for table in group.tables))
        self.has_full = specs[0].kind == FULL
        if checkpoint_tokens is None:
            checkpoint_tokens = CHECKPOINT_TOKENS if self.has_full else CHECKPOINT_TOKENS_ALONE
        self._checkpoint = checkpoint_tokens // slot_tokens
        self.suffixes = tuple(range(int(self.has_full), len(groups)))
        self._left = 1
        self._has_tails = tails

    def farthest(self, request: RequestView) -> int:
        if not self._has_tails:
            return super().farthest(request)
        return min(max(request.tokens - 1, 0) // self.block_tokens, len(request.hashes) - self.volatile, MAX_HASHES - 1)

    def tails(self, request: RequestView) -> tuple[Sequence[bytes], int]:
        if not self._has_tails or (most := self.farthest(request)) <= 0:
            return (), 0
        names, step = list(request.hashes[: most + self.volatile]), self.blocks_per_slot
        if self.volatile:
            names[step - 1 :: step] = [name.translate(_COMPLEMENT) for name in names[step - 1 :: step]]
        else:
            names.insert(0, bytes(len(names[0])))
        return names, step

    def tail_name(self, request: RequestView, end: int) -> bytes:
        at = end + self.volatile
        if at > len(request.hashes):
            return b""
        name = request.hashes[at - 1]
        return name.translate(_COMPLEMENT) if self.volatile and at % self.blocks_per_slot == 0 else name

    def names(self, request: RequestView, start: int, end: int, tail: int = 0) -> Sequence[bytes]:
        whole = super().names(request, start, end)
        return [*whole, self.tail_name(request, end)] if tail else whole

    def usable(self, hits: int) -> int:
        """As above. If there are suffix groups, the daemon has left out volatile blocks: see
        `GroupSpec.needs_next_block`."""
        return hits if self.suffixes else super().usable(hits)

    def references(self, keys: Sequence[bytes], hits: int, had: int) -> Sequence[bytes]:
        return [key for count in self.counts(hits, had) for key in keys[hits - count : hits]]

    def counts(self, hits: int, had: int) -> Sequence[int]:
        least = max(0, hits - had)
        return [hits if spec.kind == FULL else min(spec.needed(hits), least) for spec in self._specs]

    def columns(self, number: int) -> int:
        return self._groups[number].columns

    def slot_blocks(self, tables: BlockTables, first: int, end: int) -> list[int]:
        return self._blocks(0, tables, range(first, end))

    def suffix_blocks(
        self, number: int, tables: BlockTables, slots: Sequence[int], computed: int
    ) -> dict[int, list[int]]:
        """Return, by slot, the device blocks of those `slots` of a suffix group whose blocks the engine has all kept.

        It had computed at most `computed` tokens when it last gave blocks away.
        """
        first, found = self._groups[number].first_kept(computed), {}
        for slot in slots:
            blocks = self._blocks(number, tables, (slot,), first)
            if len(blocks) == self.columns(number):
                found[slot] = blocks
        return found

    def suffix_slots(
        self, number: int, request: RequestView, first: int, end: int, limit: int | None, divergence: int = 0
    ) -> list[int]:
        """Return the slots of a suffix group, from `first` to `end`, that are to be saved.

        These are the slots that are needed at the end of the prompt, also by a request that has to compute its last
        token or the volatile blocks; at the `limit` of saves; at the `divergence`, where the request leaves the cached
        chain; at each checkpoint; and all generated ones. States are saved as they are made.
        """
        if self._groups[number].is_state:
            return []
        needed, step = self._specs[number].needed, self._checkpoint
        prompt = request.prompt_tokens // self.slot_tokens
        ends = {prompt, prompt if limit is None else limit}
        last = (request.prompt_tokens - 1) // self.slot_tokens
        if any(group.is_state for group in self._groups):
            divergence = 0  # no request can continue there: the engine has no state of it
        boundaries = {divergence, last, *ends, *(end - self.volatile for end in ends)}
        if step:
            window_blocks = self._specs[number].window_blocks
            boundaries.update(range(-(-(first + 1) // step) * step, min(end + window_blocks, prompt) + 1, step))
        wanted = set(range(max(first, prompt), end))
        for boundary in boundaries:
            wanted.update(range(max(first, boundary - needed(boundary)), min(boundary, end)))
        return sorted(wanted)

    def tails_made(
        self, request: RequestView, tables: BlockTables, offers: Sequence[tuple[int, int, int]]
    ) -> Iterator[tuple[int, list[list[int]]]]:
        """Yield the tails that end at states that are made: the number of the engine's blocks up to the end, and the
        device blocks of each group. `offers` are those of `state_slots`."""
        prompt_end = (request.prompt_tokens // self.block_tokens - 1) * self.block_tokens if self.volatile else 0
        for tokens, made in _by_end(offers).items() if self._has_tails else ():
            # At the end of a whole block, only a tail proves the next unit: the next block may not be cached.
            if tokens % self.block_tokens or (tokens % self.slot_tokens == 0 and tokens != prompt_end):
                continue
            found = [self._tail_blocks(tables, tokens // self.slot_tokens, tokens)]
            found += [[made.get(table.number, 0) for table in group.tables] for group in self._groups[1:]]
            if all(map(all, found[1:])) and found[0]:
                yield tokens // self.block_tokens, found

    def state_slots(self, offers: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, list[int]]]:
        """Return (suffix group, slot, device blocks) of states that are made: `offers` are (the engine's group, block,
        tokens).

        A slot needs the states of all of the engine's groups that are in it.
        """
        found, by_end = [], _by_end(offers)
        for number in self.suffixes:
            group = self._groups[number]
            for tokens, blocks in by_end.items() if group.is_state else ():
                if tokens % self.slot_tokens == 0 and all(table.number in blocks for table in group.tables):
                    every = [blocks[table.number] for table in group.tables]
                    found.append((number, tokens // self.slot_tokens - 1, every))
        return found

    def cut_loads(self, request: str, found: Found, tables: BlockTables, first: int, count: int) -> list[LoadJob]:
        """As above. In the jobs, 0 is a block that is not to be filled.

        The engine has blocks for exactly those positions that it will read. If one of them is in no slot, it wants to
        continue at another boundary than that of the hits.
        """
        begin, end = first * self.block_tokens, (first + count) * self.block_tokens
        jobs: list[LoadJob] = []
        at, hits = 0, found.hits
        if end % self.align and end != found.tail * self.block_tokens:
            return []
        for number, (group, slots) in enumerate(zip(self._groups, self.counts(hits, found.had), strict=True)):
            columns = []
            for table in group.tables:
                per_slot = self.slot_tokens // table.block_tokens
                ids = np.zeros(hits * per_slot, np.int64)
                known = tables[table.number][: -(-end // table.block_tokens)]
                if len(known) > len(ids):
                    return []
                ids[: len(known)] = known
                if found.tail and group.is_state:
                    ids[len(known) - 1], ids[-1] = 0, known[-1]
                ids[: begin // table.block_tokens] = 0
                placed = ids.reshape(hits, per_slot)[hits - slots :, per_slot - table.blocks :]
                if np.count_nonzero(placed) != np.count_nonzero(ids):
                    return []
                columns.append(placed)
            blocks = np.concatenate(columns, axis=1)
            (used,) = np.count_nonzero(blocks, axis=1).nonzero()
            if len(used):
                low, high = int(used[0]), int(used[-1]) + 1
                refs, sums = found.part(at + low, at + high)
                jobs.append(LoadJob(request, found.region, refs, blocks[low:high].ravel().tolist(), 0, sums, number))
            at += slots
        return [msgspec.structs.replace(job, jobs=len(jobs)) for job in jobs]

    def _tail_blocks(self, tables: BlockTables, slot: int, tokens: int) -> list[int]:
        """Return the device blocks of the full group in a slot, 0 for those after `tokens`; [] if some are missing."""
        found: list[int] = []
        for table in self._groups[0].tables:
            first = slot * self.slot_tokens // table.block_tokens
            known = tables[table.number][first : -(-tokens // table.block_tokens)]
            if len(known) < -(-tokens // table.block_tokens) - first or not all(known):
                return []
            found += [*known, *[0] * (table.blocks - len(known))]
        return found

    def _blocks(self, number: int, tables: BlockTables, slots: Sequence[int], first: int = 0) -> list[int]:
        """Return the device blocks of `slots` from token `first` on, fewer if the engine does not have them all."""
        found: list[int] = []
        for slot in slots:
            for table in self._groups[number].tables:
                end = (slot + 1) * self.slot_tokens // table.block_tokens
                low = end - table.blocks
                if low >= first // table.block_tokens:
                    found += [block for block in tables[table.number][low:end] if block]
        return found


def _by_end(offers: Sequence[tuple[int, int, int]]) -> dict[int, dict[int, int]]:
    """Return the device blocks of offered states by the tokens before them, and then by the engine's group."""
    found: dict[int, dict[int, int]] = {}
    for table, block, tokens in offers:
        found.setdefault(tokens, {})[table] = block
    return found
