"""Cut the bytes of one file into documents: top-level blocks of Python, paragraphs of anything else."""

from __future__ import annotations

import ast
import re
import warnings

_BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")


def split_documents(data: bytes, is_python: bool) -> list[bytes]:
    """The documents of one file, in order; each is a non-empty slice of ``data``.

    Python that does not parse (templates, other versions' syntax) is cut into paragraphs like any text.
    """
    if is_python:
        blocks = python_blocks(data)
        if blocks is not None:
            return blocks
    return paragraphs(data)


def python_blocks(data: bytes) -> list[bytes] | None:
    """Every top-level ``def`` and ``class`` with its decorators, or None when ``data`` does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's sources are not our user's business
            tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    # bytes.splitlines cuts at \n, \r and \r\n, exactly where the parser counts lines (str.splitlines cuts at more).
    lines = data.splitlines(keepends=True)
    blocks = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            blocks.append(b"".join(lines[first - 1 : node.end_lineno]))
    return blocks


def paragraphs(data: bytes) -> list[bytes]:
    """Runs of lines between blank lines, without leading or trailing newlines."""
    return [block for piece in _BLANK_LINES.split(data) if (block := piece.strip(b"\r\n")).strip()]
