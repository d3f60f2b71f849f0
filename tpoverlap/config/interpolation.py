"""OmegaConf interpolations (``${oc.env:NAME,default}``) in the overlap section of a document.

OmegaConf is imported only where such a text occurs or an OmegaConf object is passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpoverlap.errors import ConfigError


@dataclass(frozen=True)
class Failure:
    """An interpolation that does not resolve: keys from the section to its value, and OmegaConf's reason."""

    path: tuple[Any, ...]
    reason: str


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


def interpolate(
    root: Any, where: tuple[Any, ...], values: Mapping[Any, Any]
) -> tuple[dict[Any, Any], tuple[Failure, ...]]:
    """``values``, which stand at ``where`` below ``root``, with the interpolations in them replaced by their values.

    What does not resolve is left out and reported, so that the rest can still be looked at.

    Raises:
        ConfigError: OmegaConf is not installed.
    """
    open_keys = [key for key, value in values.items() if is_open(value)]
    if not open_keys:
        return dict(values), ()
    try:
        from omegaconf import OmegaConf
    except ImportError as error:
        raise ConfigError(
            "the configuration holds interpolations such as ${oc.env:NAME}, which need OmegaConf; "
            "install it: pip install omegaconf"
        ) from error
    resolved = dict(values)
    try:
        node = root if is_omegaconf(root) else OmegaConf.create(root)
    except Exception:
        # Something in the document is nothing that OmegaConf reads. What refers to it fails below, by name.
        node = OmegaConf.create(_readable(root, set()))
    for key in where:
        node = node[key]
    failures: list[Failure] = []
    for key in open_keys:
        value = values[key]
        if isinstance(value, Mapping):
            resolved[key] = {name: child for name, child in value.items() if not is_open(child)}
            paths: list[tuple[Any, ...]] = [(key, name) for name in value if name not in resolved[key]]
        else:
            del resolved[key]
            paths = [(key,)]
        for path in paths:
            try:
                plain = _resolve(node, values[key][path[1]] if len(path) > 1 else values[key], path)
            except Exception as error:  # a resolver is anybody's code and may raise anything
                failures.append(Failure(path, str(error).partition("\n")[0][:300] or type(error).__name__))
                continue
            if len(path) == 1:
                resolved[key] = plain
            else:
                resolved[key][path[1]] = plain
    ordered = {key: _in_order(values[key], resolved[key]) for key in values if key in resolved}
    return ordered, tuple(failures)


def _resolve(node: Any, written: Any, path: tuple[Any, ...]) -> Any:
    """The value at ``path`` below ``node``, where ``written`` stands."""
    from omegaconf import OmegaConf

    OmegaConf.create({"value": written})  # a broken text is refused here, with the reason
    value = node
    for key in path:
        value = value[key]
    return OmegaConf.to_container(value, resolve=True) if is_omegaconf(value) else value


def _readable(value: Any, inside: set[int]) -> Any:
    """A copy of ``value`` without what OmegaConf refuses; ``inside`` stops at containers that hold themselves."""
    from omegaconf import OmegaConf

    if not isinstance(value, (Mapping, list)):
        try:
            OmegaConf.create({"value": value})
        except Exception:
            return None
        return value
    if id(value) in inside:
        return None
    inside = inside | {id(value)}
    if isinstance(value, list):
        return [_readable(child, inside) for child in value]
    keys = (key for key in value if isinstance(key, (str, int, float, bool)))
    return {key: _readable(value[key], inside) for key in keys}


def _in_order(before: Any, after: Any) -> Any:
    """``after`` with its keys as they stood in ``before``."""
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        return after
    return {key: after[key] for key in before if key in after}


def is_open(value: Any) -> bool:
    """Whether a string anywhere in ``value`` holds an interpolation, however deep."""
    seen: set[int] = set()  # stops at containers that hold themselves
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str) and "${" in one:
            return True
        if isinstance(one, (Mapping, list)) and id(one) not in seen:
            seen.add(id(one))
            waiting += one.values() if isinstance(one, Mapping) else one
    return False
