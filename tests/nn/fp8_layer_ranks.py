"""Rank functions of `test_fp8_layers`."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import tpoverlap as tpo
from tpoverlap import nn
from tpoverlap.gemm.fp8.recipes import Role
from tpoverlap.testing.conformance.comparison import Comparison
from tpoverlap.testing.conformance.fp8 import RECIPES, _transposed, _weight_grads
from tpoverlap.testing.conformance.plain import rank_sum
from tpoverlap.testing.conformance.plain_fp8 import PlainQuantizer, PlainTensor, product
from tpoverlap.testing.numeric import relative_error

CAPACITY, HIDDEN, FFN, HEADS = 48, 64, 96, 4


def _open() -> tpo.UserBufferManager:
    return tpo.UserBufferManager(
        None,
        (CAPACITY, HIDDEN),
        dtype=torch.float32,
        backend="shared",
        quantization_modes=["none", "fp8"],
        timeout_s=20.0,
    )


def _draw(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def transformer_layer(rank: int, size: int, mode: str) -> dict[str, Any]:
    """The same layer in float32 and in FP8, at several T; both backward modes."""
    flags = {"ub_overlap_rs_dgrad": True} if mode == "rs_dgrad" else {}
    errors: dict[str, float] = {}
    with _open() as manager:
        torch.manual_seed(3)
        layer = nn.TransformerLayer(
            HIDDEN, FFN * size, HEADS * size, normalization="RMSNorm", activation="swiglu", bias=False,
            kv_channels=16, manager=manager, fp8_recipe=tpo.Float8CurrentScaling(), **flags
        )  # fmt: skip
        plain = copy.deepcopy(layer)
        for lengths in ([5, 12], [CAPACITY], [1, 3, 7]):
            num_tokens = sum(lengths)
            cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
            results = []
            for one, context in ((layer, tpo.fp8_autocast(True)), (plain, tpo.fp8_autocast(False))):
                one.zero_grad()
                with manager.microbatch(num_tokens) as partition, context:
                    x = _draw(num_tokens, HIDDEN, num_tokens)[partition.rows(rank)].requires_grad_()
                    y = one(x, cu_seqlens)
                    y.backward(_draw(num_tokens, HIDDEN, 100 + num_tokens)[partition.rows(rank)])
                grads = {name: parameter.grad.clone() for name, parameter in one.named_parameters()}
                results.append({"y": y.detach(), "dx": x.grad, **grads})
            for name, value in results[1].items():
                if value.numel():
                    errors[name] = max(errors.get(name, 0.0), relative_error(results[0][name], value))
        manager.check()
    return errors


def options(rank: int, size: int) -> dict[str, bool]:
    """save_gathered, main_grad and delayed wgrad give the numbers of the plain FP8 layer, bit by bit."""
    same: dict[str, bool] = {}
    with _open() as manager:
        torch.manual_seed(3)
        make = {"manager": manager, "fp8_recipe": tpo.Float8CurrentScaling(), "activation": "gelu"}
        reference = nn.LayerNormMLP(HIDDEN, FFN * size, **make)
        expected = _step(reference, manager, rank)
        for name, extra in (
            ("save_gathered", {"save_gathered": True}),
            ("main_grad", {"fuse_wgrad_accumulation": True}),
            ("delayed", {"delay_wgrad_compute": True}),
            ("saved and delayed", {"save_gathered": True, "delay_wgrad_compute": True}),
        ):
            layer = nn.LayerNormMLP(HIDDEN, FFN * size, **make, **extra)
            layer.load_state_dict(reference.state_dict())
            if "fuse_wgrad_accumulation" in extra:
                for parameter in layer.parameters():
                    parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
            found = _step(layer, manager, rank)
            same[name] = set(found) == set(expected) and all(torch.equal(found[key], expected[key]) for key in expected)
        manager.check()
    return same


def _step(layer: nn.LayerNormMLP, manager: tpo.UserBufferManager, rank: int) -> dict[str, torch.Tensor]:
    with manager.microbatch(19) as partition:
        x = _draw(19, HIDDEN, 0)[partition.rows(rank)].requires_grad_()
        y = layer(x)
        assert isinstance(y, torch.Tensor)
        y.backward(_draw(19, HIDDEN, 1)[partition.rows(rank)])
    with manager.microbatch(CAPACITY) as partition, torch.no_grad():
        for seed in (7, 8, 9):  # every slot has other rows by now
            layer(_draw(CAPACITY, HIDDEN, seed)[partition.rows(rank)])
    layer.backward_dw()
    found = {"y": y.detach(), "dx": x.grad}
    for name, parameter in layer.named_parameters():
        grad = parameter.grad if parameter.grad is not None else parameter.main_grad  # type: ignore[attr-defined]
        found[name] = grad
    return found  # type: ignore[return-value]


def recomputed_under_autocast(rank: int, size: int) -> dict[str, bool]:
    """fp8_autocast round a checkpointed forward, backward outside of it: recomputed in FP8, bit by bit as without."""
    found = []
    with _open() as manager:
        torch.manual_seed(3)
        layer = nn.LayerNormMLP(HIDDEN, FFN * size, manager=manager)
        for recomputes in (False, True):
            layer.zero_grad()
            x = _draw(4, HIDDEN, rank).requires_grad_()
            with tpo.fp8_autocast():
                y = (
                    checkpoint(layer, x, use_reentrant=False, context_fn=tpo.checkpoint_context_fn)
                    if recomputes
                    else layer(x)
                )
            y.square().sum().backward()
            found.append({"dx": x.grad.clone(), **{name: one.grad.clone() for name, one in layer.named_parameters()}})
        with tpo.fp8_autocast(enabled=False):
            layer.zero_grad()
            layer(x.detach()).square().sum().backward()
        differs = not torch.equal(layer.fc1_weight.grad, found[0]["fc1_weight"])
    return {"FP8 ran": differs, **{name: torch.equal(value, found[1][name]) for name, value in found[0].items()}}


def resumed_under_autocast(rank: int, size: int) -> tuple[dict[str, bool], str]:
    """Delayed scaling by fp8_autocast alone: a new layer that loads a state dict goes on bit by bit, also by way of a
    layer that only loaded and saved it; another recipe than the histories' is refused, and the layer stays usable.
    """
    recipe = tpo.DelayedScaling(amax_history_len=3)

    def make() -> nn.LayerNormMLP:
        torch.manual_seed(3)
        return nn.LayerNormMLP(HIDDEN, FFN * size, manager=manager)

    def step(layer: nn.LayerNormMLP, number: int, recipe: tpo.DelayedScaling = recipe) -> torch.Tensor:
        with tpo.fp8_autocast(True, recipe):
            y = layer(_draw(4, HIDDEN, 10 * number + rank) * (1 + number))
        y.square().sum().backward()
        return y.detach()

    with _open() as manager:
        first, second, third = make(), make(), make()
        for number in range(3):
            step(first, number)
        saved = {name: value.clone() for name, value in first.state_dict().items()}
        second.load_state_dict(saved)
        passed_on = second.state_dict()
        same = {"names": list(passed_on) == list(saved)}
        same["values"] = all(torch.equal(passed_on[name], value) for name, value in saved.items())
        third.load_state_dict(passed_on)
        message = ""
        try:
            step(third, 3, tpo.DelayedScaling(amax_history_len=5))
        except tpo.ConfigError as error:
            message = str(error)
        expected = step(first, 3)
        same |= {"second": torch.equal(step(second, 3), expected), "third": torch.equal(step(third, 3), expected)}
        same["a history mattered"] = not torch.equal(step(make(), 3), expected)
        manager.check()
    return same, message


def without_sequence_parallelism(rank: int, size: int, recipe_name: str, config: str) -> None:
    """Column and row layers on whole activations against each rank's quantisation in plain torch, at several T."""
    recipe = RECIPES[recipe_name]
    configs: dict[str, dict[str, Any]] = {
        "default": {},
        "fp8_buf": {"proj_fprop": {"fp8_buf": True}},
        "rs_dgrad": {"qkv_dgrad": {"method": "ring_exchange", "fp8_buf": True}},
        "pipeline": {"proj_fprop": {"method": "pipeline", "num_splits": 3}},
        "fused": {name: {"method": "fused"} for name in ("qkv_dgrad", "proj_fprop")},
        "sequential": {name: {"method": "sequential"} for name in ("qkv_dgrad", "proj_fprop")},
    }
    comparison = Comparison()
    packs = config == "fp8_buf"
    manager = tpo.UserBufferManager(
        None, (300, HIDDEN), dtype=torch.float32, backend="shared", quantization_modes=["none", "fp8"],
        timeout_s=20.0, ub_cfgs=configs[config],
    )  # fmt: skip
    with manager:
        make: dict[str, Any] = {"manager": manager, "sequence_parallel": False, "fp8_recipe": recipe}
        column = nn.Linear(HIDDEN, FFN * size, parallel_mode="column", ub_name="qkv", **make)
        row = nn.Linear(FFN * size, HIDDEN, parallel_mode="row", ub_name="proj", **make)
        ws = [[_draw(FFN, HIDDEN, 10 + q) / 8, _draw(HIDDEN, FFN, 50 + q) / 8] for q in range(size)]
        with torch.no_grad():
            for layer, weight in zip((column, row), ws[rank], strict=True):
                layer.weight.copy_(weight)
                assert layer.bias is not None
                layer.bias.copy_(torch.arange(float(layer.bias.numel())) / 64)
        quantizers: dict[tuple[str, int], PlainQuantizer] = {}

        def quantise(x: torch.Tensor, name: str, q: int, role: Role) -> PlainTensor:
            return quantizers.setdefault((name, q), PlainQuantizer(recipe, role, gathered=False))(x)

        for turn, num_tokens in enumerate((1, 17, 300, 2)):
            comparison.where = f"rank {rank}, {recipe_name} {config} T={num_tokens}"
            x, dz = _draw(num_tokens, HIDDEN, turn).requires_grad_(), _draw(num_tokens, HIDDEN, 90 + turn)
            with manager.microbatch(num_tokens):
                y = column(x)
                inner = y.detach().clone().requires_grad_()
                z = row(inner)
            z.backward(dz)
            dy = _draw(num_tokens, FFN * size, 70 + turn).chunk(size, 1)
            y.backward(dy[rank].contiguous())
            x8 = quantise(x.detach(), "x", 0, "input")
            columns8 = [quantise(w[0], "column", q, "weight") for q, w in enumerate(ws)]
            rows8 = [quantise(w[1], "row", q, "weight") for q, w in enumerate(ws)]
            assert column.bias is not None and row.bias is not None
            shifts = column.bias.detach(), row.bias.detach()
            products = [product(x8, w8, "twin") for w8 in columns8]
            comparison.close("y", y, products[rank] + shifts[0], product(x8, columns8[rank], "reference") + shifts[0])
            everyone: list[Any] = [None] * size
            dist.all_gather_object(everyone, inner.detach())
            inners8 = [quantise(one, "inner", q, "input") for q, one in enumerate(everyone)]
            partials = [product(a, b, "twin") for a, b in zip(inners8, rows8, strict=True)]
            wide = torch.stack([product(a, b, "reference") for a, b in zip(inners8, rows8, strict=True)]).sum(0)
            if not packs:  # FP8 rows are judged by test_fp8's twins; here they only have to be near
                comparison.close("z", z, rank_sum(partials) + shifts[1], wide + shifts[1], roundings=1)
            comparison.true("z is far off", relative_error(z.detach(), wide + shifts[1]) < 0.05)
            dz8 = quantise(dz, "dz", 0, "grad")
            dys8 = [quantise(one, "dy", q, "grad") for q, one in enumerate(dy)]
            rowwise = recipe_name == "rowwise"
            dgrads = [_transposed(recipe, w[1]) if rowwise else w8.t() for w, w8 in zip(ws, rows8, strict=True)]
            comparison.close("d inner", inner.grad, *(product(dz8, dgrads[rank], p) for p in ("twin", "reference")))
            dgrads = [_transposed(recipe, w[0]) if rowwise else w8.t() for w, w8 in zip(ws, columns8, strict=True)]
            pairs = list(zip(dys8, dgrads, strict=True))
            wide = torch.stack([product(*pair, "reference") for pair in pairs]).sum(0)
            if config != "rs_dgrad":
                twin = rank_sum([product(*pair, "twin") for pair in pairs])
                comparison.close("dx", x.grad, twin, wide, roundings=1)
            comparison.true("dx is far off", x.grad is not None and relative_error(x.grad, wide) < 0.1)
            for name, layer, dy8, a8, wide_dy in (
                ("column", column, dys8[rank], x8, dy[rank]), ("row", row, dz8, inners8[rank], dz)
            ):  # fmt: skip
                comparison.close(f"dW {name}", layer.weight.grad, *_weight_grads(recipe, dy8, a8, None), roundings=1)
                comparison.close(f"db {name}", layer.bias.grad, wide_dy.sum(0), wide_dy.double().sum(0))
                layer.zero_grad()
        same: list[Any] = [None] * size
        dist.all_gather_object(same, z.detach())
        assert all(torch.equal(one, z) for one in same), "ranks have other bits"
        manager.check()
    comparison.summary()


