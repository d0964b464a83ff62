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

from kvcache_proto.errors import ConfigError
from kvcache_proto.sizes import format_size, parse_size
from kvcache_server import signals
from kvcache_server.admin_client import AdminClient
from kvcache_server.commands import describe
from kvcache_server.storage.region_file import available_memory
from kvcache_tools import demo_model
from kvcache_tools.daemon_process import Failed, finish, running_daemon, tail
from kvcache_tools.plan.host import GIB
from kvcache_tools.plan.workload import Needs, Workload, needs

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
BATCHED_TOKENS = 2048
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 2, 6000, 6  # of random numbers
WARM_UP_TOKENS = 256
SENTENCE_TOKENS = 48  # at most, per answer in text
CONNECTOR = "kvcache_client.connector"  # only a name: the engine imports it, the daemon never does
VISIBLE_WITHIN = 30.0
LIBRARY_BYTES = 3 * GIB // 2  # of an engine's rank, besides weights and cache
QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO", "TOKENIZERS_PARALLELISM": "false"}


class EngineProcess:
    """A `demo_engine` process, or one with the same interface; its log goes to a file."""

    def __init__(
        self,
        name: str,
        folder: Path,
        environment: dict[str, str],
        command: Sequence[str] = (sys.executable, "-m", "kvcache_tools.demo_engine"),
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
        with contextlib.suppress(BrokenPipeError):  # answer() reports the reason
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


class Seconds(NamedTuple):
    """The time that an answer took: until it began, and in all."""

    first: float
    last: float


class Answer(NamedTuple):
    """An engine's answer from the shared cache, compared with that of an engine without one."""

    question: str
    text: str
    cold: Seconds
    cached: Seconds
    loaded: int  # tokens
    loadable: int
    equal: bool


def region_dir(folder: Path, size: int) -> str:
    """Return /dev/shm if a region of `size` fits there, else `folder`."""
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    fits = shm is not None and shm.f_bavail * shm.f_frsize > size
    return "/dev/shm" if fits else str(folder)


def sized(config: dict[str, Any], name: str, work: Workload, size: str | None) -> Needs:
    """Return the needs of `work`, with a region of `size`, if given. Raises Failed if that is too small."""
    given = parse_size(size) if size is not None else None
    try:
        found = needs(config, name, work)
    except ConfigError as error:
        if given is None:
            raise Failed(f"the memory that {name} needs is not known ({error}): choose it with --size") from None
        return Needs(given, 0, GIB)
    if given is not None and given < found.region:
        raise Failed(f"--size {size}: the prompts' KV needs {format_size(found.region)}")
    return found if given is None else found._replace(region=given)


def engine_bytes(found: Needs, ranks: int) -> int:
    """Return the memory of an engine."""
    return found.weights + ranks * (found.cache + LIBRARY_BYTES)


class Demo:
    """A daemon and two engines, A and B, which end with `stack`."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, ranks: int = 1, size: str | None = None) -> None:
        self._stack = stack
        self._folder = folder
        self._ranks = ranks
        self._size = size
        self._begin = time.monotonic()

    def say(self, text: str) -> None:
        click.echo(f"[{time.monotonic() - self._begin:4.0f} s] {text}")

    def share(self, model: str | None = None, prompts: int = PROMPTS, tokens: int | None = None) -> list[Row]:
        """Let each engine answer `prompts` of random tokens, and then the other engine the same ones."""
        engines = self._processes(offline=model is None)
        config: dict[str, Any] = LLAMA | {"model_type": "llama"}
        name = "a small random Llama"
        if model is not None:
            config, name = self._config(engines[0], model), model
        longest = config.get("max_position_embeddings") or PROMPT_TOKENS + ANSWER_TOKENS
        tokens = tokens or min(PROMPT_TOKENS, longest - ANSWER_TOKENS)
        work = Workload(2 * prompts + len(engines), tokens + ANSWER_TOKENS, BLOCK_TOKENS, BATCHED_TOKENS, self._ranks)
        needed = self._check(config, name, work)
        endpoint, admin = self._daemon(needed.region)
        if model is None:
            model = str(self._folder / "random-llama")
            made = engines[0].call("make_model", directory=model, config=LLAMA)
            self.say(f"made a Llama with {made['parameters'] / 1e6:.0f} million random weights")
        facts = self._start(engines, model, endpoint, work.tokens, needed)
        both = (engines, engines[::-1])
        return [self._share(first, second, prompts, tokens, facts, admin) for first, second in both]

    def ask(self, gguf: Path, text: str) -> list[Answer]:
        """Let engine A answer questions about `text` without a cache, and engine B from the blocks that A computed
        first."""
        engines = self._processes(offline=True)
        model = str(self._model(gguf, engines[0]))
        asked = engines[0].call("encode", model=model, messages=demo_model.messages(text))
        longest = max(map(len, asked["prompts"])) + SENTENCE_TOKENS
        work = Workload(len(asked["prompts"]) + len(engines), longest, BLOCK_TOKENS, BATCHED_TOKENS)
        needed = self._check(self._config(engines[0], model), demo_model.NAME, work)
        endpoint, admin = self._daemon(needed.region)
        facts = self._start(engines, model, endpoint, longest, needed)
        answers = []
        for number, question in enumerate(demo_model.QUESTIONS):
            answers.append(self._ask(engines, question, number, model, asked, facts["block_tokens"], admin))
        return answers

    def _model(self, gguf: Path, engine: EngineProcess) -> Path:
        """Return the folder of the converted model."""

        def convert(folder: Path) -> None:
            self.say(f"converting {demo_model.NAME} for vLLM, only once")
            engine.call("convert", gguf=str(gguf), directory=str(folder))

        try:
            model = demo_model.converted(demo_model.cache_folder(), convert)
        except OSError as error:  # no space, or a home that cannot be written
            self.say(f"{error.filename or 'the cache folder'}: {error.strerror}: the converted model is not kept")
            model = self._folder / "model"
            convert(model)
        self.say(f"the model is {demo_model.NAME}, in {model}")
        return model

    def _processes(self, offline: bool) -> list[EngineProcess]:
        environment = {
            "PYTHONHASHSEED": "0",  # older engines derive their block hashes from it
            "VLLM_RPC_BASE_PATH": str(self._folder),  # for vLLM's sockets
            "TORCHINDUCTOR_CACHE_DIR": str(self._folder / "inductor"),  # and torch's cache
        }
        if offline:
            environment |= {"HF_HUB_OFFLINE": "1"}
        if self._ranks > 1:
            cores = sorted(os.sched_getaffinity(0))
            bound = "|".join(str(cores[rank % len(cores)]) for rank in range(self._ranks))
            environment |= {"VLLM_CPU_OMP_THREADS_BIND": bound}
        engines = []
        for name in "AB":
            engines.append(EngineProcess(name, self._folder, environment))
            self._stack.callback(engines[-1].close)
        return engines

    @staticmethod
    def _config(engine: EngineProcess, model: str) -> dict[str, Any]:
        answer = engine.call("config_of", model=model)
        if "error" in answer:
            raise Failed(f"--model {model}: {answer['error']}")
        config: dict[str, Any] = answer["config"]
        return config

    def _check(self, config: dict[str, Any], name: str, work: Workload) -> Needs:
        """Print the needs of `work`. Raises Failed if the host has less."""
        needed = sized(config, name, work, self._size)
        each = engine_bytes(needed, self._ranks)
        total, available = needed.region + 2 * each, available_memory()
        self.say(
            f"{name} in float32 needs about {format_size(total)} of memory: {format_size(needed.region)} for the "
            f"shared region, {format_size(each)} for each of two engines"
        )
        if total > available:
            raise Failed(f"only {format_size(available)} of memory are available: choose a smaller model or --tokens")
        return needed

    def _daemon(self, size: int) -> tuple[str, AdminClient]:
        flags = ("--size", str(size), "--region-dir", region_dir(self._folder, size))
        endpoint, _ = self._stack.enter_context(running_daemon(self._folder, *flags))
        self.say(f"daemon at {endpoint}, region of {format_size(size)}")
        return endpoint, self._stack.enter_context(AdminClient(endpoint))

    def _start(
        self, engines: list[EngineProcess], model: str, endpoint: str, tokens: int, needed: Needs
    ) -> dict[str, Any]:
        """Start the engines for requests of up to `tokens`, and return facts about them."""
        for engine in engines:  # they end before the daemon, which has their last saves
            self._stack.callback(engine.close)
        self.say(f"starting two vLLM engines, A and B (logs are in {self._folder})")
        for engine in engines:
            engine.ask(
                "start",
                model=model,
                skip_tokenizer_init=True,
                dtype="float32",  # so that "equal" means equal
                enforce_eager=True,
                block_size=BLOCK_TOKENS,
                kv_cache_memory_bytes=needed.cache,
                max_model_len=tokens,
                max_num_batched_tokens=BATCHED_TOKENS,
                max_num_seqs=4,
                tensor_parallel_size=self._ranks,
                seed=0,
                disable_log_stats=False,  # the stats have the time of the first token
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
            warm_up = self._make(f"warm-up {engine.name}", facts, 1, min(WARM_UP_TOKENS, tokens - 2))
            engine.call("generate", prompts=warm_up, tokens=2)
        return facts

    def _ask(
        self,
        engines: list[EngineProcess],
        question: str,
        number: int,
        model: str,
        asked: dict[str, Any],
        block_tokens: int,
        admin: AdminClient,
    ) -> Answer:
        """Ask both engines; B only ever loads the blocks that A computes for the first question."""
        first, second = engines
        prompt, limits = asked["prompts"][number], {"tokens": SENTENCE_TOKENS, "stop": asked["stop"]}
        before = totals(admin)
        # Later questions begin with the same text: with a salt, A finds no blocks of it, neither shared ones nor its
        # own.
        cold = first.call("generate", prompts=[prompt], **limits, **({"salt": f"question {number}"} if number else {}))
        if number == 0:
            self._wait_until_visible(admin, before["blocks"] + len(prompt) // block_tokens)
        elif not second.call("forget")["done"]:  # B would not load blocks that it has itself
            raise Failed(f"engine {second.name} did not reset its prefix cache")
        between = totals(admin)
        cached = second.call("generate", prompts=[prompt], **limits)
        loaded = totals(admin)["hit_blocks"] - between["hit_blocks"]
        seen = common_prefix(prompt, asked["prompts"][0]) if number else len(prompt) - 1
        (text,) = first.call("decode", model=model, answers=cached["answers"])["texts"]
        answer = Answer(
            question,
            text.strip(),
            Seconds(cold["first"][0], cold["seconds"][0]),
            Seconds(cached["first"][0], cached["seconds"][0]),
            loaded * block_tokens,
            seen // block_tokens * block_tokens,
            cold["answers"] == cached["answers"],
        )
        self.say(f"question {number + 1}: {answer.question}")
        click.echo(f"         answer:     {answer.text}")
        for engine, how, took in (first, "without a cache", answer.cold), (second, "from the cache", answer.cached):
            click.echo(
                f"         engine {engine.name}: begins after {took.first:.2f} s, ends after {took.last:.2f} s, {how}"
            )
        equal = "the answers are equal" if answer.equal else "THE ANSWERS DIFFER"
        click.echo(f"         {answer.loaded:,} of {len(prompt):,} tokens were loaded; {equal}")
        return answer

    @staticmethod
    def _make(seed: str, facts: dict[str, Any], count: int, tokens: int) -> list[list[int]]:
        draw = random.Random(seed)
        return [[draw.randrange(facts["vocabulary"]) for _ in range(tokens)] for _ in range(count)]

    def _share(
        self,
        first: EngineProcess,
        second: EngineProcess,
        count: int,
        tokens: int,
        facts: dict[str, Any],
        admin: AdminClient,
    ) -> Row:
        prompts = self._make(f"prompts of {first.name}", facts, count, tokens)
        whole = count * (tokens // facts["block_tokens"])
        loadable = count * ((tokens - 1) // facts["block_tokens"])
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
        self.say(f"engine {engine.name}, {how}: {seconds:.2f} s per prompt of {len(prompts[0]):,} tokens")
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
    namespaces = admin.status().namespaces
    return {
        "blocks": sum(namespace.blocks for namespace in namespaces),
        "hit_blocks": sum(namespace.hit_blocks for namespace in namespaces),
    }


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


def answer_table(answers: list[Answer]) -> str:
    head = (
        *("question", "answer begins, cold", "from the cache", "speed-up", "answer ends, cold", "from the cache"),
        *("tokens loaded", "answers equal"),
    )
    cells = [
        (
            f"{number}",
            f"{answer.cold.first:.2f} s",
            f"{answer.cached.first:.2f} s",
            f"{answer.cold.first / answer.cached.first:.1f}x",
            f"{answer.cold.last:.2f} s",
            f"{answer.cached.last:.2f} s",
            f"{answer.loaded:,} of {answer.loadable:,}",
            "yes" if answer.equal else "NO",
        )
        for number, answer in enumerate(answers, 1)
    ]
    return "\n".join(describe.table(head, cells, left=len(head)))


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def readable() -> tuple[Path, str] | None:
    """Return the model's file and the text to ask about, or None after printing the reason."""
    gguf, text = demo_model.packaged(), demo_model.document()
    if gguf is None:
        click.echo(f"random weights, as there is no model here; for answers in text: {demo_model.INSTALL}")
        return None
    if text is None:
        click.echo("random weights, as kvcache-server is not installed with its license, the text to ask about")
        return None
    return gguf, text


@click.command(name="demo", help=__doc__, short_help="Let two vLLM engines on this machine share one cache.")
@click.option("--model", help="Answer random prompts with this model: a folder or a name on the hub.")
@click.option("--toy", is_flag=True, help="Answer random prompts with a small Llama with random weights.")
@click.option("--prompts", type=click.IntRange(1), help=f"Random prompts per engine.  [default: {PROMPTS}]")
@click.option(
    "--tokens",
    type=click.IntRange(1),
    help=f"Tokens per random prompt.  [default: {PROMPT_TOKENS}, or what the model can]",
)
@click.option("--tensor-parallel", type=click.IntRange(1), help="Ranks per engine, with random prompts.  [default: 1]")
@click.option("--size", help="Size of the daemon's region.  [default: what the prompts need]")
@click.option("--write-model", metavar="FOLDER", help="Only write the small random Llama there, for your own engine.")
def command(
    model: str | None,
    toy: bool,
    prompts: int | None,
    tokens: int | None,
    tensor_parallel: int | None,
    size: str | None,
    write_model: str | None,
) -> None:
    signals.exit_cleanly_when_told()
    if model and toy:
        raise click.UsageError("--model and --toy exclude each other")
    with tempfile.TemporaryDirectory(prefix="kvdemo-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        if write_model:
            write(write_model, folder)
            return
        demo = Demo(stack, folder, tensor_parallel or 1, size)
        random_prompts = model or toy or prompts or tokens or tensor_parallel
        found = None if random_prompts else readable()
        if found:
            answers = demo.ask(*found)
        else:
            rows = demo.share(model, prompts or PROMPTS, tokens)
    click.echo()
    if found:
        click.echo(answer_table(answers))
        equal = all(answer.equal for answer in answers)
        complete = all(answer.loaded >= answer.loadable for answer in answers)
    else:
        click.echo(table(rows))
        equal = all(row.equal for row in rows)
        complete = all(row.hits >= row.expected for row in rows)
    if not equal:
        raise Failed("tokens differ")
    if not complete:
        raise Failed("hits are missing")
