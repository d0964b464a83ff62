"""Compare real vLLM engines on a GPU: without offload, with each installed alternative, and with our connector.

    python tests/bench/engines.py [--cases none,native,simple,lmcache,ours] [--parts small,large,overlap,two]

The model is a Llama with 8 billion random weights in bfloat16. The parts:

small   an engine whose KV cache is smaller than the prompts together, so that hits come from host memory
large   an engine with all memory of the GPU: decoding beside long prompts, and requests at a fixed rate
overlap an engine with nothing else to do: a prompt of which the tier has most, beside its load and its rest alone
below   the case `disk`: prompts that come from a disk below the region
two     only our connector: two engines on one GPU, in float32, so that their answers can be compared for equality
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_cases
from engine_cases import CASES, GIB, Case, start_engine

from kvcache_tools.daemon_process import Failed

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOY = LLAMA | {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is a package of its own
}

Figures = dict[str, list[float]]
Call = Callable[..., dict[str, Any]]


class Sizes:
    """Tokens and numbers of every part: as the text above says, or some hundred times less."""

    def __init__(self, toy: bool, brief: bool = False) -> None:
        self.brief = brief
        part = 16 if toy else 1
        self.prompt, self.long = 8192 // part, 10_000 // part
        self.grow, self.turns, self.turn_answer = 2400 // part, 3 if toy else 10, 8 if toy else 64
        self.rest, self.hits = 2048 // part, 4 if toy else 12
        self.decoders, self.short, self.decode = 4 if toy else 32, 512 // part, 64 if toy else 800
        self.rate, self.open_requests, self.open_answer = 2.0, 4 if toy else 40, 1024 // part
        self.small_gib, self.max_len = (0.03, 4096) if toy else (6.0, 32768)
        self.rounds = 1 if toy else 2


def prompts(name: str, count: int, tokens: int, answer: int = 1, every: float = 0.0) -> list[dict[str, Any]]:
    return [{"prompt": [[f"{name} {i}", tokens]], "tokens": answer, "at": i * every} for i in range(count)]


def ms(answer: dict[str, Any], key: str = "ttft") -> list[float]:
    return [row[key] * 1e3 for row in answer["requests"]]


def share_cached(answer: dict[str, Any], tokens: int) -> list[float]:
    return [100 * row["cached"] / tokens for row in answer["requests"]]


def small(call: Call, tier: bool, sizes: Sizes) -> Figures:
    """Prompts that the KV cache does not hold together."""
    found: Figures = defaultdict(list)
    call("run", requests=prompts("warm", 2, sizes.prompt, 4))
    call("run", requests=prompts("warm", 2, sizes.prompt, 4))
    for turn in range(sizes.rounds):
        asked = prompts(f"single {turn}", 8, sizes.prompt)
        found["prompt cold, ms"] += ms(call("run", requests=asked, at_once=1))
        call("wait", seconds=1.0)
        for row in asked[-3:]:
            found["prompt on the device, ms"] += ms(call("run", requests=[row]))
        if tier:
            call("forget")
            for _ in range(2):
                again = call("run", requests=asked, at_once=1)
                found["prompt from the tier, ms"] += ms(again)
                found["of it cached, %"] += share_cached(again, sizes.prompt)
        eight = []
        for _ in range(3):
            call("forget")
            eight.append(call("run", requests=asked)["seconds"] * 1e3)
        found["eight at once, ms"] += eight
    if sizes.brief:
        return found
    ten = prompts("ten", 10, sizes.long)
    first = call("run", requests=ten)["seconds"]
    call("wait", seconds=1.0)
    seconds = []
    for _ in range(3):
        call("forget")
        seconds.append(call("run", requests=ten)["seconds"])
    found["ten of 10,000, first, ms"] = [first * 1e3]
    found["ten of 10,000, second, ms"] = [spent * 1e3 for spent in seconds]
    found["ten of 10,000, first by second"] = [first / spent for spent in seconds]
    talk = call(
        "converse",
        seeds=[f"talk {i}" for i in range(8)],
        turns=sizes.turns,
        grow=sizes.grow,
        tokens=sizes.turn_answer,
        at_once=2,
    )
    found |= served("multi-turn", talk, sizes.turn_answer)
    return found


def overlap(call: Call, tier: bool, sizes: Sizes) -> Figures:
    """Prompts one by one: first a hit with hardly any rest, then the same with a long rest."""
    found: Figures = defaultdict(list)
    call("run", requests=prompts("warm", 2, sizes.prompt, 4))

    def ask(head: str, tail: str, rest: int) -> list[float]:
        return ms(call("run", requests=[{"prompt": [[head, sizes.prompt], [tail, rest]], "tokens": 1}]))

    for turn in range(-4, sizes.hits):  # the first ones are not counted: kernels are loaded, and times are learned
        figures = {}
        figures["cold, ms"] = ask(f"head {turn}", "first", sizes.rest)
        call("wait", seconds=0.5)
        figures["its rest alone, ms"] = ask(f"head {turn}", "on the device", sizes.rest)
        if tier:
            for name, tail, rest in (("its load alone, ms", "load", 16), ("load and rest, ms", "both", sizes.rest)):
                call("forget")
                figures[name] = ask(f"head {turn}", tail, rest)
            slower = max(figures["its rest alone, ms"] + figures["its load alone, ms"])
            figures["load and rest by the slower of both"] = [figures["load and rest, ms"][0] / slower]
        for name, values in figures.items() if turn >= 0 else ():
            found[name] += values
    return found


def below(call: Call, tier: bool, sizes: Sizes) -> Figures:
    """More prompts than the region holds, one by one: computed, found in memory, and found on the disk below."""
    call("run", requests=prompts("warm", 4, sizes.prompt, 4), at_once=1)
    asked = prompts("below", sizes.hits, sizes.prompt)
    found: Figures = defaultdict(list)
    for row in asked:
        found["cold, ms"] += ms(call("run", requests=[row]))
        call("wait", seconds=0.3)
        call("forget")
        found["from memory, ms"] += ms(call("run", requests=[row]))
        call("wait", seconds=2.0)  # until it is written
    for _ in range(2):
        for row in asked:
            call("forget")
            again = call("run", requests=[row])
            found["from the disk, ms"] += ms(again)
            found["of it cached, %"] += share_cached(again, sizes.prompt)
    return found


def served(name: str, answer: dict[str, Any], tokens: int) -> Figures:
    ttft, tpot = sorted(ms(answer)), sorted(ms(answer, "tpot"))
    return {
        f"{name}, TTFT, ms": ttft,
        f"{name}, TTFT P99, ms": [quantile(ttft, 0.99)],
        f"{name}, TPOT, ms": tpot,
        f"{name}, TPOT P99, ms": [quantile(tpot, 0.99)],
        f"{name}, tokens/s out": [len(answer["requests"]) * tokens / answer["seconds"]],
    }


def large(call: Call, tier: bool, sizes: Sizes) -> Figures:
    """All the GPU's memory: prompts are saved, and come back only beside the second half of the decodes."""
    found: Figures = defaultdict(list)
    call("run", requests=prompts("warm", 2, sizes.prompt, 4))
    decoders = prompts("decoder", sizes.decoders, sizes.short, sizes.decode)
    call("run", requests=prompts("warm decoder", sizes.decoders, sizes.short, 20))
    for turn in range(sizes.rounds):
        alone = call(
            "run", requests=[{**row, "prompt": [[f"alone {turn} {i}", sizes.short]]} for i, row in enumerate(decoders)]
        )
        found["decode of 32 alone, TPOT, ms"] += ms(alone, "tpot")
        found["decode of 32 alone, step, ms"] += [g * 1e3 for g in alone["requests"][0]["gaps"][50:]]
        beside = [{**row, "prompt": [[f"beside {turn} {i}", sizes.short]]} for i, row in enumerate(decoders)]
        long = [{**row, "at": 1.0 + row["at"]} for row in prompts(f"long {turn}", 8, sizes.prompt, 1, 0.5)]
        both = call("run", requests=beside + long)
        rows = both["requests"]
        found["decode of 32 beside prompts, TPOT, ms"] += [r["tpot"] * 1e3 for r in rows[: len(beside)]]
        found["prompts beside decodes, ms"] += [r["ttft"] * 1e3 for r in rows[len(beside) :]]
        if tier:
            call("forget")
            beside = [{**row, "prompt": [[f"hits {turn} {i}", sizes.short]]} for i, row in enumerate(decoders)]
            rows = call("run", requests=beside + long)["requests"]
            found["decode of 32 beside hits, TPOT, ms"] += [r["tpot"] * 1e3 for r in rows[: len(beside)]]
            found["hits beside decodes, ms"] += [r["ttft"] * 1e3 for r in rows[len(beside) :]]
    cold = call("run", requests=prompts("cold", 12, sizes.prompt), at_once=1)
    found["prompts in a row, cold, ms"] = ms(cold)
    if sizes.brief:
        return found
    asked = prompts("open", sizes.open_requests, sizes.prompt, sizes.open_answer, 1 / sizes.rate)
    found |= served("open loop", call("run", requests=asked), sizes.open_answer)
    return found


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