def whole_layers(rank: int, size: int) -> dict[str, bool]:
    """A TransformerLayer without sequence parallelism: near the one with it; delayed wgrad and main_grad bit by bit."""
    found: dict[str, torch.Tensor] = {}
    same: dict[str, bool] = {}
    with _open() as manager:
        torch.manual_seed(3)
        make: dict[str, Any] = {
            "manager": manager, "fp8_recipe": tpo.Float8CurrentScaling(), "kv_channels": 16, "sequence_parallel": False,
        }  # fmt: skip
        reference = nn.TransformerLayer(HIDDEN, FFN * size, HEADS * size, **make)
        for name, extra in (
            ("plain", {}),
            ("delayed", {"delay_wgrad_compute": True}),
            ("main_grad", {"fuse_wgrad_accumulation": True}),
            ("sharded", {"sequence_parallel": True}),
        ):
            layer = nn.TransformerLayer(HIDDEN, FFN * size, HEADS * size, **make | extra)
            layer.load_state_dict(reference.state_dict())
            for parameter in layer.parameters():
                parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
            with manager.microbatch(19) as partition:
                rows = partition.rows(rank) if name == "sharded" else slice(None)
                x = _draw(19, HIDDEN, 0)[rows].requires_grad_()
                y = layer(x, [0, 5, 19])
            y.backward(_draw(19, HIDDEN, 1)[rows])
            layer.backward_dw()
            assert x.grad is not None
            one = {"y": y.detach(), "dx": x.grad}
            for key in ("self_attention.layernorm_qkv.weight", "layernorm_mlp.fc2_weight"):
                parameter = layer.get_parameter(key)
                one[key] = parameter.main_grad if name == "main_grad" else parameter.grad  # type: ignore[assignment]
            if name == "plain":
                found = one
            elif name == "sharded":
                for key, value in one.items():
                    expected = found[key][rows] if key in ("y", "dx") else found[key]
                    same[f"near the sharded {key}"] = not value.numel() or relative_error(value, expected) < 0.1
            else:
                same |= {f"{name} {key}": torch.equal(value, found[key]) for key, value in one.items()}
        with torch.no_grad(), tpo.fp8_autocast(enabled=False):
            same["FP8 ran"] = not torch.equal(layer(x.detach(), [0, 5, 19], partition=partition), one["y"])
        manager.check()
    return same


