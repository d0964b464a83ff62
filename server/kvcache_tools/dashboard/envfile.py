"""systemd's EnvironmentFile, parsed as systemd does, and edited such that everything else stays unchanged. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvcache_proto.errors import BadArgument

_NEWLINE, _SPACE = "\n\r", " \t"
_ESCAPED_IN_DOUBLE = '"\\`$'


class Assignment(NamedTuple):
    """One `KEY=value` and its position in the text, from its first letter to the end of the line."""

    key: str
    value: str
    start: int
    end: int


def parse(text: str) -> list[Assignment]:
    """Return all assignments; of several with the same key, the last one counts.

    Raises BadArgument for a comment that ends in a backslash: versions of systemd disagree on the next line.
    """
    found, at = [], 0
    while at < len(text):
        if text[at] in _NEWLINE + _SPACE:
            at += 1
        elif text[at] in "#;":
            end = _line_end(text, at)
            if text[at:end].endswith("\\"):
                line = text.count("\n", 0, at) + 1
                raise BadArgument(f"line {line}: a comment ends in a backslash: systemd's versions differ on that")
            at = end
        else:
            equals, end = text.find("=", at + 1), _line_end(text, at)
            if equals < 0 or equals > end:
                at = end  # not an assignment: systemd ignores it, too
                continue
            value, end = _value(text, equals + 1)
            found.append(Assignment(text[at:equals].rstrip(), value, at, end))
            at = end
    return found


def _line_end(text: str, at: int) -> int:
    return min((end for end in (text.find(mark, at) for mark in _NEWLINE) if end >= 0), default=len(text))


def _value(text: str, at: int) -> tuple[str, int]:
    """Return the value that begins at `at`, and the position of the end of its line."""
    value, kept, quote, bare = "", 0, "", False  # `kept`: length of the value without trailing white space
    while at < len(text):
        letter = text[at]
        following = text[at + 1 : at + 2]
        at += 1
        if quote:
            if letter == quote:
                quote, kept = "", len(value)
            elif letter == "\\" and quote == '"':
                at += 1
                if following != "\n":
                    value += following if following in _ESCAPED_IN_DOUBLE else letter + following
            else:
                value += letter
        elif letter in _NEWLINE:
            return value[:kept], at - 1
        elif letter == "\\":
            at += 1
            bare = True
            value += following if following not in _NEWLINE else ""
            kept = len(value)
        elif not bare and letter in "'\"":
            quote = letter
        elif bare or letter not in _SPACE:
            bare = True
            value += letter
            kept = len(value) if letter not in _SPACE else kept
    return value if quote else value[:kept], len(text)


def write(value: str) -> str:
    """Return `value` quoted for systemd. Raises BadArgument for a value that does not fit on one line."""
    if not value.isprintable():
        raise BadArgument(f"{value!r}: only printable characters, on one line")
    if value == value.strip() and "\\" not in value and not value.startswith(("'", '"')):
        return value
    if "'" not in value:
        return f"'{value}'"
    return '"' + "".join("\\" + each if each in _ESCAPED_IN_DOUBLE else each for each in value) + '"'


def edit(text: str, values: Mapping[str, str]) -> str:
    """Return `text` with these values, each replacing the last assignment of its key. Raises BadArgument."""
    last = {each.key: each for each in parse(text)}
    missing = values.keys() - last.keys()
    if missing:
        raise BadArgument(f"the file does not set {', '.join(sorted(missing))}")
    for found in sorted((last[key] for key in values), key=lambda each: -each.start):
        text = f"{text[: found.start]}{found.key}={write(values[found.key])}{text[found.end :]}"
    after = {each.key: each.value for each in parse(text)}
    assert after == {key: each.value for key, each in last.items()} | dict(values), "the edit reads back otherwise"
    return text
