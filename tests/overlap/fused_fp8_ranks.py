"""Rank functions: FP8 operations under a given method, called as the layers call them, against plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import tpoverlap as tpo
from tests.overlap.fused_ranks import context_of, forced_form
from tpoverlap import nn
from tpoverlap.gemm.fp8 import Quantizer, ScaledPartialGemm, ScaledRowGemm, scaled_mm
from tpoverlap.gemm.fp8.recipes import Role
from tpoverlap.manager import UserBufferManager
from tpoverlap.overlap import gather_then_gemm, gemm_then_scatter
from tpoverlap.overlap.fp8 import QuantizedShard, gather_operation, scatter_operation
from tpoverlap.testing.conformance.fp8 import MODES, RECIPES
from tpoverlap.testing.conformance.plain import rank_sum
from tpoverlap.testing.conformance.plain_fp8 import PlainQuantizer, PlainTensor, product
from tpoverlap.testing.conformance.setting import Setting
from tpoverlap.testing.faults import delay_transfers
from tpoverlap.testing.numeric import assert_close_to_twin, relative_error
from tpoverlap.tokens import TokenPartition


def _twin(left: PlainTensor, right: PlainTensor, formats: tuple[torch.dtype, torch.dtype], fast: bool) -> torch.Tensor:
    """``left`` times ``right`` transposed, rounded once.

    On a GPU by cuBLAS: sums of tensor cores have errors of their own, which a long K shows beside a rounding.
    """
    if left.numbers.device.type != "cuda":
        return product(left, right, "twin")
    out = torch.empty(left.numbers.shape[0], right.numbers.shape[0], dtype=left.dtype, device=left.numbers.device)
    operands = [one.numbers.to(dtype) for one, dtype in zip((left, right), formats, strict=True)]
    scaled_mm(operands[0], operands[1].t(), left.scale, right.scale, out, fast_accumulation=fast)
    wide = product(left, right, "reference")
    assert relative_error(out, wide) < 0.01, "the twin itself"
    return out


E4M3 = torch.float8_e4m3fn
FUSED: dict[str, dict[str, Any]] = {
    **{f"{name}_fprop": {"method": "fused"} for name in ("qkv", "proj", "fc1", "fc2")},
    **{f"{name}_dgrad": {"method": "fused"} for name in ("qkv", "proj", "fc1")},
    "fc2_dgrad": {"method": "ring_exchange", "atomic_gemm": True},
}
BOTH = ("fused", "ring_exchange")
"""Methods that run on the same operands: each has to be as near the reference as the twin is."""


def gather(
    rank: int,
    size: int,
    setting: Setting,
    partitions: Sequence[TokenPartition],
    recipe_name: str,
    role: Role,
    num_weights: int = 1,
    form: str = "",
    methods: Sequence[str] = BOTH,
    use_ce: bool = True,
    delay_s: float = 0.0,
) -> int:
    """All-gather + GEMM for every partition; ``role`` "grad": E5M2 rows times E4M3 weights, where the recipe has it."""
    recipe, compared = RECIPES[recipe_name], 0
    with setting.open_manager(rank, quantization_modes=MODES) as manager:
        quantizer, weight_quantizer = (Quantizer(recipe, one, manager.device) for one in (role, "weight"))
        for turn, partition in enumerate(partitions):
            own = partition.rows(rank)
            x = setting.draw(rank, (partition.total, setting.hidden), "x", turn, scale=2.0 ** (turn % 5 - 2))
            shapes = [(setting.features + 16 * i, setting.hidden) for i in range(num_weights)]
            weights = [setting.draw(rank, s, "w", rank, i, scale=s[1] ** -0.5) for i, s in enumerate(shapes)]
            biases = [
                setting.draw(rank, (weight.shape[0],), "b", i) if (turn + i) % 2 else None
                for i, weight in enumerate(weights)
            ]
            x8 = PlainQuantizer(recipe, role, gathered=True)(x)
            for method in methods:
                operation = context_of(manager, partition, scatter=False, method=method, use_ce=use_ce)
                operation = gather_operation(operation, quantizer)
                gathered: list[torch.Tensor] = []
                outs = [x.new_full((partition.total, weight.shape[0]), float("nan")) for weight in weights]
                # Who reads the gathered rows gets the copy-engine form, so one launch is never asked to.
                wants = turn % 2 == 0 and form != "one_launch"
                reads = (lambda whole, keep=gathered: keep.append(whole.clone())) if wants else None
                with delay_transfers(manager, delay_s, only_source=turn % size), forced_form(form):
                    shard = QuantizedShard(operation, quantizer, x[own].contiguous(), record=False)
                    task = ScaledRowGemm(
                        weights=[weight_quantizer.local(weight, record=False) for weight in weights],
                        biases=biases,
                        outs=outs,
                        x_scale=shard.scale,
                        x_format=shard.dtype,
                        fast_accumulation=bool(turn % 2),
                    )
                    gather_then_gemm(operation, shard.local.bytes, task, reads)
                for weight, bias, out in zip(weights, biases, outs, strict=True):
                    weight8 = PlainQuantizer(recipe, "weight", gathered=False)(weight)
                    formats = recipe.dtype(role), recipe.dtype("weight")
                    twin = _twin(x8, weight8, formats, bool(turn % 2))
                    reference = product(x8, weight8, "reference")
                    if bias is not None:
                        twin, reference = (twin.float() + bias.float()).to(twin.dtype), reference + bias.double()
                    what = f"{method} rank {rank} T={partition.total} {partition.counts}"
                    assert_close_to_twin(out, twin, reference, what=what)
                    compared += 1
                if reads is not None:
                    assert torch.equal(shard.whole(gathered[0]).data.float(), x8.numbers), "gathered x"
        manager.check()
    return compared


def scatter(
    rank: int,
    size: int,
    setting: Setting,
    partitions: Sequence[TokenPartition],
    recipe_name: str,
    role: Role,
    num_terms: int = 1,
    form: str = "",
    methods: Sequence[str] = BOTH,
    use_ce: bool = True,
    delay_s: float = 0.0,
) -> int:
    """GEMM + reduce-scatter for every partition; several terms have scales of their own, and one an addend."""
    recipe, compared = RECIPES[recipe_name], 0
    local: Callable[..., Any] = lambda role, tensor: Quantizer(recipe, role, tensor.device).local(tensor, record=False)  # noqa: E731
    with setting.open_manager(rank, quantization_modes=MODES) as manager:
        for turn, partition in enumerate(partitions):
            own, total, width = partition.rows(rank), partition.total, setting.hidden
            depths = [setting.features + 16 * term for term in range(num_terms)]
            bias = setting.draw(rank, (width,), "b") if turn % 2 else None
            extras = [setting.draw(rank, (total, width), "addend", turn, q) for q in range(size)]
            lefts = [
                [setting.draw(rank, (total, k), "l", turn, q, i, scale=4.0 ** (i - q)) for i, k in enumerate(depths)]
                for q in range(size)
            ]
            rights = [
                [setting.draw(rank, (width, k), "w", q, i, scale=k**-0.5) for i, k in enumerate(depths)]
                for q in range(size)
            ]
            adds = num_terms > 1
            task = ScaledPartialGemm(
                terms=[
                    (local(role, left), local("weight", right))
                    for left, right in zip(lefts[rank], rights[rank], strict=True)
                ],
                addend=extras[rank] if adds else None,
                bias=bias,
                fast_accumulation=bool(turn % 2),
            )
            partials, reference = [], torch.zeros(total, width, dtype=torch.float64, device=manager.device)
            for q in range(size):
                partial = torch.zeros(total, width, dtype=setting.dtype, device=manager.device)
                for left, right in zip(lefts[q], rights[q], strict=True):
                    left8 = PlainQuantizer(recipe, role, gathered=False)(left)
                    right8 = PlainQuantizer(recipe, "weight", gathered=False)(right)
                    partial += _twin(left8, right8, (recipe.dtype(role), recipe.dtype("weight")), bool(turn % 2))
                    reference += product(left8, right8, "reference")
                if adds:
                    partial, reference = partial + extras[q], reference + extras[q].double()
                partials.append(partial)
            twin = rank_sum(partials)
            if bias is not None:
                twin, reference = twin + bias, reference + bias.double()
            for method in methods:
                out = torch.full((own.stop - own.start, width), float("nan"), dtype=setting.dtype, device=twin.device)
                operation = context_of(manager, partition, scatter=True, method=method, use_ce=use_ce)
                with delay_transfers(manager, delay_s, only_source=turn % size), forced_form(form):
                    gemm_then_scatter(*scatter_operation(operation, task, recipe.dtype(role)), out)
                what = f"{method} rank {rank} T={total} {partition.counts}"
                assert_close_to_twin(out, twin[own], reference[own], what=what)
                compared += 1
        manager.check()
    return compared


def alone_without_kernels(rank: int, size: int, setting: Setting) -> list[str]:
    """Rank 0 alone tries both directions where `fused` cannot run: what it is told, without waiting for anybody."""
    recipe, said = RECIPES["current"], []
    with setting.open_manager(rank, quantization_modes=MODES) as manager:
        partition = TokenPartition.balanced(9, size)
        x = setting.draw(rank, (9, setting.hidden), "x")
        weight = Quantizer(recipe, "weight", manager.device).local(x, record=False)

        def gather() -> None:
            operation = context_of(manager, partition, scatter=False)
            quantizer = Quantizer(recipe, "input", manager.device)
            QuantizedShard(gather_operation(operation, quantizer), quantizer, x[partition.rows(rank)], record=False)

        def scatter() -> None:
            scatter_operation(
                context_of(manager, partition, scatter=True), ScaledPartialGemm(terms=[(weight, weight)]), E4M3
            )

        for attempt in (gather, scatter) if rank == 0 else ():
            try:
                attempt()
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def layers(rank: int, size: int, recipe_name: str, kind: str) -> dict[str, float]:
    """A layer class, forward and backward, all its operations `fused`, beside the default methods: how far apart."""
    errors: dict[str, float] = {}
    kinds: dict[str, Callable[[UserBufferManager], torch.nn.Module]] = {
        "mlp": lambda manager: nn.LayerNormMLP(32, 48 * size, activation="gelu", manager=manager),
        "transformer": lambda manager: nn.TransformerLayer(
            32, 48 * size, 2 * size, kv_channels=16, manager=manager, ub_overlap_rs_dgrad=True
        ),
    }
    setting = Setting(backend="shared", capacity=24, hidden=32)
    found: list[dict[str, torch.Tensor]] = []
    prefixes = ("fc1", "fc2") if kind == "mlp" else ("qkv", "proj", "fc1", "fc2")
    for configs in ({}, FUSED):
        results: dict[str, torch.Tensor] = {}
        with setting.open_manager(rank, ub_cfgs=configs, quantization_modes=MODES) as manager:
            torch.manual_seed(3)
            layer = kinds[kind](manager)
            for lengths in ([5, 12], [1]):
                total = sum(lengths)
                with manager.microbatch(total) as partition, tpo.fp8_autocast(True, RECIPES[recipe_name]):
                    own = partition.rows(rank)
                    x = setting.draw(rank, (total, 32), "x")[own].requires_grad_()
                    more = [torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)] if kind != "mlp" else []
                    y = layer(x, *more)
                    y.backward(setting.draw(rank, (total, 32), "dy")[own])
                assert x.grad is not None
                results |= {f"y {total}": y.detach(), f"dx {total}": x.grad}
            results |= {name: one.grad for name, one in layer.named_parameters() if one.grad is not None}
            for name in configs:
                used = manager.stats().get(name, {})
                methods = {key for key, count in used.items() if key.startswith("method_") and count}
                # An x is gathered again beside the GEMM of a reduce-scatter in dgrad, under that name.
                assert methods - {"method_bulk"} == ({"method_fused"} if name.startswith(prefixes) else set()), used
            manager.check()
        found.append(results)
    for name, value in found[0].items():
        if value.numel():
            errors[name] = relative_error(found[1][name], value)
    return errors
