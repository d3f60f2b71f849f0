"""Tables in Markdown, and the places between two comments that documents keep for them."""

from __future__ import annotations

from collections.abc import Sequence

import click


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Heads, a rule, and a line a row."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), *rows))


def filled(text: str, begin: str, end: str, wanted: str) -> str:
    """``text`` with ``wanted`` between the comments ``begin`` and ``end``.

    Raises:
        click.ClickException: the document does not have each of them once.
    """
    if text.count(begin) != 1 or text.count(end) != 1:
        raise click.ClickException(f"the document needs {begin} and {end}, each once, around the table")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{wanted}\n{end}{rest.partition(end)[2]}"
