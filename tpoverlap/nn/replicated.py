"""Gradients of replicated parameters: each rank saw only its own rows, so they must be summed over the group."""

from __future__ import annotations

from typing import Any

import torch

from tpoverlap.setup import resolve_group


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
    """
    import torch.distributed as dist

    process_group = resolve_group(group)
    named = {
        id(getattr(module, name)) for module in model.modules() for name in getattr(module, "replicated_parameters", ())
    }
    parameters = [
        p for p in model.parameters() if p.requires_grad and (getattr(p, "sequence_parallel", False) or id(p) in named)
    ]
    if not parameters or process_group.size() == 1:
        return len(parameters)
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
