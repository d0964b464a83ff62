"""A small cache with a known history, and ways to make its lookups miss."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from host import geometry_of
from insights import answer, explained, figures, insight

from kvcache_proto import messages as m
from kvcache_proto.codec import decode_request, encode
from kvcache_proto.types import REF_BYTES, Finding, GroupSpec, NamespaceSpec, Outcome, Refusal
from kvcache_server.commands.why import describe
from kvcache_server.core.cache import Cache
from kvcache_server.core.eviction.policy import LRU
from kvcache_server.core.limits import Limits
from kvcache_server.miss_report import Answer

KIB = 1 << 10
IDENTITY = {"dtype": "bfloat16", "weights": "", "shards": "1", "block": "16x8", "seed": "0", "layout": "NHD"}
OTHERWISE = {"dtype": "float16", "weights": "v2", "shards": "2", "layout": "HND"}
BLOCK = 64 * KIB


class World:
    """A small cache, and its true history: which blocks were removed, and why."""

    def __init__(self, seed: int = 0, blocks: int = 248, policy: str = LRU, **limits: Any) -> None:
        geometry = geometry_of(blocks)
        options = {"pin_quota": 1.0, "supersede_after": 2.0, **limits}
        limits = Limits(**options)
        self.cache = Cache(memoryview(bytearray(geometry.region_bytes)), geometry, limits, seed=11, policy=policy)
        self.draw = random.Random(seed)
        self.now, self.requests = 100.0, 0
        insight(self.cache).misses.started(0.0, "first")

    def tick(self, seconds: float = 0.01) -> None:
        self.now += seconds
        self.cache.tick(self.now)
        insight(self.cache).tick(self.now)

    def chain(self, length: int) -> list[bytes]:
        return [self.draw.randbytes(16) for _ in range(length)]

    def visible(self) -> dict[tuple[int, bytes], None]:
        spaces = self.cache.namespaces.values()
        return {(space.number, each): None for space in spaces for each in space.groups[0].visible}

    def stored(self, engine: Engine) -> int:
        (space,) = [each for each in figures(self.cache, self.now)["namespaces"] if each["id"] == engine.spec.id]
        return int(space["engines"].get(engine.name, 0))

    def why(self, request: str) -> dict[str, Any]:
        """Return the answer as in JSON."""
        found = self._explained(request)
        describe(found)  # whatever it is, it can be told
        told: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(found))
        return told

    def told(self, request: str) -> str:
        """Return the answer as text."""
        return describe(self._explained(request))

    def _explained(self, request: str) -> Answer:
        return explained(answer(self.cache, self.operator(), m.Why(1, b"", request), self.now))

    def operator(self) -> int:
        for number, session in self.cache.sessions.items():
            if session.engine.name == "operator":
                return number
        return self.cache.open_session("operator", "", self.now)


class Engine:
    def __init__(self, world: World, name: str, size: int = BLOCK, model: str = "m", ceiling: int = 0, **other: str):
        self.world, self.cache, self.name = world, world.cache, name
        self.session = self.cache.open_session(name, "", world.now)
        self.spec = NamespaceSpec(model, (GroupSpec(128, size),), IDENTITY | other, 16)
        self.number = self.ask(m.Attach(1, b"", self.spec, (0,), ceiling)).namespace

    def ask(self, request: Any) -> Any:
        self.world.tick()
        return answer(self.cache, self.session, request, self.world.now)

    def reserve(self, run: list[bytes], parent: bytes | None = None) -> m.Reserved:
        return self.ask(m.Reserve(1, b"", self.number, [m.Run(run, parent)]))

    def settle(self, reserved: m.Reserved, outcome: Outcome = Outcome.COMMITTED, at: tuple[int, ...] = ()) -> None:
        region = self.cache.geometry.region_id
        self.ask(m.Settle(1, b"", region, reserved.reservation, (0,), outcome, list(at)))

    def store(self, run: list[bytes], parent: bytes | None = None) -> list[bytes]:
        """Store a run; return it. It must fit."""
        reserved = self.reserve(run, parent)
        assert not any(answer > Refusal.IN_FLIGHT for answer in reserved.answers)
        if reserved.reservation:
            self.settle(reserved)
        return run

    def look_up(self, run: list[bytes], request: str = "", pin: bool = False, **facts: Any) -> tuple[str, m.Acquired]:
        """Look up as the service does, frame and all; return the request's id and the answer.

        Unless `pin`, the lease is released."""
        self.world.requests += 1
        request = request or f"chatcmpl-{self.world.requests:08x}-0"
        self.world.tick()
        frame = encode(m.Acquire(1, b"t" * 16, self.number, run, request=request, tokens=9, **facts))
        asked = decode_request(frame)
        assert isinstance(asked, m.Acquire)
        reply = answer(self.cache, self.session, asked, self.world.now)
        assert isinstance(reply, m.Acquired)
        if reply.lease and not pin:
            self.ask(m.Release(1, b"", [reply.lease]))
        return request, reply

    def tell(self, cause: str, run: list[bytes], request: str = "told") -> None:
        self.ask(m.ReportMisses(1, b"", self.number, [m.MissNote(request, cause, 5, run)]))

    def leave(self) -> None:
        self.world.tick()
        self.cache.end_session(self.session, self.world.now)


def fill(engine: Engine) -> None:
    """Store until a block is evicted."""
    stored = len(engine.world.visible())
    while len(engine.world.visible()) == stored:
        engine.store(engine.world.chain(1))
        stored += 1


Expected = list[tuple[int, str, dict[str, Any]]]  # how many blocks, why, and facts among those told


class Injector:
    """Makes blocks miss in one way or another; each way returns who asked for what, and the true cause, run after run.

    Who went is seen by looking before and after, not by asking who evicts.
    """

    def __init__(self, world: World) -> None:
        self.world, self.draw = world, world.draw
        self.a, self.b = Engine(world, "a"), Engine(world, "b")
        self.bounded = Engine(world, "bounded", ceiling=6 * BLOCK)
        self.others = {key: Engine(world, f"other {key}", **{key: value}) for key, value in OTHERWISE.items()}
        self.large = Engine(world, "large", model="large")
        self.mortals = 0

    def head(self) -> list[bytes]:
        """A prefix that is cached, of none to three blocks: what is missed below it is missed for its own cause."""
        run = self.world.chain(self.draw.randrange(4))
        return self.a.store(run) if run else run

    def room(self) -> Any:
        run = self.draw.choice([self.a, self.b]).store(self.world.chain(self.draw.randint(2, 6)))
        mine = {(self.a.number, each) for each in run}
        while mine <= self.world.visible().keys():
            actor = self.draw.choice([self.a, self.b, *self.others.values()])
            actor.store(self.world.chain(self.draw.randint(1, 2)))
        kept = len(mine & self.world.visible().keys())
        facts = {"engine": actor.name}
        if actor in self.others.values():
            facts["namespace"] = actor.spec.id
        return self.a, run, [(kept, "hit", {}), (len(run) - kept, "room", facts)]

    def own_ceiling(self) -> Any:
        run = self.bounded.store(self.world.chain(3))
        mine = {(self.bounded.number, each) for each in run}
        while mine <= self.world.visible().keys():
            full = self.world.stored(self.bounded) == 6 * BLOCK  # else it is the pool that is full
            self.bounded.store(self.world.chain(1))
        kept = len(mine & self.world.visible().keys())
        return (
            self.bounded,
            run,
            [(kept, "hit", {}), (3 - kept, "own_ceiling" if full else "room", {"engine": "bounded"})],
        )

    def cleared(self) -> Any:
        run = self.a.store(self.world.chain(4))
        self.world.tick()
        answer(self.world.cache, self.world.operator(), m.Clear(1, b"", self.a.spec.id), self.world.now)
        return self.b, run, [(4, "cleared", {"engine": "operator"})]

    def invalidated(self) -> Any:
        head = self.head()
        run = self.a.store(self.world.chain(3), head[-1] if head else None)
        finding = self.draw.choice(list(Finding))
        slots = self.a.ask(m.Acquire(1, b"", self.a.number, [*head, *run], pin=False)).slots
        region = self.world.cache.geometry.region_id
        self.b.ask(m.Invalidate(1, b"", region, slots[REF_BYTES * len(head) :][:REF_BYTES], 0, finding))
        return self.a, [*head, *run], [(len(head), "hit", {}), (3, finding.name.lower(), {"engine": "b"})]

    def no_space(self) -> Any:
        """Everything is leased: there is no room for the first, and no parent for the rest."""
        leases = []
        for space in self.world.cache.namespaces.values():
            for block in list(space.groups[0].visible.values()):
                if block.child is None:
                    names = [each.hash for each in block.ancestors()][::-1]
                    engine = next(e for e in self.engines() if e.number == space.number)
                    leases.append((engine, engine.ask(m.Acquire(1, b"", space.number, names)).lease))
        run: list[bytes] = []
        answers = b""
        while not any(answer > Refusal.IN_FLIGHT for answer in answers):  # until the last free page is taken
            part = self.world.chain(4)
            reserved = self.b.reserve(part, run[-1] if run else None)
            run, answers = run + part, answers + reserved.answers
            if reserved.reservation:
                self.b.settle(reserved)
        for engine, lease in leases:
            engine.ask(m.Release(1, b"", [lease]))
        hits = answers.index(Refusal.NO_SPACE)
        facts = {"engine": "b"}
        rest = len(run) - hits - 1
        return self.a, run, [(hits, "hit", {}), (1, "no_space", facts), (rest, "no_parent", facts)]

    def engines(self) -> list[Engine]:
        return [self.a, self.large, *self.others.values()]

    def refused_own_ceiling(self) -> Any:
        mine = self.world.chain(6)
        self.bounded.store(mine[:2])
        self.bounded.store(mine[2:], mine[1])
        _, held = self.bounded.look_up(mine, pin=True)
        assert held.hits == 6
        run = self.world.chain(3)
        self.bounded.reserve(run)
        self.bounded.ask(m.Release(1, b"", [held.lease]))
        facts = {"engine": "bounded"}
        return self.b, run, [(1, "refused_own_ceiling", facts), (2, "no_parent", facts)]

    def refused_write_quota(self) -> Any:
        limit = int(self.world.cache.limits.write_quota * self.world.cache.pool.capacity) // BLOCK
        run = self.world.chain(limit + 3)
        reserved = self.b.reserve(run)
        assert len(reserved.slots) // REF_BYTES == limit
        self.b.settle(reserved)
        facts = {"engine": "b"}
        return self.a, run, [(limit, "hit", {}), (1, "refused_write_quota", facts), (2, "no_parent", facts)]

    def writer_died(self) -> Any:
        self.mortals += 1
        head, mortal = self.head(), Engine(self.world, f"mortal {self.mortals}")
        run = self.world.chain(3)
        mortal.reserve(run, head[-1] if head else None)
        self.a.store(self.world.chain(1))
        mortal.leave()
        self.world.tick(20.0)  # the quarantine is over: the pool stays as large as it was
        facts = {"engine": mortal.name}
        return self.a, [*head, *run], [(len(head), "hit", {}), (1, "writer_died", facts), (2, "orphaned", facts)]

    def write_failed(self) -> Any:
        head, run = self.head(), self.world.chain(4)
        reserved = self.b.reserve(run, head[-1] if head else None)
        self.b.settle(reserved, at=(0,))
        self.b.settle(reserved, Outcome.FAILED, at=(1,))
        self.b.settle(reserved, at=(2, 3))
        facts = {"engine": "b"}
        hits = len(head) + 1
        return self.a, [*head, *run], [(hits, "hit", {}), (1, "write_failed", facts), (2, "orphaned", facts)]

    def not_started(self) -> Any:
        head, run = self.head(), self.world.chain(2)
        self.b.settle(self.b.reserve(run, head[-1] if head else None), Outcome.NEVER_STARTED)
        facts = {"engine": "b"}
        return self.a, [*head, *run], [(len(head), "hit", {}), (1, "not_started", facts), (1, "orphaned", facts)]

    def told(self) -> Any:
        head, run = self.head(), self.world.chain(3)
        cause = self.draw.choice(["save_prompt", "given_away", "paused", "weights", "down"])
        self.b.tell(cause, run)
        return self.a, [*head, *run], [(len(head), "hit", {}), (3, cause, {"engine": "b"})]

    def elsewhere(self) -> Any:
        field = self.draw.choice(list(OTHERWISE))
        run = self.others[field].store(self.world.chain(3))
        facts = {"namespace": self.others[field].spec.id, "fields": [[field, IDENTITY[field], OTHERWISE[field]]]}
        return self.a, run, [(3, "elsewhere", facts)]

    def another_model(self) -> Any:
        run = self.large.store(self.world.chain(2))
        return self.a, run, [(2, "elsewhere", {"fields": [["model", "m", "large"]], "model": "large"})]

    def diverged(self) -> Any:
        run = self.a.store(self.world.chain(4))
        at = self.draw.randrange(4)
        return self.b, run[:at] + self.world.chain(3), [(at, "hit", {}), (3, "diverged", {})]

    def new(self) -> Any:
        run = self.a.store(self.world.chain(2))
        return self.b, run + self.world.chain(3), [(2, "hit", {}), (3, "new", {})]

    def salted(self) -> Any:
        return self.a, self.world.chain(3), [(3, "salted", {})]

    def pending(self) -> Any:
        head, run = self.head(), self.world.chain(3)
        reserved = self.b.reserve(run, head[-1] if head else None)
        self.undo = lambda: self.b.settle(reserved, Outcome.NEVER_STARTED)
        tail = self.world.chain(1)
        hit = (len(head), "hit", {})
        return self.a, [*head, *run, *tail], [hit, (3, "pending", {"engine": "b"}), (1, "new", {})]

    def undo(self) -> None:
        """What a way leaves to be done once the lookup is over."""


NOT_WAYS = {"head", "engines", "undo"}
WAYS = [name for name in vars(Injector) if not name.startswith("_") and name not in NOT_WAYS]