class Bench:
    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options, self.sizes = folder, options, Sizes(options.toy, options.brief)
        self.sizes.small_gib = options.small_gib or self.sizes.small_gib
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps((TOY if options.toy else LLAMA) | options.config))
        self.found: dict[str, dict[str, Figures]] = {}

    def arguments(self, **more: Any) -> dict[str, Any]:
        common = {
            "model": str(self.model),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": self.sizes.max_len,
            "enable_prefix_caching": True,
            "seed": 0,
        }
        return common | self.options.engine | more

    def small_cache(self) -> dict[str, Any]:
        return {"kv_cache_memory_bytes": int(self.sizes.small_gib * GIB), "enforce_eager": True}

    def large_cache(self) -> dict[str, Any]:
        if self.options.toy:
            return self.small_cache()
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
        return {"gpu_memory_utilization": 0.92, "max_num_seqs": 64, "compilation_config": graphs, **self.options.large}

    def measure(self, case: Case, part: str) -> Figures:
        tests = {
            "small": (small, self.small_cache()),
            "large": (large, self.large_cache()),
            "overlap": (overlap, self.large_cache()),
            "below": (below, self.large_cache()),
        }
        test, cache = tests[part]
        begin = time.monotonic()
        with case.serve(self.folder, self.options.gib, self.options.extra) as more:
            served_after = time.monotonic() - begin
            engine = start_engine(f"{case.name}-{part}", self.folder, ENVIRONMENT | case.environment)
            try:
                started = engine.call("start", **self.arguments(**cache, **more))
                found: Figures = {"engine start, s": [started["seconds"]], "server start, s": [served_after]}
                found |= test(engine.call, case.tier, self.sizes)
            finally:
                engine.close()
        return found

    def two(self) -> Figures:
        """Two engines of one model at once on one GPU."""
        sizes, case, found = self.sizes, CASES["ours"], {}
        asked = prompts("shared", 8, sizes.prompt, 16)
        cache = {"kv_cache_memory_bytes": 2 * int(sizes.small_gib * GIB), "enforce_eager": True, "dtype": "float32"}
        if not self.options.toy:
            cache |= {"gpu_memory_utilization": 0.45, **self.options.float32}
        with case.serve(self.folder, self.options.gib, self.options.extra) as more:
            engines = [start_engine(f"two-{name}", self.folder, ENVIRONMENT) for name in "ab"]
            try:
                for engine in engines:
                    engine.call("start", **self.arguments(**cache, **more))
                    engine.call("run", requests=prompts("warm", 1, sizes.prompt, 2))
                first, second = (engine.call("run", requests=asked, at_once=1, answers=True) for engine in engines)
            finally:
                for engine in engines:
                    engine.close()
        found["first engine, cold, ms"], found["second engine's first pass, ms"] = ms(first), ms(second)
        found["of it cached, %"] = share_cached(second, sizes.prompt)
        equal = [a["answer"] == b["answer"] for a, b in zip(first["requests"], second["requests"], strict=True)]
        found["answers equal, %"] = [100.0 * same for same in equal]
        found["different tokens in the answers"] = [float(len({t for a in first["requests"] for t in a["answer"]}))]
        return found

    def run(self) -> None:
        for part in self.options.parts:
            if part == "two":
                self.note(part, "ours", self.two)
                continue
            for name in self.options.cases:
                case = CASES[name]
                reason = case.unsupported_reason()
                if reason:
                    print(f"{name}: left out, {reason}", flush=True)
                    continue
                self.note(part, name, self.measure, case, part)

    def note(self, part: str, name: str, measure: Callable[..., Figures], *arguments: Any) -> None:
        begin = time.monotonic()
        try:
            self.found.setdefault(part, {})[name] = measure(*arguments)
            print(f"[{time.monotonic() - begin:.0f} s] {part}, {name}: measured", flush=True)
        except Failed as error:
            print(f"[{time.monotonic() - begin:.0f} s] {part}, {name}: {error}", flush=True)
        if self.options.json:
            self.options.json.write_text(json.dumps(self.found))


