"""`kvcache-server bench`: compares the daemon with a bare ZeroMQ echo in one run, so that both see the same noise.

The echo is a ROUTER on uvloop that decodes a request, looks each hash up in one dict and sends the frame back: the
minimum cost of any daemon with this protocol. The daemon runs in a process of its own, with blocks so small that a
million of them need no large region. Its pool is full and evicts throughout.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import click
import msgspec
import uvloop
import zmq

from kvcache_proto import messages as m
from kvcache_proto.codec import decode_request, encode
from kvcache_proto.region import ALIGN, ROW
from kvcache_proto.types import GroupSpec, NamespaceSpec, Outcome, Refusal
from kvcache_server import signals
from kvcache_server.admin_client import AdminClient
from kvcache_server.commands.describe import json_text
from kvcache_server.commands.tier import run_tier_module
from kvcache_tools.daemon_process import running_daemon

SHARD_BYTES = 64
PAGE = 4096
CHAIN = 1536  # blocks of a whole prompt; the longest lookup asks for 1,024
RUN = 64  # blocks written at once
WIDTHS = (64, 1024)  # hashes per lookup
BURST = 20  # requests to the daemon, then as many to the echo
MISSES = 0.3  # share of a lookup's hashes, on average
CLIENTS = 4
SPEC = NamespaceSpec("bench", (GroupSpec(16, SHARD_BYTES),))


def block_hash(number: int) -> bytes:
    """Return the hash of block `number`, the same in every process."""
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


class Prompts:
    """Branching chains of blocks: half of the prompts begin with part of an earlier one."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._next = 0
        self.chains: list[list[bytes]] = []
        self.heads: list[int] = []  # numbers of the first blocks of prompts that share no prefix

    def new(self) -> tuple[list[bytes], int]:
        """Return the hashes of a new prompt, and the number of them that it shares with an earlier one."""
        shared: list[bytes] = []
        if self.chains and self._draw.random() < 0.5:
            shared = self._draw.choice(self.chains)
            shared = shared[: self._draw.randrange(len(shared))]
        fresh = range(self._next, self._next + CHAIN - len(shared))
        self._next = fresh.stop
        if not shared:
            self.heads.append(fresh.start)
        return [*shared, *map(block_hash, fresh)], len(shared)

    def question(self, width: int) -> list[bytes]:
        """Return `width` hashes: a prefix of a chain, then unknown ones; MISSES of them are unknown on average."""
        chain = self._draw.choice(self.chains)
        known = width if self._draw.random() < 1 - 2 * MISSES else self._draw.randrange(width)
        return chain[:known] + [self._draw.randbytes(32) for _ in range(width - known)]


class Writer(AdminClient):
    """An engine that stores prompts and looks them up, only by messages: it does not map the region."""

    def __init__(self, endpoint: str, seed: int) -> None:
        super().__init__(endpoint, "bench", engine=f"bench-{seed}")
        self._namespace = self.ask(m.Attach(0, b"", SPEC, (0,))).namespace
        self.prompts = Prompts(seed)
        self._chain: list[bytes] = []
        self._at = self._asked = 0
        self.names = True  # whether it names its requests, as engines do, so that misses are remembered

    def __enter__(self) -> Writer:
        return self

    def write(self) -> tuple[int, float]:
        """Reserve and commit the next RUN blocks; return the number granted, and the seconds."""
        if self._at >= len(self._chain):
            if self._chain:
                self.prompts.chains.append(self._chain)
            self._chain, self._at = self.prompts.new()
            self.acquire(self._chain)  # an engine looks a prompt up before it computes it
        run = self._chain[self._at : self._at + RUN]
        parent = self._chain[self._at - 1] if self._at else None
        begin = time.perf_counter()
        reserved = self.ask(m.Reserve(0, b"", self._namespace, [m.Run(run, parent)]))
        if reserved.reservation:
            region, outcome = self.geometry.region_id, Outcome.COMMITTED
            self.ask(m.Settle(0, b"", region, reserved.reservation, (0,), outcome))
        seconds = time.perf_counter() - begin
        self._at += len(run)
        if max(reserved.answers) > Refusal.IN_FLIGHT:
            self._chain, self._at = [], 0  # its parent has been evicted, or the rest is not worth its space
        return reserved.answers.count(Refusal.GRANTED), seconds

    def acquire(self, hashes: list[bytes]) -> tuple[int, float]:
        """Acquire and release; return the hits, and the seconds."""
        self._asked += 1
        name = f"chatcmpl-{self._asked:032x}-0" if self.names else ""
        begin = time.perf_counter()
        acquired = self.ask(m.Acquire(0, b"", self._namespace, hashes, request=name))
        if acquired.lease:
            self.tell(m.Release(0, b"", [acquired.lease]))
        return acquired.hits, time.perf_counter() - begin


