"""`kvcache-server demo`: a daemon and two vLLM engines on this machine; what one engine computes, the other loads."""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from kvcache_proto.sizes import format_size, parse_size
from kvcache_server import signals
from kvcache_server.admin_client import AdminClient
from kvcache_server.commands import describe
from kvcache_server.commands.daemon_process import Failed, finish, running_daemon, tail

# About 29 million weights and 16 KiB of KV per token: some seconds of prefill for 6,000 tokens on two cores.
LLAMA = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}
BLOCK_TOKENS = 128
ANSWER_TOKENS = 6
CONNECTOR = "kvcache_client.connector"  # only a name: the engine imports it, the daemon never does
VISIBLE_WITHIN = 5.0
QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO", "TOKENIZERS_PARALLELISM": "false"}


class EngineProcess:
    """A `demo_engine` process, or one with the same interface; its log goes to a file."""

    def __init__(
        self,
        name: str,
        folder: Path,
        environment: dict[str, str],
        command: Sequence[str] = (sys.executable, "-m", "kvcache_server.commands.demo_engine"),
    ) -> None:
        self.name = name
        self._log = folder / f"engine-{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | QUIET | environment,
                text=True,
                bufsize=1,
            )

    def ask(self, call: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # answer() reports why
            self._process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to the last `ask`. Raises Failed, with the end of the log, if the engine has exited."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Failed(f"engine {self.name} exited with status {self._process.wait()}:\n{tail(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def call(self, call: str, **arguments: Any) -> dict[str, Any]:
        self.ask(call, **arguments)
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        finish(self._process, 20)


class Pass(NamedTuple):
    """One pass over the prompts by one engine."""

    answers: list[list[int]]
    seconds: float  # per prompt, median


class Row(NamedTuple):
    """A row of the table, about the prompts that `engine` computed first."""

    engine: str
    other: str
    prompts: list[list[int]]
    cold: Pass
    again: Pass
    elsewhere: Pass
    visible_after: float
    hits: int
    expected: int

    @property
    def equal(self) -> bool:
        return self.cold.answers == self.again.answers == self.elsewhere.answers


def region_dir(folder: Path, size: str) -> str:
    """Return /dev/shm if a region of `size` fits there, else `folder`."""
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    fits = shm is not None and shm.f_bavail * shm.f_frsize > parse_size(size)
    return "/dev/shm" if fits else str(folder)


class Demo:
    def __init__(self, folder: Path, prompts: int, tokens: int, ranks: int) -> None:
        self._folder = folder
        self._prompts = prompts
        self._tokens = tokens
        self._ranks = ranks
        self._begin = time.monotonic()

    def say(self, text: str) -> None:
        click.echo(f"[{time.monotonic() - self._begin:4.0f} s] {text}")

    def run(self, model: str | None, size: str) -> list[Row]:
        with contextlib.ExitStack() as stack:
            flags = ("--size", size, "--region-dir", region_dir(self._folder, size))
            endpoint, _ = stack.enter_context(running_daemon(self._folder, *flags))
            self.say(f"daemon at {endpoint}, region of {format_size(parse_size(size))}")
            environment = {
                "PYTHONHASHSEED": "0",  # older engines derive their block hashes from it
                "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
                "VLLM_RPC_BASE_PATH": str(self._folder),  # for vLLM's sockets
                "TORCHINDUCTOR_CACHE_DIR": str(self._folder / "inductor"),  # and torch's cache
            }
            if model is None:
                environment |= {"HF_HUB_OFFLINE": "1"}
            if self._ranks > 1:
                cores = sorted(os.sched_getaffinity(0))
                bound = "|".join(str(cores[rank % len(cores)]) for rank in range(self._ranks))
                environment |= {"VLLM_CPU_OMP_THREADS_BIND": bound}
            engines = []
            for name in "AB":
                engines.append(EngineProcess(name, self._folder, environment))
                stack.callback(engines[-1].close)
            if model is None:
                model = str(self._folder / "random-llama")
                made = engines[0].call("make_model", directory=model, config=LLAMA)
                self.say(f"made a Llama with {made['parameters'] / 1e6:.0f} million random weights")
            self.say(f"starting two vLLM engines, A and B (logs are in {self._folder})")
            facts = self._start(engines, model, endpoint)
            with AdminClient(endpoint) as admin:
                rows = []
                for first, second in (engines, engines[::-1]):
                    rows.append(self._share(first, second, facts, admin))
        return rows

    def _start(self, engines: list[EngineProcess], model: str, endpoint: str) -> dict[str, Any]:
        for engine in engines:
            engine.ask(
                "start",
                model=model,
                skip_tokenizer_init=True,
                dtype="float32",  # so that "equal" means equal
                enforce_eager=True,
                block_size=BLOCK_TOKENS,
                max_model_len=self._tokens + 4 * BLOCK_TOKENS,
                max_num_batched_tokens=2048,
                max_num_seqs=4,
                tensor_parallel_size=self._ranks,
                seed=0,
                kv_transfer_config={
                    "kv_connector": "KVCacheServerConnector",
                    "kv_connector_module_path": CONNECTOR,
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"endpoint": endpoint},
                },
            )
        for engine in engines:
            facts = engine.answer()
            self.say(f"engine {engine.name} is up")
        for engine in engines:  # keep the runtime's first-time costs out of the measurement
            engine.call("generate", prompts=self._make(f"warm-up {engine.name}", facts, 1, 256), tokens=2)
        return facts

    @staticmethod
    def _make(seed: str, facts: dict[str, Any], count: int, tokens: int) -> list[list[int]]:
        draw = random.Random(seed)
        return [[draw.randrange(facts["vocabulary"]) for _ in range(tokens)] for _ in range(count)]

    def _share(self, first: EngineProcess, second: EngineProcess, facts: dict[str, Any], admin: AdminClient) -> Row:
        prompts = self._make(f"prompts of {first.name}", facts, self._prompts, self._tokens)
        whole = len(prompts) * (self._tokens // facts["block_tokens"])
        loadable = len(prompts) * ((self._tokens - 1) // facts["block_tokens"])
        before = totals(admin)
        cold = self._pass(first, prompts, "cold")
        visible_after = self._wait_until_visible(admin, before["blocks"] + whole)
        self.say(f"  {whole} blocks visible to all engines {visible_after:.2f} s after the last answer")
        between = totals(admin)
        elsewhere = self._pass(second, prompts, "which has not seen them before")
        if not first.call("forget")["done"]:
            raise Failed(f"engine {first.name} did not reset its prefix cache")
        again = self._pass(first, prompts, "after reset_prefix_cache")
        hits = totals(admin)["hit_blocks"] - between["hit_blocks"]
        return Row(first.name, second.name, prompts, cold, again, elsewhere, visible_after, hits, 2 * loadable)

    def _pass(self, engine: EngineProcess, prompts: list[list[int]], how: str) -> Pass:
        answer = engine.call("generate", prompts=prompts, tokens=ANSWER_TOKENS)
        seconds = statistics.median(answer["seconds"])
        self.say(f"engine {engine.name}, {how}: {seconds:.2f} s per prompt of {self._tokens:,} tokens")
        return Pass(answer["answers"], seconds)

    @staticmethod
    def _wait_until_visible(admin: AdminClient, blocks: int) -> float:
        begin = time.monotonic()
        while totals(admin)["blocks"] < blocks:
            if time.monotonic() - begin > VISIBLE_WITHIN:
                raise Failed(f"{totals(admin)['blocks']} of {blocks} blocks are visible after {VISIBLE_WITHIN} s")
            time.sleep(0.01)  # the daemon does not announce new blocks: poll
        return time.monotonic() - begin


def write(directory: str, folder: Path) -> None:
    """Write the demo's model to `directory`. Raises Failed."""
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise Failed(f"--write-model {directory}: {error.strerror}") from None
    engine = EngineProcess("writer", folder, {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")})
    try:
        made = engine.call("make_model", directory=directory, config=LLAMA)
    finally:
        engine.close()
    click.echo(f"wrote a Llama with {made['parameters'] / 1e6:.0f} million random weights to {directory}")


def totals(admin: AdminClient) -> dict[str, int]:
    namespaces = admin.stats()["namespaces"]
    return {key: sum(namespace[key] for namespace in namespaces) for key in ("blocks", "hit_blocks")}


def table(rows: list[Row]) -> str:
    head = (
        *("engine", "prompt tokens", "cold", "second pass", "other engine's first pass"),
        *("hits", "tokens equal", "speed-up"),
    )
    cells = [
        (
            row.engine,
            f"{len(row.prompts)} x {len(row.prompts[0]):,}",
            f"{row.cold.seconds:.2f} s",
            f"{row.again.seconds:.2f} s",
            f"{row.elsewhere.seconds:.2f} s ({row.other})",
            f"{row.hits} of {row.expected} blocks",
            "yes" if row.equal else "NO",
            f"{row.cold.seconds / row.again.seconds:.1f}x, {row.cold.seconds / row.elsewhere.seconds:.1f}x",
        )
        for row in rows
    ]
    return "\n".join(describe.table(head, cells, left=len(head)))


@click.command(name="demo", help=__doc__, short_help="Let two vLLM engines on this machine share one cache.")
@click.option("--model", help="Model to use instead of a small random Llama: a folder or a name on the hub.")
@click.option("--prompts", default=2, show_default=True, help="Prompts that each engine computes first.")
@click.option("--tokens", default=6000, show_default=True, help="Tokens per prompt.")
@click.option("--tensor-parallel", default=1, show_default=True, help="Ranks per engine.")
@click.option("--size", default="768MiB", show_default=True, help="Size of the daemon's region.")
@click.option(
    "--write-model",
    metavar="FOLDER",
    help="Only write the small random Llama there, for your own engine.",
)
def command(
    model: str | None, prompts: int, tokens: int, tensor_parallel: int, size: str, write_model: str | None
) -> None:
    signals.exit_cleanly_when_told()
    with tempfile.TemporaryDirectory(prefix="kvdemo-") as folder:
        if write_model:
            write(write_model, Path(folder))
            return
        rows = Demo(Path(folder), prompts, tokens, tensor_parallel).run(model, size)
    click.echo()
    click.echo(table(rows))
    if not all(row.equal for row in rows):
        raise Failed("tokens differ")
    if any(row.hits < row.expected for row in rows):
        raise Failed("hits are missing")
