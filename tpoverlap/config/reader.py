"""From what a user passes (None, a mapping, a path of a YAML file) to the mapping that holds the overlap options."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tpoverlap.config.interpolation import interpolate, is_omegaconf, unresolved
from tpoverlap.config.legality import is_entry
from tpoverlap.config.names import KNOWN_NAMES, RESERVED_SECTION
from tpoverlap.config.notes import Note
from tpoverlap.errors import ConfigError

EMBEDDED_KEY: Final = "ub_tp_comm_overlap_cfg"
"""Where NeMo's training files keep the overlap options, usually below ``model``."""

Path_ = tuple[Any, ...]
"""Keys and list indices from the top of a document to one value."""


@dataclass(frozen=True)
class RawConfig:
    """Top-level keys as written, unchecked; ``origin`` names the source in messages."""

    entries: Mapping[Any, Any]
    origin: str
    notes: tuple[Note, ...] = field(default=())


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
        f"{reprlib.repr(source)}; a list with one entry a quantization mode belongs to te.initialize_ub"
    )


def _read_file(path: str) -> RawConfig:
    text = _read_text(path)
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(f"reading {path} needs PyYAML; install it: pip install pyyaml") from error
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        document = None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        # SafeLoader raises ValueError for an impossible date or number
        raise ConfigError(f"{path} is not a YAML file that can be read: {error}; correct the file") from error
    if document is None:
        return RawConfig({}, path, (_note("empty-file", f"{path} holds no keys: every name takes its defaults"),))
    if not isinstance(document, Mapping):
        raise ConfigError(
            f"{path} must hold a mapping of GEMM names at its top, but holds a {type(document).__name__}; "
            "write one name a line, its options below it"
        )
    fresh = yaml.SafeLoader(text).get_single_node()  # constructing merges `<<` into the nodes in place
    _refuse_duplicates(fresh, _locate(document, path), path)
    return _extract(document, path)


def _read_text(path: str) -> str:
    if "\n" in path:
        raise ConfigError(
            f"ub_cfgs is a text of several lines ({reprlib.repr(path)}), but a string is read as a path; "
            "pass yaml.safe_load(text)"
        )
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}; is it the right file?") from error
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a null byte; RuntimeError: ~ without a home
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the overlap configuration {path!r}: {reason}; check the path") from error


def _extract(document: Mapping[Any, Any], origin: str, root: Any = None) -> RawConfig:
    """The overlap section of ``document``; ``root`` is the OmegaConf object it came from, if any."""
    where = _locate(document, origin)
    section: Any = document
    for key in where:
        section = section[key]
    root = document if root is None else root
    if where and isinstance(section, str):
        section = interpolate(root, where[:-1], {where[-1]: section}, origin)[where[-1]]
    elif isinstance(section, Mapping):
        # Foreign keys keep theirs: a training file uses resolvers that exist in its own program only.
        ours = {key: value for key, value in section.items() if key == RESERVED_SECTION or is_entry(key, value)}
        section = dict(section) | interpolate(root, where, ours, _origin(origin, where))
    notes = []
    if where:
        notes.append(_note("embedded", f"the overlap options were found below {_dotted(where)} in {origin}"))
    if section is None:
        notes.append(_note("empty-section", f"{_dotted(where)} is null: every name takes its defaults"))
        section = {}
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"{_dotted(where)} in {origin} must be a mapping of GEMM names, got {reprlib.repr(section)}; "
            "if it names another file, pass that file"
        )
    return RawConfig(section, _origin(origin, where), tuple(notes))


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
    raise ConfigError(
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


def _refuse_duplicates(node: Any, where: Path_, path: str) -> None:
    """PyYAML takes the last of two equal keys silently; in the overlap section that is an error."""
    for key in where:
        children = dict(_children(node))
        if str(key) not in children:
            return  # reached through an anchor or a merge key
        node = children[str(key)]
    for section in (node, *(child for _, child in _children(node))):
        lines: dict[str, int] = {}
        for key_node, _ in section.value if section.id == "mapping" else ():
            line = key_node.start_mark.line + 1
            if key_node.id == "scalar" and key_node.value in lines and key_node.value != "<<":
                raise ConfigError(
                    f"{path} has the key {key_node.value!r} twice, in lines {lines[key_node.value]} and {line}; "
                    "remove one"
                )
            lines[str(key_node.value)] = line


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    """Keys and nodes below a YAML mapping or sequence node."""
    if node.id == "mapping":
        yield from ((str(key.value), child) for key, child in node.value)
    elif node.id == "sequence":
        yield from ((str(index), child) for index, child in enumerate(node.value))


def _dotted(where: Path_) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in where).lstrip(".")


def _origin(origin: str, where: Path_) -> str:
    return f"{origin} ({_dotted(where)})" if where else origin


def _note(rule: str, message: str) -> Note:
    return Note("note", rule, "", "", message, "")
