"""One logging configuration, two forms of a line: text for people, JSON for machines.

A record may bear `extra={"fields": {...}}`: JSON lines have them as keys; a text says them in its own words.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, TextIO

import msgspec

from kvcache_proto.text import escaped

ROOT = "kvcache_server"


class TextFormatter(logging.Formatter):
    """2026-01-31T12:00:00.123Z INFO message

    A record is one line, for messages have names that clients chose in them; a traceback is indented below it.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_stamp(record)} {record.levelname} {escaped(record.getMessage())}"
        if not record.exc_info:
            return line
        traced = self.formatException(record.exc_info).split("\n")  # what it says may have lines of its own
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
    """Send the daemon's log to `stream`, stderr by default, as `form` ("text" or "json"), from `level` on."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def level() -> str:
    """Return the least severity that is logged."""
    return logging.getLevelName(logging.getLogger(ROOT).getEffectiveLevel()).lower()


def set_level(level: str) -> None:
    """Log from `level` on; a name as in the configuration."""
    logging.getLogger(ROOT).setLevel(level.upper())
