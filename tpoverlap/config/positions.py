"""Lines of keys in a YAML document, keys written twice, and how large its anchors make it. Works on PyYAML's nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Lines = dict[tuple[str, ...], int]
"""Keys and list indices, as text, from the top of a document -> line, counted from 1."""


@dataclass(frozen=True)
class Duplicate:
    """A key that stands twice in one mapping; ``path`` ends with it."""

    path: tuple[str, ...]
    first_line: int
    line: int


def key_lines(node: Any) -> Lines:
    """The line of every key below ``node``. What an anchor repeats has its line at the first place only."""
    lines: Lines = {}
    seen: set[int] = set()
    pending: list[tuple[Any, tuple[str, ...]]] = [(node, ())]
    while pending:
        current, path = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        for key, line, child in _children(current):
            lines.setdefault((*path, key), line)
            pending.append((child, (*path, key)))
    return lines


def duplicates(node: Any, where: tuple[Any, ...]) -> Iterator[Duplicate]:
    """Keys that are written twice in the mapping at ``where`` or in one directly below it.

    PyYAML takes the last of two equal keys silently.
    """
    path = tuple(str(key) for key in where)
    for key in path:
        children = {name: child for name, _, child in _children(node)}
        if key not in children:
            return  # reached through an anchor or a merge key
        node = children[key]
    for section, names in ((node, ()), *((child, (name,)) for name, _, child in _children(node))):
        lines: dict[str, int] = {}
        for key, line, _ in _children(section) if section.id == "mapping" else ():
            if key in lines and key != "<<":
                yield Duplicate((*path, *names, key), lines[key], line)
            lines[key] = line


def expanded_size(node: Any, limit: int) -> int:
    """How many values ``node`` holds when every alias is written out; stops counting above ``limit``.

    A few lines of aliases to aliases can mean more values than memory holds; merge keys and OmegaConf copy them.
    An anchor that contains itself counts once.
    """
    sizes: dict[int, int] = {}
    pending: list[tuple[Any, bool]] = [(node, False)]
    while pending:
        current, children_done = pending.pop()
        if children_done:
            sizes[id(current)] = min(limit + 1, 1 + sum(sizes.get(id(child), 0) for child in _values(current)))
        elif id(current) not in sizes:
            sizes[id(current)] = 1  # what a cycle back to here sees
            pending.append((current, True))
            pending.extend((child, False) for child in _values(current))
    return sizes[id(node)]


def _children(node: Any) -> Iterator[tuple[str, int, Any]]:
    """(key or index, line, node) of everything directly below a mapping or sequence node; other keys are left out."""
    if node.id == "mapping":
        for key, child in node.value:
            if key.id == "scalar":
                yield key.value, key.start_mark.line + 1, child
    elif node.id == "sequence":
        for index, child in enumerate(node.value):
            yield str(index), child.start_mark.line + 1, child


def _values(node: Any) -> Iterator[Any]:
    if node.id == "mapping":
        for key, child in node.value:
            yield key
            yield child
    elif node.id == "sequence":
        yield from node.value
