"""The state that the saves, loads and checks of a rank share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvcache_client.address_ranges import Runs
from kvcache_client.devices import Device, Job, Memory
from kvcache_client.session.counters import Counters
from kvcache_client.session.namespace import Namespace
from kvcache_client.session.session import Session
from kvcache_client.worker.kv_layout import KVLayout
from kvcache_client.worker.places import Piece
from kvcache_client.worker.verification import Verifier


class Rank:
    def __init__(self, session: Session, number: int, layout: KVLayout) -> None:
        self.session, self.number, self.layout = session, number, layout
        self.counts = Counters()
        self.verifier = Verifier(layout.reads, layout.writes, self.counts)
        self.device: Device | None = None  # copies its blocks, once its KV tensors are known
        self.namespace: Namespace | None = None  # that it has joined
        self.epoch = 0  # counts changes of the weights
        self.abandoned = False  # its blocks are given to other requests without a fence: reads may be wrong

    def check_read(self, done: Job) -> None:
        """Fail a job that may have read other requests' writes."""
        if self.abandoned and not done.error:
            done.error = "its blocks may have been overwritten"

    def count_copy(self, size: str, time: str, copied: int, done: Job) -> None:
        """Count the bytes that a job has `copied`, and its microseconds, by these names."""
        self.counts.add(size, copied)
        self.counts.add(time, round(done.seconds * 1e6))

    def amount(self, slots: float, seconds: float, request: str) -> str:
        """Describe a copy for the log."""
        size = slots * self.layout.places[0].bytes
        tokens = slots * self.layout.spec.groups[0].block_tokens
        return (
            f"{slots:,.0f} blocks ({tokens:,.0f} tokens), {size / (1 << 20):.1f} MiB, "
            f"{size / max(seconds, 1e-9) / 1e9:.1f} GB/s, request {request}, engine {self.session.engine}"
        )


def jobs_of(
    region: Memory,
    runs: Runs | None,
    pieces: Sequence[Piece],
    ended: Callable[[Job], None],
    sections: Sequence[int] = (0,),
) -> list[Job]:
    """Return a copy for each section of each piece, section by section.

    `ended` gets the last one once all have ended, with their joint result.
    """
    if len(pieces) == len(sections) == 1:
        (piece,) = pieces
        return [Job(region, piece.blocks, piece.offsets, ended, runs, layout=piece.layout, section=sections[0])]
    lock, done = threading.Lock(), []

    def ended_one(job: Job) -> None:
        with lock:
            done.append(job)
            if len(done) < len(pieces) * len(sections):
                return
        job.error = next((each.error for each in done if each.error), "")
        job.cancelled = all(each.cancelled for each in done)
        job.direct = all(each.direct for each in done)
        job.seconds = sum(each.seconds for each in done)
        ended(job)

    return [
        Job(region, piece.blocks, piece.offsets, ended_one, runs, layout=piece.layout, section=section)
        for section in sections
        for piece in pieces
    ]


def copy_pieces(
    copy: Callable[[Job], None],
    region: Memory,
    runs: Runs | None,
    pieces: Sequence[Piece],
    ended: Callable[[Job], None],
) -> None:
    """Start a copy for each piece; `ended` is as for `jobs_of`."""
    for job in jobs_of(region, runs, pieces, ended):
        copy(job)
