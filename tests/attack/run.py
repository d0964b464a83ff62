"""Attackers of two kinds beside an honest engine, on a real daemon that is killed and restarted from time to time.

    python tests/attack/run.py --seconds 3600 --seed 1

One kind is a user who may not attach, the other one may. These must hold: no block is wrong; the daemon stays alive;
its memory and descriptors do not grow; nothing outside of its folders is touched; its log has no traceback, and no line
that somebody else has written. The waiting times of the honest engine are printed. It must run as root to use other
users.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).parent
sys.path[:0] = [each for each in (str(HERE.parent),) if each not in sys.path]

from conftest import Daemon  # noqa: E402

STRANGER, ADMITTED = 54_321, 54_322
LINE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z (DEBUG|INFO|WARNING|ERROR|CRITICAL) ")


class Result(msgspec.Struct):
    """What a run found. `sizes` are bytes of the daemon's own memory, once a second; latencies are microseconds."""

    victim: dict[str, float] = {}
    attacks: Counter[str] = Counter()
    sizes: list[int] = []
    descriptors: list[int] = []
    lives: int = 1
    seconds: float = 0.0


@contextlib.contextmanager
def process(*command: object) -> Iterator[subprocess.Popen[str]]:
    """A helper that prints "ready", and its figures at its end, once its input is closed."""
    with subprocess.Popen(
        [sys.executable, *map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "ready\n", f"{command[0]} has not begun"
            yield child
        finally:
            child.kill()


def figures(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.close()
    line = child.stdout.readline()
    assert line, f"it ended with {child.wait()}"
    told: dict[str, Any] = json.loads(line)
    return told


def listing(folder: Path) -> dict[str, tuple[int, int, int, int]]:
    """What lies below `folder`: mode, owner, size and time of change."""
    found = {}
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        found[str(path)] = (state.st_mode, state.st_uid, state.st_size, state.st_mtime_ns)
    return found


def attack(folder: Path, seconds: float, seed: int, life: float, strangers: int = 1, admitted: int = 2) -> Result:
    """Let them attack for so long; the daemon is killed after each `life` seconds. Raises AssertionError."""
    draw, result, began = random.Random(seed), Result(), time.monotonic()
    outside, inside = folder / "outside", folder / "kv"
    outside.mkdir()
    inside.mkdir(mode=0o755)
    folder.chmod(0o755)
    (outside / "precious").write_text("not the daemon's")
    before = listing(outside)

    def start() -> Daemon:
        flags = {"size": "32MiB", "quarantine": 0.5, "grace": 2, "allow_uids": ADMITTED, "keep": "true"}
        return Daemon(inside, endpoint=f"ipc://{inside}/kv.sock", **flags).wait_ready()

    daemon = start()
    daemons = [daemon]
    try:
        with contextlib.ExitStack() as stack:
            victim = stack.enter_context(process(HERE / "victim.py", daemon.endpoint, seed))
            attackers = [
                stack.enter_context(
                    process(HERE / "attacker.py", uid, daemon.endpoint, "/dev/shm", draw.randrange(1 << 30))
                )
                for uid in [STRANGER] * strangers + [ADMITTED] * admitted
            ]
            until, dies = time.monotonic() + seconds, time.monotonic() + life  # however long all of them took to start
            while time.monotonic() < until:
                time.sleep(1)  # between two samples of the daemon's memory and descriptors
                assert daemon.process.poll() is None, daemon.log[-4000:]
                result.sizes.append(daemon.own_bytes)
                result.descriptors.append(daemon.descriptors)
                if dies < until and time.monotonic() > dies:
                    daemon.kill()
                    daemon = start()
                    daemons.append(daemon)
                    dies = time.monotonic() + life
                    until = max(until, dies - life / 2)  # on a busy host this may have come late
            for attacker in attackers:
                result.attacks.update(figures(attacker))
            result.victim = figures(victim)
        daemon.wait_status(lambda status: not status["sessions"], "the end of all sessions")
        status = daemon.status()
        assert "internal" not in status["daemon"]["errors"], daemon.log[-4000:]
        daemon.check_integrity()
        assert daemon.stop() == 0, daemon.log[-4000:]
    finally:
        for each in daemons:
            each.kill()
            each.tidy()
    result.lives, result.seconds = len(daemons), time.monotonic() - began
    assert listing(outside) == before
    for each in daemons:
        assert "Traceback" not in each.log, each.log[-8000:]
        odd = [line for line in each.log.splitlines() if not LINE.match(line) or not line.isprintable()]
        assert not odd, odd[:5]
        assert "session 1 ended: all is well" not in [line.split(" INFO ", 1)[-1] for line in each.log.splitlines()]
    assert not result.victim.get("blocks_wrong"), result.victim
    for planted in ("session file written to", "planted in the endpoint's folder", "another's session resumed"):
        assert not result.attacks[planted], planted
    return result


def describe(result: Result) -> str:
    sizes = sorted(result.sizes)
    shown = {name: round(value) for name, value in result.victim.items()}
    return "\n".join(
        (
            f"{result.seconds:.0f} s, {result.lives} daemons, {sum(result.attacks.values()):,} acts",
            "attackers: " + ", ".join(f"{name} {count:,}" for name, count in sorted(result.attacks.items())),
            f"victim: {shown}",
            f"memory of the daemon: median {sizes[len(sizes) // 2] >> 20} MiB, at most {sizes[-1] >> 20} MiB; "
            f"descriptors at most {max(result.descriptors)}",
        )
    )


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--seconds", type=float, default=3600)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--life", type=float, default=60, help="seconds until the daemon is killed")
    options.add_argument("--dir", default="/tmp", help="where to create the endpoint's folder")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv", dir=given.dir) as folder:
        print(describe(attack(Path(folder), given.seconds, given.seed, given.life)))


if __name__ == "__main__":
    main()
