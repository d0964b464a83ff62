"""Compare settings of our connector, or other versions of it, in real vLLM engines on one GPU that take turns.

    python tests/bench/by_turns.py --variants '{"off": {"compress": "off"}, "auto": {}, "before": {"tree": "DIR"}}'
                                   [--gib 24] [--rounds 8] [--parts hits,load] [--model llama|mla] [--toy] [--trace]

Each variant is an engine with a daemon of its own; all live at the same time, and each figure is taken of one after the
other, so that what the host does besides is shared by all. `tree` is a folder with another version of all packages, and
`env` has variables. The models have random weights in bfloat16: a Llama of 8 billion, of `engines.py`, and one with the
KV of DeepSeek V2. The parts:

hits    one prompt of `--tokens` computed, from the host, and on the device; all `--prompts` at once from the host.
        Each ends with `--rest` tokens of a block that is not full
load    16 sequences that decode beside new prompts that are saved, and beside prompts that come from the host

The last column of each variant is the median of its figures by those of the first one, pair by pair. `--trace` prints
where the time of each hit goes, in ms after the scheduler first asked for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import engine_cases
from engine_cases import GIB, start_engine
from engines import ENVIRONMENT, LLAMA, TOY, ms, prompts, quantile

from kvcache_proto.errors import KVCacheError
from kvcache_server.admin_client import AdminClient
from kvcache_tools.engine_process import EngineProcess

HERE = Path(__file__).parent
MLA = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 60,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 60,  # no experts
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "max_position_embeddings": 65536,
    "torch_dtype": "bfloat16",
}
TOY_MLA = MLA | {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "first_k_dense_replace": 2}
ANSWER = 8  # tokens, where answers are compared


class Side:
    """A variant: its daemon, and its engine."""

    def __init__(self, name: str, settings: dict[str, Any], folder: Path, options: argparse.Namespace) -> None:
        self.name, self.figures = name, defaultdict[str, list[float]](list)
        self._folder = folder / name
        self._folder.mkdir()
        settings = dict(settings)
        tree, more = settings.pop("tree", ""), settings.pop("env", {})
        paths = [tree, os.environ.get("PYTHONPATH", "")] if tree else [os.environ.get("PYTHONPATH", "")]
        environment = {"PYTHONPATH": os.pathsep.join([*paths, str(HERE)]), **more}
        self._endpoint = f"ipc://{self._folder}/kvcache.sock"
        command = [sys.executable, "-m", "kvcache_server", "serve", "--keep=false", "--endpoint", self._endpoint]
        with (self._folder / "daemon.log").open("wb") as log:
            self._daemon = subprocess.Popen(
                [*command, "--size", f"{options.gib}GiB"], stdout=log, stderr=log, env=os.environ | environment
            )
        self._wait_daemon()
        self._trace = self._folder / "trace.jsonl"
        module = "traced_connector" if options.trace else "kvcache_client.connector"
        self.engine: EngineProcess = start_engine(
            name, self._folder, ENVIRONMENT | environment | {"KVTRACE": str(self._trace)}
        )
        self.arguments = {
            "kv_transfer_config": {
                "kv_connector": "KVCacheServerConnector",
                "kv_connector_module_path": module,
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"endpoint": self._endpoint, **settings},
            }
        }

    def _wait_daemon(self) -> None:
        until = time.monotonic() + engine_cases.STARTING
        while time.monotonic() < until:
            with contextlib.suppress(KVCacheError), AdminClient(self._endpoint) as admin:
                admin.ping()
                return
            if self._daemon.poll() is not None:
                break
            time.sleep(0.05)
        raise SystemExit(f"no daemon:\n{(self._folder / 'daemon.log').read_text()}")

    def counts(self) -> dict[str, int]:
        with AdminClient(self._endpoint) as admin:
            return dict(admin.status().client_counts)

    def close(self, logs: Path | None) -> None:
        self.engine.close()
        self._daemon.terminate()
        self._daemon.wait()
        if logs:
            shutil.copytree(self._folder, logs / self.name, ignore=shutil.ignore_patterns("*.sock"))


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
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--logs", type=Path, help="folder for the logs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as name, contextlib.ExitStack() as stack:
        model = Path(name) / "model"
        model.mkdir()
        shapes = {"llama": (LLAMA, TOY), "mla": (MLA, TOY_MLA)}
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
        for each, settings in options.variants.items():
            sides.append(Side(each, settings, Path(name), options))
            stack.callback(sides[-1].close, options.logs)
        for side in sides:
            side.engine.ask("start", **common, **side.arguments)
        for side in sides:
            print(f"{side.name}: engine ready, {side.engine.answer()}", flush=True)
        for part in options.parts:
            {"hits": hits, "load": load}[part](sides, options)
            print(f"\n{part}; the ratios are of medians, and the median of ratios\n{table(sides)}\n", flush=True)
            for side in sides:
                side.figures.clear()
        for side in sides:
            counts = side.counts()
            rate = counts.get("loaded_bytes", 0) / (1e3 * counts.get("load_us", 1))
            print(f"{side.name}: loads at {rate:.1f} stored GB/s a rank; {json.dumps(counts)}", flush=True)
            if options.trace:
                print(side._trace.read_text() if side._trace.exists() else "no trace", flush=True)


if __name__ == "__main__":
    main()
