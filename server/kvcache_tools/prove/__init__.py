"""`kvcache-server prove MODEL`: whether this vLLM gives the same answers with the cache as without it.

A real engine answers prompts whose lengths lie around all boundaries, each by itself: while it saves them; then a new
engine, which loads all that is cached; then one without the connector, which computes them, and answers them once more
with hits of its own that end where those of the cache did. The last answer is what a hit has to equal: in 16-bit types,
computing a prompt in one piece has other last bits. If an answer differs from it, the engine is asked again several
times: if it has also given that answer, or if the differing token is its second one and its own answers vary by more
than the two differ in likelihood, the answer counts as `noise`.

Exit codes: 0 all answers are equal, and some depend on what was loaded; 1 an answer differs; 8 nothing is proved,
because the engine does not run, is declined, or loads nothing.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from kvcache_proto.errors import ConfigError, KVCacheError
from kvcache_proto.sizes import format_size, parse_size
from kvcache_server import signals
from kvcache_server.admin_client import AdminClient
from kvcache_server.commands import describe
from kvcache_server.status import Namespace
from kvcache_tools.daemon_process import Failed, region_dir, running_daemon
from kvcache_tools.demo_engine import EngineFacts, Generated
from kvcache_tools.engine_process import EngineProcess, engine_environment, transfer_config
from kvcache_tools.plan.host import GIB
from kvcache_tools.plan.workload import Needs, Workload, needs
from kvcache_tools.prove.cases import (
    ANSWER_TOKENS,
    Case,
    Draw,
    Sizes,
    fills,
    later_cases,
    lengths,
    loadable,
    saved_cases,
)
from kvcache_tools.prove.verdict import (
    HEAD,
    UNPROVEN,
    Answer,
    Result,
    differs,
    first_difference,
    row,
    summary,
    verdicts,
)

LONGEST = 2048  # tokens
REPEATS = 8  # of a prompt with other answers: with sparse attention, an engine itself gives several
SAVED_WITHIN = 60.0
GUESSED_BLOCK = 128  # tokens; the real size is known when the daemon needs a size
ALL_AT_LENGTH = 10  # prompts of the greatest length that have as many tokens as all prompts
DECLINED = re.compile(r"runs without the KV cache server: (.*)")


class Unproven(click.ClickException):
    """Nothing can be proved."""

    exit_code = UNPROVEN


class Engine:
    """A process with one engine after the other, which answer one prompt at a time."""

    def __init__(self, name: str, folder: Path, ranks: int) -> None:
        # On a CPU, vLLM would leave another core to an engine with a connector: other threads, other last bits.
        # Threads of torch that have drawn random weights do not survive a fork.
        environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        self.process = EngineProcess(name, folder, environment | engine_environment(folder, ranks))

    def start(self, options: Mapping[str, Any]) -> EngineFacts:
        return EngineFacts(*self.process.call("start", **options))

    def ask(self, prompt: list[int], tokens: int = ANSWER_TOKENS, keep: bool = False) -> Answer:
        """Answer a prompt; without `keep`, nothing of it is in the engine's own prefix cache."""
        if not keep and not self.process.call("forget"):
            raise Failed(f"engine {self.process.name} did not reset its prefix cache")
        found = Generated(*self.process.call("generate", prompts=[prompt], tokens=tokens, logprobs=True))
        second = [(token, logprob) for token, logprob in found.second[0]]
        return Answer(found.answers[0], found.logprobs[0], found.cached[0], second)


