"""Pure: the loads and saves of one step, from the scheduler to every rank, and the ranks' reports.

A plan is plain data. Ranks carry it out and decide nothing. Each plan is carried out once, however often and in
whatever order the engine presents it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvcache_proto.types import REF_BYTES, NamespaceSpec

SHIPPED = 1024  # saves that are remembered, because ranks may yet report what became of them


class LoadJob(msgspec.Struct, frozen=True, array_like=True):
    """Fill device blocks from slots. Each rank reports a request once, when the last of its loads has ended."""

    request: str
    region: bytes  # id of the region that the references belong to
    refs: bytes  # REF_BYTES per slot
    blocks: list[int]  # device blocks, in order; with several groups, those of whole slots, and 0 is not to be filled
    skip: int = 0  # blocks at the beginning of the first slot that the engine has, and that `blocks` leaves out
    sums: bytes = b""  # SUM_BYTES per shard of each slot, 0 for none; empty if nothing is verified
    group: int = 0
    jobs: int = 1  # of this request's load
    layered: bool = False  # a rank that can do so reports it when it begins, and has each layer wait for its section


class SaveJob(msgspec.Struct, frozen=True, array_like=True):
    """Copy device blocks to the slots of one reservation, `len(blocks) / len(positions)` blocks per slot.

    Every rank settles each of `positions` (of granted blocks) once its copy has ended.
    """

    request: str
    region: bytes
    reservation: int
    positions: list[int]
    refs: bytes
    blocks: list[int]
    summed: list[int] = []  # indices into `positions` of the blocks that a checksum is taken of
    group: int = 0


class CheckJob(msgspec.Struct, frozen=True, array_like=True):
    """Compare device blocks with the slots of group 0 that should hold the same, equally many blocks per slot."""

    request: str
    region: bytes
    refs: bytes
    blocks: list[int]


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    number: int = 0  # counts up; 0 is a step without work
    saves: list[SaveJob] = []  # to be started before anything of this step touches device memory
    given: list[int] = []  # device blocks that this step gives to another request, and a running save may still read
    loads: list[LoadJob] = []  # to be started after that
    finished: list[str] = []  # requests that ended since the last plan, for the log
    namespace: NamespaceSpec | None = None  # that the ranks write to from now on; None is no change
    checks: list[CheckJob] = []  # to be started with the saves
    timed: bool = False  # the step computes parts of prompts, and the ranks report its end
    unguarded: bool = False  # from now on, plans leave `given` out: saves that still run have failed


NOTHING = StepPlan()


@dataclass(frozen=True, slots=True)
class RankVerdicts:
    """The daemon's answer to a rank that settled its shards of a reservation: one verdict per position."""

    region: bytes
    reservation: int
    positions: list[int]
    verdicts: list[int]


@dataclass
class Report:
    """What ranks report to the scheduler's side, each item once.

    Attributes:
        verdicts: the daemon's verdicts on settlements, if events are wanted.
        declined: by rank, the reason that it takes no part in the cache, "" if it takes part again.
        given_away: the saves, by reservation and first position, that were cancelled.
        not_compressed: the saves, in the same way, and the indices of their blocks that could not be compressed.
        carried: by rank, the seconds that a thread takes to carry one block of the engine, 0 if copies need no thread.
        arrived: the requests of layered loads that have ended on a rank, and the seconds that their copies took.
        ready: by rank, whether the engine announces its layers to it.
        timed: the numbers of timed plans whose step has ended.
    """

    verdicts: list[RankVerdicts] = field(default_factory=list)
    declined: dict[int, str] = field(default_factory=dict)
    given_away: list[tuple[int, int]] = field(default_factory=list)
    not_compressed: list[tuple[int, int, list[int]]] = field(default_factory=list)
    carried: dict[int, float] = field(default_factory=dict)
    arrived: list[tuple[str, float]] = field(default_factory=list)
    ready: dict[int, bool] = field(default_factory=dict)
    timed: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def merged(self, other: Report) -> Report:
        """Return both reports as one."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Report(*(mine | theirs if isinstance(mine, dict) else mine + theirs for mine, theirs in pairs))


def pick_refs(packed: bytes, positions: Sequence[int]) -> bytes:
    """Return the references at `positions`."""
    return b"".join(packed[p * REF_BYTES : (p + 1) * REF_BYTES] for p in positions)
