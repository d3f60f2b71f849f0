"""What all ranks must have been given alike, and the comparison that says where they were not.

Every rank sends what it was given, or the error that its own arguments cause, so that no rank waits for one that has
raised. Large settings (options, plans) are sent as a digest; their contents follow only where the digests differ, which
every rank sees alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from tpoverlap.errors import ConfigError, RankMismatchError
from tpoverlap.memory.base import agree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tpoverlap.config import ResolvedConfig

_BY_DEFAULT = " by default"
_MAX_KEYS, _MAX_VALUES, _MAX_RANKS, _MAX_TEXT, _MAX_KEY = 6, 4, 6, 80, 120


@dataclass(frozen=True)
class Settings:
    """What every rank's manager must have been given alike; compared before anything is allocated.

    The names are those of the manager's arguments: messages use them. ``ub_cfgs`` and ``plan`` are digests.
    """

    capacity_shape: tuple[int, int]
    dtype: str
    device: str
    backend: str
    timeout_s: float
    on_overflow: str
    max_rows_per_rank: int
    ub_cfgs: str
    plan: str
    quantization_modes: tuple[str, ...]


@dataclass(frozen=True)
class Registration:
    """A further name; compared like `Settings`."""

    name: str
    width: int
    max_tokens: int
    max_rows_per_rank: int


@dataclass(frozen=True)
class TpSize:
    """The size of the groups that a larger group is cut into; compared like `Settings`."""

    tp_size: int


@dataclass(frozen=True)
class Contents:
    """What stands behind a digest: dotted key -> value as text.

    ``written``: what the user wrote. ``otherwise``: what holds for keys that only other ranks wrote; ``missing`` where
    nothing does. ``source``: the file's path, or how else it was given.
    """

    written: dict[str, str]
    otherwise: dict[str, str] = field(default_factory=dict)
    missing: str = "not there"
    source: str = ""

    def at(self, key: str) -> str:
        """The value of ``key`` on this rank, as text."""
        return self.written.get(key) or self.otherwise.get(key, self.missing)


Agreed = TypeVar("Agreed", Settings, Registration, TpSize)


def require_agreement(
    group: ProcessGroup,
    settings: Agreed | Exception,
    contents: Mapping[str, Callable[[], Contents]] | None = None,
) -> Agreed:
    """Every rank's settings, or error, compared on every rank; returns ``settings``. Collective.

    A rank whose own arguments are illegal takes part with its error: if it raised at once, its peers would wait for it.

    Args:
        group: the ranks.
        settings: what this rank was given, or the error about it.
        contents: for settings that are digests, by name: what is behind them.

    Raises:
        Exception: this rank's own error. ConfigError: another rank has one.
        RankMismatchError: settings differ; names the keys, the values and who has which, cut short where they are many.
    """
    message = f"{type(settings).__name__}: {settings}" if isinstance(settings, Exception) else None
    answers: list[tuple[str | None, dict[str, Any]]] = agree(
        group, (message, {} if isinstance(settings, Exception) else asdict(settings))
    )
    if isinstance(settings, Exception):
        raise settings
    for rank, (error, _) in enumerate(answers):
        if error is not None:
            raise ConfigError(f"rank {rank} was given something illegal: {error}; correct it there")
    steps = [", ".join(answer) for _, answer in answers]
    if len(set(steps)) > 1:  # some register a name where others make a manager, or their releases differ
        raise RankMismatchError(
            f"ranks are at different steps of the set-up, or have different versions of tpoverlap: one that compares "
            f"{_by_rank(steps)}; make managers and register names in the same order everywhere"
        )
    differing, found = [], []
    for key in asdict(settings):
        values = [repr(answer[key]) for _, answer in answers]
        if len(set(values)) > 1:
            differing.append(key)
            make = (contents or {}).get(key)
            inside = [] if make is None else list(_differences(agree(group, make())))
            found += inside or [f"{key} is {_by_rank(values)}"]
    if not differing:
        return settings
    more = f"; and {len(found) - _MAX_KEYS} more" if len(found) > _MAX_KEYS else ""
    raise RankMismatchError(
        f"ranks were given different {', '.join(differing)}: {'; '.join(found[:_MAX_KEYS])}{more}; "
        "pass the same everywhere"
    )


def config_contents(config: ResolvedConfig) -> Contents:
    """The options of all names: ``fc2_fprop.method``, and what stands under ``tpoverlap:``."""
    defaults = {
        f"{name}.{key}": f"{value!r}{_BY_DEFAULT}"
        for name, options in config.configs.items()
        for key, value in options.to_dict().items()
    }
    written = dict(_leaves(config.to_dict()))
    source = "a mapping" if config.origin == "ub_cfgs" else config.origin
    return Contents(written, defaults, source=source if written else "none")


def plan_contents(plan: Mapping[str, Any] | None) -> Contents:
    """The rows of a plan: ``plan.methods.fc2_fprop.method``."""
    if plan is None:
        return Contents({}, missing="without a plan")
    rows = {key: value for key, value in plan.items() if key not in ("hash", "version", "tp_size")}
    return Contents(dict(_leaves(rows, "plan")))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(dotted path, text) of everything in nested mappings and lists; an empty one is a leaf."""
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            inner = repr(key) if "." in str(key) or "[" in str(key) else key  # else {"a.b": 1} is {"a": {"b": 1}}
            yield from _leaves(child, f"{path}.{inner}" if path else str(key))
    elif isinstance(value, list | tuple) and value:
        for index, child in enumerate(value):
            yield from _leaves(child, f"{path}[{index}]")
    elif path:
        yield path, repr(value)


def _differences(contents: Sequence[Contents]) -> Iterator[str]:
    """Where it is from, then what somebody wrote and not all ranks have, real differences first. If nobody wrote any,
    the ranks' releases fill in different defaults.
    """
    sources = [one.source for one in contents]
    if len(set(sources)) > 1:
        yield f"the source is {_by_rank(sources)}"
    written = dict.fromkeys(key for one in contents for key in one.written)
    defaults = dict.fromkeys(key for one in contents for key in one.otherwise)
    for keys in (written, defaults):
        rows = [(key, [one.at(key) for one in contents]) for key in keys]
        differing = [(key, values) for key, values in rows if len(set(values)) > 1]
        for key, values in sorted(differing, key=lambda row: _is_by_default_only(row[1])):
            yield f"{_short(key, _MAX_KEY)} is {_by_rank(values)}"
        if differing:
            return


def _is_by_default_only(values: Sequence[str]) -> bool:
    return len({value.removesuffix(_BY_DEFAULT) for value in values}) == 1


def _by_rank(values: Sequence[str]) -> str:
    """``'pipeline' on ranks 0-2, 5 and 'bulk' on rank 4``, in the order of the first rank that has the value."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    parts = [f"{_short(value)} on {_ranges(having)}" for value, having in ranks.items()]
    if len(parts) > _MAX_VALUES:
        parts = [*parts[:_MAX_VALUES], f"{len(parts) - _MAX_VALUES} other values elsewhere"]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def _short(text: str, most: int = _MAX_TEXT) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 2) :]}"


def _ranges(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:_MAX_RANKS]]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}{', ...' if len(runs) > _MAX_RANKS else ''}"
