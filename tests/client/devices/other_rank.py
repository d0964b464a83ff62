"""Another rank of an engine, with the same blocks: shares its cache, in one line of hexadecimal digits, until its input
ends.

python other_rank.py LAYOUT
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from rigs import LAYOUTS, RIGS, Bench


def main(layout: str) -> None:
    torch.manual_seed(1)  # other blocks than those of the test
    bench = Bench(RIGS["cuda"], LAYOUTS[layout])
    try:
        (shared,) = bench.device.share(1)
        for block in (bytes(data) for data in bench.blocks()):
            print(block.hex())
        print(shared.hex(), flush=True)
        sys.stdin.read()
    finally:
        bench.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
