"""One vLLM engine behind a pipe, for engines.py: one JSON object per line in both directions.

Requests are timed as a client of the engine's server would see them: from the call until each token arrives.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

Pieces = Sequence[Sequence[Any]]  # of a prompt: [seed, tokens] each


def tokens_of(pieces: Pieces, vocabulary: int) -> list[int]:
    """Return the same tokens for the same pieces, in every process."""
    found: list[int] = []
    for seed, count in pieces:
        draw = random.Random(seed)
        found.extend(draw.randrange(vocabulary) for _ in range(count))
    return found


class Engine:
    """What the pipe may ask for; each method's return value is the answer."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._vocabulary = 0
        self._number = 0

    async def start(self, **arguments: Any) -> dict[str, Any]:
        """Make the engine. `seconds` is from here to ready, the imports of vLLM done before."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        begin = time.perf_counter()
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, disable_log_stats=True))
        seconds = time.perf_counter() - begin
        config = self._engine.vllm_config
        self._vocabulary = config.model_config.get_vocab_size()
        return {"seconds": seconds, "block_tokens": config.cache_config.block_size}

    async def run(self, requests: list[dict[str, Any]], at_once: int = 0, answers: bool = False) -> dict[str, Any]:
        """Answer `requests`, each {"prompt": pieces, "tokens": how many, "at": seconds from now}, `at_once` at most."""
        prompts = [tokens_of(request["prompt"], self._vocabulary) for request in requests]
        gate = asyncio.Semaphore(at_once or len(requests))
        begin = time.perf_counter()

        async def one(request: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
            await asyncio.sleep(max(0.0, begin + request.get("at", 0.0) - time.perf_counter()))
            async with gate:
                return await self._answer(prompt, request["tokens"])

        found = await asyncio.gather(*map(one, requests, prompts))
        seconds = time.perf_counter() - begin
        for row in found:
            row["begin"] -= begin
            if not answers:
                del row["answer"]
        return {"seconds": seconds, "requests": found}

    async def converse(self, seeds: list[str], turns: int, grow: int, tokens: int, at_once: int) -> dict[str, Any]:
        """Hold a conversation a seed, `at_once` turns at a time: each turn says all that was said, and `grow` tokens
        more."""
        gate, rows = asyncio.Semaphore(at_once), []
        begin = time.perf_counter()

        async def one(seed: str) -> None:
            said: list[int] = []
            for turn in range(turns):
                said += tokens_of([[f"{seed} {turn}", grow]], self._vocabulary)
                async with gate:
                    row = await self._answer(said, tokens)
                said = said + row.pop("answer")
                rows.append({**row, "turn": turn})

        await asyncio.gather(*map(one, seeds))
        return {"seconds": time.perf_counter() - begin, "requests": rows}

    async def forget(self) -> dict[str, Any]:
        """Empty the engine's own prefix cache. Those that still copy from it make it wait."""
        for attempt in range(100):
            if await self._engine.reset_prefix_cache():
                return {"attempts": attempt + 1}
            await self._answer([attempt] * 8, 1)  # an idle engine does not step, and some free blocks in steps alone
            await asyncio.sleep(0.05)
        return {"attempts": 0}

    async def wait(self, seconds: float) -> dict[str, Any]:
        await asyncio.sleep(seconds)
        return {}

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()

    async def _answer(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._number += 1
        greedy = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        answer: list[int] = []
        times: list[float] = []
        cached = 0
        begin = time.perf_counter()
        async for output in self._engine.generate({"prompt_token_ids": prompt}, greedy, f"request-{self._number}"):
            new = output.outputs[0].token_ids
            if new:
                times.append(time.perf_counter())
            answer.extend(new)
            cached = output.num_cached_tokens or cached
        return {
            "begin": begin,
            "ttft": times[0] - begin,
            "tpot": (times[-1] - times[0]) / max(1, len(answer) - 1),
            "gaps": [round(b - a, 6) for a, b in itertools.pairwise(times)],
            "cached": cached,
            "answer": answer,
        }


async def serve() -> None:
    # Libraries write to stdout as they like: the pipe gets a descriptor of its own, and they get stderr.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import vllm  # noqa: F401  # its import is nobody's start

    engine = Engine()
    print("{}", file=replies, flush=True)
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            answer = await getattr(engine, request.pop("call"))(**request)
            print(json.dumps(answer), file=replies, flush=True)
    finally:
        engine.stop()


if __name__ == "__main__":
    asyncio.run(serve())
