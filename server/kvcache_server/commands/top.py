"""`kvcache-server top`: the daemon's activity, once per second. It uses messages, so it works without HTTP.

A frame is computed from two reports. Each is written over the last one in a single write, so that nothing flickers even
over a slow line. If the output is not a terminal, frames follow one another.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Generator, Iterator
from functools import partial
from typing import NamedTuple, TextIO

import click

from kvcache_proto.errors import BadToken, KVCacheError, Unavailable
from kvcache_proto.sizes import format_size
from kvcache_proto.text import escaped
from kvcache_proto.types import Refusal
from kvcache_server.admin_client import AdminClient
from kvcache_server.commands import describe
from kvcache_server.commands.options import endpoint_option
from kvcache_server.core.limits import OPERATOR
from kvcache_server.status import Counts, Status

BAR = 40
_NOT_NEEDED = {Refusal.PRESENT.name.lower(), Refusal.IN_FLIGHT.name.lower()}


class Line(NamedTuple):
    """One line of a frame."""

    text: str
    bold: bool = False

    @property
    def shown(self) -> str:
        """The text, with control characters escaped: names in it come from clients."""
        return escaped(self.text)


class Sample(NamedTuple):
    """One report of the daemon, and the time of its arrival."""

    figures: Status
    at: float


def frame(before: Sample, after: Sample) -> list[Line]:
    """Return the frame for `after`, with rates since `before`, which is of the same daemon."""
    figures, pool = after.figures, after.figures.pool
    filled = round(BAR * pool.used_bytes / pool.bytes)
    return [
        Line(describe.heading(figures.daemon), True),
        Line(f"pool  [{'#' * filled:.<{BAR}}] {describe.occupied(pool)}"),
        Line(f"      {describe.blocks(pool)}" + ("; in grace: nothing is evicted" if figures.grace else "")),
        Line(""),
        *_traffic(before, after),
        Line(""),
        *_tiers(before, after),
        *_headed(_namespaces(before, after)),
        Line(""),
        *_headed(_sessions(figures)),
        *map(Line, describe.away(figures.away)),
    ]


def _headed(table: list[str]) -> list[Line]:
    return [Line(text, bold=not at) for at, text in enumerate(table)]


def _traffic(before: Sample, after: Sample) -> list[Line]:
    seconds = max(after.at - before.at, 1e-9)

    gained = partial(_gain, before.figures.counters, after.figures.counters)
    told = partial(_gain, before.figures.client_counts, after.figures.client_counts)

    def row(
        name: str, blocks: tuple[float, float] | None, size: tuple[float, float] | None, more: str = ""
    ) -> tuple[str, ...]:
        counts = (f"{blocks[0] / seconds:,.0f}", f"{blocks[1]:,}") if blocks else ("", "")
        sizes = (f"{format_size(size[0] / seconds)}/s", format_size(size[1])) if size else ("", "")
        return name, counts[0], sizes[0], counts[1], sizes[1], more

    asked, found = gained("blocks_requested"), gained("blocks_hit")
    earlier, refusals = (
        {reason: count for reason, count in each.figures.refusals.items() if reason not in _NOT_NEEDED}
        for each in (before, after)
    )
    refused = sum(refusals.values())
    rows = [
        row("asked for", asked, None),
        row("found", found, _bytes(before, after, "hit_bytes")),
        row("needed", told("needed_blocks"), told("needed_bytes")),
        row("loaded", None, told("loaded_bytes")),  # counted by ranks, which know only bytes
        row("saved", gained("blocks_committed"), _bytes(before, after, "saved_bytes")),
        row("evicted", gained("blocks_evicted"), None),
        row("refused", (refused - sum(earlier.values()), refused), None, describe.counts(refusals) if refused else ""),
    ]
    hits = f"hits  now {describe.ratio(found[0], asked[0])}, overall {describe.ratio(found[1], asked[1])}"
    head = ("blocks", "per second", "", "total", "", "")
    return [Line(hits, True), *_headed(describe.table(head, rows, left=1))]


def _tiers(before: Sample, after: Sample) -> list[Line]:
    """Return a table of the tiers and an empty line; nothing if there are none."""
    seconds = max(after.at - before.at, 1e-9)
    earlier = {each.name: each for each in before.figures.daemon.tiers}
    rows, states = [], []
    for tier in after.figures.daemon.tiers:
        # A tier that has just come back continues its former counts: this is no rate.
        last = earlier.get(tier.name, tier)
        row = [
            tier.name,
            describe.ratio(tier.blocks_found - last.blocks_found, tier.blocks_looked_up - last.blocks_looked_up),
            describe.ratio(tier.blocks_found, tier.blocks_looked_up),
        ]
        for now, then in ((tier.bytes_brought, last.bytes_brought), (tier.bytes_written, last.bytes_written)):
            row += [f"{format_size((now - then) / seconds)}/s", format_size(now)]
        rows.append([*row, format_size(tier.to_bring_bytes), f"{tier.to_write_blocks:,}"])
        states.append(describe.tier_state(tier))
    for name, state in describe.absent_tiers(after.figures.daemon).items():
        rows.append([name, *[""] * 8])
        states.append(state)
    if not rows:
        return []
    head = ("tier", "had now", "overall", "read", "", "written", "", "to read", "blocks to write")
    table = describe.table(head, rows, left=1)
    return [*_headed([table[0], *map("  ".join, zip(table[1:], states, strict=True))]), Line("")]


def _gain(before: Counts, after: Counts, name: str) -> tuple[int, int]:
    """Return the increase of a count since `before`, and the count."""
    total = after.get(name, 0)
    return total - before.get(name, 0), total


def _bytes(before: Sample, after: Sample, field: str) -> tuple[float, float]:
    """Return a sum of all namespaces: the increase since `before`, and the total."""
    now, earlier = ({space.id: getattr(space, field) for space in each.figures.namespaces} for each in (after, before))
    return sum(size - earlier.get(name, 0) for name, size in now.items()), sum(now.values())


def _namespaces(before: Sample, after: Sample) -> list[str]:
    earlier = {space.id: space for space in before.figures.namespaces}
    rows = []
    for space in sorted(after.figures.namespaces, key=lambda space: -space.bytes):
        last = earlier.get(space.id)
        hits, asked = (last.hit_blocks, last.requested_blocks) if last else (0, 0)
        rows.append(
            (
                *(space.id, space.model, f"{space.blocks:,}", format_size(space.bytes)),
                describe.ratio(space.hit_blocks - hits, space.requested_blocks - asked),
                describe.ratio(space.hit_blocks, space.requested_blocks),
            )
        )
    return describe.table(("namespace", "model", "blocks", "size", "hits now", "overall"), rows, left=2)


def _sessions(figures: Status) -> list[str]:
    engines = [session for session in figures.sessions if session.engine != OPERATOR]
    others = len(figures.sessions) - len(engines)
    return [*describe.sessions(engines), *([f"and {others} of operators"] if others else [])]


# The terminal.


class Screen:
    """Shows frames: in place on a terminal, one after the other elsewhere."""

    def __init__(self, out: TextIO, is_terminal: bool) -> None:
        self._out, self.is_terminal = out, is_terminal

    def show(self, lines: list[Line]) -> None:
        """Write one frame, cut to the terminal, in a single write, so that half a frame is never shown."""
        if not self.is_terminal:
            self._out.write("\n".join(line.shown for line in lines) + "\n")
            self._out.flush()
            return
        columns, rows = os.get_terminal_size(self._out.fileno())
        columns -= 1  # at the last column, some terminals erase the text just written
        if len(lines) > rows:
            lines = [*lines[: rows - 1], Line(f"and {len(lines) - rows + 1} more lines: enlarge the window")]
        shown = [f"\x1b[1m{line.shown[:columns]}\x1b[m" if line.bold else line.shown[:columns] for line in lines]
        self._out.write("\x1b[H" + "\x1b[K\n".join(shown) + "\x1b[K\x1b[J")
        self._out.flush()


@contextlib.contextmanager
def _full_screen(screen: Screen) -> Iterator[None]:
    """Switch to the alternate screen, without cursor or line buffering, and restore everything afterwards."""
    if not screen.is_terminal:
        yield
        return
    keys = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = termios.tcgetattr(keys) if keys is not None else None
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(0))
    try:
        if keys is not None:
            tty.setcbreak(keys)
        sys.stdout.write("\x1b[?1049h\x1b[?25l")
        yield
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
        if keys is not None and before is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _quits(seconds: float) -> bool:
    """Wait for `seconds` or until q is pressed; return whether it was."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(left)  # until the next frame: there is no key to wait for
        elif select.select([sys.stdin], [], [], left)[0] and b"q" in os.read(sys.stdin.fileno(), 64).lower():
            return True
    return False


