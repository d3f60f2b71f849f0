"""A file read, checked, converted, and named the way NeMo names its presets."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
from typing import Literal

from tpoverlap.config import FileReport, check_file
from tpoverlap.config.reader import RawConfig, read_text
from tpoverlap.errors import ConfigError
from tpoverlap.tools.config.convert import Format, convert_text, converted_to, restored
from tpoverlap.tools.config.document import section_of
from tpoverlap.tools.config.preset_name import PresetName


class RefusedError(ConfigError):
    """The file cannot be converted; ``unreadable`` where no options could be taken from it at all."""

    def __init__(self, message: str, unreadable: bool) -> None:
        super().__init__(message)
        self.unreadable = unreadable


@dataclass(frozen=True)
class Wanted:
    """What a preset's name is to say; None takes what the file says."""

    gpu: str | None = None
    hidden: int | None = None
    micro_batch: int | None = None
    seq_len: int | None = None
    cp_size: int | None = None
    lora: bool = False
    dtype: Literal["bf16", "fp8"] | None = None


@dataclass(frozen=True)
class Converted:
    """The new text, remarks on it, and what was found in the file that it came from."""

    text: str
    remarks: tuple[str, ...]
    report: FileReport


def converted(path: str, to: Format, tp_size: int | None, extract: bool = False) -> Converted:
    """The file at ``path`` for ``to``; with ``extract`` only its options.

    A file that was converted before is first restored, so that converting there and back gives the same text.

    Raises:
        RefusedError: it cannot be read, or has an error that makes its meaning unclear.
        ConfigError: it is written in a way in which no line can be added.
    """
    report = check_file(path, tp_size)
    if not report.readable or report.raw is None:
        raise RefusedError(str(report.notes[-1]), unreadable=True)
    # What one side refuses to run has a clear meaning all the same; what is misspelt has none.
    wrong = [note for note in report.notes if note.level == "error" and note.target == "both"]
    if wrong:
        raise RefusedError(f"{path}:{wrong[0].line}: {wrong[0]} ({len(wrong)} such errors)", unreadable=False)
    text = read_text(path)
    remarks: tuple[str, ...] = ()
    before = converted_to(text)
    if before == to:
        remarks = (f"the file was converted --to {to} already",)
    elif before is not None:
        text = restored(text)
        remarks = ("an earlier conversion was taken back: what it added is gone, what it kept is there again",)
    else:
        text, remarks = convert_text(report.raw, to, report.tp_size)
        if any(note.rule == "from-environment" for note in report.notes):
            remarks = (*remarks, "some values come from environment variables: converted for what they are now")
    if report.tp_source == "assumed":
        remarks = (*remarks, f"tp_size {report.tp_size} is assumed, the file does not say; pass --tp")
    if extract and report.raw.where:
        text = _section_text(text, report.raw)
    return Converted(text, remarks, report)


def _section_text(text: str, raw: RawConfig) -> str:
    """The lines of the section, moved to the left."""
    section = section_of(replace(raw, text=text))
    lines = text.splitlines(keepends=True)
    return textwrap.dedent("".join(lines[section.first : section.last + 1]))


def name_for(done: Converted, wanted: Wanted) -> PresetName:
    """NeMo's name for a converted file, from what is wanted, then from what the file says.

    Raises:
        ConfigError: a part of the name is not known.
    """
    around = done.report.surroundings
    precision = around.find("precision")
    dtype = wanted.dtype or ("bf16" if precision is None else str(precision.value))
    hidden = wanted.hidden or around.number("hidden")
    micro_batch = wanted.micro_batch or around.number("micro_batch")
    seq_len = wanted.seq_len or around.number("seq_len")
    missing = [
        option
        for option, value in (
            ("--gpu", wanted.gpu), ("--hidden", hidden), ("--mbs", micro_batch), ("--seqlen", seq_len),
            ("--tp", None if done.report.tp_source == "assumed" else done.report.tp_size),
        )
        if value is None
    ]  # fmt: skip
    if missing or hidden is None or micro_batch is None or seq_len is None or wanted.gpu is None:
        raise ConfigError(f"NeMo's name says what the file does not: pass {', '.join(missing)}")
    cp_size = wanted.cp_size or around.number("cp_size")
    cp_size = None if cp_size == 1 else cp_size
    name = PresetName(
        dtype, wanted.gpu.lower(), hidden, done.report.tp_size, micro_batch, seq_len, cp_size, wanted.lora
    )
    return PresetName.parse(str(name))  # a GPU's name with a dash in it would give a name that nobody can read
