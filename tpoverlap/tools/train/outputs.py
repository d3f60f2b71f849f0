"""Output files: known to be writable before the work starts, written after it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpoverlap.errors import ConfigError


def require_writable(path: Path, option: str) -> None:
    """Raise ConfigError unless ``path`` can be written. Leaves what is there as it is, and nothing new."""
    existed = path.exists()
    try:
        with path.open("ab"):  # really opened: permission bits say little about mounts, quotas and root
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot write {option} {path}: {reason}; give a file in an existing, writable directory"
        ) from error
    if not existed:
        path.unlink()


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Indented UTF-8. NaN losses are written as null, since NaN is not JSON."""
    path.write_text(
        json.dumps(_without_nan(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
    )


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value