def whole_sizes_are_checked(rank: int, size: int) -> str:
    with _open() as manager:
        layer = nn.Linear(
            HIDDEN, 24 * size, parallel_mode="column", manager=manager, ub_name="qkv", sequence_parallel=False,
            fp8_recipe=tpo.Float8CurrentScaling(),
        )  # fmt: skip
        try:
            layer(_draw(6, HIDDEN, 0))
        except tpo.ActiveShapeError as error:
            return str(error)
    return "nothing was raised"


def returned_norm_without_sequence_parallelism(rank: int, size: int) -> dict[str, float]:
    """Each rank's gradient of the norm that an FP8 layer returns is a part of dx: the all-reduce sums it."""
    errors = {}
    with _open() as manager:
        x, dy = _draw(13, HIDDEN, 1), _draw(13, HIDDEN * size, 2)
        for name, recipe in RECIPES.items():
            layer = nn.LayerNormLinear(
                HIDDEN,
                HIDDEN * size,
                manager=manager,
                ub_name="qkv",
                sequence_parallel=False,
                return_layernorm_output_gathered=True,
                fp8_recipe=recipe,
            )
            whole = x.clone().requires_grad_()
            manager.set_active_shape(13)
            _, normed = layer(whole)
            normed.backward(dy.chunk(size, 1)[rank])
            plain = x.clone().requires_grad_()
            torch.nn.functional.layer_norm(plain, (HIDDEN,)).backward(sum(dy.chunk(size, 1)))
            assert whole.grad is not None and plain.grad is not None
            errors[name] = relative_error(whole.grad, plain.grad)
    return errors


