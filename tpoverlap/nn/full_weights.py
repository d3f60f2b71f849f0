"""Between a parameter of the full model and its parts on the ranks: `load_full_weight` and `full_weight`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from tpoverlap.errors import ConfigError
from tpoverlap.nn.shard_spec import ShardSpec

if TYPE_CHECKING:
    from tpoverlap.manager import UserBufferManager


class CutParameter(NamedTuple):
    """A parameter of a layer, how it is cut, and over whose group."""

    name: str
    parameter: torch.nn.Parameter
    spec: ShardSpec
    manager: UserBufferManager


def cut_parameter(module: torch.nn.Module, name: str) -> CutParameter:
    """Parameter ``name`` of ``module``, as ``named_parameters`` spells it.

    Raises:
        ConfigError: there is no such parameter, or it belongs to no layer of this package.
    """
    prefix, _, leaf = name.rpartition(".")
    try:
        owner, parameter = module.get_submodule(prefix), module.get_parameter(name)
    except AttributeError as error:
        names = ", ".join(known for known, _ in module.named_parameters())
        raise ConfigError(f"{type(module).__name__} has no parameter {name!r}; it has {names}") from error
    spec = getattr(owner, "shard_specs", {}).get(leaf)
    if spec is None:
        raise ConfigError(f"{name} belongs to a {type(owner).__name__}, which is no tensor-parallel layer of tpoverlap")
    manager: UserBufferManager = owner.manager  # type: ignore[assignment]  # of every layer with shard_specs
    return CutParameter(name, parameter, spec, manager)


def load_full_weight(module: torch.nn.Module, name: str, full: torch.Tensor) -> None:
    """Fill this rank's part of a parameter from the parameter of the full model. Local: nothing is communicated.

    Args:
        module: a layer, or any module with layers in it.
        name: as in ``module.named_parameters()``: "fc1_weight", "self_attention.proj.weight".
        full: the whole parameter, in the layout of `ShardSpec`; on any device. Another dtype is converted, as by
            ``load_state_dict``.

    Raises:
        ConfigError: no such parameter, ``full`` has another shape, or the parameter is on the meta device.
    """
    _, parameter, spec, manager = cut_parameter(module, name)
    if tuple(full.shape) != spec.full_shape:
        raise ConfigError(
            f"{name}: the full parameter is {list(spec.full_shape)}, got {list(full.shape)} (this rank of "
            f"{manager.tp_size} holds {list(parameter.shape)}; pass the whole one)"
        )
    if parameter.is_meta:
        raise ConfigError(f"{name} is on the meta device; call to_empty(device=...) before loading")
    with torch.no_grad():
        parameter.copy_(spec.shard(full, manager.rank, manager.tp_size))


def full_weight(module: torch.nn.Module, name: str) -> torch.Tensor:
    """The parameter of the full model, put together from all ranks' parts: bit for bit what `load_full_weight` took.

    Collective over the layer's group: every rank calls it for the same parameters in the same order, and gets a new
    tensor on the parameter's device. A replicated parameter is this rank's own.

    Raises:
        ConfigError: no such parameter.
    """
    _, parameter, spec, manager = cut_parameter(module, name)
    local = parameter.detach()
    if spec.dim is None or manager.tp_size == 1:
        return local.clone()
    return spec.unshard(_all_gather(local, spec, manager))


def _all_gather(local: torch.Tensor, spec: ShardSpec, manager: UserBufferManager) -> list[torch.Tensor]:
    """All ranks' parts. As bytes, so that any dtype travels; padded to the largest, which is all that gloo takes."""
    import torch.distributed as dist

    shapes = [spec.local_shape(rank, manager.tp_size) for rank in range(manager.tp_size)]
    sizes_bytes = [math.prod(shape) * local.element_size() for shape in shapes]
    on_host = local.is_cuda and "nccl" not in dist.get_backend(manager.group)
    device = torch.device("cpu") if on_host else local.device
    sent = torch.zeros(max(sizes_bytes), dtype=torch.uint8, device=device)
    sent[: sizes_bytes[manager.rank]].copy_(local.contiguous().reshape(-1).view(torch.uint8))
    received = [torch.empty_like(sent) for _ in shapes]
    dist.all_gather(received, sent, group=manager.group)
    return [
        flat[:size_bytes].view(local.dtype).view(shape).to(local.device)
        for flat, size_bytes, shape in zip(received, sizes_bytes, shapes, strict=True)
    ]
