"""`kvcache-server demo`: a daemon and two vLLM engines on this machine; what one engine computes, the other loads."""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
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
from kvcache_tools.daemon_process import Failed, region_dir, running_daemon
from kvcache_tools.demo_engine import Encoded, EngineFacts, Generated
from kvcache_tools.engine_process import EngineProcess, engine_environment, transfer_config
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
VISIBLE_WITHIN = 30.0
LIBRARY_BYTES = 3 * GIB // 2  # of an engine's rank, besides weights and cache


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


def sized(config: Mapping[str, Any], name: str, work: Workload, size: str | None) -> Needs:
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


class Demo:
    """A daemon and two engines, A and B, which end with `stack`."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, ranks: int = 1, size: str | None = None) -> None:
        self._stack = stack
        self._folder = folder
        self._ranks = ranks
        self._size = size
        self._begin = time.monotonic()
        self._engines: list[EngineProcess] = []
        self._admin: AdminClient
        self._block_tokens = self._vocabulary = 0

    def say(self, text: str) -> None:
        click.echo(f"[{time.monotonic() - self._begin:4.0f} s] {text}")

    def share(self, model: str | None = None, prompts: int = PROMPTS, tokens: int | None = None) -> list[Row]:
        """Let each engine answer `prompts` of random tokens, and then the other engine the same ones."""
        first, second = self._start_processes(offline=model is None)
        config: Mapping[str, Any] = LLAMA | {"model_type": "llama"}
        name = "a small random Llama"
        if model is not None:
            config, name = self._config(model), model
        longest = config.get("max_position_embeddings") or PROMPT_TOKENS + ANSWER_TOKENS
        tokens = tokens or min(PROMPT_TOKENS, longest - ANSWER_TOKENS)
        work = Workload(2 * prompts + 2, tokens + ANSWER_TOKENS, BLOCK_TOKENS, BATCHED_TOKENS, self._ranks)
        needed = self._check(config, name, work)
        endpoint = self._start_daemon(needed.region)
        if model is None:
            model = str(self._folder / "random-llama")
            made = first.call("make_model", directory=model, config=LLAMA)
            self.say(f"made a Llama with {made / 1e6:.0f} million random weights")
        self._start_engines(model, endpoint, work.tokens, needed)
        return [self._share(*pair, prompts, tokens) for pair in ((first, second), (second, first))]

    def ask(self, gguf: Path, text: str) -> list[Answer]:
        """Let engine A answer questions about `text` without a cache, and engine B from the blocks that A computed
        first."""
        first, _ = self._start_processes(offline=True)
        model = str(self._model(gguf))
        asked = Encoded(*first.call("encode", model=model, messages=demo_model.messages(text)))
        longest = max(map(len, asked.prompts)) + SENTENCE_TOKENS
        work = Workload(len(asked.prompts) + 2, longest, BLOCK_TOKENS, BATCHED_TOKENS)
        needed = self._check(self._config(model), demo_model.NAME, work)
        self._start_engines(model, self._start_daemon(needed.region), longest, needed)
        return [self._ask(number, question, model, asked) for number, question in enumerate(demo_model.QUESTIONS)]

    # Preparing.

    def _model(self, gguf: Path) -> Path:
        def convert(folder: Path) -> None:
            self.say(f"converting {demo_model.NAME} for vLLM, only once")
            self._engines[0].call("convert", gguf=str(gguf), directory=str(folder))

        try:
            model = demo_model.converted(demo_model.cache_folder(), convert)
        except OSError as error:  # no space, or a home that cannot be written
            self.say(f"{error.filename or 'the cache folder'}: {error.strerror}: the converted model is not kept")
            model = self._folder / "model"
            convert(model)
        self.say(f"the model is {demo_model.NAME}, in {model}")
        return model

    def _start_processes(self, offline: bool) -> list[EngineProcess]:
        """Start two processes, in which engines are started later."""
        environment = engine_environment(self._folder, self._ranks)
        if offline:
            environment |= {"HF_HUB_OFFLINE": "1"}
        for name in "AB":
            self._engines.append(EngineProcess(name, self._folder, environment))
            self._stack.callback(self._engines[-1].close)
        return self._engines

    def _config(self, model: str) -> Mapping[str, Any]:
        config: Mapping[str, Any] | str = self._engines[0].call("config_of", model=model)
        if isinstance(config, str):
            raise Failed(f"--model {model}: {config}")
        return config

    def _check(self, config: Mapping[str, Any], name: str, work: Workload) -> Needs:
        """Print the needs of `work`. Raises Failed if the host has less."""
        needed = sized(config, name, work, self._size)
        each = needed.weights + self._ranks * (needed.cache + LIBRARY_BYTES)
        total, available = needed.region + 2 * each, available_memory()
        self.say(
            f"{name} in float32 needs about {format_size(total)} of memory: {format_size(needed.region)} for the "
            f"shared region, {format_size(each)} for each of two engines"
        )
        if total > available:
            raise Failed(f"only {format_size(available)} of memory are available: choose a smaller model or --tokens")
        return needed

    def _start_daemon(self, size: int) -> str:
        flags = ("--size", str(size), "--region-dir", region_dir(self._folder, size))
        endpoint, _ = self._stack.enter_context(running_daemon(self._folder, *flags))
        self.say(f"daemon at {endpoint}, region of {format_size(size)}")
        self._admin = self._stack.enter_context(AdminClient(endpoint))
        return endpoint

    def _start_engines(self, model: str, endpoint: str, tokens: int, needed: Needs) -> None:
        for engine in self._engines:  # they end before the daemon, which has their last saves
            self._stack.callback(engine.close)
        self.say(f"starting two vLLM engines, A and B (logs are in {self._folder})")
        for engine in self._engines:
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
                kv_transfer_config=transfer_config(endpoint),
            )
        for engine in self._engines:
            facts = EngineFacts(*engine.answer())
            self.say(f"engine {engine.name} is up")
        self._vocabulary, self._block_tokens = facts.vocabulary, facts.block_tokens
        for engine in self._engines:  # keep the runtime's first-time costs out of the measurement
            warm_up = self._random_prompts(f"warm-up {engine.name}", 1, min(WARM_UP_TOKENS, tokens - 2))
            engine.call("generate", prompts=warm_up, tokens=2)

    def _random_prompts(self, seed: str, count: int, tokens: int) -> list[list[int]]:
        draw = random.Random(seed)
        return [[draw.randrange(self._vocabulary) for _ in range(tokens)] for _ in range(count)]

    # Measuring.

    def _ask(self, number: int, question: str, model: str, asked: Encoded) -> Answer:
        """Ask both engines; B only ever loads the blocks that A computes for the first question."""
        first, second = self._engines
        prompt, limits = asked.prompts[number], {"tokens": SENTENCE_TOKENS, "stop": asked.stop}
        before = self._total("blocks")
        # Later questions begin with the same text: with a salt, A finds no blocks of it, neither shared ones nor its
        # own.
        salt = f"question {number}" if number else ""
        cold = Generated(*first.call("generate", prompts=[prompt], salt=salt, **limits))
        if number == 0:
            self._wait_until_visible(before + len(prompt) // self._block_tokens)
        else:
            _forget(second)  # B would not load blocks that it has itself
        hits = self._total("hit_blocks")
        cached = Generated(*second.call("generate", prompts=[prompt], **limits))
        loaded = self._total("hit_blocks") - hits
        if not (cold.first[0] and cached.first[0]):
            raise Failed("these engines do not report when an answer begins")
        seen = len(os.path.commonprefix([prompt, asked.prompts[0]])) if number else len(prompt) - 1
        (text,) = first.call("decode", model=model, answers=cached.answers)
        answer = Answer(
            question,
            text.strip(),
            Seconds(cold.first[0], cold.seconds[0]),
            Seconds(cached.first[0], cached.seconds[0]),
            loaded * self._block_tokens,
            seen // self._block_tokens * self._block_tokens,
            cold.answers == cached.answers,
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

    def _share(self, first: EngineProcess, second: EngineProcess, count: int, tokens: int) -> Row:
        prompts = self._random_prompts(f"prompts of {first.name}", count, tokens)
        whole = count * (tokens // self._block_tokens)
        loadable = count * ((tokens - 1) // self._block_tokens)
        before = self._total("blocks")
        cold = self._pass(first, prompts, "cold")
        visible_after = self._wait_until_visible(before + whole)
        self.say(f"  {whole} blocks visible to all engines {visible_after:.2f} s after the last answer")
        hits = self._total("hit_blocks")
        elsewhere = self._pass(second, prompts, "which has not seen them before")
        _forget(first)
        again = self._pass(first, prompts, "after reset_prefix_cache")
        hits = self._total("hit_blocks") - hits
        return Row(first.name, second.name, prompts, cold, again, elsewhere, hits, 2 * loadable)

    def _pass(self, engine: EngineProcess, prompts: list[list[int]], how: str) -> Pass:
        answer = Generated(*engine.call("generate", prompts=prompts, tokens=ANSWER_TOKENS))
        seconds = statistics.median(answer.seconds)
        self.say(f"engine {engine.name}, {how}: {seconds:.2f} s per prompt of {len(prompts[0]):,} tokens")
        return Pass(answer.answers, seconds)

    def _wait_until_visible(self, blocks: int) -> float:
        """Return the seconds until there are that many blocks. Raises Failed after VISIBLE_WITHIN."""
        begin = time.monotonic()
        while (visible := self._total("blocks")) < blocks:
            if time.monotonic() - begin > VISIBLE_WITHIN:
                raise Failed(f"{visible} of {blocks} blocks are visible after {VISIBLE_WITHIN} s")
            time.sleep(0.01)  # the daemon does not announce new blocks: poll
        return time.monotonic() - begin

    def _total(self, figure: str) -> int:
        """Return a figure of all namespaces together."""
        return sum(getattr(namespace, figure) for namespace in self._admin.status().namespaces)


def _forget(engine: EngineProcess) -> None:
    if not engine.call("forget"):
        raise Failed(f"engine {engine.name} did not reset its prefix cache")


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
    click.echo(f"wrote a Llama with {made / 1e6:.0f} million random weights to {directory}")


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
        *("question", "TTFT cold", "TTFT cached", "speed-up", "end cold", "end cached"),
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
