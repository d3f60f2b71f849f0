"""Gradients of replicated parameters: each rank saw only its own rows, so they must be summed over the group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tpoverlap.errors import RankMismatchError
from tpoverlap.memory.base import agree
from tpoverlap.setup import resolve_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def sync_replicated_grads(model: torch.nn.Module, group: Any) -> int:
    """Sum over ``group`` the gradients of parameters that carry ``sequence_parallel = True``, and of those that our
    layers name as replicated (which copied and re-made parameters keep being).

    Under sequence parallelism norm weights, row biases and replicated embeddings multiply only this rank's T_r rows.
    Without this call a plain training loop trains them on 1 / R of the tokens, and differently on every rank.
    (Megatron-core's ``finalize_model_grads`` does the same for the same flag.) Call it once an optimizer step, after
    the last backward: it sums what ``grad`` holds, so after every microbatch it would count the earlier ones again. A
    parameter that got no gradient on this rank (it owned no row) takes part with zeros.

    Args:
        model: any module; parameters without the flag are left alone.
        group: ProcessGroup, 1-D DeviceMesh or None for the default group.

    Returns:
        The number of parameters that were summed.

    Raises:
        RankMismatchError: ranks have other parameters to sum, such as one that is frozen on one rank only. Compared in
            a model's first call, and again when what it has to sum changes, which it has to on all ranks alike.
    """
    import torch.distributed as dist

    process_group = resolve_group(group)
    named = {
        id(getattr(module, name)) for module in model.modules() for name in getattr(module, "replicated_parameters", ())
    }
    flagged = {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad and (getattr(p, "sequence_parallel", False) or id(p) in named)
    }
    parameters = list(flagged.values())
    if process_group.size() == 1:
        return len(parameters)
    _require_same(model, process_group, flagged)
    if not parameters:
        return 0
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        assert parameter.grad is not None, "filled above"
        by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for grads in by_dtype.values():
        # One collective a dtype, in float32: many small all-reduces cost latency, bfloat16 sums cost digits.
        flat = torch.cat([grad.detach().float().reshape(-1) for grad in grads])
        on_host = flat.is_cuda and "nccl" not in dist.get_backend(process_group)
        summed = flat.cpu() if on_host else flat
        dist.all_reduce(summed, group=process_group)
        for grad, part in zip(grads, summed.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))
    return len(parameters)


def _require_same(model: torch.nn.Module, group: ProcessGroup, parameters: dict[str, torch.nn.Parameter]) -> None:
    """Sums of different lengths end a process in gloo and hang in NCCL; of different parameters they are just wrong."""
    own = [f"{name} {list(parameter.shape)} {parameter.dtype}" for name, parameter in parameters.items()]
    key = (group.group_name, own)
    if getattr(model, "_tpoverlap_summed", None) == key:
        return
    everywhere = agree(group, own)
    for rank, other in enumerate(everywhere):
        differing = sorted(set(other) ^ set(everywhere[0]))
        if other != everywhere[0]:
            which = f"{', '.join(differing[:3])} on one of them only" if differing else "the same ones in another order"
            raise RankMismatchError(
                f"ranks 0 and {rank} have different replicated gradients to sum: {which}; freeze parameters, and build "
                "the model, alike on every rank"
            )
    model._tpoverlap_summed = key  # type: ignore[assignment]  # plain data: copies and pickles keep it
