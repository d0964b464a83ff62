"""The daemon's figures as text: the output of `status`, and the parts that `top` shows. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import msgspec

from kvcache_proto.sizes import format_size
from kvcache_proto.text import escaped
from kvcache_server.commands import sharing
from kvcache_server.status import Away, Daemon, Eviction, Hints, Pool, Session, Status, Tier

# Fields of Tier.
_LOST_BELOW = ("blocks_not_brought", "blocks_not_written", "looks_dropped", "writes_dropped", "writes_too_late")


def json_text(value: object) -> str:
    """Return a struct as JSON in ASCII: names in it come from clients, and may have control characters."""
    return json.dumps(msgspec.to_builtins(value), indent=2)


def describe(figures: Status) -> str:
    daemon, told = figures.daemon, figures.client_counts
    spaces = sorted(figures.namespaces, key=lambda space: -space.bytes)
    hits, asked = sum(space.hit_blocks for space in spaces), sum(space.requested_blocks for space in spaces)
    lines = [
        heading(daemon),
        f"pool        {occupied(figures.pool)}",
        f"            {blocks(figures.pool)}",
        f"hits        {ratio(hits, asked)} of {asked:,} blocks asked for, "
        f"{format_size(sum(space.hit_bytes for space in spaces))} found",
        # The devices' own caches had the rest.
        f"            {told.get('needed_blocks', 0):,} of them needed, {format_size(told.get('needed_bytes', 0))}",
        *evicting(figures.eviction),
        *regretted(figures),
        f"copies      {format_size(told.get('loaded_bytes', 0))} loaded, "
        f"{format_size(told.get('saved_bytes', 0))} saved",
        *kept(figures.hints),
        *below(daemon),
        "refusals    " + counts(figures.refusals),
        "errors      " + counts(daemon.errors | daemon.drops | daemon.handshakes_refused),
    ]
    if figures.grace:
        lines.append("grace       sessions of the previous daemon are reconnecting, and nothing is evicted meanwhile")
    lines.append("")
    lines += table(
        ("namespace", "model", "blocks", "size", "lookups", "hits", "asked", "ratio"),
        [
            (
                *(space.id, space.model, f"{space.blocks:,}", format_size(space.bytes)),
                *(f"{space.lookups:,}", f"{space.hit_blocks:,}", f"{space.requested_blocks:,}"),
                ratio(space.hit_blocks, space.requested_blocks),
            )
            for space in spaces
        ],
        left=2,
    )
    lines += [
        f"namespace {space.id} is compressed, {said}" for space in spaces if (said := space.identity.get("compression"))
    ]
    lines += sharing.within(sharing.spaces_of(figures))
    return "\n".join(map(escaped, [*lines, "", *sessions(figures.sessions), *away(figures.away)]))


def heading(daemon: Daemon) -> str:
    return f"kvcache-server {daemon.version}, pid {daemon.pid}, {daemon.endpoint}, up {duration(daemon.uptime_s)}"


def occupied(pool: Pool) -> str:
    share = pool.used_bytes / pool.bytes
    return f"{format_size(pool.used_bytes)} of {format_size(pool.bytes)} used ({share:.0%})"


def blocks(pool: Pool) -> str:
    """Return a text on the pool's content, and the part of it that cannot be evicted."""
    return (
        f"{pool.blocks:,} blocks, {pool.blocks_writing:,} being written, "
        f"{format_size(pool.pinned_bytes)} pinned, {pool.blocks_quarantined:,} blocks in quarantine"
        + (f", {format_size(pool.doubled_bytes)} also on devices" if pool.doubled_bytes else "")
    )


def evicting(eviction: Eviction) -> list[str]:
    """Return lines on how blocks are chosen for eviction, and on how often they had been requested."""
    chosen = "what is worth least goes first"
    if eviction.by_age:
        chosen = "the least recently used goes first: in the sample, that finds more than eviction by worth"
    if declined := eviction.declined_blocks:
        chosen += f"; blocks not stored, because they were worth less than each cached one: {declined:,}"
    if eviction.due_bytes:
        chosen += f"; {format_size(eviction.due_bytes)} that queued requests wait for go last"
    lines = [f"eviction    {chosen}"]
    for said, by_class in (
        ("hits on blocks that had been asked for", eviction.hit_blocks_by_class),
        ("evicted, after having been asked for", eviction.evicted_blocks_by_class),
    ):
        if by_class.once or by_class.twice or by_class.more:
            lines.append(
                f"            {said} once {by_class.once:,}, twice {by_class.twice:,}, more often {by_class.more:,}"
            )
    return lines


