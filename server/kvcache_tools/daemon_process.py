"""A daemon in a process of its own, for commands that start one."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from kvcache_proto.errors import KVCacheError
from kvcache_server.admin_client import AdminClient

START_SECONDS = 60.0
FIRST_ERROR = re.compile(r"\bERROR .*\] (\w+\.)*\w*(Error|Exception)\b")  # as vLLM logs the end of a traceback


class Failed(click.ClickException):
    """A process failed that the command needs."""


def region_dir(folder: Path, size: int) -> str:
    """Return /dev/shm if a region of `size` fits there, else `folder`."""
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    fits = shm is not None and shm.f_bavail * shm.f_frsize > size
    return "/dev/shm" if fits else str(folder)


@contextlib.contextmanager
def running_daemon(folder: Path, *flags: str) -> Iterator[tuple[str, int]]:
    """Run `serve` with `flags` at an endpoint in `folder`; yield the endpoint and the process id once it answers.

    The log goes to `daemon.log` in `folder`; nothing is kept in memory afterwards. Raises Failed, with the end of the
    log, if the daemon does not start.
    """
    endpoint, log = f"ipc://{folder}/kvcache.sock", folder / "daemon.log"
    command = [sys.executable, "-m", "kvcache_server", "serve", "--endpoint", endpoint, "--keep=false", *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        _wait_for(endpoint, process, log)
        yield endpoint, process.pid
    finally:
        process.terminate()
        finish(process, 10)


def _wait_for(endpoint: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            raise Failed(f"the daemon exited with status {process.returncode}:\n{tail(log)}")
        with contextlib.suppress(KVCacheError), AdminClient(endpoint) as admin:
            admin.ping()
            return
        time.sleep(0.1)  # it is not listening yet
    raise Failed(f"the daemon does not answer:\n{tail(log)}")


def finish(process: subprocess.Popen[Any], seconds: float) -> None:
    """Wait for the end of `process`, and kill it after `seconds`."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def tail(log: Path, lines: int = 30) -> str:
    """Return the last lines, and above them the first error that vLLM has logged: its last lines only refer to it."""
    every = log.read_text(errors="replace").splitlines()
    first = next((line for line in every[:-lines] if FIRST_ERROR.search(line)), None)
    return "\n".join([*([first, "..."] if first else []), *every[-lines:]])
