"""A log record is one line, whatever names clients choose."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from typing import Any

import pytest

from kvcache_client import Session
from kvcache_proto import messages as m
from kvcache_proto.codec import decode_handshake, decode_reply, encode
from kvcache_proto.errors import BadFrame
from kvcache_proto.text import escaped
from kvcache_proto.types import GroupSpec, NamespaceSpec, PoolGeometry
from kvcache_server.admin_client import AdminClient
from kvcache_server.logs import JsonFormatter, TextFormatter

FORGED = (
    "x\n2026-01-01T00:00:00.000Z ERROR session 7 was fenced off\r\x1b[2J\x9b31m\u2028\u2029\x85\u202e\u2066\x00\ud800"
)
STAMP = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z (DEBUG|INFO|WARNING|ERROR) ")


def record(message: str, *arguments: object, error: BaseException | None = None) -> logging.LogRecord:
    info = (type(error), error, None) if error is not None else None
    return logging.LogRecord("kvcache_server", logging.INFO, "", 0, message, arguments, info)


def test_a_message_is_one_line_without_control_characters() -> None:
    line = TextFormatter().format(record("opened: %s, pid %d", FORGED, 5))
    assert line.isprintable()
    assert line.endswith(
        r"opened: x\n2026-01-01T00:00:00.000Z ERROR session 7 was fenced off\r\x1b[2J\x9b31m"
        r"\u2028\u2029\x85\u202e\u2066\x00\ud800, pid 5"
    )
    ordinary = "stored 5 blocks of Qwen/Qwen3-8B-Größe 模型, C:\\x"
    assert TextFormatter().format(record(ordinary)).endswith(" INFO " + ordinary)


def test_a_traceback_cannot_be_mistaken_for_log_lines() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        text = TextFormatter().format(logging.LogRecord("", logging.ERROR, "", 0, "failed", (), sys.exc_info()))
    first, *rest = text.split("\n")
    assert STAMP.match(first) and "Traceback" in rest[0]
    assert all(line.isprintable() and line.startswith("    ") for line in rest)


def test_json_keeps_the_original_text() -> None:
    line = JsonFormatter().format(record("%s", FORGED.removesuffix("\ud800")))
    assert "\n" not in line and json.loads(line)["message"] == FORGED.removesuffix("\ud800")


def test_client_names_cannot_forge_log_lines(daemon: Any) -> None:
    """Names of engine, label, client, model and namespace, in handshakes and in messages."""
    name = FORGED.removesuffix("\ud800")
    spec = NamespaceSpec(name, (GroupSpec(16, 3 << 20),), {name: name})
    with AdminClient(daemon.endpoint, name, engine=name) as engine:
        engine.ask(m.Attach(0, b"", spec, (0,)))
        with pytest.raises(Exception, match="no namespace"):
            engine.clear(name)
        engine.ask(m.Acquire(0, b"", 1, [bytes(32)], request=name))
        why = [sys.executable, "-m", "kvcache_server", "why", "2026-01-01"]
        shown = subprocess.run([*why, "--endpoint", daemon.endpoint], capture_output=True, text=True)
        assert r"x\n2026-01-01" in shown.stdout, shown
        assert all(line.isprintable() for line in shown.stdout.split("\n"))
        clear = [sys.executable, "-m", "kvcache_server", "clear", "--namespace", name.replace("\0", "")]
        failed = subprocess.run([*clear, "--endpoint", daemon.endpoint], capture_output=True, text=True)
        assert failed.returncode == 1 and failed.stderr.removesuffix("\n").isprintable(), failed.stderr
    daemon.wait_status(lambda status: not status["sessions"])
    assert r"opened: engine x\n2026-01-01" in daemon.log
    for line in daemon.log.removesuffix("\n").split("\n"):
        assert STAMP.match(line) and line.isprintable()
        assert not line.startswith("2026-01-01T00:00:00.000Z")


def test_a_daemon_s_message_is_one_line_in_the_engine_s_log(daemon: Any, caplog: pytest.LogCaptureFixture) -> None:
    error = decode_reply(encode(m.Error(1, "no\nsuch", FORGED.removesuffix("\ud800"))))
    assert isinstance(error, m.Error) and error.message.isprintable() and error.code.isprintable()
    geometry = PoolGeometry(bytes(16), 4 << 20, 2 << 20, 1, 2 << 20)
    welcome = decode_handshake(encode(m.Welcome(2, 1, bytes(16), geometry, "0.2\n\x1b[2J")))
    assert isinstance(welcome, m.Welcome) and welcome.daemon == r"0.2\n\x1b[2J"
    with pytest.raises(BadFrame) as nonsense:
        decode_reply(encode(["a tag\n\x1b[2J", 1]))
    assert str(nonsense.value).isprintable()
    with Session.open(daemon.endpoint, engine="e") as session:
        session.attach(NamespaceSpec("m", (GroupSpec(16, 1 << 40),)), (0,), insist=True)
        assert session.counters["attaches_refused"] == 1
    assert all(each.getMessage().isprintable() for each in caplog.records), caplog.text


def test_nothing_is_escaped_twice() -> None:
    assert escaped(escaped(FORGED)) == escaped(FORGED)
