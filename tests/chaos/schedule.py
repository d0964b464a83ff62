"""What goes wrong in one run, and when. All of it follows from the seed. Pure."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass, field, replace

# Seeds take turns at them; `--themes` chooses some.
THEMES = (
    *("store", "before-reply", "after-reply", "evict", "grant", "settle", "session", "start", "rebuild", "notes"),
    *("instant", "fresh", "client-kill", "client-stop", "ranks", "proxy", "daemon-stop", "full", "clock"),
)
# How many arrivals a theme's point may wait for: about what the traffic of a life brings.
REACH = {
    "store": 3000,
    "before-reply": 600,
    "after-reply": 600,
    "evict": 1500,
    "grant": 4000,
    "settle": 4000,
    "session": 150,
    "start": 250,
    "rebuild": 6000,
    "notes": 1500,
    "clock": 1 << 30,  # the seed of its leaps
}
POINTS = ("attached", "reserved", "half written", "written", "lease held", "mid-read")
TIGHT, ROOMY = "16MiB", "160MiB"  # the first holds a sixth of all blocks that there are, the second all of them
CROWDED = {"evict", "full"}  # themes that want the region full
KINDS = ("small", "large", "ranks")
SHARDS = {"small": [0], "large": [0], "ranks": [0, 1]}


@dataclass(frozen=True)
class Client:
    """One process. `point` is [name, each how many times, signal]; `stopped_for` is how long it stays stopped."""

    name: str
    role: str  # whole, scheduler or rank
    engine: str
    kind: str
    shards: list[int]
    seed: int
    signals: tuple[int, ...] = ()
    point: tuple[str, int, int] | None = None
    stopped_for: float = 0.0
    restless: bool = False
    proxied: bool = False
    incarnation: int = 0


@dataclass(frozen=True)
class Life:
    """One run of the daemon: until it dies at `point`, or for `seconds`, then by `end`; then none runs for `down`."""

    point: str = ""
    seconds: float = 1.5
    end: int = signal.SIGKILL
    down: float = 0.1
    fresh: bool = False
    crowded_mount: bool = False  # the first try to start it meets a full tmpfs
    stopped: tuple[float, float] = (0.0, 0.0)  # when it is stopped, and for how long
    meanwhile: tuple[tuple[str, int], ...] = ()  # what happens to clients while it is down: (kill or stop, which)
    proxy: tuple[tuple[float, str], ...] = ()  # what the proxies are told, and when


@dataclass(frozen=True)
class Schedule:
    seed: int
    theme: str
    roomy: bool
    quarantine: float
    supersede_after: float
    clients: list[Client]
    lives: list[Life] = field(default_factory=list)


def make(seed: int, clients: int = 4, themes: tuple[str, ...] = THEMES, pace: float = 1.0, lives: int = 0) -> Schedule:
    """Return what happens in the run of this seed: so many lives of the daemon, `pace` times as long as usual."""
    draw = random.Random(f"chaos {seed}")
    theme = themes[seed % len(themes)]
    roomy = theme not in CROWDED and draw.random() < 0.6
    plans = _ranks(draw) if theme == "ranks" else [_whole(draw, number, theme) for number in range(clients)]
    return Schedule(
        seed,
        theme,
        roomy,
        # Shorter than clients are stopped, door cut or not: what they write then must be theirs.
        quarantine=0.3,
        supersede_after=draw.choice((0.1, 0.5, 2.0)),
        clients=plans,
        lives=[_life(draw, theme, len(plans), pace, number) for number in range(lives or draw.randint(2, 3))],
    )


def again(client: Client) -> Client:
    """Return the process that takes the place of one that was killed: the same engine, with another fate."""
    draw = random.Random(f"{client.seed} {client.incarnation + 1}")
    born = replace(client, incarnation=client.incarnation + 1, seed=draw.getrandbits(32))
    return _doomed(draw, born)


def last(client: Client) -> Client:
    """Return the same client with nothing to die of."""
    return replace(client, signals=(), point=None)


def _whole(draw: random.Random, number: int, theme: str) -> Client:
    kind = KINDS[number % len(KINDS)]
    signals = {"client-kill": (signal.SIGKILL,), "client-stop": (signal.SIGSTOP,), "proxy": (signal.SIGSTOP,)}.get(
        theme, ()
    )
    client = Client(
        *(f"client{number}", "whole", f"engine {number}", kind, SHARDS[kind], draw.getrandbits(32)),
        signals=() if number == 0 else tuple(map(int, signals)),
        restless=theme in ("session", "ranks") or draw.random() < 0.3,
        proxied=theme == "proxy" and number > 0,
    )
    return _doomed(draw, client)


def _ranks(draw: random.Random) -> list[Client]:
    clients = [_whole(draw, 2, "client-stop")]
    for number in range(2):
        engine = f"pair {number}"
        for name, role, shards in (("scheduler", "scheduler", []), ("rank0", "rank", [0]), ("rank1", "rank", [1])):
            signals = tuple(map(int, draw.choice(((), (signal.SIGKILL,), (signal.SIGSTOP,)))))
            client = Client(*(f"{name}-{number}", role, engine, "ranks", shards, draw.getrandbits(32)), signals=signals)
            clients.append(_doomed(draw, client))
    return clients


def _doomed(draw: random.Random, client: Client) -> Client:
    client = replace(client, stopped_for=draw.choice((0.1, 0.7, 1.5)))
    if not client.signals:
        return client
    points = POINTS if client.role != "scheduler" else ("attached", "reserved", "lease held")
    name = draw.choice(points)
    count = 1 if name == "attached" else int(60 ** draw.random())
    return replace(client, point=(name, count, draw.choice(client.signals)))


def _life(draw: random.Random, theme: str, clients: int, pace: float, number: int) -> Life:
    point = f"{theme}:{int(REACH[theme] ** draw.random())}" if theme in REACH else ""
    if theme == "rebuild" and number == 0:
        point = ""  # there must be something to find
    meanwhile = tuple(
        (draw.choice(("kill", "stop")), draw.randrange(clients)) for _ in range(draw.choice((0, 0, 1, 2)))
    )
    if theme == "proxy":
        meanwhile = ()
    return Life(
        point,
        seconds=pace * (draw.uniform(0.3, 1.5) if theme in ("instant", "fresh") else 2.0),
        end=draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)),
        down=draw.choice((0.0, 0.05, 0.5)),
        fresh=theme == "fresh" or draw.random() < (0.3 if theme == "ranks" else 0.1),
        crowded_mount=theme == "full",
        stopped=(pace * draw.uniform(0.2, 1.0), draw.choice((0.02, 0.2, 0.8)) if theme == "daemon-stop" else 0.0),
        meanwhile=meanwhile,
        proxy=_interference(draw, pace) if theme == "proxy" else (),
    )


def _interference(draw: random.Random, pace: float) -> tuple[tuple[float, str], ...]:
    acts = [
        draw.choice(("delay 0.2 0.1", "delay 0.05 0.6", "drop 0.03", "twice 0.1", "cut", "still", "clear"))
        for _ in range(5)
    ]
    return tuple((0.3 * pace * (number + 1), act) for number, act in enumerate(acts))
