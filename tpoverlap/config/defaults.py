"""Defaults: by the *configured* method and the direction, so that overriding ``method`` moves the others with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tpoverlap.config.names import COLUMN_DGRADS, KNOWN_NAMES, ROW_WGRADS
from tpoverlap.config.options import OptionValue, OverlapConfig, direction_name
from tpoverlap.errors import ConfigError

DEFAULT_METHOD: Final = "ring_exchange"
"""For names that are not among the twelve, in both directions."""

CHUNK_METHODS: Final = ("ring_exchange", "fused")
"""They cut the rows in one chunk a rank, so ``num_splits`` is tp_size."""

REDUCE_SCATTER_DGRAD_METHODS: Final = ("ring_exchange", "pipeline", "fused")
"""On ``qkv_dgrad`` and ``fc1_dgrad`` these mean "reduce-scatter the input gradient"; there ``bulk`` all-gathers."""

_COLLECTIVE_METHODS: Final = ("pipeline", "bulk", "external")


def default_method(name: str) -> str:
    """The method that ``name`` gets when its options do not say one."""
    known = KNOWN_NAMES.get(name)
    return known.method if known else DEFAULT_METHOD


def direction(name: str, method: str, given: OptionValue = None) -> bool:
    """Whether ``name`` reduce-scatters under ``method``; ``given`` is an explicit ``is_reduce_scatter`` or None.

    A name of the twelve fixes its direction and ``given`` may only confirm it (a rule checks that), but ``qkv_dgrad``
    and ``fc1_dgrad`` follow their method; under ``sequential`` and ``auto``, legal both ways, they follow ``given``.
    """
    known = KNOWN_NAMES.get(name)
    if known is None:
        return method == "pipeline" if given is None else bool(given)
    if known.fixed_direction or method == "bulk":
        return known.is_reduce_scatter
    if method in REDUCE_SCATTER_DGRAD_METHODS:
        return True
    return known.is_reduce_scatter if given is None else bool(given)


def method_defaults(method: str, is_reduce_scatter: bool, tp_size: int) -> OverlapConfig:
    """Every default under ``method``; the numbers are Transformer Engine's for that method."""
    collective = method in _COLLECTIVE_METHODS
    return OverlapConfig(
        method=method,
        is_reduce_scatter=is_reduce_scatter,
        num_sm=16 if collective else 1,
        cga_size=2 if collective else 1,
        set_sm_margin=collective,
        num_splits=4 if collective else tp_size,
        aggregate=False,
        atomic_gemm=False,
        use_ce=True,
        fp8_buf=not is_reduce_scatter,
        comm_priority=None,
        gemm_priority=None,
        pipeline_rs_overlap_first_gemm=False,
        num_max_streams=3,
    )


def fill_defaults(name: str, options: Mapping[str, Any], tp_size: int) -> OverlapConfig:
    """``options`` (normalised, any subset of the keys) over the defaults of their method and direction."""
    method = str(options.get("method", default_method(name)))
    is_reduce_scatter = direction(name, method, options.get("is_reduce_scatter"))
    values = method_defaults(method, is_reduce_scatter, tp_size).to_dict() | dict(options)
    values["is_reduce_scatter"] = is_reduce_scatter
    if method in CHUNK_METHODS:
        values["num_splits"] = tp_size
    return OverlapConfig(**values)


def default_config(name: str, is_reduce_scatter: bool, tp_size: int) -> OverlapConfig:
    """The options of a name that no configuration mentions, for the direction that it is used in.

    Raises:
        ConfigError: tp_size below 1; a name of the twelve used against its direction or with nothing to communicate.
    """
    require_tp_size(tp_size)
    if name in ROW_WGRADS:
        raise ConfigError(
            f"{name} has nothing to communicate: it reuses what {name.replace('wgrad', 'dgrad')} gathered; "
            "take that communicator's gathered tensor"
        )
    if name in COLUMN_DGRADS and is_reduce_scatter:
        return method_defaults(DEFAULT_METHOD, True, tp_size)
    known = KNOWN_NAMES.get(name)
    if known is not None and known.is_reduce_scatter != is_reduce_scatter:
        raise ConfigError(
            f"{name} is a name for {direction_name(known.is_reduce_scatter)}, but it is used for "
            f"{direction_name(is_reduce_scatter)}; register another name for that"
        )
    return method_defaults(default_method(name), is_reduce_scatter, tp_size)


def transformer_engine_config(name: str, options: Mapping[str, Any], tp_size: int) -> OverlapConfig:
    """What Transformer Engine makes of the same ``options`` for one of the twelve names.

    There a default follows the *name's own* method, not the configured one; but a reduce-scattering ``X_dgrad`` is
    moved to its configured method first, so it alone agrees with ours.
    """
    method = str(options.get("method", KNOWN_NAMES[name].te_method))
    origin = method if name in COLUMN_DGRADS else KNOWN_NAMES[name].te_method
    is_reduce_scatter = direction(name, method, options.get("is_reduce_scatter"))
    values = method_defaults(origin, is_reduce_scatter, tp_size).to_dict() | {"method": method} | dict(options)
    if method in CHUNK_METHODS:
        values["num_splits"] = tp_size
    return OverlapConfig(**values)


def require_tp_size(tp_size: object) -> None:
    """Raise ConfigError unless ``tp_size`` is a positive whole number."""
    if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1:
        raise ConfigError(f"tp_size must be a whole number of at least 1, got {tp_size!r}")
