"""`kvcache-server why`: explains in words why a request had no hit, or not for all of its blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import click

from kvcache_proto.text import escaped
from kvcache_proto.types import MAX_NAME
from kvcache_server.admin_client import AdminClient
from kvcache_server.commands.describe import json_text
from kvcache_server.commands.options import endpoint_option
from kvcache_server.miss_report import Answer, EmptyReason, Explanation, Remembered, Run, TierRun

# One line per cause; {engine}, {where}, {ages} and so on are filled in from the facts that come with it.
CAUSES = {
    "hit": "hit",
    # Found by the lookup itself.
    "pending": "being written{by} at the time: a request waits for that once, at most 50 ms",
    "quota": "cached, but withheld: the engine's leases had used up its pin_quota",
    "leases": "cached, but withheld: the session held as many leases as max_leases allows",
    "ranks_missing": "cached, but not offered: a rank of engine {own} was not attached and could not have loaded them",
    "no_suffix": "cached, but of no use: what layers with a window or a state need to continue there was not",
    "no_next_block": "cached, but computed again: what a drafter has of its last token depends on the next block",
    "unexamined": "not examined: one answer covers a limited number of blocks",
    # They were cached.
    "room": "evicted {ages} earlier, to make room for blocks that engine {engine} saved{where}{worth}",
    "own_ceiling": "evicted {ages} earlier: engine {engine} had reached its own num_cpu_blocks, and saved other "
    "blocks{worth}",
    "namespace_ceiling": "evicted {ages} earlier: the namespace had reached its ceiling, and engine {engine} saved "
    "other blocks{worth}",
    "dropped": "evicted {ages} earlier, before all others, because a request had said that they are not needed again; "
    "to make room for blocks that engine {engine} saved{where}",
    "passed": "evicted {ages} earlier, before others, because their prompts had gone on by two boundaries; to make "
    "room for blocks that engine {engine} saved{where}",
    "cleared": "cleared {ages} earlier by an operator ({engine})",
    "corrupt": "invalidated {ages} earlier: engine {engine} found that their bytes were not those that were stored",
    "different": "invalidated {ages} earlier: engine {engine} computed something else in a canary check",
    # They were never cached.
    "no_space": "not saved: {ages} earlier there was no space for engine {engine}, and nothing could be evicted",
    "not_worth_it": "not saved by engine {engine} {ages} earlier: no block was free, and they were worth less than "
    "each cached block that could have gone",
    "grace": "not saved: {ages} earlier nothing was evicted yet, while engines reconnected after a restart",
    "no_parent": "not saved by engine {engine} {ages} earlier: their parent block was not cached",
    "refused_own_ceiling": "not saved: {ages} earlier engine {engine} had reached num_cpu_blocks, nothing evictable",
    "refused_namespace_ceiling": "not saved by engine {engine}: {ages} earlier the namespace had reached its ceiling",
    "refused_write_quota": "not saved: {ages} earlier unsettled saves of engine {engine} had used up its write_quota",
    "writer_died": "not saved: {ages} earlier engine {engine}, or one of its ranks, died while it wrote them",
    "write_failed": "not saved: {ages} earlier engine {engine} failed to copy them",
    "not_started": "not saved: {ages} earlier engine {engine} gave them back unwritten",
    "orphaned": "not kept: {ages} earlier one of the blocks before them was lost",
    "save_prompt": "never saved: generated tokens, and engine {engine} saves only those of prompts (save: prompt)",
    "given_away": "not saved: {ages} earlier engine {engine} reused their device memory before the daemon answered",
    "not_compressed": "not saved: engine {engine} could not compress the first of them (compress)",
    "paused": "not saved: {ages} earlier engine {engine} had just been refused, and had stopped asking for a while",
    "min_hits": "not saved: too few requests of engine {engine} had asked for them (min_hits)",
    "drop": "not saved: the request said that they are used once (drop, or done)",
    "retain_quota": "not retained, although the request asked for it: engine {engine} had used up its retain_quota",
    "retain_count": "not retained, although the request asked for it: engine {engine} retains too many prompts",
    "weights": "not saved by engine {engine}: its weights changed during the request, {ages} earlier",
    # Nothing is known about them.
    "elsewhere": "cached in another namespace, {where_else}",
    "other_hashes": "not cached; blocks of this model in {where_else} have other hashes for the same tokens",
    "salted": "no prompt with this beginning was cached under this cache salt",
    "diverged": "from here on, the tokens differ from every cached prompt with the same beginning",
    "began_empty": "not stored since the daemon started empty: {began}",
    "new": "never stored: no cached prompt continues beyond this point",
}
NOTES = {
    "down": "the engine did not ask: the daemon was away or had been too slow (breaker open)",
    "deadline": "the daemon did not answer within deadline_ms; its late answer was discarded",
    "over_budget": "other lookups in the same step had used up the deadline",
    "slow": "its hits were not loaded: by what this engine has measured, computing them was faster (gate)",
    "load_failed": "loading its hits failed and it was computed instead; it is offered no hits again",
    "loads_fail": "three loads in a row had failed, so no hits were offered for a while",
    "lora": "which weights its LoRA adapter has is not known (see the engine's log): neither saved nor loaded",
    "lora_unread": "the files of its LoRA adapter were still being read: neither saved nor loaded",
    "multimodal": "it contains images or the like, whose names in the hashes may be anything: neither saved nor loaded",
    "prompt_embeds": "no hash tells its embeddings from tokens, or another dtype: neither saved nor loaded",
    "streaming": "its prompt grows while it runs (streaming input): neither saved nor loaded",
    "weights": "it started under other weights: nothing was loaded until it started again",
    "rank": "a rank of this engine takes no part in the cache: see the engine's log",
    "unaligned": "the engine had computed part of a block by itself",
    "by_request": "the request disabled the prefix cache (skip_reading_prefix_cache)",
    "canary": "its hits were computed nevertheless, to compare them with the cache (canary_every)",
    "not_wanted": "this engine does not load (kv_role)",
    "refused": "the daemon refused the lookup: see the engine's log",
    "came": "blocks that were being written or withheld were available after a short wait",
}
# A tier's report about blocks that were not in memory.
TIERS = {
    "off": "it was off: {why}",
    "asked": "it was being asked for them, and has not answered",
    "absent": "it does not have them",
    "not_written": "it does not have them, and cannot be written to: {why}",
    "not_asked": "it was not asked: too many lookups waited for its answer",
    "beyond": "it was not asked for these: it is asked for a limited number of blocks at a time, the first ones first",
    "coming": "it has them, and is bringing them",
    "starting": "it was starting, and could not be asked yet",
    "late": "it had them, but they came too late for this lookup: the last one {after} after it",
    "lost": "it had {found} blocks, but brought only {brought}: it could not read the others, or there was no room",
}
_ASKED = {"once": "once", "twice": "twice", "more": "more than twice"}
_OTHERS = {
    "room": "every other block that could go",
    "own_ceiling": "each other block of the engine",
    "namespace_ceiling": "each other block of the namespace",
}
_RETAINED = {"retain_quota", "retain_count"}  # notes of the daemon itself
BEGAN: dict[EmptyReason, str] = {
    "fresh": "serve --fresh discarded the previous cache",
    "not_kept": "keep is false, so nothing outlives a daemon",
    "first": "there was no previous daemon",
    "resized": "size or page_size had changed",
    "no_state": "the previous daemon's state file was missing",
    "distrusted": "the previous daemon's region could not be trusted and was put aside",
    "": "it found the previous daemon's cache",
}


@click.command(name="why")
@click.argument("request")
@endpoint_option
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
def command(request: str, endpoint: str, as_json: bool) -> None:
    """Explain why a request had few hits or none.

    REQUEST is the id in vLLM's answer, or a part of it that no other request's id contains.
    """
    if len(request) > MAX_NAME:
        raise click.BadParameter(f"at most {MAX_NAME} characters")
    with AdminClient(endpoint, "why") as admin:
        answer = admin.why(request)
    click.echo(json_text(answer) if as_json else describe(answer))
    if not answer.explained:
        raise SystemExit(1)


def describe(answer: Answer) -> str:
    memory = answer.remembered
    if answer.matched > 1:
        lines = [f"{answer.matched} requests have {answer.asked!r} in their ids:", *answer.matches]
    elif not answer.explained:
        back = _age(memory.lookups_since_s)
        lines = [
            f"nothing is known about {answer.asked!r}: all of its blocks were hits, or in the engine's own prefix",
            "cache; or it has no full block; or its engine does not name its requests; or it was too long ago: the",
            f"last {memory.lookups:,} lookups that missed something are remembered, {back} back.",
        ]
        if answer.latest:
            lines += ["the most recent ones:", *answer.latest]
    else:
        lines = [line for each in answer.explained for line in _explained(each, memory)]
        if (more := answer.engines - len(answer.explained)) > 0:
            lines.append(f"{more} other engines had a request with this id, too")
    lines.append("")
    lines.append(_memory(memory))
    return "\n".join(map(escaped, lines))


def _explained(told: Explanation, memory: Remembered) -> list[str]:
    head = f"request {told.request} of engine {told.engine}"
    if told.runs:
        length = f" for {told.tokens:,} tokens" if told.tokens else ""
        head += (
            f", {_age(told.age_s)} ago: {told.hits:,} hits of {told.blocks:,} blocks of "
            f"{told.block_tokens} tokens{length}, in namespace {told.namespace} ({told.model})"
        )
    lines = [head]
    width = max((len(_blocks(run)) for run in told.runs), default=0)
    lines += [f"  {_blocks(run).ljust(width)}  {_sentence(run, told, memory)}" for run in told.runs]
    for each in told.tiers:
        facts = {"why": each.why, "found": each.found, "brought": each.brought, "after": _age(each.after_s)}
        lines.append(f"  tier {each.tier}, {_blocks(each)}: {TIERS.get(each.cause, each.cause).format_map(facts)}")
    for kept in told.retained:
        lines.append(f"  retained: {kept.blocks:,} of {kept.wanted:,} blocks, for {_age(kept.ends_s)} from now on")
    for note in told.notes:
        saved = f" ({note.blocks:,} blocks{'' if note.cause in _RETAINED else ' not saved'})" if note.blocks else ""
        why = (CAUSES if note.blocks else NOTES).get(note.cause, note.cause)
        # An engine may name any cause, even one that needs facts which only the daemon has.
        why = why.format_map(defaultdict(lambda: "unknown", engine=told.engine, ages=_age(note.age_s), own=told.engine))
        by = "" if note.cause in _RETAINED else "reported by the engine "
        lines.append(f"  {by}{_age(note.age_s)} ago: {why}{saved}")
    return lines


def _blocks(run: Run | TierRun) -> str:
    return f"block {run.first}" if run.first == run.last else f"blocks {run.first}-{run.last}"


def _sentence(run: Run, told: Explanation, memory: Remembered) -> str:
    said = CAUSES.get(run.cause, run.cause).format(
        engine=run.engine or "?",
        own=told.engine,
        by=f" by engine {run.engine}" if run.engine else "",
        where=f" in namespace {run.namespace} ({run.model})" if run.namespace else "",
        where_else=f"{run.namespace} ({run.model})",
        ages=_ages(run.ages_s or ()),
        worth=_worth(run),
        began=BEGAN[memory.began_empty],
    )
    if run.fields:
        said += ": " + "; ".join(f"{field} is {here!r} here and {there!r} there" for field, here, there in run.fields)
    if now := run.cached_now:
        said += f" ({'cached' if now == run.last - run.first + 1 else f'{now:,} of them cached'} now)"
    return said


def _worth(run: Run) -> str:
    """Return the reason that these blocks were evicted rather than others."""
    if not run.asked:
        return ""
    others = _OTHERS[run.cause]
    reason = f"less recently than {others}" if run.by_age else f"and worth less than {others}"
    return f"; asked for {_ASKED[run.asked]}, last about {_ages(run.unused_s or ())} before, {reason}"


def _ages(seconds: Iterable[float]) -> str:
    return " to ".join(dict.fromkeys(map(_age, seconds)))


def _memory(memory: Remembered) -> str:
    return (
        f"remembered: {memory.lookups:,} lookups in the last {_age(memory.lookups_since_s)}; "
        f"{memory.departures:,} blocks that were evicted or not saved in the last "
        f"{_age(memory.departures_since_s)}. The daemon started {_age(memory.began_s)} ago: "
        f"{BEGAN[memory.began_empty]}."
    )


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
