"""Small vLLM engines on CPU, each in a process of its own behind a pipe, for benchmarks that ask them by turns."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any

from rig import Child

TOY = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
BLOCK = 64
STARTING = 300.0  # seconds


def set_environment(level: str) -> None:
    """Prepare this process for an engine that logs from this level on."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": level}
    os.environ |= {"PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def make_engine(model: str, extra: dict[str, Any] | None, **options: Any) -> Any:
    """Return an engine without a connector (None), with one that does nothing ({}), or with ours."""
    from vllm import LLM

    ours = {"kv_connector": "KVCacheServerConnector", "kv_connector_module_path": "kvcache_client.connector"}
    null = {"kv_connector": "NullConnector", "kv_connector_module_path": "null_connector"}
    chosen = {**(ours if extra else null), "kv_role": "kv_both", "kv_connector_extra_config": extra}
    common = {"dtype": "float32", "enforce_eager": True, "block_size": BLOCK, "max_model_len": 4096, "max_num_seqs": 4}
    transfer = None if extra is None else chosen
    return LLM(model=model, skip_tokenizer_init=True, kv_transfer_config=transfer, **common | options)


def _serve(pipe: Connection, model: str, extra: dict[str, Any] | None, options: dict[str, Any]) -> None:
    set_environment("ERROR")
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

    llm = make_engine(model, extra, **options)
    engine, throttle = llm.llm_engine, [0.0]
    connector = engine.engine_core.engine_core.scheduler.connector._scheduler if extra else None
    if connector is not None:
        worker = get_kv_transfer_group()._worker
    if connector is not None and hasattr(worker._device, "_loader"):  # on a CPU
        copy = worker._device._loader._copy

        def throttled(job: Any) -> None:
            time.sleep(throttle[0])
            copy(job)

        worker._device._loader._copy = throttled
    pipe.send(True)
    number = 0
    while (order := pipe.recv()) is not None:
        greedy = SamplingParams(temperature=0.0, max_tokens=order["tokens"], ignore_eos=True, detokenize=False)
        if "batch" in order:
            begin = time.perf_counter()
            llm.generate([{"prompt_token_ids": prompt} for prompt in order["batch"]], greedy, use_tqdm=False)
            pipe.send(time.perf_counter() - begin)
            continue
        throttle[0] = order["throttle"]
        while order["reset"] and not engine.reset_prefix_cache():
            time.sleep(0.01)
        number += 1
        begin = time.perf_counter()
        engine.add_request(f"r{number}", {"prompt_token_ids": order["prompt"]}, greedy)
        first, outputs = 0.0, []
        while not (outputs and outputs[-1].finished):
            outputs += engine.step()
            if outputs and not first:
                first = time.perf_counter() - begin
        for _ in range(3):  # its blocks are saved in the steps after it
            engine.step()
        counts = {**connector.counters, **worker.counters} if connector is not None else {}
        answer = list(outputs[-1].outputs[0].token_ids)
        pipe.send({"seconds": first, "counts": counts, "cached": outputs[0].num_cached_tokens or 0, "answer": answer})
    engine.engine_core.shutdown()


class Engines:
    """Engines by name, with the settings of their connector; see `make_engine`."""

    def __init__(self, model: str, variants: dict[str, dict[str, Any] | None], **options: Any) -> None:
        """`options` are vLLM's engine arguments."""
        self._children = {name: Child(_serve, model, extra, options) for name, extra in variants.items()}
        for child in self._children.values():
            child.hear(STARTING)

    @property
    def names(self) -> list[str]:
        return list(self._children)

    def ask(
        self, name: str, prompt: list[int], tokens: int = 1, reset: bool = False, throttle: float = 0.0
    ) -> dict[str, Any]:
        """Answer a prompt: `seconds` to the first token, the connector's `counts`, `cached` tokens, the `answer`.

        With `reset`, the engine's own prefix cache is emptied first. Each load takes `throttle` seconds longer.
        """
        self._children[name].pipe.send({"prompt": prompt, "tokens": tokens, "reset": reset, "throttle": throttle})
        answer: dict[str, Any] = self._children[name].pipe.recv()
        return answer

    def answer_batch(self, name: str, prompts: list[list[int]], tokens: int) -> float:
        """Return the seconds that the engine needs for all prompts together."""
        self._children[name].pipe.send({"batch": prompts, "tokens": tokens})
        return float(self._children[name].pipe.recv())

    def close(self) -> None:
        for child in self._children.values():
            child.pipe.send(None)
        for child in self._children.values():
            child.process.join(20)
            child.end()