def table(part: str, cases: dict[str, Figures]) -> str:
    names = list(cases)
    rows = [[part, *names]]
    for metric in dict.fromkeys(metric for figures in cases.values() for metric in figures):
        row = [metric]
        for name in names:
            values = cases[name].get(metric) or []
            text = f"{statistics.median(values):,.2f}" if values else "-"
            if len(values) > 1:
                text += f" ({quantile(values, 0.1):,.2f}..{quantile(values, 0.9):,.2f})"
            row.append(text)
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", type=lambda text: text.split(","), default=["none", "native", "simple", "lmcache", "ours"]
    )
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["small", "large", "two"])
    parser.add_argument("--gib", type=int, default=48, help="host memory for each case")
    parser.add_argument("--extra", type=json.loads, default={}, help="JSON: settings of our connector")
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON: arguments of every engine")
    parser.add_argument("--config", type=json.loads, default={}, help="JSON: what differs in the model's configuration")
    parser.add_argument("--disk", default="", help="folder in which the case `disk` has its tier")
    parser.add_argument("--large", type=json.loads, default={}, help="JSON: arguments of engines with a large cache")
    parser.add_argument("--float32", type=json.loads, default={}, help="JSON: arguments of the engines of `two`")
    parser.add_argument("--toy", action="store_true", help="a toy model on CPU, to try this script")
    parser.add_argument("--brief", action="store_true", help="without ten prompts, turns, and the open loop")
    parser.add_argument("--small-gib", type=float, default=0.0, help="KV cache of each rank in `small`")
    parser.add_argument("--json", type=Path, help="file for all samples")
    parser.add_argument("--logs", type=Path, help="folder for the logs")
    options = parser.parse_args()
    engine_cases.DISK = options.disk
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as folder:
        bench = Bench(Path(folder), options)
        bench.run()
        if options.logs:
            options.logs.mkdir(parents=True, exist_ok=True)
            for log in bench.folder.glob("*.log"):
                shutil.copy(log, options.logs)
        for part, cases in bench.found.items():
            print(f"\n{table(part, cases)}")
    sys.exit(0 if bench.found else 1)


if __name__ == "__main__":
    main()
