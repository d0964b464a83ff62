"""Compare lazy saves with eager ones: conversations of several turns, on two engines that share a daemon.

    python tests/bench/lazy.py [--conversations 12] [--turns 6]

Each mode has a daemon and two real vLLM engines on CPU, and the modes take turns. All conversations begin with the same
system prompt. Each takes its turns on one engine, and its last two on the other one. The device memory of an engine has
room for about 60 % of what its conversations have at their end.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
from typing import Any

from engine_pipes import BLOCK, TOY, Engines
from rig import one_daemon

SYSTEM, GROW, ANSWER = 384, 192, 32  # tokens: of the system prompt, of each turn, of each answer
MODES = ("eager", "lazy")


def measure(conversations: int, turns: int, blocks: int, size: str) -> dict[str, dict[str, float]]:
    """Return for each mode what was saved, what was found where, and the time to the first token."""
    from kvcache_tools.demo_engine import make_model

    with contextlib.ExitStack() as stack:
        daemons = {mode: stack.enter_context(one_daemon(size=size)) for mode in MODES}
        make_model(model := f"{daemons['eager'].folder}/model", TOY | {"num_hidden_layers": 4, "hidden_size": 256})
        variants: dict[str, dict[str, Any] | None] = {
            f"{mode} {engine}": {
                "endpoint": daemons[mode].endpoint,
                "save_mode": mode,
                "block_size": BLOCK,
                "gate": "off",
                "canary_every": 0,
                "deadline_ms": 5000,
            }
            for mode in MODES
            for engine in "ab"
        }
        engines = Engines(model, variants, num_gpu_blocks_override=blocks, max_num_batched_tokens=512)
        stack.callback(engines.close)
        draw = random.Random(0)
        system = [draw.randrange(TOY["vocab_size"]) for _ in range(SYSTEM)]
        said = {mode: [list(system) for _ in range(conversations)] for mode in MODES}
        rows: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
        last: dict[str, dict[str, int]] = {}
        for turn in range(turns):
            for number in range(conversations):
                moved = turn >= turns - 2
                engine = "ab"[(number + moved) % 2]
                more = [draw.randrange(TOY["vocab_size"]) for _ in range(GROW)]
                for mode in MODES if (turn + number) % 2 else MODES[::-1]:
                    prompt = said[mode][number] + more
                    name = f"{mode} {engine}"
                    row = engines.ask(name, prompt, ANSWER)
                    loaded = row["counts"].get("needed_blocks", 0) - last.get(name, {}).get("needed_blocks", 0)
                    last[name] = row["counts"]
                    rows[mode].append(
                        {"seconds": row["seconds"], "tokens": len(prompt), "cached": row["cached"]}
                        | {"loaded": loaded * BLOCK, "engine": engine, "moved": moved}
                    )
                    said[mode][number] = prompt + row["answer"]
        found = {}
        for mode in MODES:
            counts = [last[f"{mode} {engine}"] for engine in "ab"]
            total = {name: sum(each.get(name, 0) for each in counts) for name in {*counts[0], *counts[1]}}
            asked = sum(row["tokens"] for row in rows[mode])
            reserved = daemons[mode].status()["counters"]["blocks_reserved"]
            moved = [row for row in rows[mode] if row["moved"]]
            found[mode] = {
                "saved_MiB": total["saved_bytes"] / (1 << 20),
                "hits_device": sum(row["cached"] - row["loaded"] for row in rows[mode]) / asked,
                "hits_host": sum(row["loaded"] for row in rows[mode]) / asked,
                "hits_after_move": sum(row["cached"] for row in moved) / sum(row["tokens"] for row in moved),
                "ttft_p50_ms": 1e3 * statistics.median(row["seconds"] for row in rows[mode]),
                "ttft_mean_ms": 1e3 * statistics.mean(row["seconds"] for row in rows[mode]),
                "no_parent": total.get("saves_no_parent", 0) / reserved,
                "missed_blocks": total.get("saves_missed", 0),
            }
            for engine in "ab":
                own = [row for row in rows[mode] if row["engine"] == engine]
                found[mode][f"hits_{engine}"] = sum(row["cached"] for row in own) / sum(row["tokens"] for row in own)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--blocks", type=int, default=160, help="of 64 tokens, in each engine's device memory")
    parser.add_argument("--size", default="256MiB", help="of each daemon's region")
    options = parser.parse_args()
    figures = measure(options.conversations, options.turns, options.blocks, options.size)
    for name in figures["eager"]:
        eager, lazy = figures["eager"][name], figures["lazy"][name]
        print(f"{name:<16} eager {eager:10.3f}   lazy {lazy:10.3f}   ratio {lazy / eager if eager else 0:6.3f}")


if __name__ == "__main__":
    main()
