"""Names of a manager: which communicators exist, and what a layer's three are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from tpoverlap.communicator import CommOverlap, CommOverlapP2P, LayerCommunicators
from tpoverlap.config import KNOWN_NAMES, OverlapConfig, ResolvedConfig, default_config
from tpoverlap.config.names import PHASES, ROW_WGRADS, nearest_gemm, nearest_layer
from tpoverlap.errors import ConfigError
from tpoverlap.memory.layout import MAX_PIECES

if TYPE_CHECKING:
    from tpoverlap.manager import UserBufferManager

logger = logging.getLogger("tpoverlap")


class NameTable:
    """Name -> communicator. Names are independent: one that is missing affects itself alone."""

    def __init__(
        self, manager: UserBufferManager, config: ResolvedConfig, width: int, max_tokens: int, max_rows_per_rank: int
    ) -> None:
        self._manager = manager
        self._config = config
        self._width = width
        self._max_tokens = max_tokens
        self._max_rows_per_rank = max_rows_per_rank
        self._table: dict[str, CommOverlap] = {}
        self._layers: dict[tuple[str, bool], LayerCommunicators] = {}
        self._unregistered: dict[tuple[str, bool], CommOverlap] = {}
        self._registered: set[str] = set()  # by `register`
        self._said: set[str] = set()
        for name, options in config.names.items():
            self._add(name, options)

    def __iter__(self) -> Iterator[CommOverlap]:
        return iter(self._table.values())

    @property
    def unregistered(self) -> Collection[CommOverlap]:
        """What layers use under names that were not registered; a name once a direction."""
        return self._unregistered.values()

    def __contains__(self, name: str) -> bool:
        return name in self._table

    def get(self, name: str) -> CommOverlap:
        """The communicator of a GEMM name.

        Raises:
            ConfigError: it was not registered; lists what was.
        """
        communicator = self._table.get(name)
        if communicator is not None:
            return communicator
        if name in ROW_WGRADS:
            raise ConfigError(
                f"{name!r} has nothing to communicate: it reuses what {name.replace('wgrad', 'dgrad')} gathered; "
                "get that one"
            )
        if any(gemm_name in self._table for gemm_name in _gemm_names(name)):
            gemms = ", ".join(one for one in _gemm_names(name) if one in self._table)
            raise ConfigError(f"{name!r} is a layer: get one of its GEMMs, {gemms}, or call mgr.layer({name!r})")
        raise ConfigError(
            f"no communicator is named {name!r}{_did_you_mean(nearest_gemm(name, self._table))}; registered: "
            f"{', '.join(sorted(self._table))}. "
            f"Add it with mgr.register({name!r}, width=...) or in ub_cfgs"
        )

    def find(self, name: str) -> CommOverlap:
        """As `get`, but also the stand-in of a name that a layer uses without anybody having registered it."""
        for communicator in self._unregistered.values():
            if communicator.name == name and name not in self._table:
                return communicator
        return self.get(name)

    def register(
        self,
        name: str,
        width: int,
        max_tokens: int,
        max_rows_per_rank: int,
        gather_region: str,
        scatter_region: str,
    ) -> None:
        """Add a layer ``name`` (its fprop, dgrad and wgrad), or a single GEMM if the name says which."""
        for gemm_name in _gemm_names(name):
            self._registered.add(gemm_name)
            options = self._config.get(gemm_name) or _default_for(gemm_name, False, self._manager.tp_size)
            self._add(
                gemm_name,
                options,
                width=width,
                max_tokens=max_tokens,
                max_rows_per_rank=max_rows_per_rank,
                gather_region=gather_region,
                scatter_region=scatter_region,
            )
        self._layers.clear()  # some may hold what was there before

    def require_new(self, name: str) -> None:
        """Raise ConfigError unless `register` may add ``name``. Names that only ub_cfgs mentions may be added once."""
        if not isinstance(name, str) or not name or not name.isprintable() or any(c.isspace() for c in name):
            raise ConfigError(f"a name must be printable text without blanks, got {name!r}")
        for gemm_name in _gemm_names(name):
            if gemm_name in KNOWN_NAMES:
                raise ConfigError(
                    f"{gemm_name} is one of the standard names, at width {self._width}; "
                    "pick another name for another width"
                )
            if gemm_name in self._registered:
                existing = self._table[gemm_name]
                raise ConfigError(
                    f"{gemm_name} is registered already, with capacity {existing.get_buffer_capacity_shape()}; "
                    "pick another name"
                )

    def layer(self, name: str, *, row: bool = False) -> LayerCommunicators:
        """fprop, dgrad and wgrad of a column layer (all-gather in fprop), or of a ``row`` one (reduce-scatter).

        An unregistered name gets communicators that run sequentially, and one log line says so.
        """
        key = (name, row)
        if key not in self._layers:
            self._layers[key] = self._make_layer(name, row)
        return self._layers[key]

    def _make_layer(self, name: str, row: bool) -> LayerCommunicators:
        fprop = self._phase(name, "fprop", scatter=row, method="ring_exchange")
        if row:
            return LayerCommunicators(
                self._manager, name, fprop, self._phase(name, "dgrad", scatter=False, method="ring_exchange"), None
            )
        dgrad = self._phase(name, "dgrad", scatter=None, method="bulk")
        wgrad = None if dgrad.is_reduce_scatter else self._phase(name, "wgrad", scatter=True, method="bulk")
        return LayerCommunicators(self._manager, name, fprop, dgrad, wgrad)

    def _phase(self, layer: str, phase: str, *, scatter: bool | None, method: str) -> CommOverlap:
        """One phase's communicator; ``scatter`` None: as configured, else the direction that it must have."""
        name = f"{layer}_{phase}"
        existing = self._table.get(name)
        tp_size = self._manager.tp_size
        if existing is None:
            hint = _did_you_mean(nearest_layer(layer, self._table))
            self._say_once(
                layer,
                f"{name} is not registered{hint}: what is missing of layer {layer!r} runs without overlap (other "
                f"layers are not affected). mgr.register({layer!r}, width=...) or entries in ub_cfgs register it",
            )
            key = (name, bool(scatter))
            if key not in self._unregistered:
                options = default_config("unregistered", bool(scatter), tp_size)
                added = self._make(name, replace(options, method="sequential"), registered=False)
                added.hint = hint
                other = self._unregistered.get((name, not scatter))
                if other is not None:
                    added.statistics = other.statistics
                self._unregistered[key] = added
            return self._unregistered[key]
        if name in KNOWN_NAMES or self._config.source(name) == "explicit":
            if scatter is not None and existing.is_reduce_scatter != scatter:
                used = "reduce-scatter" if scatter else "all-gather"
                raise ConfigError(
                    f"{name} is configured for {existing.config.direction}, but this layer uses it for {used}; "
                    "use the matching parallel mode, or another name"
                )
            return existing
        # A user's own name without options: the direction follows the use.
        options = replace(_default_for(name, bool(scatter), tp_size), method=method, is_reduce_scatter=bool(scatter))
        return self._add_like(existing, options)

    def _add_like(self, existing: CommOverlap, options: OverlapConfig) -> CommOverlap:
        if existing.config == options:
            return existing
        added = self._add(
            existing.name,
            options,
            width=existing.width,
            max_tokens=existing.max_tokens,
            max_rows_per_rank=existing.max_rows_per_rank,
            gather_region=existing.gather_region,
            scatter_region=existing.scatter_region,
        )
        added.statistics = existing.statistics  # whoever still holds the former one counts here too
        return added

    def _add(self, name: str, options: OverlapConfig, **where: object) -> CommOverlap:
        communicator = self._make(name, options, **where)
        self._table[name] = communicator
        return communicator

    def _make(self, name: str, options: OverlapConfig, **where: object) -> CommOverlap:
        if options.method == "pipeline" and max(options.num_splits, options.num_max_streams) > MAX_PIECES:
            raise ConfigError(
                f"{name}: num_splits={options.num_splits}, num_max_streams={options.num_max_streams}, but an operation "
                f"has {MAX_PIECES} flags, one a split; use at most that"
            )
        kind: Callable[..., CommOverlap] = CommOverlapP2P if options.method == "ring_exchange" else CommOverlap
        defaults: dict[str, object] = {
            "width": self._width,
            "max_tokens": self._max_tokens,
            "max_rows_per_rank": self._max_rows_per_rank,
            "gather_region": "ag",
            "scatter_region": "rs",
        }
        return kind(self._manager, name, options, **(defaults | where))

    def _say_once(self, key: str, message: str) -> None:
        if key not in self._said:
            self._said.add(key)
            logger.warning(message)

    def forget(self) -> None:
        """Drop everything (the manager was closed)."""
        self._table.clear()
        self._layers.clear()
        self._unregistered.clear()


def _gemm_names(name: str) -> tuple[str, ...]:
    if name.endswith(PHASES):
        return (name,)
    return (f"{name}_fprop", f"{name}_dgrad", f"{name}_wgrad")


def _did_you_mean(name: str | None) -> str:
    return "" if name is None else f" (did you mean {name!r}?)"


def _default_for(name: str, scatter: bool, tp_size: int) -> OverlapConfig:
    return default_config("unregistered" if name in KNOWN_NAMES else name, scatter, tp_size)
