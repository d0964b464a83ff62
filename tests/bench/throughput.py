"""Compare the throughput of an engine without a connector, with one that does nothing, and with ours, alternating.

    python tests/bench/throughput.py [--rounds 7] [--json]

Each variant is a real vLLM engine on CPU in a separate process. All of them run at the same time and answer the same
batches, one engine at a time. No prompt is repeated, so nothing is ever loaded: the difference is the connector's cost.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

from one_daemon import one_daemon

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


def engine(pipe: Connection, model: str, extra: dict[str, Any] | None) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ |= {"PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams

    ours = {
        "kv_connector": "KVCacheServerConnector",
        "kv_connector_module_path": "kvcache_client.connector",
        "kv_connector_extra_config": extra,
    }
    null = {"kv_connector": "NullConnector", "kv_connector_module_path": "null_connector"}
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=64,
        max_model_len=1024,
        max_num_seqs=BATCH,
        kv_transfer_config=None if extra is None else {"kv_role": "kv_both", **(ours if extra else null)},
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    pipe.send(True)
    while (prompts := pipe.recv()) is not None:
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
        pipe.send(time.perf_counter() - begin)
    llm.llm_engine.engine_core.shutdown()


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
        spawn = multiprocessing.get_context("spawn")
        pipes, processes = {}, []
        try:
            for name, extra in variants.items():
                pipes[name], theirs = spawn.Pipe()
                processes.append(spawn.Process(target=engine, args=(theirs, f"{folder}/model", extra), daemon=True))
                processes[-1].start()
                theirs.close()  # so that an engine that dies is an end of file here
            for pipe in pipes.values():
                pipe.recv()
            seconds: dict[str, list[float]] = {name: [] for name in variants}
            draw = random.Random(0)
            for turn in range(rounds + 1):
                names = list(variants)
                for name in names if turn % 2 else names[::-1]:
                    # Prompts of its own: two engines at one daemon would load what the other one has just saved.
                    pipes[name].send(
                        [[draw.randrange(LLAMA["vocab_size"]) for _ in range(PROMPT)] for _ in range(BATCH)]
                    )
                    spent = pipes[name].recv()
                    if turn:  # the first one warms up
                        seconds[name].append(spent)
            for pipe in pipes.values():
                pipe.send(None)
            for process in processes:
                process.join(20)
        finally:
            for process in processes:
                process.kill()
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
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.large:
        from kvcache_tools.demo import LLAMA as large

        LLAMA.update(large)
    figures = measure(options.rounds)
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    print(f"batches of {BATCH} prompts of {PROMPT} tokens, {ANSWER} tokens out; {options.rounds} rounds")
    for name, row in figures.items():
        best = f"best {row['best_tokens_per_second']:8,.0f} tokens/s ({row['best_ratio']:6.1%})"
        print(f"  {name:<22} {best}   median of the rounds' ratios {row['ratio']:6.1%}")


if __name__ == "__main__":
    main()
