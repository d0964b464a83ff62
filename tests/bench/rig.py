"""What benchmarks share: a daemon, blocks in it, and processes at the other end of a pipe."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent)]

import msgspec  # noqa: E402
from conftest import Daemon, a_short_folder  # noqa: E402

from kvcache_client import Namespace  # noqa: E402
from kvcache_proto.messages import Stats  # noqa: E402
from kvcache_proto.types import MAX_BLOCKS  # noqa: E402
from kvcache_server.admin_client import AdminClient  # noqa: E402


@contextmanager
def one_daemon(env: dict[str, str] | None = None, **flags: object) -> Iterator[Daemon]:
    """Yield a daemon that is ready, with `env` beside our own; `flags` are those of `Daemon`."""
    with a_short_folder() as folder:
        daemon = Daemon(folder, os.environ | (env or {}), **flags)
        try:
            yield daemon.wait_ready()
        finally:
            try:
                daemon.stop(300)  # of a large region, the unmapping takes its time
            finally:
                daemon.kill()
                daemon.tidy()


def save(namespace: Namespace, chain: list[bytes], begin: int = 0, data: bytes = b"") -> None:
    """Write the blocks of a chain from the position `begin` on. Without `data`, slots keep the bytes that they have."""
    for at in range(begin, len(chain), MAX_BLOCKS):
        reservation = namespace.reserve(chain[at : at + MAX_BLOCKS], chain[at - 1] if at else None)
        for slot in reservation.slots if data else ():
            slot.view()[:] = data  # blocks of one size lie in one piece
        reservation.commit()


def raw_figures(client: AdminClient) -> dict[str, Any]:
    """Return the figures of `status` as a map: a daemon of another version may report others than this one knows."""
    found: dict[str, Any] = msgspec.msgpack.decode(client.ask(Stats(0, b"")).stats)
    return found


class Child:
    """A process that runs `target(pipe, *arguments)`; `pipe` is our end of its pipe."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()  # so that its death is an end of file here
        assert self.process.pid is not None
        self.pid: int = self.process.pid

    def hear(self, seconds: float = 120.0) -> Any:
        """Return its next message. Raises EOFError where it has ended, and AssertionError where it is silent."""
        assert self.pipe.poll(seconds), f"process {self.pid} is silent"
        return self.pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
