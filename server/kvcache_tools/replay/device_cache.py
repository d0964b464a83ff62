"""The prefix cache of an engine's device, as vLLM has it. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvcache_proto.messages import Run


class DeviceCache:
    """It has `capacity` blocks, and evicts the least recently used: of a prompt's blocks, the last one first.

    Attributes: `reports` is whether its engine names the blocks that it evicts; `hits` counts the blocks found.
    """

    def __init__(self, capacity: int = 0, reports: bool = False) -> None:
        self.capacity, self.reports, self.hits = capacity, reports, 0
        # The parent, last use and hits of each block, in the order of eviction. A block goes before those above it.
        self._blocks: OrderedDict[bytes, tuple[bytes | None, float, int]] = OrderedDict()

    def ask(self, prompt: Sequence[bytes], now: float) -> tuple[int, list[Run]]:
        """Look a prompt up, and take its blocks; of a prompt that does not fit, the first ones.

        Return the number of hits, and the chains whose last `leaving` blocks were evicted for it; none unless it
        `reports` them.
        """
        blocks = self._blocks
        hits = next((at for at, name in enumerate(prompt) if name not in blocks), len(prompt))
        self.hits += hits
        for at in range(min(len(prompt), self.capacity) - 1, -1, -1):
            found = blocks[prompt[at]][2] + 1 if at < hits else 0
            blocks[prompt[at]] = prompt[at - 1] if at else None, now, found
            blocks.move_to_end(prompt[at])
        gone: list[Run] = []
        last: tuple[bytes | None, float] = None, now
        while len(blocks) > self.capacity:
            name = next(iter(blocks))
            if not self.reports:
                del blocks[name]
                continue
            chain = [name]
            while (parent := blocks[chain[-1]][0]) is not None:
                chain.append(parent)
            parent, used, found = blocks.pop(name)
            if last == (name, used):
                gone[-1].leaving += 1
            else:
                gone.append(Run(chain[::-1], leaving=1, idle_ms=round((now - used) * 1000), found=found))
            last = parent, used
        return hits, gone
