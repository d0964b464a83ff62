"""Ask, on a host with a GPU, whether hits change a token: models of several kinds, in real engines with one daemon.

    python tests/bench/models.py [--models gemma,granite,...] [--tp N] [--pp N] [--at-once N] [--memory GIB]
                                 [--rounds N] [--overlap] [--below]

For each model: two engines without the connector, of which the second shows whether the model itself answers alike
twice; one that saves, one that loads the prompts, and one that loads prompts and answers. With --below, all of them
come from a disk below the region, which has forgotten them. Random weights in float32,
greedy. tests/e2e/test_models.py does the same on a CPU, where vLLM has no kernels for states (Mamba, linear
attention), and none that continue a prompt of an MLA model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rig import Daemon, one_daemon

sys.path[:0] = [str(Path(__file__).parent.parent / "e2e")]

from engine import Engine as Writer  # noqa: E402
from model_configs import COMMON, MODELS, STATES  # noqa: E402

from kvcache_server.admin_client import AdminClient  # noqa: E402

ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
BFLOAT16 = ("mla", "deepseek-v32", "qwen3-next")  # vLLM has no kernels of these in float32
LENGTHS = (31, 700, 1500, 3000)


def run_engine(name: str, folder: str, endpoint: str, tp: int, pp: int, memory: float, overlap: bool) -> None:
    """One engine, for each line of prompts on its standard input: prints a line of answers."""
    from vllm import LLM, SamplingParams

    more: dict[str, Any] = {"mamba_cache_mode": "align"} if name in STATES else {}
    if name == "qwen3-next":
        more["gdn_prefill_backend"] = "triton"  # FlashInfer is a package of its own
    if name == "deepseek-v32":  # the class made for NVIDIA needs CUTLASS's Python package, one of its own
        plain = "vllm.model_executor.models.deepseek_v2:DeepseekV3ForCausalLM"
        more["model_class_overrides"] = {"DeepseekV32ForCausalLM": plain}
    if endpoint:
        # A load that is verified does not overlap.
        settings = {"overlap": "auto"} if overlap else {"verify": "all", "gate": "off"}
        more["kv_transfer_config"] = {
            "kv_connector": "KVCacheServerConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"endpoint": endpoint, **settings},
        }
        if overlap:
            sys.path[:0] = [str(Path(__file__).parent.parent / "e2e")]
            more["kv_transfer_config"]["kv_connector_module_path"] = "overlapping_connector"
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="bfloat16" if name in BFLOAT16 else "float32",
        enforce_eager=True,
        max_model_len=4096,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=int(memory * (1 << 30)),
        gpu_memory_utilization=0.1,  # small: the engines of a model share the GPU
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        enable_prefix_caching=True,
        disable_hybrid_kv_cache_manager=False,
        **more,
    )
    print("ready", llm.llm_engine.vllm_config.cache_config.block_size, file=sys.stderr, flush=True)
    parameters = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    answers_to = os.fdopen(int(os.environ["ANSWERS"]), "w")
    for line in sys.stdin:
        answers = []
        for prompt in json.loads(line):
            (output,) = llm.generate({"prompt_token_ids": prompt}, parameters, use_tqdm=False)
            answers.append((list(output.outputs[0].token_ids), int(output.num_cached_tokens or 0)))
        for _ in range(3):  # saves that were granted after the last step begin with the next one
            llm.generate({"prompt_token_ids": [3, 4, 5]}, parameters, use_tqdm=False)
            time.sleep(0.2)
        print(json.dumps(answers), file=answers_to, flush=True)


class Engine:
    def __init__(self, name: str, folder: Path, endpoint: str, options: argparse.Namespace) -> None:
        self.log = folder.parent / f"{name} {time.monotonic_ns()}.log"
        reading, writing = os.pipe()
        arguments = [name, str(folder), endpoint, str(options.tp), str(options.pp), str(options.memory)]
        arguments.append("overlap" if options.overlap else "")
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--engine", *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                pass_fds=[writing],
                env={**os.environ, **ENVIRONMENT, "ANSWERS": str(writing)},
            )
        os.close(writing)
        self._answers = os.fdopen(reading)

    def ask(self, prompts: list[list[int]]) -> list[Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(prompts) + "\n")
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        line = self._answers.readline()
        self._process.wait()
        if not line:
            raise RuntimeError(f"the engine ended:\n{self.log.read_text()[-3000:]}")
        return list(json.loads(line))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def said(self) -> list[str]:
        lines = self.log.read_text().splitlines()
        return [each for each in lines if "KV cache server" in each or "needed;" in each or each.startswith("ready")]


def forget(daemon: Daemon) -> None:
    """Leave nothing in the region, once the tier has all."""
    daemon.wait_status(lambda status: not any(each["to_write_blocks"] for each in status["daemon"]["tiers"]))
    with AdminClient(daemon.endpoint) as admin:
        admin.clear()


def compare(name: str, daemon: Daemon, options: argparse.Namespace) -> str:
    """Return a line of the table."""
    endpoint = daemon.endpoint
    with tempfile.TemporaryDirectory(prefix="kvm") as parent, ExitStack() as after:
        folder = Path(parent) / "model"
        subprocess.run([sys.executable, __file__, "--write", name, str(folder)], check=True, capture_output=True)
        draw = random.Random(name)
        prompts = [[draw.randrange(3, 512) for _ in range(length)] for length in LENGTHS * options.rounds]
        # All start at once, which takes the most time, and wait for their prompts.
        alone, other, *engines = [Engine(name, folder, each, options) for each in ("", "", "", *[endpoint] * 3)]
        for engine in (alone, other, *engines):
            after.callback(engine.close)
        rows: list[list[Any]] = []
        expected = [tokens for tokens, _ in alone.ask(prompts)]
        longer = [[*prompt, *answer, 5, 6, 7] for prompt, answer in zip(prompts, expected, strict=True)]
        continued = [tokens for tokens, _ in other.ask(longer)]
        asked = ((prompts, expected), (prompts, expected), (prompts, expected), (longer, continued))
        for engine, (texts, right) in zip(engines, asked, strict=True):
            found = engine.ask(texts)
            if options.below:
                forget(daemon)
            rows.append([sum(tokens == one for (tokens, _), one in zip(found, right, strict=True))])
            rows[-1].append(sum(cached for _, cached in found))
        different = len({tuple(answer) for answer in expected})
        cells = ", ".join(f"{equal}/{len(prompts)} equal, {cached} cached" for equal, cached in rows)
        lines = [f"{name:12} {different} answers; alone again, saved, loaded, continued: {cells}", *engine.said()]
        return "\n             ".join(lines)


def main() -> None:
    if "--write" in sys.argv:
        name, folder = sys.argv[2:]
        Writer().make_model(folder, COMMON | MODELS[name])
        return
    if "--engine" in sys.argv:
        name, folder, endpoint, tp, pp, memory, overlap = sys.argv[2:]
        run_engine(name, folder, endpoint, int(tp), int(pp), float(memory), bool(overlap))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1, help="of four prompts each, of four lengths")
    parser.add_argument("--at-once", type=int, default=2, help="models that are compared at the same time")
    parser.add_argument("--memory", type=float, default=1.0, help="GiB of KV cache of each engine")
    parser.add_argument("--overlap", action="store_true", help="loads overlap with the computation of the rest")
    parser.add_argument("--below", action="store_true", help="all blocks come from a disk below the region")
    options = parser.parse_args()
    if options.below:
        options.at_once = 1  # what one model has forgotten, another one has not stored yet
    with ExitStack() as after:
        flags = {}
        if options.below:
            config = Path(after.enter_context(tempfile.TemporaryDirectory())) / "kv.toml"
            config.write_text(f'[[tier]]\nurl = "disk:{config.parent}/tier?size=8GiB"\nwrites = "through"\n')
            flags["config"] = config
        daemon = after.enter_context(one_daemon(size="4GiB", **flags))
        several = after.enter_context(ThreadPoolExecutor(options.at_once))
        work = {name: several.submit(compare, name, daemon, options) for name in options.models.split(",")}
        for name, each in work.items():
            try:
                print(each.result(), flush=True)
            except (RuntimeError, subprocess.CalledProcessError) as error:
                said = getattr(error, "stderr", b"") or b""
                print(f"{name:12} {error}\n{said.decode()[-2000:]}", flush=True)
        if options.below:
            print(json.dumps(daemon.status()["daemon"]["tiers"]), flush=True)
        if options.overlap:
            print(f"loads that overlapped: {daemon.status()['client_counts'].get('loads_layered', 0)}", flush=True)


if __name__ == "__main__":
    main()
