"""Logging: lines as text for people, or as JSON for programs.

A record may carry `extra={"fields": {...}}`: JSON lines have them as keys; the text of the message has them in words.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, TextIO, cast

import msgspec

from kvcache_proto.text import escaped
from kvcache_server.status import Level

ROOT = "kvcache_server"


class TextFormatter(logging.Formatter):
    """2026-01-31T12:00:00.123Z INFO message

    Every record is one line, because messages may contain names that clients chose; a traceback is indented below it.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_stamp(record)} {record.levelname} {escaped(record.getMessage())}"
        if not record.exc_info:
            return line
        traced = self.formatException(record.exc_info).split("\n")  # an exception's message may have several lines
        return "\n".join((line, *(f"    {escaped(each)}" for each in traced)))


class JsonFormatter(logging.Formatter):
    """{"time": ..., "level": ..., "logger": ..., "message": ..., and the record's fields}"""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _stamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key, value in getattr(record, "fields", {}).items():
            line.setdefault(key, value)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def _stamp(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def set_up(level: str, form: str, stream: TextIO | None = None) -> None:
    """Log to `stream`, by default stderr, records of `level` and above, in the form "text" or "json"."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def level() -> Level:
    """Return the current log level, named as in the configuration."""
    return cast(Level, logging.getLevelName(logging.getLogger(ROOT).getEffectiveLevel()).lower())


def set_level(level: str) -> None:
    logging.getLogger(ROOT).setLevel(level.upper())
