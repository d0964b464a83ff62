"""Conversations with a model that has states, on a GPU: what a turn computes again, beside vLLM's own prefix cache.

    python tests/bench/turns.py [--units 16,128] [--turns N] [--grow TOKENS] [--conversations N]

One engine has only vLLM's cache. Two have the connector and are asked by turns, their own caches emptied: all that they
do not compute again comes from the host. Qwen3-Next's layers, fewer of them, with random weights.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from engine_pipes import Engines
from rig import one_daemon

MODEL = Path(__file__).parent.parent / "models/qwen3-next-80b.json"
FEWER = {"num_hidden_layers": 8, "num_experts": 16, "vocab_size": 4096}
OPTIONS = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "block_size": 128,  # vLLM raises it to 1,152, a multiple of both units
    "mamba_ssm_cache_dtype": "float32",
    "max_model_len": 32768,
    "max_num_batched_tokens": 4096,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 4 << 30,
    "enable_prefix_caching": True,
    "mamba_cache_mode": "align",
    "gdn_prefill_backend": "triton",  # FlashInfer is a package of its own
}
ANSWER = 24


def converse(engines: Engines, turns: int, grow: int, conversations: int) -> dict[str, Any]:
    """Return the tokens that each turn computes again, with vLLM's own cache and with ours, and how many answers are
    equal."""
    rows: list[tuple[int, int, int]] = []
    equal = 0
    for number in range(conversations):
        draw = random.Random(number)
        said = [draw.randrange(FEWER["vocab_size"]) for _ in range(1500 + draw.randrange(1000))]
        for turn in range(turns):
            alone = engines.ask("alone", said, ANSWER)
            ours = engines.ask(("one", "two")[turn % 2], said, ANSWER, reset=True)
            equal += alone["answer"] == ours["answer"]
            if turn:
                rows.append((len(said), alone["cached"], ours["cached"]))
            said = [*said, *alone["answer"], *(draw.randrange(FEWER["vocab_size"]) for _ in range(grow))]
    more = [device - host for _, device, host in rows]
    return {
        "turns": len(rows),
        "equal answers": f"{equal}/{turns * conversations}",
        "computed, vLLM's cache": sum(length - device for length, device, _ in rows) / len(rows),
        "computed, ours": sum(length - host for length, _, host in rows) / len(rows),
        "more, most": max(more),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", default="16,128")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--grow", type=int, default=500)
    parser.add_argument("--conversations", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, one_daemon(size="8GiB") as daemon:
        (Path(folder) / "config.json").write_text(json.dumps(json.loads(MODEL.read_text()) | FEWER))
        for unit in map(int, options.units.split(",")):
            settings = {"endpoint": daemon.endpoint, "gate": "off", "verify": "all", "canary_every": 0}
            variants = {"alone": None, "one": settings, "two": settings}
            with closing(Engines(folder, variants, prefix_match_unit=unit, **OPTIONS)) as engines:
                found = converse(engines, options.turns, options.grow, options.conversations)
            print(json.dumps({"unit": unit} | found), flush=True)


if __name__ == "__main__":
    sys.exit(main())
