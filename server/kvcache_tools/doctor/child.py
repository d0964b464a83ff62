"""Checks on the engine's side, which the server's package never imports. Each runs in its own process, which may
crash."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

import msgspec

from kvcache_tools.doctor.check_result import CheckResult

ENGINE_SIDE = "kvcache_tools.doctor.engine_side"  # only a name
_answers: msgspec.json.Decoder[CheckResult] = msgspec.json.Decoder(CheckResult)


def ask(question: str, *arguments: str, seconds: float = 120.0) -> Iterator[CheckResult]:
    """Yield the results of `python -m kvcache_tools.doctor.engine_side QUESTION ...` as they arrive.

    If the process fails, or runs longer than `seconds`, the last result is a failure with its last line of output.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", ENGINE_SIDE, question, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # so that its own children can be killed with it
        )
        late = threading.Event()

        def stop() -> None:
            late.set()
            _kill(process)

        timer = threading.Timer(seconds, stop)
        timer.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield _answers.decode(line)
            status = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                _kill(process)
            process.wait()
            process.stdout.close()
        if status:
            log.seek(0)
            words = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
            how = f"not finished after {seconds:.0f} s" if late.is_set() else f"ended by {_name(status)}"
            said = f"; its last line: {words[-1].strip()}" if words else ""
            cure = f"for details, run {sys.executable} -m {ENGINE_SIDE} {question}"
            yield CheckResult(question, "failed", f"{how}{said}", cure)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _name(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