class Proof:
    """The engines of a proof, which end with `stack`."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, options: dict[str, Any], longest: int, quiet: bool):
        self._stack, self._folder, self._quiet = stack, folder, quiet
        self._given, self._longest = options, longest
        self._ranks = int(options.get("tensor_parallel_size", 1))
        self._begin = time.monotonic()
        self._admin: AdminClient
        self.facts: EngineFacts
        self.sizes: Sizes

    def say(self, text: str) -> None:
        click.echo(f"[{time.monotonic() - self._begin:4.0f} s] {text}", err=self._quiet)

    def run(self, model: str, random_weights: bool, size: str | None) -> list[Result]:
        """Return the answers of all engines. Raises Unproven if there are none, and Failed."""
        saving = self._engine("saving")
        config = saving.process.call("config_of", model=model)
        if isinstance(config, str):
            raise Failed(f"{model}: {config}")
        needed = self._needs(config, model, size)
        if random_weights:
            random_model = str(self._folder / "model")
            saving.process.call("randomize", model=model, directory=random_model)
            model = random_model
        flags = ("--size", str(needed.region), "--region-dir", region_dir(self._folder, needed.region))
        endpoint, _ = self._stack.enter_context(running_daemon(self._folder, *flags))
        self._admin = self._stack.enter_context(AdminClient(endpoint))
        self.say(f"region of {format_size(needed.region)}; starting an engine that only saves")
        self._stack.callback(saving.process.close)  # before the daemon ends
        plain, transfer = self._options(model, needed), self._transfer(endpoint)
        self.facts = saving.start(plain | {"kv_transfer_config": transfer | {"kv_role": "kv_producer"}})
        self._read_sizes(saving)
        draw = Draw(self.facts.vllm, self.facts.vocabulary)
        cases = saved_cases(self.sizes, self._longest, draw)
        saved: list[Answer | None] = [saving.ask(case.prompt) for case in cases]
        self._wait_until_saved(saving)
        saving.process.close()
        later = later_cases(cases, [each.tokens for each in saved if each is not None], self.sizes, draw)

        self.say("starting an engine that loads")
        loading = self._engine("loading")
        loading.start(plain | {"kv_transfer_config": transfer})
        loaded = [loading.ask(case.prompt) for case in cases]
        for case in later:
            loaded.append(loading.ask(case.prompt))
            self._wait_until_saved(loading)  # the next one may load some of it
        counts = {name: n for each in self._admin.status().sessions for name, n in each.counts.items() if n}
        loading.process.close()
        if not any(each.cached for each in loaded):
            self.say(f"nothing was loaded; the connector has counted: {json.dumps(counts)}")

        self.say("starting an engine without the connector")
        alone = self._engine("alone")
        alone.start(plain)
        saved += [None] * len(later)
        return [
            self._result(alone, case, one, two, draw)
            for case, one, two in zip([*cases, *later], saved, loaded, strict=True)
        ]

    def _engine(self, name: str) -> Engine:
        engine = Engine(name, self._folder, self._ranks)
        self._stack.callback(engine.process.close)
        return engine

    def _needs(self, config: Mapping[str, Any], name: str, size: str | None) -> Needs:
        work = Workload(ALL_AT_LENGTH, self._longest, GUESSED_BLOCK, self._longest, self._ranks)
        try:
            found = needs(config, name, work)
        except ConfigError as error:
            if size is None:
                raise Failed(f"the memory that {name} needs is not known ({error}): choose it with --size") from None
            found = Needs(0, 0, GIB)
        return found if size is None else found._replace(region=parse_size(size))

    def _options(self, model: str, needed: Needs) -> dict[str, Any]:
        """Return the engines' options, without the connector's."""
        usual = {
            "model": model,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": needed.cache,
            "max_model_len": self._longest + ANSWER_TOKENS,
            "max_num_batched_tokens": self._longest // 2,
            "max_num_seqs": 4,
            "seed": 0,
        }
        return usual | {name: value for name, value in self._given.items() if name != "kv_transfer_config"}

    def _transfer(self, endpoint: str) -> dict[str, Any]:
        """Return the connector's options: all that is cached is loaded, and compared by nobody else."""
        settings: dict[str, Any] = {"gate": "off", "canary_every": 0, "deadline_ms": 5000}
        settings["checkpoint_tokens"] = self._longest // 4
        given: dict[str, Any] = self._given.get("kv_transfer_config", {})
        settings |= given.get("kv_connector_extra_config", {}) | {"endpoint": endpoint}
        return transfer_config(endpoint) | given | {"kv_connector_extra_config": settings}

    def _read_sizes(self, engine: Engine) -> None:
        """Note the sizes that decide about lengths. Raises Unproven if the engine is declined."""
        space = self._attached(engine)
        has_windows = any(group.kind != "full" for group in space.groups)
        facts = self.facts
        checkpoint = self._longest // 4 if has_windows and facts.window else 0
        cached = max(space.block_tokens)
        self.sizes = Sizes(facts.block_tokens, cached, facts.batched_tokens, facts.window, checkpoint, facts.top_k)
        self.say(
            f"vLLM {facts.vllm}, {facts.dtype}; tokens: {facts.block_tokens} per block, {cached} per cached "
            f"block, {facts.batched_tokens} per step"
            + (f", {facts.window} per window" if facts.window else "")
            + (f", {facts.top_k} selected" if facts.top_k else "")
        )
        if beyond := lengths(self.sizes, self._longest)[1]:
            self.say(f"left out, as they exceed --longest: {', '.join(beyond)}")

    def _attached(self, engine: Engine) -> Namespace:
        until = time.monotonic() + SAVED_WITHIN
        while time.monotonic() < until:
            if spaces := self._admin.status().namespaces:
                return spaces[0]
            if found := DECLINED.search(engine.process.log.read_text(errors="replace")):
                raise Unproven(f"the connector declines this engine: {found[1]}")
            engine.ask([5, 6, 7], 1)  # some engines attach at the first request
        raise Failed("the engine does not use the daemon")

    def _wait_until_saved(self, engine: Engine) -> None:
        until = time.monotonic() + SAVED_WITHIN
        while (pool := self._admin.status().pool).reservations or pool.blocks_writing:
            if time.monotonic() > until:
                raise Failed(f"{pool.blocks_writing} blocks are not saved after {SAVED_WITHIN} s")
            engine.ask([5, 6, 7], 1)  # saves that were granted after the last step begin with the next one

    def _result(self, alone: Engine, case: Case, saved: Answer | None, loaded: Answer, draw: Draw) -> Result:
        """Let an engine without the connector answer what others have answered."""
        boundary = loaded.cached
        if boundary == len(case.prompt):  # an engine's own hits leave the last token
            boundary = (boundary - 1) // self.sizes.block * self.sizes.block
        computed, device, other = alone.ask(case.prompt), None, None
        more: list[Answer] = []
        if boundary:
            for fill in fills(case, boundary, draw):
                alone.ask(fill, ANSWER_TOKENS if fill == case.turn else 1)
                answer = alone.ask(case.prompt, keep=True)
                if device is None and answer.cached == boundary:
                    device = answer
                else:
                    more.append(answer)
                if device is not None and first_difference(device, loaded) is None:
                    break  # else, what other answers does the engine itself give?
            other = alone.ask(draw.others(case.prompt[:boundary]) + case.prompt[boundary:])
        most = max(loadable(case, self.sizes), loaded.cached)  # hits may end within a block, or at the end of all
        result = Result(case.name, len(case.prompt), most, saved, loaded, computed, device, other, more)
        for _ in range(REPEATS):
            if not differs(result):
                break
            result = replace(result, more=[*result.more, alone.ask(case.prompt), alone.ask(case.prompt, keep=True)])
        return result