def spawned(stack: contextlib.ExitStack, target: Callable[..., None], *arguments: object) -> Connection:
    """Run `target(*arguments, pipe)` in a process that ends with `stack`; return the other end of the pipe."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    stack.callback(process.join)
    stack.callback(process.terminate)
    theirs.close()  # so that the death of the process is an end of file here
    return ours


# The echo.


def echo_process(endpoint: str, blocks: int, ready: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it, too, but its parent ends it
    table = {block_hash(number): number for number in range(blocks)}
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(endpoint)
    loop = uvloop.new_event_loop()

    def drain() -> None:
        while True:
            try:
                identity = router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            frame = router.recv(zmq.NOBLOCK)
            request = decode_request(frame)
            assert isinstance(request, m.Acquire)
            list(map(table.get, request.hashes))
            router.send(identity, zmq.NOBLOCK | zmq.SNDMORE)
            router.send(frame, zmq.NOBLOCK)

    loop.add_reader(router.getsockopt(zmq.FD), drain)
    loop.call_soon(drain)
    ready.send(True)
    loop.run_forever()


class Echo:
    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(endpoint)

    def ask(self, hashes: list[bytes]) -> float:
        begin = time.perf_counter()
        self._socket.send(encode(m.Acquire(0, bytes(16), 1, hashes)))
        self._socket.recv()
        return time.perf_counter() - begin


# Measuring.


class Quantiles(msgspec.Struct):
    """Microseconds."""

    p50_us: float
    p99_us: float


class Lookups(msgspec.Struct):
    """Acquire and release of as many hashes, beside the echo of a message of that size."""

    hashes: int
    samples: int
    hit_ratio: float
    daemon: Quantiles
    echo: Quantiles
    p50_to_echo: float
    p99_to_p50: float
    echo_p99_to_p50: float


class Commits(Quantiles):
    """Reserve and commit, per block; `echo_us` is the median of an echo of RUN hashes."""

    echo_us: float


class Figures(msgspec.Struct):
    """Commits are by the number of cached blocks, and those that evict."""

    blocks_indexed: int
    blocks_evicted: int
    lookups: list[Lookups]
    clients: int
    acquires_per_second: float
    commit_us_per_block: dict[str, Commits]
    daemon_bytes: int
    daemon_bytes_at_start: int
    daemon_bytes_per_million_blocks: float
    idle_core_share: float


def quantiles(seconds: list[float]) -> Quantiles:
    ordered = sorted(seconds)
    return Quantiles(statistics.median(ordered) * 1e6, ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e6)


def lookups(writer: Writer, echo: Echo, width: int, rounds: int) -> Lookups:
    """Time acquire + release of `width` hashes and the echo in alternating bursts; in between, the pool evicts."""
    ours: list[float] = []
    theirs: list[float] = []
    hits = 0
    for _ in range(rounds):
        questions = [writer.prompts.question(width) for _ in range(BURST)]
        for question in questions:
            found, seconds = writer.acquire(question)
            hits += found
            ours.append(seconds)
        theirs.extend(echo.ask(question) for question in questions)
        writer.write()
    mine, other = quantiles(ours), quantiles(theirs)
    return Lookups(
        hashes=width,
        samples=len(ours),
        hit_ratio=hits / (len(ours) * width),
        daemon=mine,
        echo=other,
        p50_to_echo=mine.p50_us / other.p50_us,
        p99_to_p50=mine.p99_us / mine.p50_us,
        echo_p99_to_p50=other.p99_us / other.p50_us,
    )


def commits(writer: Writer, echo: Echo, runs: int) -> Commits:
    """Time reserve + commit per block, in runs of RUN, alternating with echoes of as many hashes."""
    ours: list[float] = []
    theirs: list[float] = []
    question = [block_hash(number) for number in range(RUN)]
    while len(ours) < runs:
        granted, seconds = writer.write()
        if granted == RUN:
            ours.append(seconds / granted)
            theirs.append(echo.ask(question))
    mine = quantiles(ours)
    return Commits(mine.p50_us, mine.p99_us, statistics.median(theirs) * 1e6)


def client_process(seed: int, endpoint: str, chains: list[int], seconds: float, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for the echo
    with Writer(endpoint, seed) as writer:
        writer.prompts.chains = [list(map(block_hash, range(first, first + WIDTHS[0]))) for first in chains]
        questions = [writer.prompts.question(WIDTHS[0]) for _ in range(512)]
        pipe.send(True)
        pipe.recv()
        count, until = 0, time.monotonic() + seconds
        while time.monotonic() < until:
            writer.acquire(questions[count % len(questions)])
            count += 1
        pipe.send(count)


def together(endpoint: str, chains: list[int], seconds: float) -> float:
    """Return the acquires per second of CLIENTS concurrent processes; `chains` are first blocks of stored prompts."""
    with contextlib.ExitStack() as stack:
        arguments = (endpoint, chains, seconds)
        pipes = [spawned(stack, client_process, 100 + number, *arguments) for number in range(CLIENTS)]
        for pipe in pipes:
            pipe.recv()
        for pipe in pipes:
            pipe.send(True)
        done: int = sum(pipe.recv() for pipe in pipes)
    return done / seconds


def anonymous_bytes(pid: int) -> int:
    """Return the process's memory without the mapped region."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise click.ClickException("this kernel does not report RssAnon")


