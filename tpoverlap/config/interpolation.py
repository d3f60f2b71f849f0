"""OmegaConf interpolations (``${oc.env:NAME,default}``) in the overlap section of a document.

OmegaConf is imported only where such a text occurs or an OmegaConf object is passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpoverlap.errors import ConfigError


def is_omegaconf(value: Any) -> bool:
    """Whether ``value`` is an OmegaConf container, told without importing OmegaConf."""
    return type(value).__module__.partition(".")[0] == "omegaconf"


def unresolved(root: Any) -> Mapping[Any, Any]:
    """An OmegaConf mapping as plain containers with its interpolations still in place."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        plain = OmegaConf.to_container(root, resolve=False)
    except OmegaConfBaseException as error:
        raise ConfigError(f"ub_cfgs: the OmegaConf object cannot be read: {error}; correct it") from error
    if not isinstance(plain, Mapping):
        raise ConfigError(f"ub_cfgs must be a mapping, got an OmegaConf {type(plain).__name__}; pass a DictConfig")
    return plain


def interpolate(root: Any, where: tuple[Any, ...], values: Mapping[Any, Any], origin: str) -> dict[Any, Any]:
    """``values``, which stand at ``where`` below ``root``, with every interpolation in them replaced by its value.

    Raises:
        ConfigError: OmegaConf is not installed, or an interpolation does not resolve.
    """
    open_keys = [key for key, value in values.items() if _has_interpolation(value, set())]
    if not open_keys:
        return dict(values)
    try:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
    except ImportError as error:
        raise ConfigError(
            f"{origin} holds interpolations such as ${{oc.env:NAME}}, which need OmegaConf; "
            "install it: pip install omegaconf"
        ) from error
    problems = (OmegaConfBaseException, ValueError, TypeError, KeyError, RecursionError)
    resolved = dict(values)
    try:
        try:
            node = root if is_omegaconf(root) else OmegaConf.create(root)
            for key in where:
                node = node[key]
        except problems:
            # Something else in the document is nothing that OmegaConf reads. What refers to it fails below, by name.
            node = OmegaConf.create(dict(values))
        for key in open_keys:
            value = node[key]
            resolved[key] = OmegaConf.to_container(value, resolve=True) if is_omegaconf(value) else value
    except problems as error:
        reason = str(error).partition("\n")[0]
        place = getattr(error, "full_key", None)
        raise ConfigError(
            f"{origin}: an interpolation{f' at {place}' if place else ''} does not resolve: {reason}; "
            "set the variable, or write the value"
        ) from error
    return resolved


def _has_interpolation(value: Any, seen: set[int]) -> bool:
    """Whether a string anywhere in ``value`` holds ``${``; ``seen`` stops at containers that hold themselves."""
    if isinstance(value, str):
        return "${" in value
    if id(value) in seen or not isinstance(value, (Mapping, list)):
        return False
    seen.add(id(value))
    return any(_has_interpolation(child, seen) for child in (value.values() if isinstance(value, Mapping) else value))