def samples(endpoint: str) -> Generator[Sample | KVCacheError, None, None]:
    """Yield a report, or the error, for each `next`; reconnect after a restart of the daemon."""
    admin: AdminClient | None = None
    try:
        while True:
            try:
                admin = admin or AdminClient(endpoint, "top")
                yield Sample(admin.status(), time.monotonic())
            except (Unavailable, BadToken) as error:  # BadToken: a new daemon, which does not know this session
                if admin is not None:
                    admin.close()
                    admin = None
                yield error
    finally:
        if admin is not None:
            admin.close()


@click.command(name="top")
@endpoint_option
@click.option(
    "--interval", default=1.0, show_default=True, type=click.FloatRange(0.1, 3600), help="Seconds between frames."
)
@click.option("--once", is_flag=True, help="Print one frame, after one interval, and exit.")
def command(endpoint: str, interval: float, once: bool) -> None:
    """Show live figures of the daemon; q quits."""
    screen = Screen(sys.stdout, sys.stdout.isatty() and not once)
    reports = samples(endpoint)
    with contextlib.closing(reports), contextlib.suppress(KeyboardInterrupt):
        first = next(reports)
        if isinstance(first, KVCacheError):
            raise first  # there is nothing to wait for yet
        with _full_screen(screen):
            if not once:
                screen.show(frame(first, first))
            last: Sample | None = first
            while not _quits(interval):
                now = next(reports)
                if isinstance(now, KVCacheError):
                    screen.show([Line(f"{now}: waiting for a daemon", True)])
                    last = None
                    continue
                screen.show(frame(last or now, now))
                last = now
                if once:
                    return
