"""The tiers that the daemon itself runs: each is a process, which is restarted when it ends, and ended if it hangs.

One thread per tier waits for its process and logs its output. A tier's URL is not among the arguments of its process,
which every user of the host can read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from kvcache_server.config import TierSettings
from kvcache_server.status import TierProcess

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before it is restarted: twice as long each time
STEADY = 60.0  # seconds after which the next pause is a short one
NEVER_AGAIN = {2: "its URL or settings are wrong", 6: "it has no permission"}
LINE = 4096  # longest line of its output in the log, in bytes
_LEVELS = {"INFO": logging.INFO, "WARNING": logging.WARNING, "ERROR": logging.ERROR}
_OURS = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID")  # set by systemd for the daemon


class TierProcesses:
    """`apply` starts and ends them."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._running: dict[TierSettings, _Runner] = {}

    def apply(self, tiers: Sequence[TierSettings]) -> None:
        """Run exactly these tiers from now on. Does not wait for the end of others."""
        for each in self._running.keys() - set(tiers):
            self._running.pop(each).stop()
        for each in tiers:
            if each not in self._running:
                self._running[each] = _Runner(each, self._endpoint)

    def kill(self, name: str, why: str) -> None:
        """Kill the process of a tier that hangs; another one is started."""
        for each, runner in self._running.items():
            if each.name == name:
                runner.kill(why)

    def report(self) -> list[TierProcess]:
        """Return, for `status`, the processes, how often each was started, and the reason if one is not running."""
        return [runner.report() for runner in self._running.values()]


class _Runner:
    def __init__(self, settings: TierSettings, endpoint: str) -> None:
        self._settings = settings
        self._command = [sys.executable, "-m", "kvcache_tiers", "--child"]
        self._command += ["--endpoint", endpoint, "--name", settings.name, "--writes", settings.writes]
        self._environ = {key: value for key, value in os.environ.items() if key not in _OURS}
        self._environ["KVCACHE_TIER_URL"] = settings.url
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._starts, self._ended = 0, ""
        threading.Thread(target=self._run, name=f"tier {settings.name}", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()
        if (process := self._process) is not None:
            process.terminate()

    def kill(self, why: str) -> None:
        if (process := self._process) is not None:
            log.warning("tier %s: killed, because it %s", self._settings.name, why)
            process.kill()

    def report(self) -> TierProcess:
        return TierProcess(self._settings.name, self._starts, self._ended)

    def _run(self) -> None:
        pause = FIRST_PAUSE
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                status = self._run_once()
            except OSError as error:
                self._ended = f"it cannot be started: {error}"
            else:
                self._ended = NEVER_AGAIN.get(status, f"it ended with status {status}")
            if self._stopping.is_set():
                return
            if self._ended in NEVER_AGAIN.values():
                log.error("tier %s is not started again: %s", self._settings.name, self._ended)
                return
            if time.monotonic() - began > STEADY:
                pause = FIRST_PAUSE
            log.warning("tier %s: %s; it is started again in %.1f s", self._settings.name, self._ended, pause)
            self._stopping.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _run_once(self) -> int:
        """Start the process, and wait for its end. Its standard input ends with the daemon, and the process with its
        input."""
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, env=self._environ, start_new_session=True
        )
        self._process = process
        self._starts += 1
        self._ended = ""
        if self._stopping.is_set():  # set before there was a process to end
            process.terminate()
        with process:
            assert process.stdout is not None
            with contextlib.suppress(ValueError):  # the pipe is closed
                while line := process.stdout.readline(LINE):
                    self._relay(line)
            return process.wait()

    def _relay(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        level, _, rest = text.partition(" ")
        if level in _LEVELS:
            log.log(_LEVELS[level], "tier %s: %s", self._settings.name, rest)
        elif text:
            log.info("tier %s: %s", self._settings.name, text)
