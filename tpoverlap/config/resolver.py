"""``resolve`` and ``check``: read, apply the rules, fill in the defaults."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from tpoverlap.config.defaults import fill_defaults, require_tp_size
from tpoverlap.config.legality import findings, is_entry
from tpoverlap.config.names import COLUMN_WGRADS, KNOWN_NAMES, RESERVED_SECTION, ROW_WGRADS, sibling
from tpoverlap.config.notes import ConfigWarning, Note
from tpoverlap.config.options import OptionValue, OverlapConfig, normalise
from tpoverlap.config.reader import RawConfig, read_config
from tpoverlap.config.resolved import ResolvedConfig
from tpoverlap.config.rules import SUPPORTED, Case
from tpoverlap.config.surroundings import Surroundings
from tpoverlap.errors import ConfigError

ConfigSource = Mapping[Any, Any] | str | os.PathLike[str] | ResolvedConfig | None
"""What ``ub_cfgs`` may be."""

_log = logging.getLogger("tpoverlap.config")


def resolve(
    ub_cfgs: ConfigSource, tp_size: int, *, supported: frozenset[str] = SUPPORTED, fp8: bool = False
) -> ResolvedConfig:
    """The options of every name, checked, with every default filled in.

    Local: reads a file, asks no device and no other rank. Findings that are no errors are in ``.notes``; warnings are
    also issued as ``ConfigWarning`` and notes logged at level INFO by the logger ``tpoverlap.config``.

    Args:
        ub_cfgs: None (all defaults), a mapping name -> mapping of options (or OverlapConfig), or a YAML file's path.
        tp_size: R, the size of the TP group.
        supported: features that this release can run; see ``SUPPORTED``.
        fp8: whether FP8 buffers are asked for as well.

    Raises:
        ConfigError: unreadable, or a rule of level "error" fired; the message lists every such finding.
    """
    require_tp_size(tp_size)
    config, notes, origin = _evaluate(_read(ub_cfgs), tp_size, supported, fp8)
    errors = [str(note) for note in notes if _is_our_error(note)]
    if config is None:
        place = "" if origin == "ub_cfgs" else f"{origin}: "
        if len(errors) == 1:
            raise ConfigError(place + errors[0])
        listed = "\n".join(f"  {number}. {error}" for number, error in enumerate(errors, 1))
        raise ConfigError(f"{place}{len(errors)} errors in the overlap configuration:\n{listed}")
    for note in notes:
        if note.level == "warning" and note.target != "te":  # who runs tpoverlap need not care
            warnings.warn(f"{origin}: {note}", ConfigWarning, stacklevel=_callers_level())
        else:
            _log.info("%s: %s", origin, note)
    return config


_MOST_BITS: Final = 1024
"""Of a number that stands round the options: Python refuses to write out much larger ones."""


def _callers_level() -> int:
    """``stacklevel`` for a warning by this function's caller that names the first line outside the package.

    By hand, since ``skip_file_prefixes`` is of Python 3.12: managers, te and memory_estimate call at different depths.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "tpoverlap":
        frame, level = frame.f_back, level + 1
    return level


def check(
    ub_cfgs: ConfigSource, tp_size: int, *, supported: frozenset[str] = SUPPORTED, fp8: bool = False
) -> tuple[Note, ...]:
    """Every finding about a configuration, errors included, without raising for any of them.

    Errors with target "te" concern Transformer Engine alone; ``resolve`` accepts what has no others.

    Raises:
        ConfigError: tp_size is no positive whole number.
    """
    require_tp_size(tp_size)
    try:
        return _evaluate(_read(ub_cfgs), tp_size, supported, fp8)[1]
    except ConfigError as error:
        return (unreadable(error),)


