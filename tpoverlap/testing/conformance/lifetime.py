"""Results outlive the operation, grad modes, and case 9: managers one after another. Rank functions, as in `gemms`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tpoverlap import te
from tpoverlap.communicator import CommOverlap
from tpoverlap.config import legal_methods
from tpoverlap.errors import BackendUnavailableError, ConfigError, NotInitializedError
from tpoverlap.manager import UserBufferManager
from tpoverlap.nn.functional import all_gather_gemm, bulk_all_gather, bulk_reduce_scatter, gemm_reduce_scatter
from tpoverlap.testing.conformance import plain
from tpoverlap.testing.conformance.comparison import Comparison
from tpoverlap.testing.conformance.setting import Setting
from tpoverlap.tokens import TokenPartition

OWN_NAMES: Mapping[str, bool] = {"table_gather": False, "table_scatter": True}
"""A user's own names: no rule about Transformer Engine's twelve narrows down what is legal for them."""


def check_results_stay(rank: int, size: int, setting: Setting) -> dict[str, Any]:
    """What functions returned is never overwritten: five more rounds of all operations at other T change no bit."""
    comparison = Comparison(f"rank {rank}")
    counts = [setting.capacity - 1, setting.capacity, size, setting.capacity // 2, 1, setting.capacity]
    with setting.open_manager(rank) as manager:
        kept: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for turn, num_tokens in enumerate(counts):
            partition = TokenPartition.balanced(num_tokens, size)
            for name, results in _all_operations(manager, setting, partition, turn).items():
                kept += [(f"{name} of round {turn}", result, result.clone()) for result in results]
        for name, result, then in kept:
            comparison.same(f"{name} after {len(counts) - 1} more rounds", result, then)
        manager.check()
    return comparison.summary()


def check_grad_modes(rank: int, size: int, setting: Setting) -> dict[str, Any]:
    """no_grad and inference_mode give the bits of training, without history, and training goes on after them."""
    comparison = Comparison()
    with setting.open_manager(rank) as manager:
        for turn, num_tokens in enumerate((setting.capacity, size + 1, 1)):
            partition = TokenPartition.balanced(num_tokens, size)
            trained = _all_operations(manager, setting, partition, turn, trains=True)
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    quiet = _all_operations(manager, setting, partition, turn, trains=True)
                comparison.where = f"rank {rank}, {mode.__name__}, T={num_tokens}"
                for name, results in quiet.items():
                    for one, other in zip(results, trained[name], strict=True):
                        comparison.true(f"{name} has history", not one.requires_grad and other.requires_grad)
                        comparison.same(name, one, other)
            for results in trained.values():
                torch.autograd.backward(results, [torch.ones_like(result) for result in results])
        manager.check()
    return comparison.summary()


def _all_operations(
    manager: UserBufferManager, setting: Setting, partition: TokenPartition, turn: int, trains: bool = False
) -> dict[str, tuple[torch.Tensor, ...]]:
    """Every function once, in both directions; with the same ``turn`` on the same numbers."""
    rank, own, total = manager.rank, partition.rows(manager.rank), partition.total

    trains = trains and not torch.is_inference_mode_enabled()

    def draw(*shape: int) -> torch.Tensor:
        return setting.draw(rank, shape, turn, rank, *shape).requires_grad_(trains)

    shard, full = draw(own.stop - own.start, setting.hidden), draw(total, setting.hidden)
    x, column, row = (draw(n, setting.features) for n in (total, setting.features, setting.hidden))
    weight = draw(setting.features, setting.hidden)
    with manager.microbatch(partition):
        gathered = all_gather_gemm(shard, weight, manager.layer("qkv"), return_gathered=True)
        assert isinstance(gathered, tuple)
        return {
            "all_gather_gemm": gathered,
            "gemm_reduce_scatter": (gemm_reduce_scatter(x, row, manager.layer("proj")),),
            "bulk_all_gather": bulk_all_gather(shard, manager.get("qkv_dgrad"), (x, column)),
            "bulk_reduce_scatter": bulk_reduce_scatter(full, manager.get("qkv_wgrad"), (x, column)),
        }


def check_one_operation(comparison: Comparison, manager: UserBufferManager, setting: Setting, num_tokens: int) -> None:
    """A row layer and a column layer once at T: whether a manager works at all. ``setting`` has the manager's dtype."""
    rank, size, width = manager.rank, manager.tp_size, manager.capacity_shape[1]
    partition, high = TokenPartition.balanced(num_tokens, size), setting.reference_dtype
    x = setting.draw(rank, (num_tokens, width), "x", num_tokens)
    xs = [setting.draw(rank, (num_tokens, setting.features), "xs", q) for q in range(size)]
    weight = setting.draw(rank, (setting.features, width), "column", rank)
    weights = [setting.draw(rank, (width, setting.features), "row", q) for q in range(size)]
    with manager.microbatch(partition):
        y = all_gather_gemm(x[partition.rows(rank)], weight, manager.layer("fc1"))
        y_shard = gemm_reduce_scatter(xs[rank], weights[rank], manager.layer("fc2"))
    assert isinstance(y, torch.Tensor)
    reference = plain.linear(plain.wide(x, high), plain.wide(weight, high), None)
    comparison.close("y", y, plain.linear(x, weight, None), reference, roundings=1)
    own, twin = partition.rows(rank), plain.row_linear(xs, weights, None, partition)
    reference = plain.row_linear(plain.raised(xs, high), plain.raised(weights, high), None, partition)
    comparison.close("y_shard", y_shard, twin[own], reference[own])


