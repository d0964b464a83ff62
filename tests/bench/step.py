"""Measure what the connector costs in a step of a real vLLM engine on CPU.

    python tests/bench/step.py [--json]

`empty` calls every hook of a step that schedules nothing, on the scheduler's and the rank's side, with and without a
daemon. `decode` is the sum of the hooks in the steps of a real batch that decodes; about one step in 64 fills a block.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from engine_pipes import make_engine, set_environment
from rig import one_daemon

set_environment("WARNING")

SMALL = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
SCHEDULER_HOOKS = ("get_num_new_matched_tokens", "build_connector_meta", "update_connector_output", "request_finished")
RANK_HOOKS = (
    *("handle_preemptions", "bind_connector_metadata", "start_load_kv", "wait_for_layer_load", "save_kv_layer"),
    *("wait_for_save", "get_finished", "get_block_ids_with_load_errors", "clear_connector_metadata"),
)


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"p50_us": statistics.median(ordered) * 1e6, "p99_us": ordered[int(len(ordered) * 0.99)] * 1e6}


def empty_step(scheduler: Any, rank: Any, repeat: int) -> dict[str, float]:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

    spent = []
    for _ in range(repeat):
        output, result = SchedulerOutput.make_empty(), KVConnectorOutput()
        begin = time.perf_counter()
        metadata = scheduler.build_connector_meta(output)
        rank.handle_preemptions(metadata)
        rank.bind_connector_metadata(metadata)
        rank.start_load_kv(None)
        rank.wait_for_save()
        rank.get_finished(set())
        rank.get_block_ids_with_load_errors()
        rank.clear_connector_metadata()
        scheduler.update_connector_output(result)
        spent.append(time.perf_counter() - begin)
    return percentiles(spent)


def layers(rank: Any, repeat: int) -> dict[str, float]:
    """What the layers of a model with 32 of them announce in a step, which brings no load."""
    spent, names = [], [f"model.layers.{number}.self_attn.attn" for number in range(32)]
    for _ in range(repeat):
        begin = time.perf_counter()
        for name in names:
            rank.wait_for_layer_load(name)
            rank.save_kv_layer(name, None, None)
        spent.append(time.perf_counter() - begin)
    return percentiles(spent)


def timed(method: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*arguments, **named)
        finally:
            spent[-1] += time.perf_counter() - begin

    return call


def decode_steps(llm: Any, scheduler: Any, rank: Any, requests: int, tokens: int) -> dict[str, float]:
    from vllm import SamplingParams

    spent = [0.0]
    for side, hooks in ((scheduler, SCHEDULER_HOOKS), (rank, RANK_HOOKS)):
        for name in hooks:
            setattr(side, name, timed(getattr(side, name), spent))
    draw = random.Random(requests)
    prompts = [{"prompt_token_ids": [draw.randrange(1024) for _ in range(100)]} for _ in range(requests)]
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    core = llm.llm_engine.engine_core
    step = core.get_output

    def counted() -> Any:
        spent.append(0.0)
        return step()

    core.get_output = counted
    llm.generate(prompts, greedy, use_tqdm=False)
    core.get_output = step
    for side, hooks in ((scheduler, SCHEDULER_HOOKS), (rank, RANK_HOOKS)):
        for name in hooks:
            delattr(side, name)
    return percentiles(spent[4:-2])  # prefill and the end are other steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--extra", type=json.loads, default={}, help="JSON: settings of the connector")
    options = parser.parse_args()
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvcache_tools.demo_engine import make_model

    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as folder:
        make_model(f"{folder}/model", SMALL)
        endpoint = f"ipc://{folder}/kvcache.sock"
        extra = {"endpoint": endpoint, **options.extra}
        llm = make_engine(f"{folder}/model", extra, max_model_len=2048, max_num_seqs=64)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector
        rank = get_kv_transfer_group()
        figures["empty, no daemon"] = empty_step(scheduler, rank, 20_000)
        figures["decode of 1, no daemon"] = decode_steps(llm, scheduler, rank, 1, 200)
        figures["decode of 32, no daemon"] = decode_steps(llm, scheduler, rank, 32, 200)
        with one_daemon(endpoint=endpoint, size="64MiB"):
            time.sleep(8)  # the longest pause between two probes, and some
            figures["empty"] = empty_step(scheduler, rank, 20_000)
            figures["announcing 32 layers"] = layers(rank, 5_000)
            figures["decode of 1"] = decode_steps(llm, scheduler, rank, 1, 200)
            figures["decode of 32"] = decode_steps(llm, scheduler, rank, 32, 200)
            llm.llm_engine.engine_core.shutdown()
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for name, figure in figures.items():
        print(f"{name:<26} p50 {figure['p50_us']:7.1f} us   p99 {figure['p99_us']:7.1f} us a step")


if __name__ == "__main__":
    main()
