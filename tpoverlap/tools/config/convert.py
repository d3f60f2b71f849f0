"""A file for Transformer Engine made into one for this library that means the same, and back.

Only lines are added or turned into comments, so that everything else stays as it is, to the byte; both are marked, and
the way back takes them out again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from tpoverlap.config import KNOWN_NAMES, OPTION_KEYS
from tpoverlap.config.defaults import fill_defaults, transformer_engine_config
from tpoverlap.config.names import COLUMN_DGRADS, COLUMN_WGRADS, ROW_WGRADS
from tpoverlap.config.options import OptionValue, normalise
from tpoverlap.config.reader import RawConfig
from tpoverlap.tools.config.document import Entry, Section, section_of

Format = Literal["te", "tpoverlap"]
ADDED: Final = "  # added by tpoverlap config convert --to "
KEPT: Final = "# kept by tpoverlap config convert: "

_ADDED_LINE: Final = re.compile(rf"{re.escape(ADDED)}(te|tpoverlap)\r?\n?$")
_KEPT_LINE: Final = re.compile(rf"^( *){re.escape(KEPT)}(.*)$", re.DOTALL)
_TE_METHODS: Final = ("ring_exchange", "pipeline", "bulk", "external")


@dataclass
class Edits:
    """What is to happen to the lines of a text. Line numbers count from 0."""

    below: dict[int, list[str]] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    remarks: list[str] = field(default_factory=list)


def convert_text(raw: RawConfig, to: Format, tp_size: int) -> tuple[str, tuple[str, ...]]:
    """The text of ``raw`` for ``to``, and remarks on what that means. ``raw`` holds no line that is marked already.

    Raises:
        ConfigError: the file is written in a way in which no line can be added.
    """
    section = section_of(raw)
    edits = Edits()
    given = {name: _normalised(raw.entries.get(name)) for name in KNOWN_NAMES}
    for name, options in given.items():
        if name in ROW_WGRADS:
            continue
        wgrad_of_scatter = name in COLUMN_WGRADS and name not in section.entries
        if not wgrad_of_scatter:
            _convert(name, options, section, to, tp_size, edits)
    return _apply(raw.text, edits, to), tuple(edits.remarks)


def converted_to(text: str) -> Format | None:
    """What an earlier conversion made of ``text``; None where there was none, or it had nothing to add."""
    for line in text.splitlines():
        match = _ADDED_LINE.search(line)
        if match is not None:
            return "te" if match[1] == "te" else "tpoverlap"
    return "te" if KEPT in text else None  # only that way can leave a key out without putting another in its place


def restored(text: str) -> str:
    """``text`` without what an earlier conversion added, and with what it kept."""
    lines = text.splitlines(keepends=True)
    result = [_uncommented(line) for line in lines if _ADDED_LINE.search(line) is None]
    last = lines[-1] if lines else ""
    last_was_added = _ADDED_LINE.search(last) is not None and not last.endswith(("\n", "\r"))
    if last_was_added and result:  # so the file had no newline at its end
        result[-1] = result[-1].rstrip("\r\n")
    return "".join(result)


def _uncommented(line: str) -> str:
    match = _KEPT_LINE.match(line)
    return line if match is None else match[1] + match[2]


def _normalised(value: Any) -> dict[str, OptionValue]:
    return {key: normalise(key, child) for key, child in value.items()} if isinstance(value, Mapping) else {}


def _convert(
    name: str, given: Mapping[str, OptionValue], section: Section, to: Format, tp_size: int, edits: Edits
) -> None:
    """Plan what ``name`` needs to mean in ``to`` what it means now."""
    entry = section.entries.get(name)
    if to == "tpoverlap":
        wanted = transformer_engine_config(name, given, tp_size).to_dict()
        first = {"method": str(wanted["method"])}
        got = fill_defaults(name, first | dict(given), tp_size).to_dict()
        drop: set[str] = set()
    else:
        wanted = fill_defaults(name, given, tp_size).to_dict()
        method = _method_for_te(name, wanted)
        if method is None:
            edits.remarks.append(
                f"{name} is sequential: Transformer Engine's files cannot say so, and it will overlap there; "
                "switch that off where the layer is built (tp_comm_overlap_ag, tp_comm_overlap_rs, ...)"
            )
            if entry is not None:
                edits.kept |= set(range(entry.place.first, entry.place.last + 1))
            return
        drop = {"num_max_streams"} & set(given)
        if method != wanted["method"]:
            edits.remarks.append(f"{name}: method {wanted['method']} becomes {method}, Transformer Engine has no other")
            drop |= {"method"} & set(given)
            wanted["method"] = method
        first = {"method": method}
        remaining = {key: value for key, value in given.items() if key not in drop}
        got = transformer_engine_config(name, first | remaining, tp_size).to_dict()
    added = first if "method" not in given or "method" in drop else {}
    missing = [key for key in OPTION_KEYS if key not in given and key not in ("method", "is_reduce_scatter")]
    pins = dict(added) | {key: wanted[key] for key in missing if got[key] != wanted[key]}
    if "method" in pins and not drop and len(pins) == 1 and _own_method(name, to) == pins["method"]:
        pins = {}  # it is what the other side does anyway
    if pins or drop:
        _plan(name, entry, given, pins, drop, section, edits)


def _own_method(name: str, to: Format) -> str:
    return KNOWN_NAMES[name].te_method if to == "te" else KNOWN_NAMES[name].method


def _method_for_te(name: str, wanted: Mapping[str, OptionValue]) -> str | None:
    """What Transformer Engine should run; None where it cannot be told to."""
    method = str(wanted["method"])
    if method == "sequential":
        return None
    if method in _TE_METHODS:
        return method
    gathers = name in COLUMN_DGRADS and not wanted["is_reduce_scatter"]
    return "bulk" if gathers or name in COLUMN_WGRADS else "ring_exchange"


def _plan(
    name: str,
    entry: Entry | None,
    given: Mapping[str, OptionValue],
    pins: Mapping[str, OptionValue],
    drop: set[str],
    section: Section,
    edits: Edits,
) -> None:
    if entry is None or (entry.flow or not entry.options):
        block = {key: value for key, value in given.items() if key not in drop} | dict(pins)
        lines = [f"{' ' * section.column}{name}:", *_lines(block, section.column + 2)]
        if entry is not None:
            edits.kept |= set(range(entry.place.first, entry.place.last + 1))
        where = section.last if entry is None else entry.place.last
        edits.below.setdefault(where, []).extend(lines)
        return
    for key in drop & set(entry.options):
        edits.kept |= set(range(entry.options[key].first, entry.options[key].last + 1))
    last = max(entry.options.values(), key=lambda place: place.last)
    edits.below.setdefault(last.last, []).extend(_lines(pins, last.column))


def _lines(options: Mapping[str, OptionValue], column: int) -> list[str]:
    words = {True: "true", False: "false", None: "null"}
    return [
        f"{' ' * column}{key}: {words[value] if value is None or isinstance(value, bool) else value}"
        for key, value in options.items()
    ]


def _apply(text: str, edits: Edits, to: Format) -> str:
    mark = ADDED + to
    newline = "\r\n" if "\r\n" in text else "\n"
    lines = text.splitlines(keepends=True)
    if -1 in edits.below:  # no entries yet: at the end
        edits.below.setdefault(len(lines) - 1, []).extend(edits.below.pop(-1))
    result: list[str] = []
    for number in range(-1, len(lines)):
        if number >= 0:
            line = lines[number]
            indent = line[: len(line) - len(line.lstrip(" "))]
            result.append(f"{indent}{KEPT}{line[len(indent) :]}" if number in edits.kept else line)
        for added in edits.below.get(number, ()):
            if result and not result[-1].endswith(("\n", "\r")):
                result[-1] += newline
                result.append(added + mark)
            else:
                result.append(added + mark + newline)
    return "".join(result)
