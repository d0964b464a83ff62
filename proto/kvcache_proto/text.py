"""Make text from other processes safe for logs and terminals. Pure."""

from __future__ import annotations


def escaped(text: str) -> str:
    r"""Return `text` as one line without control sequences.

    Control characters, line separators and characters that change the writing direction are escaped, as in `\n`, `\x1b`
    and `\u202e`. Printable characters are unchanged.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