def check_reinitialize(rank: int, size: int, setting: Setting) -> dict[str, Any]:
    """Case 9: close, then another shape, dtype and group; both on managers and through `tpoverlap.te`."""
    comparison = Comparison()
    other = torch.float32 if setting.dtype != torch.float32 else torch.bfloat16
    pairs = [dist.new_group([first, first + size // 2]) for first in range(size // 2)] if size % 2 == 0 else []
    half = pairs[rank % (size // 2)] if pairs else None
    steps: list[tuple[tuple[int, int], torch.dtype, Any]] = [
        ((setting.capacity, setting.hidden), setting.dtype, None),
        ((setting.capacity // 2, setting.hidden * 2), other, half),
        ((setting.capacity * 2, setting.hidden - 8), setting.dtype, None),
    ]
    for shape, dtype, group in steps:
        tp_size = size if group is None else group.size()
        now = Setting(setting.device, dtype, setting.backend, *shape, setting.features, setting.timeout_s)
        comparison.where = f"rank {rank}, {shape}, {dtype}, R={tp_size}"
        with now.open_manager(rank, group) as manager:
            for num_tokens in (shape[0], 1):
                check_one_operation(comparison, manager, now, num_tokens)
        comparison.true("use after close is refused", _refused(partial(manager.layer, "qkv")))
        te.initialize_ub(
            list(shape), tp_size, dtype=dtype, tp_group=group, device=now.rank_device(rank),
            backend=setting.backend, timeout_s=setting.timeout_s,
        )  # fmt: skip
        try:
            comparison.true("initialised", te.is_ub_initialized() and te.get_ub("fc1_fprop").manager.tp_size == tp_size)
            te.set_ub_active_shape([shape[0] - 1, shape[1]])
            active = te.get_ub("fc1_fprop").get_buffer_active_shape()
            comparison.true(f"active shape {active}", active == (shape[0] - 1, shape[1]))
            check_one_operation(comparison, te.get_manager(), now, shape[0] - 1)
        finally:
            te.destroy_ub()
        comparison.true("destroyed", not te.is_ub_initialized() and _refused(lambda: te.get_ub("fc1_fprop")))
    return comparison.summary()


def _refused(use: Callable[[], object]) -> bool:
    try:
        use()
    except NotInitializedError:
        return True
    return False


def check_methods_table(rank: int, size: int, setting: Setting) -> dict[str, Any]:
    """Every method that is legal for a direction runs in it, from the function that it is for; bulk nowhere else."""
    comparison = Comparison()
    rows = {
        f"{name}_{method}": {"method": method, "is_reduce_scatter": scatters}
        for name, scatters in OWN_NAMES.items()
        for method in legal_methods(name, scatters, size)
    }
    with setting.open_manager(rank, ub_cfgs=rows) as manager:
        for turn, (name, options) in enumerate(rows.items()):
            partition = TokenPartition.balanced(setting.capacity - turn, size)
            comparison.where, own = f"rank {rank}, {name}", partition.rows(rank)
            comm = manager.get(name)
            x = setting.draw(rank, (partition.total, setting.hidden), "x", turn)
            weight = setting.draw(rank, (setting.features, setting.hidden), "w", rank)
            if options["method"] == "fused" and size > 1 and manager.backend_name != "cuda":
                with manager.microbatch(partition):
                    comparison.true("fused is refused where it cannot run", _has_no_kernels(comm, x, own, weight))
                continue
            with manager.microbatch(partition):
                if options["method"] == "bulk":
                    beside = (x, weight)
                    if options["is_reduce_scatter"]:
                        result, product = bulk_reduce_scatter(x, comm, beside)
                        comparison.same("the sum of equals", result, plain.rank_sum([x] * size)[own])
                    else:
                        result, product = bulk_all_gather(x[own], comm, beside)
                        comparison.same("the gathered rows", result, x)
                    comparison.same("the GEMM beside it", product, torch.mm(x, weight.t()))
                    if size > 1:  # with one rank nothing is communicated, whatever the method
                        comparison.true("bulk was taken for a GEMM that depends on it", _is_refused(comm, x, own))
                elif options["is_reduce_scatter"]:
                    result = gemm_reduce_scatter(x, torch.eye(setting.hidden).to(x), comm)
                    comparison.same("the sum of equals", result, plain.rank_sum([x] * size)[own])
                else:
                    _, gathered = all_gather_gemm(x[own], weight, comm, return_gathered=True)
                    comparison.same("the gathered rows", gathered, x)
            ran = "sequential" if size == 1 else options["method"]
            comparison.true(f"it ran as {manager.stats()[name]}", manager.stats()[name].get(f"method_{ran}") == 1)
        manager.check()
    return comparison.summary()


def _has_no_kernels(comm: CommOverlap, x: torch.Tensor, own: slice, weight: torch.Tensor) -> bool:
    try:
        if comm.is_reduce_scatter:
            gemm_reduce_scatter(x, torch.eye(x.shape[1]).to(x), comm)
        else:
            all_gather_gemm(x[own], weight, comm)
    except BackendUnavailableError:
        return True
    return False


def _is_refused(comm: CommOverlap, x: torch.Tensor, own: slice) -> bool:
    weight = torch.eye(x.shape[1]).to(x)
    try:
        if comm.is_reduce_scatter:
            gemm_reduce_scatter(x, weight, comm)
        else:
            all_gather_gemm(x[own], weight, comm)
    except ConfigError:
        return True
    return False
