"""Measure how much KV depends on chunks and batches, next to the canary's tolerance.

    python tests/bench/noise.py [--layers 32] [--tokens 512] [--device cuda]

The model is a Llama with random weights, or a mixture of experts (Mixtral) with `--experts`. Each prompt is computed as
a whole, in chunks, and in a batch. For each dtype: the largest relative error of a block's norm, and of a piece's.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from kvcache_client.worker import tolerance

BLOCK = 128


def model(dtype: torch.dtype, layers: int, experts: int, device: str) -> Any:
    torch.manual_seed(0)
    common: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 4096,
        "max_position_embeddings": 8192,
        "initializer_range": 0.05,
    }
    config = MixtralConfig(**common, num_local_experts=experts) if experts else LlamaConfig(**common)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()


def blocks(cache: Any, row: int, tokens: int) -> list[memoryview]:
    """Return the bytes of each block of one prompt, all layers, keys and values."""
    layers = [(layer.keys[row], layer.values[row]) for layer in cache.layers]
    found = []
    for begin in range(0, tokens - BLOCK + 1, BLOCK):
        parts = [side[:, begin : begin + BLOCK].transpose(0, 1).reshape(-1) for layer in layers for side in layer]
        found.append(memoryview(torch.cat(parts).contiguous().cpu().view(torch.uint8).numpy()))
    return found


@torch.inference_mode()
def variants(llm: Any, prompts: torch.Tensor) -> dict[str, list[list[memoryview]]]:
    rows, tokens = prompts.shape
    found: dict[str, list[list[memoryview]]] = {"whole": [], "chunks": [], "batch": []}
    for row in range(rows):
        found["whole"].append(blocks(llm(prompts[row : row + 1]).past_key_values, 0, tokens))
        cache = None
        for begin in range(0, tokens, 173):
            cache = llm(prompts[row : row + 1, begin : begin + 173], past_key_values=cache).past_key_values
        found["chunks"].append(blocks(cache, 0, tokens))
    cache = llm(prompts).past_key_values
    found["batch"] = [blocks(cache, row, tokens) for row in range(rows)]
    return found


def measure(stored: memoryview, computed: memoryview, form: tolerance.Format) -> tuple[float, float]:
    """Return the relative error of a block, and that of its worst piece: for choosing the limits."""
    ours, theirs = (tolerance._values(each, form).astype(np.float64) for each in (stored, computed))
    squares = tolerance._squares(ours - theirs), tolerance._squares(theirs)
    return float(np.sqrt(squares[0].sum() / squares[1].sum())), float(tolerance._ratios(*squares).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        form = tolerance.find_format({str(dtype).removeprefix("torch.")}, "auto", bool(options.experts))
        assert form is not None
        found = variants(
            model(dtype, options.layers, options.experts, options.device),
            torch.randint(0, 4096, (4, options.tokens), device=options.device),
        )
        for name in ("chunks", "batch"):
            pairs = [
                (ours, theirs)
                for one, other in zip(found["whole"], found[name], strict=True)
                for ours, theirs in zip(one, other, strict=True)
            ]
            worst = [measure(ours, theirs, form) for ours, theirs in pairs]
            alarms = [why for ours, theirs in pairs if (why := tolerance.difference(ours, theirs, form))]
            print(
                f"{form.name:9} {name:7} block {max(each[0] for each in worst):.5f} of {form.limit}, "
                f"piece {max(each[1] for each in worst):.4f} of {form.piece}, "
                f"alarms {len(alarms)} of {len(pairs)} {set(alarms) or ''}"
            )


if __name__ == "__main__":
    main()