def cpu_seconds(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def size_for(blocks: int) -> int:
    """Return a size at which a region with pages of PAGE has room for `blocks` blocks."""
    return -(-blocks * (PAGE + ROW) // ALIGN) * ALIGN + ALIGN


@contextlib.contextmanager
def processes(folder: Path, blocks: int) -> Iterator[tuple[str, int, Echo]]:
    """Run daemon and echo; yield the daemon's endpoint, its process id, and a client of the echo."""
    size = size_for(blocks)
    echo_endpoint = f"ipc://{folder}/echo.sock"
    flags = ("--size", str(size), "--page-size", str(PAGE), "--lock", "never")
    with contextlib.ExitStack() as stack:
        endpoint, pid = stack.enter_context(running_daemon(folder, *flags))
        spawned(stack, echo_process, echo_endpoint, blocks).recv()
        yield endpoint, pid, Echo(echo_endpoint)


def fill(writer: Writer, blocks: int, say: Callable[[str], None]) -> None:
    """Write until `blocks` blocks are cached, or the pool is full."""
    have, told = writer.status().pool.blocks, time.monotonic()
    while have < blocks:
        granted, _ = writer.write()
        have += granted
        if time.monotonic() - told > 5:
            told = time.monotonic()
            say(f"  {have:,} blocks")


def run(blocks: int, rounds: int, seconds: float, say: Callable[[str], None]) -> Figures:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcache-bench-")))
        endpoint, pid, echo = stack.enter_context(processes(folder, blocks))
        writer = stack.enter_context(Writer(endpoint, 0))
        few = min(10_000, blocks // 10)
        say(f"filling: to {few:,} blocks")
        fill(writer, few, say)
        commit_few = commits(writer, echo, 150)
        say(f"filling: to {blocks:,} blocks")
        own = anonymous_bytes(pid)
        fill(writer, blocks, say)
        indexed, memory = writer.status().pool.blocks, anonymous_bytes(pid)
        commit_many = commits(writer, echo, 150)
        while not writer.status().counters["blocks_evicted"]:
            writer.write()
        say("the pool is full: lookups, alternating with the echo")
        commit_evicting = commits(writer, echo, 150)
        found = [lookups(writer, echo, width, rounds if width == WIDTHS[0] else -(-rounds // 4)) for width in WIDTHS]
        say(f"{CLIENTS} clients at once")
        # The latest prompts that share no prefix: they are still complete.
        heads = [prompt for prompt in writer.prompts.heads if writer.acquire([block_hash(prompt)])[0]][-64:]
        rate = together(endpoint, heads, seconds)
        say("idle")
        busy = cpu_seconds(pid)
        time.sleep(seconds)  # idle: this is measured
        idle = (cpu_seconds(pid) - busy) / seconds
        evicted = writer.status().counters["blocks_evicted"]
    return Figures(
        blocks_indexed=indexed,
        blocks_evicted=evicted,
        lookups=found,
        clients=CLIENTS,
        acquires_per_second=rate,
        commit_us_per_block={f"{few}": commit_few, f"{indexed}": commit_many, "evicting": commit_evicting},
        daemon_bytes=memory,
        daemon_bytes_at_start=own,
        daemon_bytes_per_million_blocks=memory * 1e6 / indexed,
        idle_core_share=idle,
    )


def describe(figures: Figures) -> str:
    head = f"{'acquire + release':<18}{'hit':>6}{'p50':>10}{'p99':>10}{'echo p50':>10}{'echo p99':>10}"
    lines = [
        f"{figures.blocks_indexed:,} blocks indexed, {figures.blocks_evicted:,} evicted",
        "",
        f"{head}{'p50/echo':>10}{'p99/p50':>9}",
    ]
    for row in figures.lookups:
        times = (row.daemon.p50_us, row.daemon.p99_us, row.echo.p50_us, row.echo.p99_us)
        lines.append(
            f"{row.hashes:>6,} hashes     {row.hit_ratio:>6.0%}"
            + "".join(f"{time_us:>7.0f} us" for time_us in times)
            + f"{row.p50_to_echo:>9.2f}x{row.p99_to_p50:>8.2f}x"
        )
    rate = figures.acquires_per_second
    lines += ["", f"{figures.clients} clients: {rate:,.0f} acquires/s of {WIDTHS[0]} hashes", ""]
    for when, commit in figures.commit_us_per_block.items():
        name = when if when == "evicting" else f"{int(when):,} blocks"
        lines.append(
            f"reserve + commit, {name + ':':<18}{commit.p50_us:6.2f} us per block; echo {commit.echo_us:.0f} us"
        )
    lines += [
        "",
        f"daemon's own memory: {figures.daemon_bytes / 1e6:.0f} MB, "
        f"{figures.daemon_bytes_per_million_blocks / 1e6:.0f} MB per million blocks",
        f"idle daemon: {figures.idle_core_share:.2%} of a core",
    ]
    return "\n".join(lines)


@click.command(name="bench", help=__doc__, short_help="Compare the daemon with a bare ZeroMQ echo.")
@click.option("--blocks", default=1_000_000, show_default=True, help="Blocks to index.")
@click.option("--rounds", default=200, show_default=True, help=f"Bursts of {BURST} lookups each.")
@click.option("--seconds", default=5.0, show_default=True, help="Of concurrent clients, and of idling.")
@click.option("--tier", metavar="URL", help="Measure this store as a tier instead, and remove what was written.")
@click.option("--block", default="2MiB", show_default=True, help="Size of a block in the tier.")
@click.option("--total", default="1GiB", show_default=True, help="How much is written to the tier and read.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(blocks: int, rounds: int, seconds: float, tier: str | None, block: str, total: str, as_json: bool) -> None:
    if tier is not None:
        run_tier_module("bench", tier, "--block", block, "--total", total, *(["--json"] if as_json else []))
    begin = time.monotonic()
    signals.exit_cleanly_when_told()

    def say(text: str) -> None:
        click.echo(f"[{time.monotonic() - begin:4.0f} s] {text}", err=True)

    figures = run(blocks, rounds, seconds, say)
    click.echo(json_text(figures) if as_json else "\n" + describe(figures))
