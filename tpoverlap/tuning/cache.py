"""The cache of measurements: one file a machine (device, link, versions), one entry a shape. ``tune`` writes it."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tpoverlap.errors import ConfigError
from tpoverlap.tuning.by_tokens import ByTokens, Row

FORMAT: Final = 1

METHODS_VERSION: Final = 5
"""Of the methods' code. Raise it when one becomes faster or slower: older measurements then no longer count."""

Entries = dict[str, list[dict[str, Any]]]
"""`evidence.entry_key` -> rows."""


def cache_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """``folder``, else $TPOVERLAP_CACHE_DIR, else $XDG_CACHE_HOME/tpoverlap, else ~/.cache/tpoverlap."""
    given = folder or os.environ.get("TPOVERLAP_CACHE_DIR")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tpoverlap"


def cache_file(folder: Path, machine: Mapping[str, Any]) -> Path:
    """Where the entries of ``machine`` stand: plain data that says device, link and versions."""
    digest = hashlib.blake2b(json.dumps(machine, sort_keys=True).encode(), digest_size=8).hexdigest()
    return folder / f"tuned-{digest}.json"


def read_entries(folder: Path, machine: Mapping[str, Any]) -> Entries:
    """The entries of ``machine``; {} where nothing was ever measured on it.

    Raises:
        ConfigError: the file is there but cannot be read, or is not what `write_entries` wrote.
    """
    path = cache_file(folder, machine)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # ValueError: no JSON, or not UTF-8
        raise ConfigError(f"cannot read the tuned cache {path}: {error}; delete the file and tune again") from error
    try:
        if data["format"] != FORMAT or data["machine"] != json.loads(json.dumps(machine)):
            raise ValueError("format or machine differ")
        entries: Entries = {key: list(rows) for key, rows in data["entries"].items()}
        for rows in entries.values():
            ByTokens(tuple(Row.from_dict(row) for row in rows), "tuned cache")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the tuned cache {path} is not what tpoverlap tune wrote: {error}; delete it and tune again"
        ) from error
    return entries


def write_entries(folder: Path, machine: Mapping[str, Any], new: Mapping[str, Sequence[Row]]) -> Path:
    """Add ``new`` to the entries of ``machine``; readers see the old file or the new one, never half of one."""
    entries = read_entries(folder, machine) | {key: [row.to_dict() for row in rows] for key, rows in new.items()}
    path = cache_file(folder, machine)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, "machine": dict(machine), "entries": entries}, indent=1)
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False, encoding="utf-8") as part:
        part.write(text + "\n")
    os.replace(part.name, path)
    return path
