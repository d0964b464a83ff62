"""Text: made safe for logs and terminals, and names on the wire. Pure."""

from __future__ import annotations

import re


def escaped(text: str) -> str:
    r"""Return `text` as one line without control sequences.

    Control characters, line separators and characters that change the writing direction are escaped, as in `\n`, `\x1b`
    and `\u202e`. Printable characters are unchanged.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def snake_case(name: str) -> str:
    """Return the name of a class as on the wire: `BadFrame` is `bad_frame`."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()
