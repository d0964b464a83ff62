"""What compression makes of KV: stored bytes, escapes, and blocks that it cannot store; every byte is compared.

    python tests/bench/compression.py [--random] [--blocks 100000] [--tokens 16] [FILE ...]

The KV is that of the demo's model (SmolLM2-135M-Instruct) on the text of the files, by default this repository's pages
and Python's standard library, or that of the same model with `--random` weights. A block is here one layer's keys and
values of so many tokens, or of all layers with `--whole`.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvcache_client import compression
from kvcache_tools import demo_model

CONTEXT = 2048


def texts(files: list[Path]) -> Iterator[str]:
    files = files or [*sorted(Path(__file__).parents[2].rglob("*.md")), *sorted(Path(os.__file__).parent.glob("*.py"))]
    return (file.read_text(errors="replace") for file in files)


def model_and_tokens(random: bool, files: list[Path]) -> tuple[Any, Iterator[list[int]]]:
    file = demo_model.packaged()
    if file is None:
        raise SystemExit(f"the model is not installed: {demo_model.INSTALL}")
    options: dict[str, Any] = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    torch.manual_seed(0)
    if random:
        config = AutoConfig.from_pretrained(file.parent, **options)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_pretrained(file.parent, **options, dtype=torch.bfloat16)
    every = itertools.chain.from_iterable(tokenizer(text, verbose=False)["input_ids"] for text in texts(files))
    return model.eval(), iter(lambda: list(itertools.islice(every, CONTEXT)), [])


@torch.inference_mode()
def layers(model: Any, tokens: list[int]) -> list[np.ndarray]:
    """Return the KV of each layer as values of 16 bits: [token, keys or values, head, value]."""
    cache = model(torch.tensor([tokens])).past_key_values
    sides = ((layer.keys[0], layer.values[0]) for layer in cache.layers)
    return [torch.stack(both, dim=2).permute(1, 2, 0, 3).contiguous().view(torch.int16).numpy() for both in sides]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    model, prompts = model_and_tokens(options.random, options.files)
    blocks = lost = wrong = raw = stored = 0
    escapes: list[int] = []
    sizes: list[int] = []
    for tokens in prompts:
        count = len(tokens) // options.tokens
        found = [each[: count * options.tokens].reshape(count, -1) for each in layers(model, tokens)]
        for batch in [np.concatenate(found, axis=1)] if options.whole else found:
            before = np.ascontiguousarray(batch).view(np.uint8)
            size = before.shape[1]
            after = compression.compress(before)
            bad = after[:, : compression.pieces_of(size)].any(axis=1)
            wrong += int((compression.decompress(after, size)[~bad] != before[~bad]).any(axis=1).sum())
            for begin in range(0, size, compression.PIECE_BYTES):
                of = compression.form(min(compression.PIECE_BYTES, size - begin) // 2)
                escapes += after[:, compression.place(size, begin) + of.book + 15].tolist()
                sizes += [of.values] * len(after)
            blocks, lost, raw, stored = (
                blocks + len(batch),
                lost + int(bad.sum()),
                raw + before.size,
                stored + after.size,
            )
        if blocks >= options.blocks:
            break
    counted, each = np.array(escapes), np.array(sizes)
    few, values = counted[counted != compression.TOO_MANY], each[counted != compression.TOO_MANY]
    shares = few / values
    print(
        f"{blocks:,} blocks of {raw // max(blocks, 1):,} bytes: {stored / raw:.1%} stored, {lost:,} blocks cannot be, "
        f"{wrong:,} came back wrong\n"
        f"escapes: {few.sum() / values.sum():.3%} of the values; of a piece, "
        f"median {np.median(shares):.3%}, p99 {np.quantile(shares, 0.99):.3%}, worst {shares.max():.3%}"
    )


if __name__ == "__main__":
    main()
