"""From what a user passes (None, a mapping, a path of a YAML file) to the mapping that holds the overlap options."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tpoverlap.config.interpolation import interpolate, is_omegaconf, is_open, unresolved
from tpoverlap.config.legality import is_entry
from tpoverlap.config.names import KNOWN_NAMES, RESERVED_SECTION
from tpoverlap.config.notes import Note
from tpoverlap.config.positions import Duplicate, Lines, duplicates, expanded_size, key_lines
from tpoverlap.config.rules import show
from tpoverlap.errors import ConfigError

EMBEDDED_KEY: Final = "ub_tp_comm_overlap_cfg"
"""Where NeMo's training files keep the overlap options, usually below ``model``."""

MAX_BYTES: Final = 2**18
"""The largest file that is read: published ones have at most 12 KiB, and parsing this much can take seconds."""

MAX_VALUES: Final = 200_000
"""The most values that a document may hold once its aliases are written out."""

Path_ = tuple[Any, ...]
"""Keys and list indices from the top of a document to one value."""


@dataclass(frozen=True)
class RawConfig:
    """Top-level keys as written, unchecked; ``origin`` names the source in messages.

    ``where``: from the top of ``document`` to the entries. ``lines`` and ``text`` are empty unless a file was read.
    """

    entries: Mapping[Any, Any]
    origin: str
    notes: tuple[Note, ...] = field(default=())
    document: Mapping[Any, Any] = field(default_factory=dict, repr=False)
    where: Path_ = ()
    lines: Lines = field(default_factory=dict, repr=False)
    text: str = field(default="", repr=False)

    def line_of(self, name: str, key: str) -> int:
        """The line of an option, else of its name (an inherited key has none of its own), else of the section."""
        section = tuple(str(part) for part in self.where)
        places = ((*section, name, key), (*section, name), section) if name else (section,)
        return next((self.lines[place] for place in places if place in self.lines), 0)