def as_json(proof: Proof, model: str, results: list[Result], code: int, text: str) -> str:
    """Return the answers of all engines, too."""
    rows = []
    for each in results:
        saved, loaded = verdicts(each)
        found = {"verdict_saved": saved, "verdict_loaded": loaded, "depends": each.matters}
        rows.append(asdict(each) | found)
    facts = {"vllm": proof.facts.vllm, "dtype": proof.facts.dtype, "tokens": proof.sizes._asdict()}
    return json.dumps({"model": model, **facts, "exit_code": code, "summary": text, "prompts": rows}, indent=2)


def _options(context: click.Context, option: click.Parameter, given: str) -> dict[str, Any]:
    try:
        found = json.loads(given)
    except ValueError as error:
        raise click.BadParameter(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise click.BadParameter("not a JSON object")
    return found


@click.command(name="prove", help=__doc__, short_help="Compare a model's answers with and without the cache.")
@click.argument("model")
@click.option(
    "--engine-args",
    default="{}",
    metavar="JSON",
    callback=_options,
    help='Arguments of vllm.LLM, such as \'{"dtype": "float32", "tensor_parallel_size": 2}\'. Settings of the '
    "connector go into kv_transfer_config.",
)
@click.option("--random-weights", is_flag=True, help="Only read the model's config, and draw weights at random.")
@click.option(
    "--longest",
    type=click.IntRange(64),
    default=LONGEST,
    show_default=True,
    help="Tokens of the longest prompt; boundaries beyond it are left out. Steps have at most half, and windows are "
    "saved every quarter of it. 600 is quick.",
)
@click.option("--size", help="Size of the daemon's region.  [default: what the prompts need]")
@click.option("--json", "json_out", is_flag=True, help="Print all answers as JSON.")
def command(
    model: str, engine_args: dict[str, Any], random_weights: bool, longest: int, size: str | None, json_out: bool
) -> None:
    signals.exit_cleanly_when_told()
    with tempfile.TemporaryDirectory(prefix="kvprove-") as name, contextlib.ExitStack() as stack:
        proof = Proof(stack, Path(name), engine_args, longest, json_out)
        try:
            results = proof.run(model, random_weights, size)
        except (Failed, KVCacheError) as error:
            raise Unproven(str(error)) from None
    code, text = summary(results)
    if json_out:
        click.echo(as_json(proof, model, results, code, text))
    else:
        click.echo("\n" + "\n".join(describe.table(HEAD, [row(each) for each in results], left=2)))
        click.echo(f"\n{text}")
    raise SystemExit(code)
