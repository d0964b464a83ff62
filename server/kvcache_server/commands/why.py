"""`kvcache-server why`: what the daemon remembers of a request that had no hit, or a short one, in plain words."""

from __future__ import annotations

import json
from typing import Any

import click

from kvcache_proto import messages as m
from kvcache_proto.endpoint import default_endpoint
from kvcache_proto.text import escaped
from kvcache_proto.types import MAX_NAME
from kvcache_server.admin_client import AdminClient

# One line a cause; {engine}, {where} and {ages} are filled in from the facts that came with it.
CAUSES = {
    "hit": "hit",
    # Known of the lookup itself.
    "pending": "were being written{by} then: a request waits for that once, 50 ms at most",
    "quota": "cached, but kept back: the engine's leases held all that it may pin (pin_quota)",
    "leases": "cached, but kept back: the session held as many leases as it may (max_leases)",
    "ranks_missing": "cached, but not offered: a rank of engine {own} was not attached, and could not have loaded them",
    "unexamined": "not looked at: one answer covers so many blocks",
    # They were there.
    "room": "evicted {ages} before, to make room for what engine {engine} saved{where}",
    "recut": "evicted {ages} before: their part of the region was cut anew for blocks of another size, for what engine "
    "{engine} saved{where}",
    "own_ceiling": "evicted {ages} before: engine {engine} had reached its own num_cpu_blocks, and saved others",
    "namespace_ceiling": "evicted {ages} before: the namespace had reached its ceiling, where engine {engine} saved",
    "resize": "evicted {ages} before: an operator made the pool smaller",
    "cleared": "cleared {ages} before by an operator ({engine})",
    "corrupt": "distrusted {ages} before: their bytes were not those that were stored, found by engine {engine}",
    "different": "distrusted {ages} before: a canary of engine {engine} computed something else",
    # They never were.
    "no_space": "not saved: {ages} before there was no room for engine {engine}, and nothing might be evicted",
    "grace": "not saved: {ages} before nothing was evicted yet, for engines were coming back after a restart",
    "no_parent": "not saved by engine {engine}, {ages} before: the block above them was not there",
    "refused_own_ceiling": "not saved: {ages} before engine {engine} had reached num_cpu_blocks, and none might go",
    "refused_namespace_ceiling": "not saved by engine {engine}: {ages} before the namespace had reached its ceiling",
    "refused_write_quota": "not saved: {ages} before engine {engine} had as much unsettled as it may (write_quota)",
    "writer_died": "not saved: {ages} before engine {engine} died, or a rank of it, while it wrote them",
    "write_failed": "not saved: {ages} before engine {engine} could not copy them",
    "not_started": "not saved: {ages} before engine {engine} gave them back unwritten",
    "orphaned": "not kept: {ages} before a block above them was lost",
    "save_prompt": "never saved: generated tokens, and engine {engine} saves those of prompts alone (save: prompt)",
    "given_away": "not saved: {ages} before engine {engine} took their device memory for others, before the daemon "
    "answered",
    "paused": "not saved: engine {engine} had been refused shortly before, and asked no more, {ages} before",
    "weights": "not saved by engine {engine}: its weights had changed under the request, {ages} before",
    # Nothing is known of them here.
    "elsewhere": "cached in another namespace, {where_else}",
    "other_hashes": "not cached; what is cached of this model, {where_else}, has other hashes for the same tokens",
    "salted": "no prompt was cached with this beginning and this cache salt",
    "diverged": "the tokens differ here from all that was cached with the same beginning",
    "began_empty": "not stored since the daemon began empty: {began}",
    "new": "never stored: nothing was cached that goes on beyond here",
}
NOTES = {
    "down": "the daemon was away, or too slow before, so that the engine did not ask (breaker open)",
    "deadline": "the daemon did not answer within deadline_ms; what came later was of no use",
    "over_budget": "other lookups of the same step had used up the deadline",
    "slow": "its hits lay in memory that is not page-locked, and to compute them took less time than to load them",
    "load_failed": "a load of its hits failed, and it was computed: it is offered no hit again",
    "loads_fail": "loads had failed three times in a row, so that no hit was offered for a while",
    "lora": "its hashes name a LoRA adapter, not what is in it: neither saved nor loaded",
    "multimodal": "it has images or the like, whose names in the hashes may be anything: neither saved nor loaded",
    "prompt_embeds": "it came as embeddings, which no hash covers: neither saved nor loaded",
    "weights": "it began under other weights: nothing was loaded until it began again",
    "rank": "a rank of this engine takes no part in the cache: see the engine's log",
    "unaligned": "the engine had computed a part of a block by itself",
    "by_request": "it asked for no prefix cache (skip_reading_prefix_cache)",
    "canary": "its hits were computed all the same, to compare them with the cache (canary_every)",
    "not_wanted": "this engine loads nothing (kv_role)",
    "refused": "the daemon refused the lookup: see the engine's log",
    "came": "what was being written, or kept back, was there after a short wait",
}
BEGAN = {
    "fresh": "serve --fresh discarded what was there",
    "not_kept": "keep is false, so that nothing outlives a daemon",
    "first": "there was nothing of an earlier one",
    "resized": "size or extent_size differed from those of the last one",
    "no_state": "the last one's state file was missing",
    "distrusted": "what the last one left could not be trusted, and was put aside",
    "": "it found what the last one had",
}


