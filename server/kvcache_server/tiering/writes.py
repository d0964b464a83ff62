"""The blocks that a tier stores. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import chain, islice

import msgspec

from kvcache_server.core.index import Block
from kvcache_server.core.limits import LOOK

SLOT = 8  # bytes of a reference that name the slot; the rest identifies the block in it
MOST_WRITES = 1 << 16  # blocks that wait to be written


class Writing(msgspec.Struct, gc=False):
    """Blocks that are being written to the tier, under a lease of its session."""

    lease: int
    blocks: list[Block]


class Writes:
    """The blocks that one tier stores, and those that it has as far as is known.

    Attributes:
        queue: blocks to write, those of one group together.
        waiting: the number of these blocks.
        writing: the batches sent to it, by number.
        blocks_in_flight, bytes_in_flight: the content of these.
    """

    def __init__(self, batch_bytes: int, counts: Counter[str], has_now: Callable[[bytes], None]) -> None:
        """`has_now(tagged)` is called for each block that it has stored."""
        self._batch_bytes, self._counts, self._has_now = batch_bytes, counts, has_now
        # References of blocks that it has, and of those that wait or are being written, by the bytes for the slot.
        self._has: dict[bytes, bytes] = {}
        self._soon: dict[bytes, bytes] = {}
        self.queue: deque[list[Block]] = deque()
        self.waiting = 0
        self.writing: dict[int, Writing] = {}
        self.blocks_in_flight = self.bytes_in_flight = 0

    def has(self, block: Block) -> bool:
        """Whether the tier has a block or soon will, as far as is known."""
        ref = block.ref
        return self._has.get(ref[:SLOT]) == ref or self._soon.get(ref[:SLOT]) == ref

    def lacking(self, blocks: Iterable[Block]) -> list[Block]:
        return [block for block in blocks if not self.has(block)]

    def mark(self, block: Block) -> None:
        """Note that the tier has a block."""
        self._has[block.ref[:SLOT]] = block.ref

    def store(self, blocks: list[Block]) -> None:
        """Queue `blocks` to be written, parents before children, unless too many wait."""
        if self.waiting + len(blocks) > MOST_WRITES:
            self._counts["writes_dropped"] += len(blocks)
            return
        for block in blocks:
            self._soon[block.ref[:SLOT]] = block.ref
        self.queue.append(blocks)
        self.waiting += len(blocks)

    def next_batch(self, most: int) -> list[Block]:
        """Return about one batch of blocks of one group to write, after a look at no more than `most` blocks."""
        batch: list[Block] = []
        size = 0
        while self.queue and size < self._batch_bytes and most > 0:
            blocks = self.queue[0]
            group = batch[0].account.group if batch else blocks[0].account.group
            if blocks[0].account.group is not group:
                break
            taken = blocks[: min(most, max(1, (self._batch_bytes - size) // group.allocated_bytes))]
            if len(taken) < len(blocks):
                self.queue[0] = blocks[len(taken) :]
            else:
                self.queue.popleft()
            most -= len(taken)
            self.waiting -= len(taken)
            there = [block for block in taken if block.visible and block.is_found]
            self._counts["writes_too_late"] += len(taken) - len(there)
            batch += there
            size += len(there) * group.allocated_bytes
        return batch

    def begin(self, job: int, writing: Writing) -> None:
        """Note that a batch was sent to the tier."""
        self.writing[job] = writing
        self.blocks_in_flight += len(writing.blocks)
        self.bytes_in_flight += len(writing.blocks) * writing.blocks[0].account.group.allocated_bytes

    def stored(self, writing: Writing, flags: bytes) -> list[Block]:
        """Note which blocks of a batch the tier now has. Return the rest, for `unmark`."""
        size, tag = writing.blocks[0].account.group.allocated_bytes, writing.blocks[0].account.group.tag
        self.blocks_in_flight -= len(writing.blocks)
        self.bytes_in_flight -= len(writing.blocks) * size
        failed = []
        for block, flag in zip(writing.blocks, flags.ljust(len(writing.blocks), b"\0"), strict=False):
            if self._soon.get(block.ref[:SLOT]) == block.ref:
                del self._soon[block.ref[:SLOT]]
            if flag:
                self.mark(block)
                self._has_now(block.hash + tag)
            else:
                failed.append(block)
        stored = len(writing.blocks) - len(failed)
        self._counts["blocks_written"] += stored
        self._counts["bytes_written"] += stored * size
        self._counts["blocks_not_written"] += len(failed)
        return failed

    def unmark(self, blocks: Iterable[Block]) -> None:
        """Let blocks that were not stored, and those below them, be stored later: they are of no use without them."""
        below = list(blocks)
        most = len(below) + LOOK
        for block in below:  # which grows
            slot = block.ref[:SLOT]
            for marks in (self._has, self._soon):
                if marks.get(slot) == block.ref:
                    del marks[slot]
            below.extend(islice(block.children(), most - len(below)))

    def clear(self) -> list[int]:
        """Write nothing more. Return the leases on blocks being written, which the caller ends."""
        self.unmark(chain.from_iterable([self.stored(writing, b"") for writing in self.writing.values()]))
        leases = [writing.lease for writing in self.writing.values()]
        for each in (self._soon, self.queue, self.writing):
            each.clear()
        self.waiting = 0
        return leases

    def forget_marks(self) -> bool:
        """Free some of the memory for the blocks that the tier has; return whether more is left."""
        for _ in range(min(LOOK, len(self._has))):
            self._has.popitem()
        return bool(self._has)
