"""Measure the first minute of an engine beside a region that is not page-locked yet, on a GPU host.

    python tests/bench/first_minute.py [--cases none,ours] [--turns 2] [--gib 32] [--pages small,huge] [--tp 1]
                                       [--weights dummy]

The engine has a Llama with 8 billion random weights. It runs in eager mode, which launches each kernel separately, so
that delays in the driver become visible. It is started again for each case and turn; the cases alternate within one
run. From its first request on: decoding 32 sequences, eight new prompts of 8,192 tokens at once, new prompts one after
the other, and prompts from device memory; every other turn has another order. `ours` is measured with small and with
huge pages. With `--weights disk`, random weights (16 GB) are written first, and each engine reads them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from engine_cases import CASES, start_engine
from engines import ENVIRONMENT, LLAMA, TOY, Figures, Sizes, ms, prompts, table

from kvcache_tools.daemon_process import Failed


def write_weights(folder: Path, config: dict[str, Any]) -> None:
    """Write random weights of a Llama of `config` into `folder`, a file a layer, as a checkpoint has them."""
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, inner, words = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]

    def drawn(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0.0, 0.02).cpu()

    ends = {"model.embed_tokens.weight": drawn(words, hidden), "lm_head.weight": drawn(words, hidden)}
    save_file(ends | {"model.norm.weight": drawn(hidden)}, folder / "model-ends.safetensors")
    for layer in range(config["num_hidden_layers"]):
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        tensors = {f"model.layers.{layer}.{name}.weight": drawn(*shape) for name, shape in shapes.items()}
        save_file(tensors, folder / f"model-layer-{layer:02}.safetensors")


def decode(call: Any, sizes: Sizes, turn: int, found: Figures) -> None:
    rows = call("run", requests=prompts(f"decoder {turn}", 32, 512, 200))["requests"]
    gaps = [gap * 1e3 for gap in rows[0]["gaps"]]
    found["decode of 32, step, ms"].append(statistics.median(gaps))
    found["decode of 32, TPOT, ms"].append(statistics.median(ms({"requests": rows}, "tpot")))


def eight(call: Any, sizes: Sizes, turn: int, found: Figures) -> None:
    seconds = call("run", requests=prompts(f"eight {turn}", 8, sizes.prompt))["seconds"]
    found["eight new at once, ms"].append(seconds * 1e3)


def cold(call: Any, sizes: Sizes, turn: int, found: Figures) -> None:
    asked = prompts(f"cold {turn}", 4, sizes.prompt)
    found["new prompts in a row, ms"] += ms(call("run", requests=asked, at_once=1))
    for row in asked:
        found["from the device, ms"] += ms(call("run", requests=[row]))


def measure(case: str, pages: str, options: argparse.Namespace, folder: Path, turn: int) -> Figures:
    sizes, found = Sizes(options.toy), defaultdict[str, list[float]](list)
    os.environ["KVCACHE_HUGE_PAGES"] = "always" if pages == "huge" else "never"
    with CASES[case].serve(folder, options.gib, options.extra) as more:
        engine = start_engine(f"{case}-{pages}-{turn}", folder, ENVIRONMENT | CASES[case].environment)
        try:
            cache = {"kv_cache_memory_bytes": 1 << 25} if options.toy else {"gpu_memory_utilization": 0.85}
            started = engine.call(
                "start",
                model=str(folder / "model"),
                load_format="dummy" if options.weights == "dummy" else "auto",
                skip_tokenizer_init=True,
                max_model_len=sizes.max_len,
                enable_prefix_caching=True,
                seed=0,
                enforce_eager=True,
                tensor_parallel_size=options.tp,
                **cache,
                **more,
            )
            found["engine start, s"] = [started["seconds"]]
            call = engine.call
            call("run", requests=prompts("kernels", 1, 64, 4))  # its kernels are loaded when they are first used
            for test in (decode, eight, cold) if turn % 2 else (eight, cold, decode):
                test(call, sizes, turn, found)
        finally:
            engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=lambda text: text.split(","), default=["none", "ours"])
    parser.add_argument("--pages", type=lambda text: text.split(","), default=["small", "huge"])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--gib", type=int, default=32, help="size of the region")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--weights", choices=("dummy", "disk"), default="dummy")
    parser.add_argument("--extra", type=json.loads, default={}, help="JSON: settings of our connector")
    parser.add_argument("--toy", action="store_true", help="a toy model on CPU, to try this script")
    parser.add_argument("--logs", type=Path, help="folder for the logs")
    options = parser.parse_args()
    found: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        config = TOY if options.toy else LLAMA
        (folder / "model" / "config.json").write_text(json.dumps(config))
        if options.weights == "disk":
            begin = time.monotonic()
            write_weights(folder / "model", config)
            print(f"[{time.monotonic() - begin:.0f} s] weights written", flush=True)
        for turn in range(options.turns):
            for case in options.cases:
                for pages in options.pages if case == "ours" else ["small"]:
                    begin, title = time.monotonic(), f"{case}, {pages}" if case == "ours" else case
                    try:
                        for metric, values in measure(case, pages, options, folder, turn).items():
                            found.setdefault(title, {}).setdefault(metric, []).extend(values)
                        print(f"[{time.monotonic() - begin:.0f} s] {title}, turn {turn}", flush=True)
                    except Failed as error:
                        print(f"{title}, turn {turn}: {error}", flush=True)
                    if options.logs:
                        options.logs.mkdir(parents=True, exist_ok=True)
                        for log in folder.glob("*.log"):
                            shutil.copy(log, options.logs)
    print(table(f"{options.gib} GiB, {options.weights} weights", found))


if __name__ == "__main__":
    main()
