"""Where the overlap options stand in the text of a file, so that single lines can be edited."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tpoverlap.config.reader import RawConfig
from tpoverlap.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """Lines ``first`` to ``last``, counted from 0, of a key and its value; ``column`` is where the key begins."""

    first: int
    last: int
    column: int


@dataclass(frozen=True)
class Entry:
    """One GEMM. ``flow``: written in braces, so its options have no lines of their own."""

    name: str
    place: Place
    flow: bool
    options: dict[str, Place]


@dataclass(frozen=True)
class Section:
    """All entries of a file; further ones go below line ``last`` (-1: at the end), indented by ``column``."""

    entries: dict[str, Entry]
    first: int
    last: int
    column: int


def section_of(raw: RawConfig) -> Section:
    """The places of the overlap options in ``raw.text``.

    Raises:
        ConfigError: they are not written one name a line, so that no line can be added.
    """
    import yaml

    node = yaml.SafeLoader(raw.text).get_single_node()
    for key in raw.where:
        node = _child(node, str(key))
    if node is None or node.id != "mapping" or not node.value:
        return Section({}, 0, -1, 0)
    if node.flow_style:
        raise ConfigError(f"{raw.origin}: the options are written in braces; write one name a line")
    entries = {}
    previous = -1
    for key, child in _pairs(node):
        place = Place(key.start_mark.line, _last_line(child), key.start_mark.column)
        if place.first <= previous:
            raise ConfigError(f"{raw.origin}: {key.value} shares its line with another name; write one name a line")
        if child.start_mark.index < key.start_mark.index:
            raise ConfigError(f"{raw.origin}: {key.value} is an alias of another name's options; write them out")
        previous = place.last
        options = {
            option.value: Place(option.start_mark.line, _last_line(value), option.start_mark.column)
            for option, value in (_pairs(child) if child.id == "mapping" else ())
        }
        entries[key.value] = Entry(key.value, place, child.id != "mapping" or bool(child.flow_style), options)
    first = node.value[0][0].start_mark
    return Section(entries, first.line, previous, first.column)


def _pairs(node: Any) -> Iterator[tuple[Any, Any]]:
    yield from ((key, child) for key, child in node.value if key.id == "scalar")


def _child(node: Any, key: str) -> Any:
    if node is None or node.id == "scalar":
        return None
    if node.id == "sequence":
        return node.value[int(key)]
    return next((child for name, child in _pairs(node) if name.value == key), None)


def _last_line(node: Any) -> int:
    """The last line with a part of ``node``; a block mapping's own end mark lies behind comments that follow it."""
    if node.id == "scalar" or node.flow_style or not node.value:
        last_line = int(node.end_mark.line)
        at_line_start = node.end_mark.column == 0 and last_line > node.start_mark.line
        return last_line - 1 if at_line_start else last_line  # a block scalar ends where the next line begins
    child = node.value[-1]
    return _last_line(child[1] if node.id == "mapping" else child)
