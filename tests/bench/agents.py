"""What users of two OpenAI servers of one model get, on one GPU: agents whose sessions alternate between the servers.

    python tests/bench/agents.py [--cases none,native,simple,lmcache,ours] [--gib 48] [--device-gib 10] [--toy]
                                 [--engines 2] [--agents 24] [--stay] [--together] [--json FILE]
                                 [--settings 'gate=off']...

Every prompt begins with what all agents share; then each turn adds what its agent's tool has said. The next turn is
asked as soon as the last one was answered, of the other server. The later waves are the same sessions again: all of it
was computed once. A cache that engines do not share has its part of `--gib` in each engine. `--settings` is another
case: ours, with these in `kv_connector_extra_config`. `--together`: instead, eight prompts at once, several times.
`--starts`: instead, how long it takes until the cache, each engine, and the first hit are there.
The model is a Llama with 8 billion random weights in bfloat16; its server generates as many tokens as asked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from engine_cases import CASES, GIB, Case, Failed, finish, free_port, ours, tail
from engines import ENVIRONMENT, LLAMA, TOY

ALONE = ("native", "simple")  # caches that belong to one engine
READY = 240.0  # seconds for the servers


class Load(NamedTuple):
    """Tokens, and numbers of agents and turns."""

    agents: int
    turns: int
    shared: int
    grow: int
    answer: int

    def sessions(self) -> list[list[list[int]]]:
        """Return the prompts of each agent, in order. In place of an answer, which may differ between runs, each has
        as many tokens that do not."""
        draw = random.Random(7)
        shared = tokens(draw, self.shared)
        return [list(self._prompts(draw, shared)) for _ in range(self.agents)]

    def _prompts(self, draw: random.Random, prompt: list[int]) -> Iterator[list[int]]:
        for _ in range(self.turns):
            prompt = prompt + tokens(draw, self.grow)
            yield prompt
            prompt = prompt + tokens(draw, self.answer)


class Answer(NamedTuple):
    first: float  # seconds until the first token
    prompt: int
    cached: int


def tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(10, 4000) for _ in range(count)]


class Servers:
    """Engines behind vLLM's OpenAI server."""

    def __init__(self, folder: Path, count: int, arguments: list[str], environment: dict[str, str]) -> None:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=600), connector=aiohttp.TCPConnector(limit=0, force_close=True)
        )
        self.ports = [free_port() for _ in range(count)]
        self.logs = [folder / f"engine{number}.log" for number in range(count)]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
        self._processes = []
        for port, log in zip(self.ports, self.logs, strict=True):
            with log.open("wb") as out:
                self._processes.append(
                    subprocess.Popen(
                        [*command, "--port", str(port)], stdout=out, stderr=out, env={**os.environ, **environment}
                    )
                )

    async def wait_ready(self) -> list[float]:
        """Return after how many seconds each engine was ready."""
        begin = time.monotonic()

        async def wait(port: int, log: Path, process: subprocess.Popen[bytes]) -> float:
            while not await self._is_ready(port):
                if process.poll() is not None or time.monotonic() > begin + READY:
                    raise Failed(f"an engine is not ready, status {process.poll()}:\n{tail(log)}")
                await asyncio.sleep(0.1)
            return round(time.monotonic() - begin, 2)

        return await asyncio.gather(*map(wait, self.ports, self.logs, self._processes))

    async def _is_ready(self, port: int) -> bool:
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with self._session.get(f"http://127.0.0.1:{port}/health") as answer:
                return answer.status == 200
        return False

    async def ask(self, engine: int, prompt: list[int], answer: int) -> Answer:
        asked = {
            "prompt": prompt,
            "max_tokens": answer,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begin, first, usage = time.perf_counter(), 0.0, {}
        async with self._session.post(f"http://127.0.0.1:{self.ports[engine]}/v1/completions", json=asked) as said:
            if said.status != 200:
                raise Failed((await said.text())[:500])
            async for line in said.content:
                if not line.startswith(b"data: {"):
                    continue
                part = json.loads(line.removeprefix(b"data: "))
                if "error" in part:
                    raise Failed(str(part["error"])[:500])
                if part.get("choices") and not first:
                    first = time.perf_counter() - begin
                usage = part.get("usage") or usage
        return Answer(first, usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    async def close(self) -> None:
        await self._session.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            finish(process, 20)


async def wave(servers: Servers, load: Load, stay: bool) -> dict[str, Any]:
    """Let all agents have their session, at once. Sessions `stay` at one engine, or alternate."""

    async def session(agent: int, prompts: list[list[int]]) -> list[Answer]:
        return [
            await servers.ask((agent if stay else agent + turn) % len(servers.ports), prompt, load.answer)
            for turn, prompt in enumerate(prompts)
        ]

    begin = time.perf_counter()
    found = await asyncio.gather(*(session(agent, prompts) for agent, prompts in enumerate(load.sessions())))
    return figures(time.perf_counter() - begin, [answer for each in found for answer in each])


async def together(servers: Servers, load: Load, turn: int) -> dict[str, Any]:
    """Ask one engine for eight prompts at once, each for the third time at least."""
    prompts = [tokens(random.Random(f"together {number}"), load.shared * 2) for number in range(8)]
    begin = time.perf_counter()
    found = await asyncio.gather(*(servers.ask(0, prompt, 1) for prompt in prompts))
    seconds = time.perf_counter() - begin
    for number in range(4):  # what was asked for leaves the device
        await servers.ask(0, tokens(random.Random(f"others {turn} {number}"), load.shared * 4), 1)
    return figures(seconds, found)


async def first_hit(servers: Servers, load: Load, since: float) -> float:
    """Ask for new prompts, each of the last engine after the first one; return when one of them was cached."""
    for number in range(20):
        prompt = tokens(random.Random(f"hit {number}"), load.shared)
        await servers.ask(0, prompt, 1)
        if (await servers.ask(len(servers.ports) - 1, prompt, 1)).cached:
            return round(time.monotonic() - since, 2)
    return -1.0


def figures(seconds: float, answers: list[Answer]) -> dict[str, Any]:
    first = sorted(answer.first * 1e3 for answer in answers)
    p50, p90, p99 = (round(first[min(len(first) - 1, int(part * len(first)))]) for part in (0.5, 0.9, 0.99))
    cached = sum(answer.cached for answer in answers) / sum(answer.prompt for answer in answers)
    return {"seconds": round(seconds, 2), "ttft_ms": [p50, p90, p99], "cached": round(cached, 3)}


async def play(case: Case, folder: Path, options: argparse.Namespace, load: Load) -> dict[str, Any]:
    gib = options.gib / options.engines if case.name in ALONE else options.gib
    asked = time.monotonic()
    with case.serve(folder, gib, {}) as more:
        served = time.monotonic()
        arguments = [
            *("--model", str(folder / "model"), "--skip-tokenizer-init", "--load-format", "dummy", "--seed", "0"),
            *("--served-model-name", "model", "--max-model-len", "40960", "--max-num-seqs", "32"),
            *("--kv-cache-memory-bytes", str(int(options.device_gib * GIB)), "--enable-prompt-tokens-details"),
            *("--gpu-memory-utilization", "0.45"),
        ]
        if options.block_size:
            arguments += ["--block-size", options.block_size]
        if options.toy:
            arguments += ["--enforce-eager", "--dtype", "float32"]
        else:
            graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
            arguments += ["--compilation-config", json.dumps(graphs)]
        for name, value in more.items():
            arguments += [f"--{name.replace('_', '-')}", json.dumps(value)]
        servers = Servers(folder, options.engines, arguments, {**ENVIRONMENT, **case.environment})
        try:
            ready = await servers.wait_ready()
            if options.starts:
                return {
                    "cache_s": round(served - asked, 2),
                    "engines_s": ready,
                    "first_hit_s": await first_hit(servers, load, served),
                }
            for engine in range(options.engines):
                for number in range(3):
                    await servers.ask(engine, tokens(random.Random(f"warm {number}"), 600), 8)
            if options.together:
                found = [await together(servers, load, turn) for turn in range(2 + options.waves)]
                return {"together": found[2:]}
            waves = [await wave(servers, load, options.stay) for _ in range(options.waves)]
            return {"first": waves[0], "again": sorted(waves[1:], key=lambda each: float(each["seconds"]))}
        finally:
            await servers.close()
            for log in servers.logs if case.name.startswith("ours") else ():
                said = [line for line in log.read_text(errors="replace").splitlines() if "KV Transfer metrics" in line]
                print("\n".join(line[-400:] for line in said[-1:]), file=sys.stderr)


def ours_with(settings: str) -> Case:
    """Return our case with other settings of the connector: `name=value`, separated by commas."""
    extra = dict(each.split("=", 1) for each in settings.split(","))
    return Case(f"ours, {settings}", lambda folder, gib, more: ours(folder, gib, {**more, **extra}))


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # engines and daemons end with us
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="none,native,simple,lmcache,ours")
    parser.add_argument("--settings", action="append", default=[])
    parser.add_argument("--gib", type=float, default=48, help="host memory for KV")
    parser.add_argument("--device-gib", type=float, default=10, help="KV cache of each engine")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--agents", type=int, default=24)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--answer", type=int, default=24, help="tokens")
    parser.add_argument("--stay", action="store_true", help="a session asks one engine only")
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--starts", action="store_true")
    parser.add_argument("--waves", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--block-size", help="of vLLM, in tokens")
    parser.add_argument("--toy", action="store_true", help="a tiny model and short prompts, which a CPU can run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", help="folder for the logs of the last case, which are kept there")
    options = parser.parse_args()
    part = 16 if options.toy else 1
    load = Load(options.agents, options.turns, 4096 // part, 1536 // part, options.answer)
    cases = [CASES[name] for name in filter(None, options.cases.split(","))] + [*map(ours_with, options.settings)]
    rows = []
    with tempfile.TemporaryDirectory(prefix="agents", dir="/tmp") as folder:
        folder = options.logs or folder
        (Path(folder) / "model").mkdir(parents=True, exist_ok=True)
        (Path(folder) / "model" / "config.json").write_text(json.dumps(TOY if options.toy else LLAMA))
        for case in cases * options.rounds:
            if why := case.unsupported_reason():
                print(f"{case.name}: {why}", flush=True)
                continue
            try:
                found = asyncio.run(play(case, Path(folder), options, load))
            except Failed as error:
                print(f"{case.name} failed: {error}", flush=True)
                continue
            rows.append({"case": case.name, **found})
            print(json.dumps(rows[-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps(rows, indent=2))
    if options.starts:
        return
    for name in dict.fromkeys(row["case"] for row in rows):
        again = [each for row in rows if row["case"] == name for each in row.get("again", row.get("together"))]
        seconds, *percentiles = (
            statistics.median(each) for each in zip(*([row["seconds"], *row["ttft_ms"]] for row in again), strict=True)
        )
        print(f"{name}: {seconds} s, TTFT p50 / p90 / p99 {' / '.join(str(each) for each in percentiles)} ms")


if __name__ == "__main__":
    main()
