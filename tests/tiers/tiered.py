"""A toy engine for tests of tiers: blocks with known bytes, and a process that runs a tier."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from conftest import Daemon
from scattered import write

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_client.session.namespace import Namespace
from kvcache_server.admin_client import AdminClient
from kvcache_server.commands.why import describe as explain

SHARDS = (96 << 10, 32 << 10)
SPEC = NamespaceSpec(model="tiered", groups=[GroupSpec(16, SHARDS)])
SECONDS = 30.0


def hashes(chain: int, blocks: int) -> list[bytes]:
    return [hashlib.sha256(b"%d %d" % (chain, at)).digest() for at in range(blocks)]


def content(block: bytes, shard: int) -> bytes:
    return random.Random(block + bytes([shard])).randbytes(SHARDS[shard])


class ToyEngine:
    """Saves and loads blocks; every loaded byte is compared."""

    def __init__(self, endpoint: str, name: str = "toy", spec: NamespaceSpec = SPEC) -> None:
        self.session = Session.connect(endpoint, engine=name, deadline=5.0)
        self.namespace: Namespace = self.session.attach(spec, range(spec.shards))

    def save(self, names: Sequence[bytes], parent: bytes | None = None) -> int:
        """Save the blocks that are not cached; return how many."""
        reservation = self.namespace.reserve(names, parent)
        for at, slot in zip(reservation.granted, reservation.slots, strict=True):
            for shard in range(len(SHARDS)):
                write(slot, content(names[at], shard), shard)
        return len(reservation.commit())

    def load(self, names: Sequence[bytes], request: str = "", answered: bool = True) -> int:
        """Return the number of hits, after a look at all their bytes. Without `answered`, the daemon may be dead."""
        with self.namespace.acquire(names, request=request) as lease:
            assert not (answered and lease.failed)
            for name, slot in zip(names, lease.slots, strict=False):
                for shard in range(len(SHARDS)):
                    assert slot.view(shard) == content(name, shard), "wrong bytes"
            return lease.hits

    def load_all(self, names: Sequence[bytes]) -> None:
        """Load until all blocks are hits."""
        wait_for(lambda: self.load(names) == len(names), f"{len(names)} hits")

    def close(self) -> None:
        self.session.close()


Connect = Callable[[Daemon], ToyEngine]


def wait_for(found: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + SECONDS
    while not found():
        assert time.monotonic() < until, f"{what}: not after {SECONDS} s"
        time.sleep(0.01)


def tier_of(daemon: Daemon) -> dict[str, Any]:
    found = daemon.status()["daemon"]["tiers"]
    return dict(found[0]) if found else {}


def wait_tier(daemon: Daemon, name: str, least: int) -> None:
    wait_for(lambda: tier_of(daemon).get(name, 0) >= least, f"{name} of {least}")


def wait_open(daemon: Daemon) -> None:
    wait_for(lambda: tier_of(daemon).get("off") == "", "a tier that works")


def save_below(daemon: Daemon, engine: ToyEngine, names: list[bytes]) -> None:
    """Save blocks, have them written to the tier, and forget those in the region."""
    before = tier_of(daemon).get("blocks_written", 0)
    assert engine.save(names) == len(names)
    assert engine.load(names) == len(names)
    wait_tier(daemon, "blocks_written", before + len(names))
    engine.session.clear()


def leave_below(daemon: Daemon, engine: ToyEngine, names: list[bytes]) -> None:
    """The same for a tier that gets all blocks: nothing finds them, so that they do not come back by themselves."""
    before = tier_of(daemon).get("blocks_written", 0)
    assert engine.save(names) == len(names)
    wait_tier(daemon, "blocks_written", before + len(names))
    engine.session.clear()


def all_is_free(daemon: Daemon) -> bool:
    pool = daemon.status()["pool"]
    return not pool["blocks_writing"] and not pool["blocks_quarantined"] and not pool["pinned_bytes"]


def patched(folder: Path, code: str) -> dict[str, str]:
    """Return the environment of a process that runs `code` first."""
    patches = folder / "patches"
    patches.mkdir()
    (patches / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(patches), os.environ.get("PYTHONPATH")]))}


class TierRun:
    """A tier's process. Its log is in `log`."""

    def __init__(self, folder: Path, url: str, endpoint: str, *flags: str, env: dict[str, str] | None = None) -> None:
        self.log_path = folder / f"tier-{len(list(folder.glob('tier-*.log')))}.log"
        command = [sys.executable, "-m", "kvcache_tiers", url, "--endpoint", endpoint, *flags]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | (env or {})
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


@contextlib.contextmanager
def a_tier(folder: Path, url: str, endpoint: str, *flags: str, env: dict[str, str] | None = None) -> Iterator[TierRun]:
    run = TierRun(folder, url, endpoint, *flags, env=env)
    try:
        yield run
        if run.process.poll() is None:
            assert run.stop() == 0, run.log
        assert "Traceback" not in run.log, run.log
    finally:
        if run.process.poll() is None:
            run.kill()


def why(daemon: Daemon, request: str) -> tuple[list[dict[str, Any]], str]:
    """Return what `why` says of tiers, and its text."""
    with AdminClient(daemon.endpoint, "test") as admin:
        answer = admin.why(request)
    (told,) = answer.explained
    return msgspec.to_builtins(told.tiers), explain(answer)


def wait_why(daemon: Daemon, request: str, *causes: str) -> str:
    """Return the text once the tiers have said what is awaited."""
    wait_for(lambda: [each["cause"] for each in why(daemon, request)[0]] == [*causes], f"{causes} of {request}")
    return why(daemon, request)[1]
