"""State dicts that say where each part belongs, for ``torch.distributed.checkpoint`` to save and reshard.

=====================================  ============================================================================
entry                                  what it is
=====================================  ============================================================================
column, row, QKV, even vocabulary      DTensor, ``Shard(dim)``, of the full shape; ``full_tensor()`` works
gate and up, uneven vocabulary         DTensor of the full shape whose local tensor is a ``LocalShardsWrapper``: its
                                       pieces are not what ``torch.chunk`` would give a rank. For checkpoints only
replicated, other modules' parameters  the plain tensor
histories of FP8's delayed scaling     plain, under "<name>.rank_r_of_R": a rank's own, of no use at another R
=====================================  ============================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tpoverlap.errors import ConfigError
from tpoverlap.gemm.fp8 import Fp8State
from tpoverlap.nn.shard_spec import ShardSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tpoverlap.manager import UserBufferManager


def dtensor_state_dict(
    module: torch.nn.Module, tensors: Mapping[str, torch.Tensor] | None = None, *, fp8_histories: bool = True
) -> dict[str, Any]:
    """``module.state_dict()`` with cut parameters as DTensors of the full shapes, under the same names.

    ``torch.distributed.checkpoint.save(dtensor_state_dict(model), checkpoint_id=folder)`` on R ranks, and ``load`` with
    the same arguments on any other number of ranks. Every entry shares its memory with the module, so ``load`` fills
    the module itself: call no ``load_state_dict`` after it. Names and full shapes are those of the plain state dict of
    a model with R = 1.

    Args:
        module: any module with layers of this package in it.
        tensors: by parameter name, to take these instead of the module's own: an optimizer's moments, say, each of its
            parameter's shape.
        fp8_histories: with those of delayed scaling. False: leave them out, to load a checkpoint of another R; scales
            then start anew.

    Call it on every rank: it makes a DeviceMesh of the group.

    Raises:
        ConfigError: one of ``tensors`` has another shape than its parameter's part on this rank.
    """
    state: dict[str, Any] = dict(module.state_dict() if tensors is None else tensors)
    meshes: dict[tuple[int, str], DeviceMesh] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        specs: dict[str, ShardSpec] = getattr(owner, "shard_specs", {})
        for name, spec in specs.items():
            local = state.get(f"{dot}{name}")
            if local is None or spec.dim is None:
                continue
            manager: UserBufferManager = owner.manager
            key = (id(manager.group), local.device.type)
            if key not in meshes:
                meshes[key] = _mesh(manager, local.device.type)
            expected = spec.local_shape(manager.rank, manager.tp_size)
            if tuple(local.shape) != expected:
                raise ConfigError(
                    f"{dot}{name}: this rank's part is {list(expected)}, got a tensor of {list(local.shape)}; pass "
                    "what belongs to the parameter of this rank"
                )
            state[f"{dot}{name}"] = _as_dtensor(local, spec, manager, meshes[key])
        if specs and tensors is None:
            own = owner.manager
            _rename_histories(state, owner, dot, f"rank_{own.rank}_of_{own.tp_size}" if fp8_histories else None)
    return state


def _mesh(manager: UserBufferManager, device_type: str) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(manager.group, device_type, mesh_dim_names=("tp",))


def _as_dtensor(local: torch.Tensor, spec: ShardSpec, manager: UserBufferManager, mesh: DeviceMesh) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    assert spec.dim is not None, "the caller left replicated ones out"
    rank, tp_size, shape = manager.rank, manager.tp_size, torch.Size(spec.full_shape)
    pieces = spec.pieces(rank, tp_size)
    if len(pieces) > 1 or shape[spec.dim] % tp_size:
        # DTensor takes for granted that a rank holds one torch.chunk; the wrapper says where each piece lies instead.
        offsets = [tuple(start if d == spec.dim else 0 for d in range(len(shape))) for start, _ in pieces]
        local = LocalShardsWrapper(spec.pieces_of(local, rank, tp_size), offsets)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(spec.dim)], run_check=False, shape=shape, stride=stride)


def _rename_histories(state: dict[str, Any], owner: torch.nn.Module, dot: str, suffix: str | None) -> None:
    for path, child in owner.named_modules():
        if isinstance(child, Fp8State):
            for name in child.state_dict():
                history = state.pop(f"{dot}{path}.{name}")
                if suffix is not None:
                    state[f"{dot}{path}.{name}.{suffix}"] = history
