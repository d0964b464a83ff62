"""What the dashboard's tests start and show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from kvcache_client import GroupSpec, NamespaceSpec, Session

ODD = "<img src=x onerror=alert(1)>"  # a model may be called so
BLOCK = 64 << 10
PATIENCE = 20.0


def wait(found: Callable[[], Any], what: str) -> Any:
    until = time.monotonic() + PATIENCE
    while not (value := found()):
        assert time.monotonic() < until, f"{what} did not come"
        time.sleep(0.02)
    return value


def status_of(api: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{api}/api/v1/status", timeout=PATIENCE) as response:
        found: dict[str, Any] = json.load(response)
        return found


def traffic(session: Session, model: str, count: int, first: int = 0) -> None:
    """Look blocks up, store those that are missing, and look them up again."""
    namespace = session.attach(NamespaceSpec(model=model, groups=[GroupSpec(16, BLOCK)]), (0,))
    hashes = [f"{model}{number}".encode()[-32:].ljust(32, b".") for number in range(first, first + count)]
    for _ in range(2):
        with namespace.acquire(hashes) as lease:
            missing = hashes[lease.hits :]
        if missing:
            reservation = namespace.reserve(missing, hashes[lease.hits - 1] if lease.hits else None)
            for at, slot in zip(reservation.granted, reservation.slots, strict=True):
                session.view(slot)[:] = missing[at] * (BLOCK // 32)
            reservation.commit()


class Dashboard:
    """A `kvcache-server dashboard` process."""

    def __init__(self, *flags: str, path: str | None = None) -> None:
        command = [sys.executable, "-m", "kvcache_server", "dashboard", "--listen", "127.0.0.1:0", *flags]
        env = os.environ | ({"PATH": path} if path is not None else {})
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.stop()
        assert line.startswith("dashboard at http"), line
        self.url = line.split()[-1]

    def stop(self) -> int:
        self.process.terminate()
        code = self.process.wait(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code
