"""The second engine of a test: loads slots 0 to 11 of a region, and saves them to 20 to 31.

python other_process.py KIND PATH
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from rigs import LAYOUTS, RIGS, Bench


def main(kind: str, path: str) -> None:
    bench = Bench(RIGS[kind], LAYOUTS["blocks first"], path)
    try:
        bench.register()
        bench.load(range(5, 17), range(12))
        bench.finish()
        bench.save(range(5, 17), range(20, 32))
        bench.finish()
    finally:
        bench.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