def check_raw(
    raw: RawConfig,
    tp_size: int,
    surroundings: Surroundings,
    *,
    supported: frozenset[str] = SUPPORTED,
    fp8: bool = False,
) -> tuple[Note, ...]:
    """``check`` for a file that was read already, against what stands round its options."""
    require_tp_size(tp_size)
    try:
        return _evaluate(raw, tp_size, supported, fp8, surroundings)[1]
    except ConfigError as error:
        return (unreadable(error),)


def unreadable(error: ConfigError) -> Note:
    """The finding about a source from which no options can be taken."""
    return Note("error", "unreadable", "", "", str(error), "", line=getattr(error, "line", 0))


def _read(ub_cfgs: ConfigSource) -> RawConfig:
    return RawConfig(ub_cfgs.to_dict(), ub_cfgs.origin) if isinstance(ub_cfgs, ResolvedConfig) else read_config(ub_cfgs)


def _is_our_error(note: Note) -> bool:
    return note.level == "error" and note.target != "te"


def _evaluate(
    raw: RawConfig, tp_size: int, supported: frozenset[str], fp8: bool, surroundings: Surroundings | None = None
) -> tuple[ResolvedConfig | None, tuple[Note, ...], str]:
    """The resolved config, or None where there is an error; all findings; the source's name."""
    around = surroundings or Surroundings()
    notes = list(raw.notes)
    options: dict[str, dict[str, OptionValue]] = {}
    for name, value in raw.entries.items():
        given = value.to_dict() if isinstance(value, OverlapConfig) else value
        case = Case(name, given, tp_size, supported=supported, fp8=fp8)
        found = findings("top", case)
        if is_entry(name, given):
            found += findings("options", case)
            if not any(note.level == "error" for note in found):
                options[name] = {key: normalise(key, value) for key, value in given.items()}
        notes += found
    entries = {name: fill_defaults(name, given, tp_size) for name, given in options.items()}
    for name, config in entries.items():
        found = findings("config", Case(name, options[name], tp_size, config, entries, supported, fp8, options, around))
        wrong = any(_is_our_error(note) for note in found)  # then remarks on the details would only distract
        notes += [note for note in found if not (wrong and note.level == "note")]
    notes += findings("file", Case("", {}, tp_size, None, entries, supported, fp8, options, around))
    notes = [note if note.line else replace(note, line=raw.line_of(note.name, note.key)) for note in notes]
    if any(_is_our_error(note) for note in notes):
        return None, tuple(notes), raw.origin
    extras = _plain(raw.entries.get(RESERVED_SECTION, {}), RESERVED_SECTION)
    configs = _configs(entries, tp_size)
    return ResolvedConfig(tp_size, configs, options, extras, tuple(notes), raw.origin), tuple(notes), raw.origin


def _configs(entries: Mapping[str, OverlapConfig], tp_size: int) -> dict[str, OverlapConfig]:
    """The twelve that communicate, as written or by default, then the user's own names."""
    configs: dict[str, OverlapConfig] = {}
    for name in KNOWN_NAMES:
        config = entries[name] if name in entries else fill_defaults(name, {}, tp_size)
        dgrad = configs.get(sibling(name, "dgrad"))
        scattered_in_dgrad = name in COLUMN_WGRADS and dgrad is not None and dgrad.is_reduce_scatter
        if name not in ROW_WGRADS and not scattered_in_dgrad:
            configs[name] = config
    return configs | {name: config for name, config in entries.items() if name not in KNOWN_NAMES}


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """``value`` as dicts, lists and scalars, so that it can be written, hashed and compared."""
    if depth > 32:
        raise ConfigError(f"{where} is nested more than 32 deep, or contains itself; flatten it")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ConfigError(f"{where} has keys that are no text: {list(value)!r}; quote them")
        return {key: _plain(child, f"{where}.{key}", depth + 1) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(child, f"{where}[{index}]", depth + 1) for index, child in enumerate(value)]
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ConfigError(f"{where} is a whole number of {value.bit_length()} bits; quote it")
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise ConfigError(f"{where} must be plain data, got {type(value).__name__} {value!r}; quote it")
