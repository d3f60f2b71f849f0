"""Text that came from somebody's file, made safe to print."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` on one line, with control characters and lone surrogates written out.

    A quoted key can hold an escape sequence that repaints the terminal, or half a character that cannot be encoded.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else " " if char.isspace() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