def recomputed_by_delayed_scaling(rank: int, size: int, sequence_parallel: bool) -> dict[str, bool]:
    """Two microbatches in flight, so that scales move on before the second forward: as without recomputation, bit by
    bit, histories too; also where one checkpoint lies in another.
    """
    again = partial(checkpoint, use_reentrant=False, context_fn=tpo.checkpoint_context_fn)
    recipe = tpo.DelayedScaling(amax_history_len=2)
    found: list[dict[str, torch.Tensor]] = []
    with _open() as manager:
        for kind in ("none", "full", "nested"):
            torch.manual_seed(3)
            common = {"manager": manager, "fp8_recipe": recipe, "sequence_parallel": sequence_parallel}
            first, second = (nn.LayerNormMLP(HIDDEN, FFN * size, **common) for _ in range(2))
            if kind == "none":
                run = torch.nn.Sequential(first, second)
            elif kind == "full":
                run = partial(again, torch.nn.Sequential(first, second))
            else:
                run = partial(again, lambda x, first=first, second=second: second(again(first, x)))
            losses = []
            for step in range(3):
                outputs = []
                for num_tokens in (7, 19):
                    with manager.microbatch(num_tokens) as partition:
                        rows = partition.rows(rank) if sequence_parallel else slice(None)
                        x = (1 + 5 * step) * _draw(num_tokens, HIDDEN, step)[rows]
                        outputs.append(run(x.requires_grad_()).square().sum())
                for output in outputs:
                    output.backward()
                losses += [output.detach() for output in outputs]
            grads = {name: one.grad for name, one in torch.nn.ModuleList([first, second]).named_parameters()}
            state = torch.nn.ModuleList([first, second]).state_dict()
            found.append(
                {"losses": torch.stack(losses), **{f"{name} grad": one for name, one in grads.items()}, **state}
            )
        manager.check()
    return {
        f"{name} {index}": torch.equal(value, found[index][name])
        for index in (1, 2)
        for name, value in found[0].items()
        if isinstance(value, torch.Tensor)
    }
