"""`kvcache-server top` on a terminal of its own, beside a real daemon with real traffic."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache_proto import messages as m
from kvcache_proto.types import Breaker, GroupSpec, NamespaceSpec
from kvcache_server.admin_client import AdminClient
from kvcache_server.commands.describe import describe
from kvcache_server.commands.top import Sample, frame

CLIENT = Path(__file__).with_name("client.py")
TOP = [sys.executable, "-m", "kvcache_server", "top", "--interval", "0.2"]
PATIENCE = 30.0


class Terminal:
    """A `top` on a terminal with the given rows and columns, whose screen the test reads."""

    def __init__(self, endpoint: str, rows: int = 40, columns: int = 100) -> None:
        self.keys, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            [*TOP, "--endpoint", endpoint],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            # Who runs the tests in the background has it ignored, and what is ignored is inherited.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.heard = ""
        self._theirs = theirs

    def read(self) -> None:
        if select.select([self.keys], [], [], 0.1)[0]:
            self.heard += os.read(self.keys, 1 << 16).decode()

    def frames(self) -> list[list[str]]:
        """Every whole frame so far, without what makes text bold."""
        found = re.findall(r"\x1b\[H(.*?)\x1b\[K\x1b\[J", self.heard, re.DOTALL)
        return [re.sub(r"\x1b\[1?m", "", each).split("\x1b[K\r\n") for each in found]

    def wait(self, met: Callable[[str], object], what: str) -> str:
        """Return the first later frame for which `met` holds."""
        until, seen = time.monotonic() + PATIENCE, len(self.frames())
        while True:
            self.read()
            for each in self.frames()[seen:]:
                seen += 1
                if met("\n".join(each)):
                    return "\n".join(each)
            assert time.monotonic() < until and self.process.poll() is None, (
                f"{what} did not come:\n{self.heard[-3000:]}"
            )

    def end(self) -> int:
        """Wait for its end, and look at what it leaves."""
        until = time.monotonic() + PATIENCE
        while (code := self.process.poll()) is None:  # read on: who is not read cannot end
            assert time.monotonic() < until, "it does not end"
            self.read()
        while select.select([self.keys], [], [], 0)[0]:
            self.read()
        assert self.heard.count("\x1b[?1049h") == self.heard.count("\x1b[?1049l") == 1
        assert self.heard.rstrip().endswith("\x1b[?1049l") and "\x1b[?25h" in self.heard, "the cursor is there again"
        assert termios.tcgetattr(self._theirs) == self.before
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.keys)
        os.close(self._theirs)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def make(*arguments: Any) -> Terminal:
        made.append(Terminal(*arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()


def number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in\n{text}"
    return int(found[1].replace(",", ""))


def test_live_traffic(daemon: Any, terminal: Any) -> None:
    top = terminal(daemon.endpoint)
    idle = top.wait(lambda text: "asked for" in text, "the first frame")
    assert "no namespaces" in idle and "no sessions" in idle and "hits  now -, overall -" in idle
    command = [sys.executable, str(CLIENT), daemon.endpoint, "qwen", "traffic", "65536", "3", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as client:
        busy = top.wait(lambda text: re.search(r"found +[1-9][\d,]* +[\d.]+ \w+/s", text), "traffic")
        assert re.search(r"hits  now \d+\.\d%, overall \d+\.\d%", busy)
        assert "blocks of 65536" in busy and "qwen" in busy
        assert client.wait(PATIENCE) == 0
    # Once it is over, nothing happens any more, and all that has is what the daemon counts.
    rest = top.wait(
        lambda text: re.search(r"asked for +0 +[1-9]", text) and "no sessions" in text, "the end of traffic"
    )
    status = daemon.status()
    counters, pool = status["counters"], status["pool"]
    assert number(rest, r"asked for +0 +([\d,]+)") == counters["blocks_requested"]
    assert number(rest, r"found +0 +0 B/s +([\d,]+)") == counters["blocks_hit"]
    assert number(rest, r"([\d,]+) blocks, 0 being") == pool["blocks"]
    assert "hits  now -" in rest
    os.write(top.keys, b"xq")  # the first is no key of ours
    assert top.end() == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_restores_the_terminal(daemon: Any, terminal: Any, signum: int) -> None:
    top = terminal(daemon.endpoint)
    top.wait(lambda text: "pool" in text, "the first frame")
    top.process.send_signal(signum)
    assert top.end() == 0


def test_a_small_terminal(daemon: Any, terminal: Any) -> None:
    spec = NamespaceSpec("a model whose name is longer than any line of a small terminal " * 3, (GroupSpec(16, 4096),))
    engines = [AdminClient(daemon.endpoint, f"rank {rank}", engine="many ranks") for rank in range(12)]
    try:
        engines[0].ask(m.Attach(0, b"", spec, (0,)))
        top = terminal(daemon.endpoint, 14, 50)
        text = top.wait(lambda text: "more lines" in text, "a frame that is cut")
        assert len(text.splitlines()) == 14
        assert max(map(len, text.splitlines())) < 50
    finally:
        for engine in engines:
            engine.close()


def test_it_reconnects_to_the_next_daemon(daemon: Any, start_daemon: Any, terminal: Any) -> None:
    top = terminal(daemon.endpoint)
    with AdminClient(daemon.endpoint, engine="qwen") as engine:
        namespace = engine.ask(m.Attach(0, b"", NamespaceSpec("llama", (GroupSpec(16, 4096),)), (0,))).namespace
        engine.ask(m.Acquire(0, b"", namespace, [bytes(32)] * 50))
        top.wait(lambda text: re.search(r"asked for +0 +50", text), "what was asked")
        daemon.kill()
        top.wait(lambda text: "waiting" in text and daemon.endpoint in text, "that it is gone")
    again = start_daemon(endpoint=daemon.endpoint)
    text = top.wait(lambda text: f"pid {again.process.pid}" in text, "the next one")
    assert re.search(r"asked for +0 +0\b", text), "another daemon's counts are no rate of this one"
    os.write(top.keys, b"q")
    assert top.end() == 0


def test_a_daemon_that_was_replaced_between_two_frames(daemon: Any, start_daemon: Any, terminal: Any) -> None:
    top = terminal(daemon.endpoint)
    with AdminClient(daemon.endpoint, engine="qwen") as engine:
        namespace = engine.ask(m.Attach(0, b"", NamespaceSpec("llama", (GroupSpec(16, 4096),)), (0,))).namespace
        engine.ask(m.Acquire(0, b"", namespace, [bytes(32)] * 50))
        top.wait(lambda text: re.search(r"asked for +0 +50", text), "what was asked")
        top.process.send_signal(signal.SIGSTOP)
    daemon.stop()
    again = start_daemon(endpoint=daemon.endpoint)
    top.process.send_signal(signal.SIGCONT)
    text = top.wait(lambda text: f"pid {again.process.pid}" in text, "the next one")
    assert re.search(r"asked for +0 +0\b", text), "another daemon's counts are no rate of this one"


def test_in_a_pipe_it_is_plain_text(daemon: Any, short_folder: Path) -> None:
    once = subprocess.run([*TOP, "--once", "--endpoint", daemon.endpoint], capture_output=True, text=True, check=True)
    assert once.stdout.startswith("kvcache-server ") and once.stdout.count("pool  [") == 1
    assert "\x1b" not in once.stdout
    ours, theirs = pty.openpty()
    subprocess.run([*TOP, "--once", "--endpoint", daemon.endpoint], stdout=theirs, check=True)
    assert b"\x1b" not in os.read(ours, 1 << 16), "on a terminal, what is shown once stays there"
    os.close(ours)
    os.close(theirs)
    nobody = subprocess.run([*TOP, "--endpoint", f"ipc://{short_folder}/other.sock"], capture_output=True, text=True)
    assert (nobody.returncode, nobody.stdout) == (4, "")
    assert "no daemon at" in nobody.stderr and "Traceback" not in nobody.stderr


def test_names_with_control_characters(daemon: Any) -> None:
    spec = NamespaceSpec("llama\x1b]0;owned\x07\r\n", (GroupSpec(16, 4096),))
    with AdminClient(daemon.endpoint, "rank\x1b[2J", engine="qwen\x9b31m\u202e") as engine:
        engine.ask(m.Attach(0, b"", spec, (0,)))
        for command in ([*TOP, "--once"], [sys.executable, "-m", "kvcache_server", "status"]):
            shown = subprocess.run(
                [*command, "--endpoint", daemon.endpoint], capture_output=True, text=True, check=True
            )
            assert "llama?]0;owned???" in shown.stdout and "qwen?31m?" in shown.stdout
            assert all(each.isprintable() or each == "\n" for each in shown.stdout)
        as_json = [sys.executable, "-m", "kvcache_server", "status", "--json", "--endpoint", daemon.endpoint]
        shown = subprocess.run(as_json, capture_output=True, text=True, check=True)
        assert shown.stdout.isascii() and "qwen\\u009b31m\\u202e" in shown.stdout


def test_rates_are_differences_of_two_reports(daemon: Any) -> None:
    def seen(at: float) -> Sample:
        return Sample(daemon.figures(), at)

    with AdminClient(daemon.endpoint, engine="qwen") as engine:
        namespace = engine.ask(m.Attach(0, b"", NamespaceSpec("llama", (GroupSpec(16, 1 << 20),)), (0,))).namespace
        run = [number.to_bytes(32, "little") for number in range(8)]
        before = seen(100.0)
        reserved = engine.ask(m.Reserve(0, b"", namespace, [m.Run(run), m.Run([bytes(31) + b"x"], bytes(31) + b"y")]))
        engine.ask(m.Settle(0, b"", engine.geometry.region_id, reserved.reservation, (0,), 0))
        engine.ask(m.Reserve(0, b"", namespace, [m.Run(run)]))  # present: nothing is refused by that
        engine.ask(m.Acquire(0, b"", namespace, [*run, bytes(31) + b"z", bytes(31) + b"y"], 0, False))
        engine.tell(
            m.ReportClient(
                0, b"", Breaker.CLOSED, {"needed_blocks": 4, "needed_bytes": 4 << 20, "loaded_bytes": 2 << 20}
            )
        )
        engine.ping()  # what is told has no answer; what comes after it has
        text = "\n".join(line.text for line in frame(before, seen(104.0)))
        status = describe(daemon.figures())
    # In four seconds: 8 stored, one refused, 8 of 10 found, 4 of these needed, 2 loaded so far.
    assert "hits  now 80.0%, overall 80.0%" in text
    for row in (
        r"asked for +2 +10\b",
        r"found +2 +2\.0 MiB/s +8 +8\.0 MiB",
        r"needed +1 +1\.0 MiB/s +4 +4\.0 MiB",
        r"loaded +512\.0 KiB/s +2\.0 MiB",
        r"saved +2 .*\b8\b",
        r"refused +0 +1 +no_parent 1",
    ):
        assert re.search(row, text), f"{row}\n{text}"
    assert "80.0% of 10 blocks asked for, 8.0 MiB found\n            4 of them needed, 4.0 MiB\n" in status
    assert "eviction    what is worth least goes first\n            hits on blocks that had been asked for" in status
    assert "copies      2.0 MiB loaded, 0 B saved" in status
    assert re.search(r"llama +8 +8\.0 MiB +80\.0% +80\.0%", text)
