"""`kvcache-server record`: records live lookups as a trace for `kvcache-server replay`.

One line per request, in the format of Mooncake's traces: `timestamp` in ms since the first one, `input_length` and
`output_length` in tokens, `hash_ids` with one number per block in the order of the prompt. Equal numbers are equal
blocks of one namespace. They count from 0 in the order in which the blocks were first seen and reveal nothing about
their contents. `engine` is a number, too.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from typing import IO, Any

import click

from kvcache_proto import messages as m
from kvcache_server.admin_client import AdminClient
from kvcache_server.commands.options import endpoint_option

EVERY = 0.25  # seconds between two requests to the daemon
RECENT = 1 << 16  # requests whose repeated lookups are recognised


class Recorder:
    """Turns lookups into lines of a trace. Repeated lookups of a request are one line."""

    def __init__(self) -> None:
        self.lookups = self.blocks = self.hits = 0
        self._numbers: dict[tuple[int, int, bytes], int] = {}
        self._engines: dict[str, int] = {}
        self._recent: dict[tuple[str, str | bytes], None] = {}
        self._first: int | None = None

    def lines(self, lookups: list[m.LookupRecord]) -> Iterator[dict[str, Any]]:
        """Yield a line for each lookup of a new request that asked for blocks."""
        for seen in lookups:
            if not seen.hashes:
                continue
            # An engine names a waiting request only now and then: other lookups are recognised by their last hash.
            name, end = (seen.engine, seen.request), (seen.engine, seen.hashes[-1])
            if (name if seen.request else end) in self._recent:
                continue
            if seen.request:
                self._recent |= {name: None, end: None}
            if len(self._recent) > RECENT:
                self._recent = dict.fromkeys(list(self._recent)[RECENT // 2 :])
            self._first = seen.at_ms if self._first is None else self._first
            self.lookups += 1
            self.blocks += len(seen.hashes)
            self.hits += seen.hits
            yield {
                "timestamp": seen.at_ms - self._first,
                "input_length": seen.tokens or len(seen.hashes) * seen.block_tokens,
                "output_length": 0,
                "engine": self._engines.setdefault(seen.engine, len(self._engines)),
                "hash_ids": [self._number(seen, each) for each in seen.hashes],
            }

    def _number(self, seen: m.LookupRecord, block: bytes) -> int:
        return self._numbers.setdefault((seen.namespace, seen.group, block), len(self._numbers))


def record(admin: AdminClient, out: IO[str], seconds: float, stopped: Any = lambda: False) -> tuple[Recorder, int]:
    """Write the lookups of `seconds` (0: until `stopped`); return the recorder and the number of lost lookups."""
    recorder, lost, until = Recorder(), 0, time.monotonic() + seconds
    since = admin.ask(m.TraceLookups(0, b"")).next
    while True:
        ending = stopped() or (seconds and time.monotonic() >= until)
        more = True
        while more:
            watched = admin.ask(m.TraceLookups(0, b"", since))
            since, more, lost = watched.next, watched.more, lost + watched.lost
            for line in recorder.lines(watched.lookups):
                out.write(json.dumps(line) + "\n")
        out.flush()
        if ending:
            return recorder, lost
        pause = min(EVERY, max(0.0, until - time.monotonic())) if seconds else EVERY
        time.sleep(pause)  # the daemon buffers lookups until they are requested


@click.command(name="record", help=__doc__, short_help="Record live lookups as a trace for replay.")
@click.argument("out", type=click.File("w"))
@click.option("--seconds", default=0.0, metavar="N", help="How long to record.  [default: until Ctrl-C]")
@endpoint_option
def command(out: IO[str], seconds: float, endpoint: str) -> None:
    ends: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, frame: ends.append(signum))
    with AdminClient(endpoint, "record") as admin:
        recorder, lost = record(admin, out, seconds, lambda: bool(ends))
    share = f", {recorder.hits / recorder.blocks:.1%} of them hit" if recorder.blocks else ""
    click.echo(
        f"recorded {recorder.lookups:,} requests, {recorder.blocks:,} blocks{share}; {lost:,} lookups lost", err=True
    )
