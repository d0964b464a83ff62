"""A Mooncake Store on the loopback interface: its master, and a node whose memory holds the values."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from kvcache_tiers.mooncake import environment

BINARIES = Path(sys.executable).parent
START_SECONDS = 60.0
TIMEOUT = 3  # seconds

Process = subprocess.Popen[bytes]


def missing() -> str | None:
    """Return why no store can be started here, or None."""
    for name, value in environment(TIMEOUT).items():
        os.environ.setdefault(name, value)  # now, since the library reads some of them when it is imported
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return f"mooncake-transfer-engine-non-cuda is not installed: {error}"
    absent = [name for name in ("mooncake_master", "mooncake_client") if not (BINARIES / name).exists()]
    return f"not in {BINARIES}: {', '.join(absent)}" if absent else None


class MooncakeStore:
    """The `master` is started at once. The store has no memory before `add_node`."""

    def __init__(self, folder: Path, address: str = "127.0.0.1") -> None:
        self._address = address
        self._log = folder / "mooncake.log"
        self._port, self._metrics = free_port(), free_port()
        self.url = f"mooncake://{address}:{self._port}/?timeout={TIMEOUT}"
        self._processes: list[Process] = []
        self.master = self.start_master()

    def start_master(self) -> Process:
        flags = {"rpc_address": self._address, "rpc_port": self._port}
        flags |= {"metrics_host": "127.0.0.1", "metrics_port": self._metrics}
        flags |= {"client_ttl": 120}  # seconds; no test ends before the master notices that a node is gone
        self.master = self._start("mooncake_master", **flags)
        self.wait(lambda: bool(self.metrics()))
        return self.master

    def add_node(self, size: str = "512 MB") -> Process:
        """Add memory to the store; return when the master knows of it."""
        before = self.metrics()["master_total_capacity_bytes"]
        flags = {"master_server_address": f"{self._address}:{self._port}", "metadata_server": "P2PHANDSHAKE"}
        node = self._start("mooncake_client", **flags, host=self._address, port=free_port(), global_segment_size=size)
        self.wait(lambda: self.metrics()["master_total_capacity_bytes"] > before)
        return node

    def metrics(self) -> dict[str, float]:
        """Return what the master counts; nothing if it does not answer."""
        with contextlib.suppress(OSError):
            address = f"http://127.0.0.1:{self._metrics}/metrics"
            with urllib.request.urlopen(address, timeout=10) as answer:
                lines = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines()]
            return {line[0]: float(line[1]) for line in lines if len(line) == 2 and line[0][:1] != "#"}
        return {}

    def wait(self, reached: Callable[[], bool]) -> None:
        until = time.monotonic() + START_SECONDS
        while not reached():
            dead = [each.args for each in self._processes if each.poll() not in (None, -9)]
            assert not dead and time.monotonic() < until, f"{dead}\n{self._log.read_text(errors='replace')[-4000:]}"
            time.sleep(0.05)  # between two looks

    def close(self) -> None:
        for process in self._processes:
            kill(process)

    def _start(self, name: str, **flags: object) -> Process:
        command = [str(BINARIES / name), *(f"--{flag}={value}" for flag, value in flags.items())]
        with self._log.open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._processes.append(process)
        return process


def kill(process: Process) -> None:
    process.kill()
    process.wait()


def free_port() -> int:
    """Return a port that the kernel gives to nobody before the server binds it."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = secrets.randbelow(low // 2) + low // 2
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
