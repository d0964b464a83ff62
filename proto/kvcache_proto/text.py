"""Text from elsewhere, fit for a log and a terminal. Pure."""

from __future__ import annotations


def escaped(text: str) -> str:
    r"""Return `text` as one line that commands nothing: control characters, line separators and marks that change the
    direction of writing as in `\n`, `\x1b`, `\u202e`. All that can be read stays as it is."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