class UnreadableError(ConfigError):
    """A file from which no options can be taken; ``line`` is where reading it ended, 0 where that is not known."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


def read_config(source: Mapping[Any, Any] | str | os.PathLike[str] | None) -> RawConfig:
    """The overlap options that ``source`` holds, found wherever they are embedded, interpolations resolved.

    Raises:
        ConfigError: no such file, unreadable, not YAML, no mapping, an interpolation that does not resolve, several
            different configurations in one file, or a key twice; the message names the path and the reason.
    """
    if source is None:
        return RawConfig({}, "defaults")
    if isinstance(source, (str, os.PathLike)):
        return _read_file(os.fsdecode(source))
    if is_omegaconf(source):
        return _extract(unresolved(source), "ub_cfgs", root=source)
    if isinstance(source, Mapping):
        return _extract(source, "ub_cfgs")
    raise ConfigError(
        f"ub_cfgs must be None, a mapping or the path of a YAML file, got {type(source).__name__} "
        f"{show(source)}; a list with one entry a quantization mode belongs to te.initialize_ub"
    )


def _read_file(path: str) -> RawConfig:
    text = read_text(path)
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(f"reading {path} needs PyYAML; install it: pip install pyyaml") from error
    try:
        node = yaml.SafeLoader(text).get_single_node()
        lines = {} if node is None else key_lines(node)
        if node is not None and expanded_size(node, MAX_VALUES) > MAX_VALUES:
            raise UnreadableError(f"{path}: its aliases stand for more than {MAX_VALUES} values; write it without them")
        # Constructing merges `<<` into the nodes in place, so keys written twice are looked for in fresh ones.
        document = None if node is None else yaml.SafeLoader("").construct_document(node)
        fresh = yaml.SafeLoader(text).get_single_node() if "<<" in text else node
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        # SafeLoader raises ValueError for an impossible date or number
        mark = getattr(error, "problem_mark", None)
        reason = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise UnreadableError(
            f"{path} is not a YAML file that can be read: {reason}; correct the file",
            0 if mark is None else mark.line + 1,
        ) from error
    if document is None:
        empty = _note("empty-file", f"{path} holds no keys: every name takes its defaults")
        return RawConfig({}, path, (empty,), text=text)
    if not isinstance(document, Mapping):
        raise UnreadableError(
            f"{path} must hold a mapping of GEMM names at its top, but holds a {type(document).__name__}; "
            "write one name a line, its options below it",
            1,
        )
    raw = _extract(document, path, lines=lines, text=text)
    return replace(raw, notes=(*(_twice(found, path, raw.where) for found in duplicates(fresh, raw.where)), *raw.notes))


def _twice(found: Duplicate, path: str, where: Path_) -> Note:
    name, key = (*found.path[len(where) :], "")[:2]
    message = f"{path} has the key {found.path[-1]!r} twice, in lines {found.first_line} and {found.line}"
    return Note("error", "duplicate-key", name, key, message, "remove one", line=found.line)


def read_text(path: str) -> str:
    """The text of the file at ``path``, without its byte order mark; ConfigError names the path and the reason."""
    if "\n" in path:
        raise ConfigError(
            f"ub_cfgs is a text of several lines ({show(path)}), but a string is read as a path; "
            "pass yaml.safe_load(text)"
        )
    try:
        mode = Path(path).expanduser().stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise OSError(None, "it is no regular file")  # a device may never end, opening a pipe never return
        with Path(path).expanduser().open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a null byte; RuntimeError: ~ without a home
        reason = getattr(error, "strerror", None) or error
        raise UnreadableError(f"cannot read the overlap configuration {path!r}: {reason}; check the path") from error
    if len(content) > MAX_BYTES:
        raise UnreadableError(f"{path} is larger than {MAX_BYTES} bytes; is it the right file?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UnreadableError(f"{path} is not UTF-8 text: {error}; is it the right file?", line) from error


def _extract(
    document: Mapping[Any, Any], origin: str, root: Any = None, lines: Lines | None = None, text: str = ""
) -> RawConfig:
    """The overlap section of ``document``; ``root`` is the OmegaConf object it came from, if any."""
    where = _locate(document, origin)
    written: Any = document
    for key in where:
        written = written[key]
    root = document if root is None else root
    place = _origin(origin, where)
    section, notes = written, []
    if where:
        notes.append(_note("embedded", f"the overlap options were found below {_dotted(where)} in {origin}"))
    if where and isinstance(written, str):
        values, failures = interpolate(root, where[:-1], {where[-1]: written})
        if failures:
            raise UnreadableError(f"{place}: its interpolation does not resolve: {failures[0].reason}")
        section = values[where[-1]]
    elif isinstance(written, Mapping):
        # Foreign keys keep theirs: a training file uses resolvers that exist in its own program only.
        ours = {key: value for key, value in written.items() if key == RESERVED_SECTION or is_entry(key, value)}
        values, failures = interpolate(root, where, ours)
        section = {key: value for key, value in written.items() if key not in ours or key in values} | values
        notes += [_unresolved(failure.path, failure.reason) for failure in failures]
        notes += _from_outside(ours, values)
    if section is None:
        notes.append(_note("empty-section", f"{_dotted(where)} is null: every name takes its defaults"))
        section = {}
    if not isinstance(section, Mapping):
        raise UnreadableError(
            f"{_dotted(where)} in {origin} must be a mapping of GEMM names, got {show(section)}; "
            "if it names another file, pass that file"
        )
    return RawConfig(section, place, tuple(notes), document, where, lines or {}, text)


def _unresolved(path: Path_, reason: str) -> Note:
    name, key = (*(part if isinstance(part, str) else show(part) for part in path), "")[:2]
    message = f"an interpolation at {_dotted(path)} does not resolve: {reason}"
    return Note("error", "interpolation-unresolved", name, key, message, "set the variable, or write the value")


def _from_outside(written: Mapping[Any, Any], resolved: Mapping[Any, Any]) -> Iterator[Note]:
    for name, options in written.items():
        after = resolved.get(name)
        if isinstance(options, Mapping) and isinstance(after, Mapping):
            for key in (key for key in options if isinstance(key, str) and key in after and is_open(options[key])):
                message = f"{name}.{key} is {show(after[key])}, from {str(options[key])[:80]}"
                remedy = "set the same variables on every rank; ranks that differ stop with RankMismatchError"
                yield Note("note", "from-environment", name, key, message, remedy)


def _locate(document: Mapping[Any, Any], origin: str) -> Path_:
    """Where in ``document`` the overlap options stand: () for its top."""
    found = list(_occurrences(document, (), set()))
    filled = [(where, value) for where, value in found if value is not None] or found
    if not filled:
        return ()
    places = [_dotted(where) for where, _ in filled]
    if any(isinstance(key, str) and key in KNOWN_NAMES for key in document):
        places.insert(0, "its top")
    elif all(value == filled[0][1] for _, value in filled):
        return filled[0][0]
    raise UnreadableError(
        f"{origin} holds overlap options in several places ({', '.join(places)}); keep one, or pass that mapping alone"
    )


def _occurrences(value: Any, where: Path_, seen: set[int]) -> Iterator[tuple[Path_, Any]]:
    """Every value of ``EMBEDDED_KEY`` at any depth; ``seen`` stops at anchors that contain themselves."""
    if id(value) in seen or len(where) > 100:
        return
    if isinstance(value, Mapping):
        seen.add(id(value))
        for key, child in value.items():
            if key == EMBEDDED_KEY:
                yield (*where, key), child
            else:
                yield from _occurrences(child, (*where, key), seen)
    elif isinstance(value, list):
        seen.add(id(value))
        for index, child in enumerate(value):
            yield from _occurrences(child, (*where, index), seen)


def _dotted(where: Path_) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in where).lstrip(".")


def _origin(origin: str, where: Path_) -> str:
    return f"{origin} ({_dotted(where)})" if where else origin


def _note(rule: str, message: str) -> Note:
    return Note("note", rule, "", "", message, "")
