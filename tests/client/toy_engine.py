"""An engine and a cache in memory around a real scheduler's side: no torch, vLLM or daemon, and a clock to turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvcache_client import GroupSpec, NamespaceSpec
from kvcache_client.scheduler.scheduler import Scheduler
from kvcache_client.scheduler.views import IDLE, EngineFacts, NewTable, RequestView, StepView
from kvcache_client.settings import ConnectorSettings
from kvcache_client.step_plan import StepPlan
from kvcache_proto.messages import MissNote, Run
from kvcache_proto.types import BlockRef, Outcome

BLOCK = 16
SPEC = NamespaceSpec("tiny", (GroupSpec(BLOCK, 4096),), {"weights": "", "checkpoint": "files"})
REGION = b"r" * 16


def chain(name: str, blocks: int) -> list[bytes]:
    """Return the hashes of a prompt."""
    return [f"{name} {number}".encode().ljust(32) for number in range(blocks)]


def refs(slots: Sequence[int]) -> bytes:
    return b"".join(BlockRef(4096 * slot, 1).pack() for slot in slots)


@dataclass
class Lease:
    cache: Cache
    id: int = 0
    hits: int = 0
    pending: int = 0
    withheld: int = 0
    packed: bytes = b""
    sums: bytes = b""
    failed: bool = False
    region_id: bytes = b""
    coming: int = 0
    eta: float = 0.0
    divergence: int = 0
    tail: int = 0

    def release(self) -> None:
        self.cache.leases.discard(self.id)
        self.id = 0


@dataclass
class Reservation:
    id: int
    granted: list[int]
    refused: dict[int, str]
    packed: bytes
    region_id: bytes = REGION
    failed: bool = False


class PendingReservation:
    """Answered by `Cache.answer`; an `error` is a refusal as a whole."""

    def __init__(self, cache: Cache, space: Space, runs: Sequence[Run]) -> None:
        self._cache, self._space, self._runs = cache, space, runs
        self.error: Exception | None = None
        self.cancelled = False
        self._answer: Reservation | None = None

    def answer(self) -> None:
        granted, slots, refused = [], [], {}
        for at, each in enumerate(each for run in self._runs for each in run.hashes):
            if why := self._cache.block_refusal(self._space, each):
                refused[at] = why
                continue
            granted.append((self._space, each))
            slots.append(next(self._cache.slots))
            self._space.writing[each] = slots[-1]
        number = next(self._cache.numbers) if granted else 0
        self._cache.open[number] = granted
        places = [at for at in range(len(granted) + len(refused)) if at not in refused]
        self._answer = Reservation(number, places, refused, refs(slots))

    def poll(self) -> Reservation | None:
        if self.error is not None:
            raise self.error
        return self._answer

    def wait(self, timeout: float) -> Reservation:
        if (found := self.poll()) is not None:
            return found
        self.cancel()
        return Reservation(0, [], dict.fromkeys(range(sum(len(run.hashes) for run in self._runs)), "unavailable"), b"")

    def cancel(self) -> None:
        self.cancelled = True
        if self._answer is not None and self._answer.id:
            count = len(self._answer.granted)
            self._space.settle(self._answer.id, Outcome.NEVER_STARTED, range(count), (0,), REGION)


class Space:
    """A namespace: what is visible, and what is being written."""

    attached = True

    def __init__(self, cache: Cache, spec: NamespaceSpec) -> None:
        self.spec, self.id, self._cache = spec, spec.id, cache
        self.visible: dict[bytes, int] = {}
        self.writing: dict[bytes, int] = {}

    def acquire(self, hashes: Sequence[bytes], *, request: str = "", **facts: Any) -> Lease:
        cache = self._cache
        cache.due.pop(request, None)
        if not hashes:
            return Lease(cache)
        cache.lookups.append(request)
        hits = sum(1 for _ in itertools.takewhile(self.visible.__contains__, hashes))
        pending = sum(1 for _ in itertools.takewhile(self.writing.__contains__, hashes[hits:]))
        allowed = min(hits, cache.quota)
        coming = sum(1 for _ in itertools.takewhile(cache.below.__contains__, hashes[hits:]))
        eta = cache.below[hashes[hits]] if coming else cache.asking if hits < len(hashes) else 0.0
        if not allowed:
            return Lease(cache, pending=pending, withheld=hits, coming=coming, eta=eta)
        number = next(cache.numbers)
        cache.leases.add(number)
        packed = refs([self.visible[each] for each in hashes[:allowed]])
        lease = Lease(cache, number, allowed, pending, hits - allowed, packed, region_id=REGION, coming=coming, eta=eta)
        if lease.withheld:
            lease.pending, lease.coming, lease.eta = 0, 0, 0.0
        return lease

    def prefetch(
        self, hashes: Sequence[bytes], *, request: str, then: Callable[[int, int], None] | None = None, **facts: Any
    ) -> bool:
        cache = self._cache
        cache.prefetched.append((request, len(hashes)))
        cache.due.pop(request, None)
        refused = sum(cache.due.values()) + len(hashes) > cache.room
        if hashes and not refused:
            cache.due[request] = len(hashes)
        if then is not None:
            hits = sum(1 for _ in itertools.takewhile(self.visible.__contains__, hashes))
            then(*((0, len(hashes)) if refused else (hits, 0)))
        return True

    def reserve_runs_later(self, runs: Sequence[Run]) -> PendingReservation:
        ticket = PendingReservation(self._cache, self, runs)
        self._cache.asked.append(list(runs))
        ticket.error = self._cache.refusal
        self._cache.tickets.append(ticket)
        return ticket

    def settle(
        self, reservation: int, outcome: Outcome, positions: Sequence[int], shards: Sequence[int], region_id: bytes
    ) -> None:
        slots = self._cache.open[reservation]
        for position in positions:
            space, each = slots[position]
            slot = space.writing.pop(each)
            if outcome is Outcome.COMMITTED:
                space.visible[each] = slot

    def retain(self, hashes: Sequence[bytes], seconds: float, *, request: str = "", then: Any) -> bool:
        self._cache.hints.append(("retain", request, list(hashes), seconds))
        if self._cache.retain_refusal:
            then(0, self._cache.retain_refusal)
        return True

    def drop(self, hashes: Sequence[bytes], after: int, *, request: str = "") -> bool:
        self._cache.hints.append(("drop", request, list(hashes), after))
        return True

    def report_device(self, kept: Sequence[bytes], evicted: Sequence[bytes]) -> bool:
        return True

    def report_misses(self, notes: list[MissNote]) -> bool:
        self._cache.notes += [(note.request, note.cause) for note in notes]
        return True


class Cache:
    """A session. `quota` blocks may be pinned by one lease, and `room` blocks may be due, by request; `refusal` is what
    reservations are answered with."""

    engine, deadline, up, room = "toy", 5.0, True, 1 << 20

    def __init__(self) -> None:
        self.spaces: dict[str, Space] = {}
        self.leases: set[int] = set()
        self.lookups: list[str] = []
        self.prefetched: list[tuple[str, int]] = []
        self.due: dict[str, int] = {}
        self.asked: list[list[Run]] = []
        self.tickets: list[PendingReservation] = []
        self.open: dict[int, list[tuple[Space, bytes]]] = {}
        self.notes: list[tuple[str, str]] = []
        self.hints: list[tuple[Any, ...]] = []  # as the daemon was told
        self.retain_refusal = ""
        self.quota = 1000
        self.below: dict[bytes, float] = {}  # seconds in which a tier brings a block
        self.asking = 0.0  # seconds until tiers say what they have
        self.refusal: Exception | None = None
        self.full = False
        self.slots, self.numbers = itertools.count(), itertools.count(1)

    def attach(
        self,
        spec: NamespaceSpec,
        shards: Sequence[int],
        ceiling_bytes: int,
        wait: bool = True,
        *,
        reports_leaving: bool = False,
    ) -> Space:
        return self.spaces.setdefault(spec.id, Space(self, spec))

    def detach(self, namespace: Any) -> None: ...

    def add_counts(self, source: Callable[[], Mapping[str, int]]) -> None: ...

    def close(self) -> None: ...

    def store(self, hashes: Sequence[bytes]) -> None:
        """Have blocks in the namespace that engines begin in, as if another engine had saved them."""
        self.attach(SPEC, (), 0).visible.update((each, next(self.slots)) for each in hashes)

    def block_refusal(self, space: Space, each: bytes) -> str:
        if each in space.visible:
            return "present"
        return "in_flight" if each in space.writing else "no_space" if self.full else ""

    def answer(self) -> None:
        """Answer all reservations that are asked for."""
        for ticket in self.tickets:
            if not ticket.cancelled and ticket.error is None:
                ticket.answer()
        self.tickets.clear()

    @property
    def writing(self) -> int:
        return sum(len(space.writing) for space in self.spaces.values())


@dataclass
class Request:
    """A request of the engine."""

    id: str
    hashes: list[bytes]
    tokens: int
    facts: dict[str, Any]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    scheduled: bool = False

    @property
    def view(self) -> RequestView:
        return RequestView(self.id, self.tokens, self.tokens, self.hashes, key=self, **self.facts)


class Engine:
    """Admits and schedules requests as an engine does; its ranks copy at once where `works` is true."""

    def __init__(self, cache: Cache, works: bool = True, joining: Sequence[int] = (), **settings: Any) -> None:
        self.cache, self.works, self.now = cache, works, 1000.0
        options = {"canary_every": 0, "gate": "off", **settings}
        self.scheduler = Scheduler(
            cache, SPEC, ConnectorSettings(**options), EngineFacts(BLOCK, joining=joining), lambda: self.now
        )
        self._blocks = itertools.count()
        self.step()  # the ranks join the namespace

    def request(self, name: str, hashes: list[bytes], extra: int = 1, **facts: Any) -> Request:
        """Return a request with `extra` tokens after its full blocks."""
        return Request(name, hashes, len(hashes) * BLOCK + extra, facts)

    def ask(self, request: Request) -> tuple[int | None, bool]:
        return self.scheduler.matched_tokens(request.view, request.computed)

    def admit(self, request: Request, load: int = 0) -> None:
        """Give a request its device blocks; `load` tokens of it are to be loaded."""
        request.blocks = [next(self._blocks) for _ in range(-(-request.tokens // BLOCK))]
        self.scheduler.allocated(request.view, [request.blocks], load)
        request.computed += load

    def step(
        self, *scheduled: tuple[Request, int], given: Sequence[int] = (), preempted: Sequence[Request] = ()
    ) -> StepPlan:
        """Run one step; `given` are blocks that a request gets which the cache has not heard of."""
        started = [
            NewTable(request.id, (request.blocks,), request.computed)
            for request, _ in scheduled
            if not request.scheduled
        ]
        running = [request for request, _ in scheduled if request.scheduled]
        tokens = {request.id: count for request, count in scheduled}
        if given:
            started.append(NewTable("a stranger", (list(given),), 0))
            tokens["a stranger"] = 1
        view = IDLE
        if tokens:
            computed = [request.computed for request in running]
            names = [request.id for request in running]
            view = StepView(sum(tokens.values()), tokens, started, names, computed, [None] * len(running))
        for request in preempted:
            request.computed, request.scheduled = 0, False
        view = msgspec.structs.replace(view, preempted={request.id for request in preempted})
        plan = self.scheduler.plan(view)
        for request, count in scheduled:
            request.scheduled = True
            request.computed += count
        if self.works:
            for job in plan.saves:
                space, _ = self.cache.open[job.reservation][0]
                space.settle(job.reservation, Outcome.COMMITTED, job.positions, (0,), job.region)
        return plan

    def finish(self, request: Request) -> None:
        self.scheduler.finished(request.id, request.computed)

    def run(self, request: Request) -> None:
        """Compute a whole request, and end it."""
        self.admit(request)
        self.step((request, request.tokens))
        self.finish(request)
        self.cache.answer()
        self.step()
