"""What watching costs: acquires while nobody watches, while Prometheus scrapes, and while ten `top`s look on besides.

    python tests/bench/scrape.py [--rounds 15] [--seconds 2] [--blocks 100000] [--json]

A daemon with ten namespaces and twenty sessions. One client acquires and releases 64 hashes as fast as it can; another
process asks for /metrics once a second, and for /api/v1/status, as a `top` does, ten times a second. The three take
turns within each round, in changing order; a ratio is the median over rounds of what was measured side by side.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from kvcache_proto import messages as m
from kvcache_proto.errors import Unavailable
from kvcache_proto.types import GroupSpec, NamespaceSpec
from kvcache_server.admin import Admin
from kvcache_server.bench import SHARD_BYTES, WIDTHS, Writer, fill

NOBODY, PROMETHEUS, TOPS = MODES = ("nobody", "prometheus", "prometheus and ten tops")
SLOTS = 10  # a second


def watch(address: str, mode: Any) -> None:
    """Ask as `mode`, an index into MODES, says, for ever."""
    began = time.monotonic()
    for slot in range(1 << 40):
        time.sleep(max(0.0, began + slot / SLOTS - time.monotonic()))
        paths = []
        if mode.value >= 1 and not slot % SLOTS:
            paths.append("/metrics")
        if mode.value >= 2:
            paths.append("/api/v1/status")
        for path in paths:
            with urllib.request.urlopen(address + path, timeout=10) as answer:
                answer.read()


@contextlib.contextmanager
def a_daemon(folder: Path, blocks: int) -> Any:
    endpoint, size = f"ipc://{folder}/kv.sock", (blocks + blocks // 4) * (SHARD_BYTES + 128)
    flags = ["--endpoint", endpoint, "--size", str(max(size, 64 << 20)), "--lock", "never", "--http", "127.0.0.1:0"]
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-m", "kvcache_server", "serve", "--keep=false", *flags]
        daemon = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for _ in range(600):
            assert daemon.poll() is None, (folder / "log").read_text()
            with contextlib.suppress(Unavailable), Admin(endpoint):
                break
            time.sleep(0.1)
        yield endpoint
    finally:
        daemon.terminate()
        daemon.wait()


def period(writer: Writer, questions: list[list[bytes]], seconds: float) -> float:
    """Return the p50 of acquires, in microseconds."""
    taken, until, at = [], time.monotonic() + seconds, 0
    while time.monotonic() < until:
        taken.append(writer.acquire(questions[at % len(questions)])[1])
        at += 1
    return statistics.median(taken) * 1e6


def run(rounds: int, seconds: float, blocks: int) -> dict[str, Any]:
    """Measure, and return the figures by mode."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-scrape-")))
        endpoint = stack.enter_context(a_daemon(folder, blocks))
        writer = stack.enter_context(Writer(endpoint, 0))
        for number in range(9):
            spec = NamespaceSpec(f"model {number}", (GroupSpec(16, SHARD_BYTES),))
            for label, shards in (("scheduler", ()), ("rank 0", (0,))):
                session = stack.enter_context(Admin(endpoint, label, engine=f"engine {number}"))
                session.ask(m.Attach(0, b"", spec, shards))
        stack.enter_context(Admin(endpoint, "idle", engine="engine 9"))
        fill(writer, blocks, lambda text: print(text, file=sys.stderr))
        questions = [writer.prompts.question(WIDTHS[0]) for _ in range(512)]
        address = writer.stats()["daemon"]["http"]["address"]
        spawn = multiprocessing.get_context("spawn")
        mode = spawn.Value("i", 0)
        watcher = spawn.Process(target=watch, args=(address, mode), daemon=True)
        watcher.start()
        stack.callback(watcher.terminate)
        period(writer, questions, seconds)
        found: dict[str, list[float]] = {name: [] for name in MODES}
        for turn in range(rounds):
            for step in range(len(MODES)):
                mode.value = (turn + step) % len(MODES)
                time.sleep(0.1)  # what it has asked for is answered
                found[MODES[mode.value]].append(period(writer, questions, seconds))
        answers = writer.stats()["daemon"]["http"]["answers"]
    ratios = {
        name: statistics.median(mine / alone for mine, alone in zip(found[name], found[NOBODY], strict=True))
        for name in MODES
    }
    p50 = {name: statistics.median(found[name]) for name in MODES}
    return {"p50_us": p50, "to_nobody": ratios, "http_answers": answers, "rounds": rounds, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = run(arguments.rounds, arguments.seconds, arguments.blocks)
    if arguments.json:
        print(json.dumps(figures, indent=2))
        return
    for name in MODES:
        print(f"{name:<26}{figures['p50_us'][name]:8.1f} us   {figures['to_nobody'][name]:6.1%}")


if __name__ == "__main__":
    main()
