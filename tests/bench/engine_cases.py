"""The cases of engines.py: vLLM without offload, with each alternative, and with our connector; and their servers."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from kvcache_tools.daemon_process import Failed, finish, tail
from kvcache_tools.engine_process import EngineProcess

GIB = 1 << 30
DISK = ""  # folder of the case `disk`, if it is not beside the engine's
STARTING = 240.0  # seconds for a server, whose memory is made and locked first

Server = Callable[[Path, int, dict[str, Any]], AbstractContextManager[dict[str, Any]]]


class Case(NamedTuple):
    """An engine's arguments beyond those of all cases come from `serve(folder, gib, extra)`, while its server lives."""

    name: str
    serve: Server
    tier: bool = True
    environment: dict[str, str] = {}  # noqa: RUF012  # nobody writes to it
    unsupported_reason: Callable[[], str] = lambda: ""


def start_engine(name: str, folder: Path, environment: dict[str, str]) -> EngineProcess:
    """Return an `engine_process.py` that has imported vLLM and has yet to start its engine."""
    engine = EngineProcess(
        name, folder, environment, [sys.executable, str(Path(__file__).parent / "engine_process.py")]
    )
    engine.answer()
    return engine


@contextlib.contextmanager
def server(
    command: list[str], log: Path, ready: Callable[[], bool], environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    out: IO[bytes]
    env = {**os.environ, **(environment or {})}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env)
    try:
        until = time.monotonic() + STARTING
        while not ready():
            if process.poll() is not None or time.monotonic() > until:
                raise Failed(f"{command[:4]} is not ready, status {process.poll()}:\n{tail(log)}")
            time.sleep(0.05)  # between two knocks: other projects' servers are asked, and tell nothing by themselves
        yield
    finally:
        process.terminate()
        finish(process, 20)


def transfer(connector: str, **more: Any) -> dict[str, Any]:
    return {"kv_transfer_config": {"kv_connector": connector, "kv_role": "kv_both", **more}}


@contextlib.contextmanager
def nothing(folder: Path, gib: int, extra: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {}


@contextlib.contextmanager
def native(folder: Path, gib: int, extra: dict[str, Any]) -> Iterator[dict[str, Any]]:
    # What was generated is kept too, as the others do.
    settings = {"cpu_bytes_to_use": int(gib * GIB), "offload_prompt_only": False}
    yield transfer("OffloadingConnector", kv_connector_extra_config=settings)


@contextlib.contextmanager
def simple(folder: Path, gib: int, extra: dict[str, Any]) -> Iterator[dict[str, Any]]:
    settings = {"cpu_bytes_to_use": int(gib * GIB), "lazy_offload": False}
    yield transfer("SimpleCPUOffloadConnector", kv_connector_extra_config=settings)


@contextlib.contextmanager
def lmcache(folder: Path, gib: int, extra: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """As its deployment guide starts it, all memory made at once. It keeps a fifth free: that comes on top."""
    port, http, size = free_port(), free_port(), str(math.ceil(gib / 0.8))
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--http-host", "127.0.0.1", "--http-port", str(http), "--l1-size-gb", size, "--l1-init-size-gb", size]
    command += ["--eviction-policy", "LRU", "--chunk-size", "256", "--max-workers", "4", "--disable-observability"]

    def ready() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{http}/healthcheck", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    with server(command, folder / "lmcache.log", ready):
        config = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
        yield transfer("LMCacheMPConnector", kv_connector_extra_config=config)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def ours(
    folder: Path, gib: int, extra: dict[str, Any], *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    from kvcache_proto.errors import KVCacheError
    from kvcache_server.admin_client import AdminClient

    endpoint = f"ipc://{folder}/kvcache.sock"
    command = [sys.executable, "-m", "kvcache_server", "serve", "--keep=false"]
    command += ["--endpoint", endpoint, "--size", f"{gib}GiB", *flags]

    def ready() -> bool:
        try:
            with AdminClient(endpoint) as admin:
                admin.ping()
            return True
        except KVCacheError:
            return False

    with server(command, folder / "daemon.log", ready, environment):
        yield transfer(
            "KVCacheServerConnector",
            kv_connector_module_path="kvcache_client.connector",
            kv_connector_extra_config={"endpoint": endpoint, **extra},
        )
        with AdminClient(endpoint) as admin:
            (folder / f"status-{time.monotonic_ns()}.log").write_bytes(msgspec.json.encode(admin.status()))


@contextlib.contextmanager
def uncompressed(folder: Path, gib: int, extra: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with ours(folder, gib, extra | {"compress": "off"}) as more:
        yield more


@contextlib.contextmanager
def disk(folder: Path, gib: int, extra: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Ours, with a disk below a small region."""
    below = tempfile.TemporaryDirectory(dir=DISK or folder)
    with below as path, ours(folder, max(1, gib // 24), extra, "--tier", f"disk:{path}?size={gib}GiB") as more:
        yield more


def _installed(name: str) -> Callable[[], str]:
    return lambda: "" if importlib.util.find_spec(name) else f"{name} is not installed"


CASES = {
    case.name: case
    for case in (
        Case("none", nothing, tier=False),
        Case("native", native),
        Case("simple", simple),
        Case(
            "lmcache",
            lmcache,
            environment={"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"},
            unsupported_reason=_installed("lmcache"),
        ),
        Case("ours", ours),
        Case("uncompressed", uncompressed),
        Case("disk", disk),
    )
}
