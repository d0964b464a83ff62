"""Compare settings of our connector, other versions of it, and its peers in real vLLM engines on one GPU, by turns.

    python tests/bench/by_turns.py --variants '{"off": {"compress": "off"}, "auto": {}, "before": {"tree": "DIR"}}'
                                   [--gib 24] [--rounds 8] [--parts hits,load] [--model llama|mla] [--toy]

Each variant is an engine with a daemon of its own; all live at the same time, and each figure is taken of one after
the other, so that what the host does besides is shared by all. `tree` is a folder with another version of all
packages, `env` has variables, and `case` names a peer, as in engine_cases.py. The models have random weights in
bfloat16: a Llama of 8 billion, of `engines.py`, and one with the KV of DeepSeek V2. The parts:

hits    one prompt of `--tokens` computed, from the host, and on the device; all `--prompts` at once from the host.
        Each ends with `--rest` tokens of a block that is not full
load    16 sequences that decode beside new prompts that are saved, and beside prompts that come from the host

The last column of each variant is the median of its figures by those of the first one, pair by pair.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

from engine_cases import CASES, GIB, ours, start_engine
from engines import ENVIRONMENT, LLAMA, TOY, ms, prompts, quantile

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]

from model_configs import COMMON, MLA  # noqa: E402

from kvcache_server.admin_client import AdminClient  # noqa: E402
from kvcache_tools.engine_process import EngineProcess  # noqa: E402

LARGE_MLA = (
    COMMON
    | MLA
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_hidden_layers": 60,
        "first_k_dense_replace": 60,  # no experts
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 1536,
        "max_position_embeddings": 65536,
        "torch_dtype": "bfloat16",
    }
)
TOY_MLA = LARGE_MLA | {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "first_k_dense_replace": 2}
ANSWER = 8  # tokens, where answers are compared


class Side:
    """A variant: its daemon and its engine, which end with `stack`."""

    def __init__(
        self,
        name: str,
        settings: dict[str, Any],
        folder: Path,
        stack: contextlib.ExitStack,
        options: argparse.Namespace,
    ) -> None:
        self.name, self.figures = name, defaultdict[str, list[float]](list)
        self._folder, settings = folder / name, dict(settings)
        self._folder.mkdir()
        paths = [settings.pop("tree", ""), os.environ.get("PYTHONPATH", ""), str(HERE)]
        case = CASES[settings.pop("case", "ours")]
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | case.environment | settings.pop("env", {})
        self.is_ours = case.name == "ours"
        serve = partial(ours, environment=environment) if self.is_ours else case.serve
        self.arguments = stack.enter_context(serve(self._folder, options.gib, settings))
        if self.is_ours:
            self._endpoint = self.arguments["kv_transfer_config"]["kv_connector_extra_config"]["endpoint"]
        self.engine: EngineProcess = start_engine(name, self._folder, ENVIRONMENT | environment)
        stack.callback(self.engine.close)

    def counts(self) -> dict[str, int]:
        with AdminClient(self._endpoint) as admin:
            return dict(admin.status().client_counts)


def take_turns(sides: list[Side], turn: int) -> list[Side]:
    return sides[turn % len(sides) :] + sides[: turn % len(sides)]


def hits(sides: list[Side], options: argparse.Namespace) -> None:
    for turn in range(-1, options.rounds):
        asked = prompts(f"turn {turn}", options.prompts, options.tokens + options.rest, ANSWER)
        found: dict[Side, dict[str, list[float]]] = {side: defaultdict(list) for side in sides}
        for row in asked:
            for side in take_turns(sides, turn):
                found[side]["prompt computed, ms"] += ms(side.engine.call("run", requests=[row]))
        for side in sides:
            side.engine.call("wait", seconds=0.5)
        for row in asked:
            for side in take_turns(sides, turn):
                side.engine.call("forget")
                host, device = (side.engine.call("run", requests=[row], answers=True) for _ in range(2))
                (from_host,), (from_device,) = ms(host), ms(device)
                found[side]["prompt from the host, ms"].append(from_host)
                found[side]["the same again, from the device, ms"].append(from_device)
                found[side]["difference, ms"].append(from_host - from_device)
                found[side]["of it cached, tokens"].append(host["requests"][0]["cached"])
                one, two = (each["requests"][0]["answer"] for each in (host, device))
                found[side]["answers equal, %"].append(100.0 * (one == two))
        for _ in range(3):
            for side in take_turns(sides, turn):
                side.engine.call("forget")
                rows = side.engine.call("run", requests=asked)["requests"]
                found[side]["all at once, until the last one begins, ms"].append(
                    max(each["begin"] + each["ttft"] for each in rows) * 1e3
                )
        if turn >= 0:  # the first time, kernels are loaded
            for side, figures in found.items():
                for name, values in figures.items():
                    side.figures[name] += values


def load(sides: list[Side], options: argparse.Namespace) -> None:
    steps = 40 if options.toy else 300
    for turn in range(-1, options.rounds):
        long = [{**row, "at": 0.5 + row["at"]} for row in prompts(f"long {turn}", 4, options.tokens, 1, 0.5)]
        for what in ("saves", "loads"):
            for side in take_turns(sides, turn):
                side.engine.call("forget")
                decoders = prompts(f"{what} {turn}", 16, 512, steps)
                rows = side.engine.call("run", requests=decoders + long)["requests"]
                if turn >= 0:
                    side.figures[f"decode of 16 beside {what}, TPOT, ms"] += [row["tpot"] * 1e3 for row in rows[:16]]
                    side.figures[f"prompts of {what} beside them, ms"] += [row["ttft"] * 1e3 for row in rows[16:]]


def table(sides: list[Side]) -> str:
    lines, first = [], sides[0]
    for metric in first.figures:
        cells = []
        for side in sides:
            values = side.figures[metric]
            low, high = quantile(values, 0.1), quantile(values, 0.9)
            pairs = zip(values, first.figures[metric], strict=True)
            ratio = statistics.median([mine / other for mine, other in pairs if other] or [0])
            cells.append(
                f"{side.name} {statistics.median(values):,.2f} ({low:,.2f}..{high:,.2f}) "
                f"{statistics.median(values) / (statistics.median(first.figures[metric]) or 1):.3f} {ratio:.3f}"
            )
        lines.append(f"{metric:<42} {len(first.figures[metric]):>3}  " + "   ".join(cells))
    return "\n".join(lines)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # engines and daemons end with us
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=json.loads, required=True)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["hits", "load"])
    parser.add_argument("--gib", type=int, default=24, help="host memory of each")
    parser.add_argument("--device-gib", type=float, default=10.0, help="KV cache of each")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--model", choices=("llama", "mla"), default="llama")
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt")
    parser.add_argument("--rest", type=int, default=40, help="tokens of it that are new")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON: arguments of every engine")
    parser.add_argument("--config", type=json.loads, default={}, help="JSON: what differs in the model's configuration")
    parser.add_argument("--toy", action="store_true", help="a toy model on CPU, to try this script")
    parser.add_argument("--logs", type=Path, help="folder for the logs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as name, contextlib.ExitStack() as stack:
        model = Path(name) / "model"
        model.mkdir()
        shapes = {"llama": (LLAMA, TOY), "mla": (LARGE_MLA, TOY_MLA)}
        (model / "config.json").write_text(json.dumps(shapes[options.model][options.toy] | options.config))
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
        common = {
            "model": str(model),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": options.tokens + options.rest + 1024,
            "enable_prefix_caching": True,
            "seed": 0,
            "kv_cache_memory_bytes": int(options.device_gib * GIB),
            "gpu_memory_utilization": 0.1,
            "max_num_seqs": 32,
            **({"enforce_eager": True} if options.toy else {"compilation_config": graphs}),
            **options.engine,
        }
        sides = []
        if options.logs:  # at the end of all
            stack.callback(shutil.copytree, name, options.logs, ignore=shutil.ignore_patterns("*.sock"))
        for each, settings in options.variants.items():
            sides.append(Side(each, settings, Path(name), stack, options))
        for side in sides:
            side.engine.ask("start", **common, **side.arguments)
        for side in sides:
            print(f"{side.name}: engine ready, {side.engine.answer()}", flush=True)
        for part in options.parts:
            {"hits": hits, "load": load}[part](sides, options)
            print(f"\n{part}; the ratios are of medians, and the median of ratios\n{table(sides)}\n", flush=True)
            for side in sides:
                side.figures.clear()
        for side in (each for each in sides if each.is_ours):
            counts = side.counts()
            rate = counts.get("loaded_bytes", 0) / (1e3 * counts.get("load_us", 1))
            print(f"{side.name}: loads at {rate:.1f} stored GB/s a rank; {json.dumps(counts)}", flush=True)


if __name__ == "__main__":
    main()
