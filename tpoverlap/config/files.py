"""One configuration file, checked together with its name, its comments and the training file that embeds it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from tpoverlap.config.claims import claims_of_comments, claims_of_name
from tpoverlap.config.notes import Note
from tpoverlap.config.reader import RawConfig, read_config
from tpoverlap.config.resolver import check_raw, unreadable
from tpoverlap.config.rules import SUPPORTED
from tpoverlap.config.surroundings import Statement, Surroundings, stated_by
from tpoverlap.errors import ConfigError

ASSUMED_TP_SIZE = 2
"""What a file is checked for when nobody says its tp_size; rules that depend on it then keep quiet."""

Precision = Literal["bf16", "fp8"]


@dataclass(frozen=True)
class FileReport:
    """Findings about one file. ``tp_source`` says who said ``tp_size``: "--tp", a key, the name, or "assumed"."""

    path: str
    tp_size: int
    tp_source: str
    notes: tuple[Note, ...]
    raw: RawConfig | None = None
    surroundings: Surroundings = field(default_factory=Surroundings)

    @property
    def readable(self) -> bool:
        """Whether options could be taken from the file."""
        return all(note.rule != "unreadable" for note in self.notes)

    def count(self, level: str) -> int:
        """How many findings have this level."""
        return sum(note.level == level for note in self.notes)


def check_file(
    path: str | os.PathLike[str],
    tp_size: int | None = None,
    precision: Precision | None = None,
    *,
    supported: frozenset[str] = SUPPORTED,
) -> FileReport:
    """Every finding about the file at ``path``, without raising for any of them.

    Args:
        path: a YAML file, of options or of a training run that embeds them.
        tp_size: R; None takes what the training file, its comments or its name say, in this order.
        precision: what the GEMMs run in; None takes what the file says.
        supported: features that this release can run; see ``SUPPORTED``.
    """
    name = os.fspath(path)
    try:
        raw = read_config(name)
        around = look_around(raw, name, tp_size, precision)
    except ConfigError as error:
        return FileReport(name, tp_size or ASSUMED_TP_SIZE, "--tp" if tp_size else "assumed", (unreadable(error),))
    said = around.find("tp_size")
    number = around.number("tp_size")
    if tp_size is not None:
        size, source = tp_size, "--tp"
    elif said is not None and number is not None:
        size, source = number, said.where
    else:
        size, source = ASSUMED_TP_SIZE, "assumed"
    stated = around.stated.get("precision")
    fp8 = stated is not None and stated.value == "fp8"
    notes = check_raw(raw, size, around, supported=supported, fp8=fp8)
    return FileReport(name, size, source, notes, raw, around)


def look_around(raw: RawConfig, path: str, tp_size: int | None, precision: Precision | None) -> Surroundings:
    """What the file at ``path``, already read, says beside its options; ``tp_size`` and ``precision`` as asked for."""
    stated = stated_by(raw.document, raw.where, raw.lines)
    if precision is not None:
        stated["precision"] = Statement(precision, "--dtype")
    header, remarks = claims_of_comments(raw.text)
    named = claims_of_name(path)
    known = tp_size is not None or any("tp_size" in source for source in (stated, header, named))
    return Surroundings(stated, header, named, remarks, tp_assumed=not known, tp_asked=tp_size)
