"""Compare the throughput of an engine without a connector, with one that does nothing, and with ours, alternating.

    python tests/bench/throughput.py [--rounds 20] [--large]

Each variant is a real vLLM engine on CPU in a separate process. All of them run at the same time and answer the same
batches, one engine at a time. No prompt is repeated, so nothing is ever loaded: the difference is the connector's cost.
"""

from __future__ import annotations

import argparse
import random
import statistics
from typing import Any

from engine_pipes import Engines
from rig import one_daemon

LLAMA = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
BATCH, PROMPT, ANSWER = 8, 480, 48


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Return tokens a second, prompt and answer together, of the best round, and the median of the rounds' ratios."""
    from kvcache_tools.demo_engine import make_model

    with one_daemon(size="512MiB") as daemon:
        folder, endpoint = daemon.folder, daemon.endpoint
        make_model(f"{folder}/model", LLAMA)
        variants: dict[str, dict[str, Any] | None] = {
            "no connector": None,
            "one that does nothing": {},
            "no daemon": {"endpoint": f"ipc://{folder}/nobody.sock"},
            "daemon, save: prompt": {"endpoint": endpoint, "save": "prompt"},
            "daemon, save: all": {"endpoint": endpoint, "save": "all"},
        }
        engines = Engines(f"{folder}/model", variants, max_model_len=1024, max_num_seqs=BATCH)
        try:
            seconds: dict[str, list[float]] = {name: [] for name in variants}
            draw = random.Random(0)
            for turn in range(rounds + 1):
                names = list(variants)
                for name in names if turn % 2 else names[::-1]:
                    # Prompts of its own: two engines at one daemon would load what the other one has just saved.
                    prompts = [[draw.randrange(LLAMA["vocab_size"]) for _ in range(PROMPT)] for _ in range(BATCH)]
                    spent = engines.answer_batch(name, prompts, ANSWER)
                    if turn:  # the first one warms up
                        seconds[name].append(spent)
        finally:
            engines.close()
    bare = seconds["no connector"]
    return {
        name: {
            "best_tokens_per_second": BATCH * (PROMPT + ANSWER) / min(spent),
            "ratio": statistics.median(b / s for b, s in zip(bare, spent, strict=True)),
            "best_ratio": min(bare) / min(spent),
        }
        for name, spent in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--large", action="store_true", help="use the demo's model: steps as long as on a GPU")
    options = parser.parse_args()
    if options.large:
        from kvcache_tools.demo import LLAMA as large

        LLAMA.update(large)
    figures = measure(options.rounds)
    print(f"batches of {BATCH} prompts of {PROMPT} tokens, {ANSWER} tokens out; {options.rounds} rounds")
    for name, row in figures.items():
        best = f"best {row['best_tokens_per_second']:8,.0f} tokens/s ({row['best_ratio']:6.1%})"
        print(f"  {name:<22} {best}   median of the rounds' ratios {row['ratio']:6.1%}")


if __name__ == "__main__":
    main()
