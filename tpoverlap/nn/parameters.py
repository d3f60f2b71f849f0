"""Parameters of layers: how they are made, marked and drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tpoverlap.default_manager import default_manager
from tpoverlap.errors import ConfigError
from tpoverlap.nn.shard_spec import ShardSpec
from tpoverlap.tokens import as_int

if TYPE_CHECKING:
    from tpoverlap.manager import UserBufferManager

InitMethod = Callable[[torch.Tensor], object]


def resolve_manager(
    manager: UserBufferManager | None, tp_group: object = None, tp_size: int | None = None
) -> UserBufferManager:
    """``manager``, or the default one; ``tp_group`` and ``tp_size``, where given, have to be its.

    Raises:
        NotInitializedError: there is none. ConfigError: it belongs to another group.
    """
    resolved = default_manager() if manager is None else manager
    if tp_size is not None and tp_size != resolved.tp_size:
        raise ConfigError(
            f"tp_size={tp_size}, but the manager's group has {resolved.tp_size} ranks; leave tp_size out or pass that "
            "group's manager"
        )
    if tp_group is not None and tp_group is not resolved.group and getattr(tp_group, "get_group", None) is None:
        raise ConfigError("tp_group is not the group of the manager; pass the manager of that group as manager=")
    return resolved


def require_positive(what: str, value: float) -> None:
    """Raise ConfigError unless ``value`` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{what} must be a finite number above 0, got {value!r}")


def require_ub_names(names: object, *roles: str) -> None:
    """Raise ConfigError unless ``names`` is one name for each of ``roles`` (empty ones are refused elsewhere)."""
    if not isinstance(names, tuple | list) or len(names) != len(roles):
        raise ConfigError(
            f"ub_names needs {len(roles)} names, those of {', '.join(roles)}, got {names!r}; "
            f"a name that was not registered runs without overlap"
        )


def require_sizes(**sizes: object) -> None:
    """Raise ConfigError unless each of ``sizes`` (by argument name) is a whole number of at least 1."""
    for what, size in sizes.items():
        whole = as_int(size)
        if whole is None or whole < 1:
            raise ConfigError(f"{what} must be a whole number of at least 1, got {size!r}")


def divided(what: str, size: int, manager: UserBufferManager) -> int:
    """``size / R``. Raises ConfigError, with both numbers, if that is no whole number of at least 1."""
    require_sizes(**{what: size})
    if size % manager.tp_size:
        raise ConfigError(f"{what}={size} is not divisible by tp_size={manager.tp_size}")
    return size // manager.tp_size


def add_parameter(
    module: torch.nn.Module,
    name: str,
    spec: ShardSpec,
    manager: UserBufferManager,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    *,
    replicated: bool = False,
) -> None:
    """Give ``module`` this rank's part of a parameter, uninitialised, and note in ``shard_specs`` how it is cut.

    ``replicated``: every rank holds it whole but sees its own rows' gradient only, so it carries Megatron's flag
    ``sequence_parallel``, which `sync_replicated_grads` reads. (Without sequence parallelism every rank sees all rows.)

    A parameter that is cut carries Megatron's flags for that: by ``tensor_model_parallel`` its gradient norm counts the
    parts of all ranks, and a replicated parameter once.
    """
    parameter = torch.nn.Parameter(
        torch.empty(
            *spec.local_shape(manager.rank, manager.tp_size),
            device=manager.device if device is None else device,
            dtype=manager.dtype if dtype is None else dtype,
        )
    )
    if spec.dim is not None:
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        parameter.partition_dim, parameter.partition_stride = spec.dim, 1  # type: ignore[attr-defined]
    if replicated:
        parameter.sequence_parallel = True  # type: ignore[attr-defined]  # see above
        # A copy of a module has new parameters, without their attributes; the module's own are copied.
        module.replicated_parameters = (*getattr(module, "replicated_parameters", ()), name)  # type: ignore[assignment]
    module.register_parameter(name, parameter)
    describe_parameter(module, name, spec)


def describe_parameter(module: torch.nn.Module, name: str, spec: ShardSpec) -> None:
    """Note how parameter ``name`` is cut."""
    module.__dict__.setdefault("shard_specs", {})[name] = spec


def draw_shard(weight: torch.nn.Parameter, manager: UserBufferManager, init: InitMethod) -> None:
    """Fill this rank's part of a cut weight by ``init``, from a seed of its own.

    (A seed that is the same on every rank is what replicated parameters need; the shards must not follow it.)
    """
    if weight.device.type == "meta":
        return
    seed = int(torch.randint(2**62, ()).item()) + manager.rank
    devices = [weight.device] if weight.is_cuda else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(seed)
        init(weight)


def uniform_by_fan_in(fan_in: int) -> InitMethod:
    """As ``torch.nn.Linear``: uniform within 1 / sqrt(fan_in) of the *full* layer."""
    bound = fan_in**-0.5
    return lambda weight: torch.nn.init.uniform_(weight, -bound, bound)
