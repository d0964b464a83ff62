"""Compare engines that tell the daemon which requests wait in their queue, and that do not: only a slow disk has them.

    python tests/bench/queued.py [--rounds 7] [--rate 24] [--decode 300]

Each variant is a real vLLM engine on CPU that runs two requests at a time, with a daemon of its own. In each round, the
daemon starts with an empty region, which another client fills, and with a disk that reads `--rate` MB/s. Two requests
decode `--decode` tokens, about as long as the disk takes for the 20 prompts that are queued behind them. Without
`on_new_request`, a prompt is looked up once one of the two has ended, and most are computed before the disk has them.
Seconds until the last of the two has ended, and the last one of all; hits of the other client afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from engine_cases import ours, start_engine
from engines import ENVIRONMENT, prompts
from fairness import hashed, store
from gate import LARGE

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_server.admin_client import AdminClient
from kvcache_tools.demo_engine import make_model

MODEL = LARGE | {"hidden_size": 1024, "intermediate_size": 2048, "num_key_value_heads": 1}  # slower than the disk
ENGINE = {"dtype": "float32", "enforce_eager": True, "block_size": 64, "max_num_seqs": 2, "max_model_len": 4096}
QUEUED = [{**row, "at": 0.1} for row in prompts("queued", 20, 1000)]  # 105 MB
OTHER = NamespaceSpec("other", (GroupSpec(16, 1 << 20),))
CHAINS, BLOCKS = 16, 60  # of the other client, in a region of 1 GiB
GROWN = 3.0  # seconds until the region has grown, and the engine has found its daemon again
SLOW = """
import threading, time, kvcache_tiers.disk as disk
get, lock = disk.DiskTier.get, threading.Lock()
def slow_get(self, keys, buffers):
    with lock:
        time.sleep(sum(buffer.nbytes for buffer in buffers) / {rate}e6)
    return get(self, keys, buffers)
disk.DiskTier.get = slow_get
"""
SILENT = """
from kvcache_client.connector import KVCacheServerConnector
KVCacheServerConnector.on_new_request = lambda self, request: None
"""


class Side:
    """An engine, whose daemon starts anew with the same disk in each round."""

    def __init__(self, name: str, folder: Path, model: str, rate: float, stack: contextlib.ExitStack) -> None:
        self.name, self.figures = name, list[tuple[float, float, float]]()
        self._folder = folder / name
        slow = self._folder / "slow"
        slow.mkdir(parents=True)
        (slow / "sitecustomize.py").write_text(SLOW.format(rate=rate))
        self._environment = {"PYTHONPATH": before(slow)}
        (self._folder / "daemon.toml").write_text(
            f'[[tier]]\nurl = "disk:{self._folder}/disk?size=4GiB"\nwrites = "through"\n'
        )
        (self._folder / "silent.py").write_text(SILENT)
        with self._daemon() as arguments:
            self.engine = start_engine(name, self._folder, ENVIRONMENT | {"PYTHONPATH": before(self._folder)})
            stack.callback(self.engine.close)
            if name == "silent":
                arguments["kv_transfer_config"]["kv_connector_module_path"] = "silent"
            self.engine.call("start", model=model, skip_tokenizer_init=True, **ENGINE, **arguments)
            self.engine.call("run", requests=QUEUED)
            self.engine.call("run", requests=prompts("last", 1, 8))  # saves that were granted late begin with a step
            with AdminClient(endpoint_of(arguments)) as admin:
                while not is_written(admin):
                    time.sleep(0.5)

    def _daemon(self) -> contextlib.AbstractContextManager[dict[str, Any]]:
        settings, flags = {"gate": "off", "canary_every": 0}, ("--config", f"{self._folder}/daemon.toml")
        return ours(self._folder, 1, settings, *flags, environment=self._environment)

    def take_turn(self, turn: int, decode: int) -> None:
        chains = [[hashed(f"{turn} {chain} {at}") for at in range(BLOCKS)] for chain in range(CHAINS)]
        with self._daemon() as arguments, Session.connect(endpoint_of(arguments), engine="other") as session:
            other = session.attach(OTHER, shards=(0,))
            self.engine.call("wait", seconds=GROWN)
            for chain in chains * 3:
                store(other, chain)
            self.engine.call("forget")
            long = prompts(f"long {turn}", 2, 64, decode)
            rows = self.engine.call("run", requests=long + QUEUED)["requests"]
            hits = sum(store(other, chain) for chain in chains)
        ends = [row["begin"] + row["ttft"] + sum(row["gaps"]) for row in rows]
        self.figures.append((max(ends[:2]), max(ends), hits / (CHAINS * BLOCKS)))


def before(folder: Path) -> str:
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def endpoint_of(arguments: dict[str, Any]) -> str:
    endpoint: str = arguments["kv_transfer_config"]["kv_connector_extra_config"]["endpoint"]
    return endpoint


def is_written(admin: AdminClient) -> bool:
    status = admin.status()
    return any(tier.blocks_written and not tier.to_write_blocks for tier in status.daemon.tiers) and not (
        status.pool.blocks_writing
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rate", type=float, default=24.0, help="of the disk, MB/s")
    parser.add_argument("--decode", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvqueued-") as name, contextlib.ExitStack() as stack:
        make_model(f"{name}/model", MODEL)
        sides = [Side(each, Path(name), f"{name}/model", options.rate, stack) for each in ("silent", "announced")]
        for turn in range(options.rounds):
            for side in sides if turn % 2 else sides[::-1]:
                side.take_turn(turn, options.decode)
        for side in sides:
            two, every, hits = (statistics.median(each) for each in zip(*side.figures, strict=True))
            print(f"{side.name:<10} two {two:.2f} s   all {every:.2f} s   hits of the other client {hits:.0%}")
        pairs = zip(*(side.figures for side in sides), strict=True)
        print(f"all, ratio {statistics.median(mine[1] / other[1] for other, mine in pairs):.2f}")


if __name__ == "__main__":
    main()