def regretted(figures: Status) -> list[str]:
    """Return lines on the evictions of blocks that were requested again; nothing without any."""
    lines, evicted, sample = [], sum(figures.evictions.values()), figures.hindsight
    if figures.evicted_early:
        early = f"{figures.evicted_early:,}, {ratio(figures.evicted_early, evicted)} of the evicted"
        lines.append(f"            evicted, and asked for within a minute: {early}")
    if asked := sample.requested_blocks:
        lines.append(
            f"            hits in a sample of the last {duration(sample.seconds)}: {ratio(sample.hit_blocks, asked)}; "
            f"a policy that knows the future: {ratio(sample.optimum_blocks, asked)}"
        )
    return lines


def below(daemon: Daemon) -> list[str]:
    """Return lines on the tiers; nothing if there are none."""
    lines = []
    for each in daemon.tiers:
        lost = {field: getattr(each, field) for field in _LOST_BELOW}
        lines += [
            f"tier        {each.name}: {tier_state(each)}; asked for {each.blocks_looked_up:,} blocks, "
            f"had {each.blocks_found:,}, brought {each.blocks_brought:,} ({format_size(each.bytes_brought)})",
            f"            {each.blocks_written:,} blocks written ({format_size(each.bytes_written)}), "
            f"{each.to_write_blocks:,} to write" + (f"; {counts(lost)}" if any(lost.values()) else ""),
        ]
    return lines + [f"tier        {name}: {state}" for name, state in absent_tiers(daemon).items()]


def tier_state(tier: Tier) -> str:
    """Return a text on whether an attached tier is used, with the reason if not."""
    if tier.off:
        return f"off: {tier.off}"
    refused = {"not written to": tier.writes_off, "wrong values stay": tier.removals_off}
    return ", ".join(["on", *(f"but {what}: {why}" for what, why in refused.items() if why)])


def absent_tiers(daemon: Daemon) -> dict[str, str]:
    """Return the states of the tiers that the daemon starts and that are not attached, by name."""
    there = {each.name for each in daemon.tiers}
    return {each.name: each.ended or "starting" for each in daemon.tier_processes if each.name not in there}


def kept(hints: Hints) -> list[str]:
    """Return lines on blocks retained by requests and pinned by operators; nothing if neither was requested."""
    if not (hints.retentions or hints.pins or hints.refused or hints.dropped_blocks):
        return []
    engines = ", ".join(f"{each.engine} {format_size(each.bytes)}" for each in hints.engines)
    return [
        f"retained    prompts: {hints.retentions:,}, {format_size(hints.retained_bytes)}"
        f" (each engine may retain {format_size(hints.quota_bytes)}){': ' if engines else ''}{engines}",
        f"            not retained: {counts(hints.refused)}; dropped {hints.dropped_blocks:,} blocks",
        f"            pins of operators: {len(hints.pins):,}, {format_size(hints.pinned_bytes)}"
        f" of {format_size(hints.pin_quota_bytes)} that they may pin",
    ]


def sessions(listed: Iterable[Session]) -> list[str]:
    """Return a table of the attached sessions, ordered by engine."""
    return table(
        ("session", "engine", "label", "age", "leases", "reservations"),
        [
            (
                *(str(session.id), session.engine, session.label, duration(session.age_s)),
                *(f"{session.leases:,}", f"{session.reservations:,}"),
            )
            for session in sorted(listed, key=lambda session: (session.engine, session.id))
        ],
        left=3,
    )


def away(listed: Iterable[Away]) -> list[str]:
    """Return an empty line and a table of the sessions that are away; nothing if none is."""
    rows = [(str(each.id), each.engine, f"{each.reservations:,}") for each in listed]
    return ["", *table(("away", "engine", "reservations"), rows, left=2)] if rows else []


def ratio(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def counts(named: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(named.items()) if count) or "none"


def duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return aligned lines; the first `left` columns are names, the rest figures."""
    if not rows:
        return [f"no {head[0]}s"]
    printable = [[_printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *printable, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *printable)
    ]


def _printable(text: str) -> str:
    """Clients choose the names: keep control characters from the terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)
