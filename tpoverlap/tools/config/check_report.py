"""Findings about files as lines of text and as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from tpoverlap.config import FileReport, Note

SCHEMA_VERSION: Final = 1
_LEVELS: Final = ("error", "warning", "note")
_QUESTIONS: Final = ("te", "tpoverlap")
_MAX_LISTED: Final = 12


def filtered(report: FileReport, target: str) -> FileReport:
    """The findings that concern ``target``: "te", "tpoverlap" or "both" (all)."""
    return replace(
        report, notes=tuple(note for note in report.notes if target == "both" or note.target in (target, "both"))
    )


def exit_code(reports: Iterable[FileReport]) -> int:
    """0: clean or nothing worse than warnings; 1: errors; 2: a file that cannot be read."""
    return max((2 if not report.readable else 1 if report.count("error") else 0 for report in reports), default=0)


def runs_in(report: FileReport) -> dict[str, bool]:
    """Whether Transformer Engine, and whether this version, accepts the file."""
    errors = [note.target for note in report.notes if note.level == "error"]
    return {who: not any(target in (who, "both") for target in errors) for who in _QUESTIONS}


def lines_of(report: FileReport, notes: bool) -> Iterator[str]:
    """A heading, then errors one by one, then warnings and notes grouped by rule and key."""
    counts = ", ".join(_counted(report.count(level), level) for level in _LEVELS if report.count(level)) or "clean"
    source = "" if not report.readable else f", tp {report.tp_size} ({report.tp_source})"
    yield f"{report.path}: {counts}{source}"
    for level in _LEVELS if notes else _LEVELS[:-1]:
        for group in _groups(note for note in report.notes if note.level == level):
            yield from _paragraph(report.path, group)


def _groups(notes: Iterable[Note]) -> list[list[Note]]:
    groups: dict[tuple[Any, ...], list[Note]] = {}
    for index, note in enumerate(notes):
        alone = index if note.level == "error" else ""
        groups.setdefault((note.rule, note.key, note.target, alone), []).append(note)
    return list(groups.values())


def _paragraph(path: str, group: Sequence[Note]) -> Iterator[str]:
    first = group[0]
    place = f"line {first.line}: " if first.line else ""
    whom = "" if first.target == "both" else f" for {first.target}"
    message = first.message
    if first.rule != "unreadable":  # the heading has the path, which may be long
        message = re.sub(rf"(?<![\w./-]){re.escape(path)}(?![\w./-])", "this file", message)
    yield f"  {place}{first.level}{whom}: {message} [{first.rule}]"
    if len(group) > 1:
        others = [f"{note.name} ({note.line})" if note.line else note.name for note in group[1 : 1 + _MAX_LISTED]]
        more = len(group) - 1 - len(others)
        yield f"      likewise: {', '.join(others)}" + (f" and {more} more" if more else "")
    if first.remedy:
        yield f"      remedy: {first.remedy}"


def summary_of(reports: Sequence[FileReport]) -> str:
    """One line on all files, which answers the two questions apart."""
    unreadable = sum(not report.readable for report in reports)
    verdicts = [runs_in(report) for report in reports if report.readable]
    accepted = {who: sum(verdict[who] for verdict in verdicts) for who in _QUESTIONS}
    return (
        f"{_counted(len(reports), 'file')}: Transformer Engine accepts {accepted['te']}, this version of tpoverlap "
        f"{accepted['tpoverlap']}; {unreadable} cannot be read"
    )


def to_dict(reports: Sequence[FileReport], code: int) -> dict[str, Any]:
    """JSON-ready: ``schema, exit_code, files [{file, tp_size, tp_source, readable, runs_in, findings [..]}]``."""
    return {"schema": SCHEMA_VERSION, "exit_code": code, "files": [_file(report) for report in reports]}


def _file(report: FileReport) -> dict[str, Any]:
    return {
        "file": report.path,
        "tp_size": report.tp_size,
        "tp_source": report.tp_source,
        "readable": report.readable,
        "runs_in": runs_in(report) if report.readable else {},
        "findings": [finding_of(report.path, note) for note in report.notes],
    }


def finding_of(path: str, note: Note) -> dict[str, Any]:
    """One finding: where it is, whom it concerns, why, and what to do. ``line`` 0: the file as a whole."""
    return {
        "file": path,
        "line": note.line,
        "gemm": note.name,
        "key": note.key,
        "level": note.level,
        "for": note.target,
        "rule": note.rule,
        "why": note.message,
        "remedy": note.remedy,
    }


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