@click.command(name="why")
@click.argument("request")
@click.option("--endpoint", metavar="ENDPOINT", help="Where the daemon is; else $KVCACHE_ENDPOINT, else the default.")
@click.option("--json", "as_json", is_flag=True, help="The facts, for programs.")
def command(request: str, endpoint: str | None, as_json: bool) -> None:
    """Say why REQUEST had no hit, or not for all of it.

    REQUEST is vLLM's id of it, as its answer has it, or a part that no other one has.
    """
    if len(request) > MAX_NAME:
        raise click.BadParameter(f"at most {MAX_NAME} characters")
    with AdminClient(endpoint or default_endpoint(), "why") as admin:
        answer = admin.ask(m.Why(0, b"", request)).answer
    click.echo(json.dumps(answer, indent=2) if as_json else describe(answer))
    if not answer["explained"]:
        raise SystemExit(1)


def describe(answer: dict[str, Any]) -> str:
    """Return the answer for people."""
    memory = answer["remembered"]
    if answer["matched"] > 1:
        lines = [f"{answer['matched']} requests have {answer['asked']!r} in their ids:", *answer["matches"]]
    elif not answer["explained"]:
        back = _age(memory["lookups_since_s"])
        lines = [
            f"nothing is remembered of {answer['asked']!r}: all of it was hit, or in the engine's own prefix cache;",
            "or it has no full block; or its engine does not name its requests; or it is forgotten: known are the last",
            f"{memory['lookups']:,} lookups that missed something, {back} back.",
        ]
        if answer["latest"]:
            lines += ["the latest ones:", *answer["latest"]]
    else:
        lines = [line for each in answer["explained"] for line in _explained(each, memory)]
        if (more := answer["engines"] - len(answer["explained"])) > 0:
            lines.append(f"{more} other engines had a request of this name, too")
    lines.append("")
    lines.append(_memory(memory))
    return "\n".join(map(escaped, lines))


def _explained(told: dict[str, Any], memory: dict[str, Any]) -> list[str]:
    head = f"request {told['request']} of engine {told['engine']}"
    if told["runs"]:
        length = f" for {told['tokens']:,} tokens" if told["tokens"] else ""
        head += (
            f", {_age(told['age_s'])} ago: {told['hits']:,} hits of {told['blocks']:,} blocks of "
            f"{told['block_tokens']} tokens{length}, in namespace {told['namespace']} ({told['model']})"
        )
    lines = [head]
    width = max((len(_blocks(run)) for run in told["runs"]), default=0)
    lines += [f"  {_blocks(run).ljust(width)}  {_sentence(run, told, memory)}" for run in told["runs"]]
    for note in told["notes"]:
        saved = f" ({note['blocks']:,} blocks not saved)" if note["blocks"] else ""
        why = CAUSES.get(note["cause"], note["cause"]) if note["blocks"] else NOTES.get(note["cause"], note["cause"])
        why = why.format(engine=told["engine"], ages=_age(note["age_s"]), own=told["engine"])
        lines.append(f"  told by the engine {_age(note['age_s'])} ago: {why}{saved}")
    return lines


def _blocks(run: dict[str, Any]) -> str:
    return f"block {run['first']}" if run["first"] == run["last"] else f"blocks {run['first']}-{run['last']}"


def _sentence(run: dict[str, Any], told: dict[str, Any], memory: dict[str, Any]) -> str:
    ages = " to ".join(dict.fromkeys(_age(each) for each in run.get("ages_s", ())))
    said: str = CAUSES.get(run["cause"], run["cause"]).format(
        engine=run.get("engine", "?"),
        own=told["engine"],
        by=f" by engine {run['engine']}" if "engine" in run else "",
        where=f" in namespace {run['namespace']} ({run['model']})" if "namespace" in run else "",
        where_else=f"{run.get('namespace', '')} ({run.get('model', '')})",
        ages=ages,
        began=BEGAN.get(memory["began_empty"], memory["began_empty"]),
    )
    if "fields" in run:
        said += ": " + "; ".join(
            f"{field} is {here!r} here and {there!r} there" for field, here, there in run["fields"]
        )
    now = run.get("cached_now", 0)
    if now:
        said += f" ({'cached' if now == run['last'] - run['first'] + 1 else f'{now:,} of them cached'} now)"
    return said


def _memory(memory: dict[str, Any]) -> str:
    lookups, departures = (
        f"{memory['lookups']:,} lookups",
        f"{memory['departures']:,} blocks that left or were not saved",
    )
    return (
        f"remembered: {lookups}, {_age(memory['lookups_since_s'])} back; {departures}, "
        f"{_age(memory['departures_since_s'])} back. The daemon began {_age(memory['began_s'])} ago: "
        f"{BEGAN.get(memory['began_empty'], memory['began_empty'])}."
    )


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
