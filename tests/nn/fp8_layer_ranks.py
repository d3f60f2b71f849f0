"""Rank functions of `test_fp8_layers`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import tpoverlap as tpo
from tpoverlap import nn
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


def without_sequence_parallelism(rank: int, size: int) -> str:
    with _open() as manager:
        layer = nn.Linear(
            HIDDEN, FFN * size, parallel_mode="column", manager=manager, ub_name="qkv", sequence_parallel=False,
            fp8_recipe=tpo.Float8CurrentScaling(),
        )  # fmt: skip
        try:
            layer(_draw(6, HIDDEN, 0))
        except tpo.ConfigError as error:
            return str(error)
    return "nothing was raised"
