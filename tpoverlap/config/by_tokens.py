"""The section ``tpoverlap: by_tokens:``: methods by T, as ``tpoverlap tune`` writes them. What may stand in it.

::

    tpoverlap:
      by_tokens:
        fc1_fprop:
          features: 14336             # of the GEMM's sharded side on one rank: for another shape the rows say nothing
          width: 8192                 # H
          instead_of: ring_exchange   # the method that this file gives fc1_fprop for Transformer Engine
          rows:
          - {up_to: 512, method: sequential}
          - {up_to: 8192, method: pipeline, num_splits: 2, time_us: 101.5, sequential_us: 130.2}
          fp8_rows:                   # the same for calls under an FP8 recipe; either of the two may be missing
          - {up_to: 8192, method: sequential}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from tpoverlap.config.names import KNOWN_NAMES, ROW_WGRADS, nearest
from tpoverlap.config.options import METHODS

BY_TOKENS: Final = "by_tokens"

_ROWS: Final = ("rows", "fp8_rows")
_ENTRY_KEYS: Final = ("features", "width", "instead_of", *_ROWS)
_ROW_KEYS: Final = ("up_to", "method", "num_splits", "aggregate", "time_us", "sequential_us", "overlap_us")
_FIGURES: Final = ("time_us", "sequential_us", "overlap_us")

LegalMethods = Callable[[str, bool], tuple[str, ...]]
Fault = tuple[str, str]
"""(dotted path below ``by_tokens``, what is wrong there)."""


def rows_key(fp8: bool) -> str:
    """Of an entry: where its rows for calls with or without an FP8 recipe stand."""
    return _ROWS[fp8]


def faults(section: Any, legal_methods: LegalMethods) -> Iterator[Fault]:
    """Everything in the section that this version would not understand."""
    if not isinstance(section, Mapping):
        yield "", f"must be a mapping of GEMM names, got {type(section).__name__}"
        return
    for name, entry in section.items():
        if not isinstance(name, str) or name in ROW_WGRADS:
            yield str(name), "is no name of a GEMM that communicates"
        elif not isinstance(entry, Mapping):
            yield name, f"must be a mapping with {', '.join(_ENTRY_KEYS)}"
        else:
            yield from _faults_of_entry(name, entry, legal_methods)


def _faults_of_entry(name: str, entry: Mapping[Any, Any], legal_methods: LegalMethods) -> Iterator[Fault]:
    yield from _unknown(name, entry, _ENTRY_KEYS)
    for key in ("features", "width"):
        if not _is_count(entry.get(key)):
            yield f"{name}.{key}", f"must be a whole number of at least 1, got {entry.get(key)!r}"
    if entry.get("instead_of") not in (None, *METHODS):
        yield f"{name}.instead_of", f"must be the method that the file gives {name}, got {entry['instead_of']!r}"
    for key in [key for key in _ROWS if key in entry] or _ROWS[:1]:
        yield from _faults_of_rows(name, key, entry.get(key), legal_methods)


def _faults_of_rows(name: str, key: str, rows: Any, legal_methods: LegalMethods) -> Iterator[Fault]:
    if not isinstance(rows, list) or not rows:
        yield f"{name}.{key}", "must be a list with at least one row"
        return
    known = KNOWN_NAMES.get(name)
    # Under a name of the twelve the direction is fixed; a user's own may run either way.
    directions = (True, False) if known is None else (known.is_reduce_scatter,)
    legal = {"sequential"} | {method for scatter in directions for method in legal_methods(name, scatter)}
    last = 0
    for index, row in enumerate(rows):
        where = f"{name}.{key}[{index}]"
        if not isinstance(row, Mapping):
            yield where, f"must be a mapping with {', '.join(_ROW_KEYS)}"
            return
        yield from _unknown(where, row, _ROW_KEYS)
        up_to: Any = row.get("up_to")
        if not _is_count(up_to) or up_to <= last:
            yield f"{where}.up_to", f"must be a whole number above {last} (rows ascend), got {up_to!r}"
        last = int(up_to) if _is_count(up_to) else last
        yield from _faults_of_method(where, row, sorted(legal))


def _faults_of_method(where: str, row: Mapping[Any, Any], legal: list[str]) -> Iterator[Fault]:
    method = row.get("method")
    if method not in legal:
        yield f"{where}.method", f"{method!r} is not one of {', '.join(legal)}"
    if "num_splits" in row and (method != "pipeline" or not _is_count(row["num_splits"])):
        yield f"{where}.num_splits", f"is a whole number of at least 1, for pipeline only, got {row['num_splits']!r}"
    if "aggregate" in row and (method != "ring_exchange" or not isinstance(row["aggregate"], bool)):
        yield f"{where}.aggregate", f"is true or false, for ring_exchange only, got {row['aggregate']!r}"
    for key in _FIGURES:
        value = row.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
            yield f"{where}.{key}", f"must be microseconds, got {value!r}"


def _unknown(where: str, given: Mapping[Any, Any], legal: tuple[str, ...]) -> Iterator[Fault]:
    for key in given:
        if key not in legal:
            match = nearest(str(key), legal)
            hint = f"did you mean {match!r}? " if match else ""
            yield f"{where}.{key}", f"is no key; {hint}legal keys: {', '.join(legal)}"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31
