"""Rank functions of `test_fp8`."""

from __future__ import annotations

import copy
import importlib
import io
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils.checkpoint import checkpoint

import tpoverlap as tpo
from tests.manager.ranks import Outcome, outcome_of
from tpoverlap import te
from tpoverlap.gemm.fp8 import Quantizer
from tpoverlap.gemm.fp8.plain import PlainOperations
from tpoverlap.testing.conformance import Setting
from tpoverlap.testing.numeric import relative_error

CAPACITY, HIDDEN, FEATURES = 64, 48, 32
BOTH = ("none", "fp8")


def _manager(dtype: torch.dtype = torch.float32, **options: Any) -> tpo.UserBufferManager:
    options = {"quantization_modes": BOTH, "timeout_s": 20.0} | options
    return tpo.UserBufferManager(None, (CAPACITY, HIDDEN), dtype=dtype, backend="shared", **options)


class PartsOperations(PlainOperations):
    """As kernels do it: each rank tells the magnitudes of several parts."""

    shared_parts = 3

    def maxima(self, x: torch.Tensor, *, shared: bool = False) -> torch.Tensor:
        whole = super().maxima(x)
        if not shared:
            return whole
        return torch.cat([torch.zeros_like(whole), whole, whole / 2])


def check_in_parts(
    rank: int, size: int, check: Callable[..., dict[str, Any]], setting: Setting, *arguments: Any
) -> dict[str, Any]:
    """``check`` where a tensor's magnitude is several numbers."""
    module = importlib.import_module("tpoverlap.gemm.fp8.quantize")  # the package's name for it is a function
    with mock.patch.object(module, "operations_on", lambda device: PartsOperations()):
        return check(rank, size, setting, *arguments)


def _draw(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def misuses(rank: int, size: int) -> dict[str, Outcome]:
    """Each is refused before any rank waits, and nothing is lost."""
    outcomes = {}
    x, weight = _draw(4, HIDDEN, 0), _draw(FEATURES, HIDDEN, 1)
    state = tpo.Fp8State()
    with _manager(quantization_modes=None) as plain:
        outcomes["no FP8 mode"] = outcome_of(lambda: tpo.all_gather_gemm(x, weight, plain.layer("qkv"), fp8=state))
        outcomes["get"] = outcome_of(lambda: plain.get("qkv_fprop", quantised=True))
    with _manager() as manager:
        manager.register("odd", 40)
        layer, row = manager.layer("qkv"), manager.layer("proj", row=True)
        calls: dict[str, Callable[[], object]] = {
            "a recipe instead of a state": lambda: tpo.all_gather_gemm(
                x,
                weight,
                layer,
                fp8=tpo.Float8CurrentScaling(),  # type: ignore[arg-type]
            ),
            "K": lambda: tpo.all_gather_gemm(x[:, :40], weight[:, :40], manager.layer("odd"), fp8=state),
            "N": lambda: tpo.all_gather_gemm(x, weight[:20], layer, fp8=state),
            "row K": lambda: tpo.gemm_reduce_scatter(_draw(5, 24, 0), _draw(HIDDEN, 24, 1), row, fp8=state),
            "number of weights": lambda: tpo.all_gather_gemm(x, [weight, weight], layer, fp8=state),
            "in the buffer": lambda: _from_buffer(manager, weight, state),
            "FP8 communicator": lambda: tpo.all_gather_gemm(x, weight, manager.get("qkv_fprop", quantised=True)),
        }
        for name, call in calls.items():
            outcomes[name] = outcome_of(call)
        y = tpo.all_gather_gemm(x, weight, layer, fp8=state)  # the manager is as good as ever
        assert isinstance(y, torch.Tensor)
        assert relative_error(y, x.repeat(size, 1) @ weight.t()) < 0.0625
    return outcomes


def _from_buffer(manager: tpo.UserBufferManager, weight: torch.Tensor, state: tpo.Fp8State) -> object:
    with manager.microbatch(8):
        comm = manager.get("qkv_fprop")
        return tpo.all_gather_gemm(comm.get_buffer(local_chunk=True), weight, comm, fp8=state)


def configurations(rank: int, size: int) -> dict[str, Outcome]:
    """Options that FP8 refuses, and modes that ranks do not agree on."""
    wide = {"qkv_fprop": {"fp8_buf": False}}
    return {
        "wide gather": outcome_of(lambda: _manager(ub_cfgs=wide)),
        "ranks differ": outcome_of(lambda: _manager(quantization_modes=BOTH if rank else None)),
    }


def one_rank_without_fp8(rank: int, size: int) -> Outcome:
    """Rank 1 forgets fp8=: nobody hangs, and both operations are named."""
    x, weight = _draw(4, HIDDEN, 0), _draw(FEATURES, HIDDEN, 1)
    manager = _manager()
    try:
        state = None if rank else tpo.Fp8State()
        return outcome_of(lambda: tpo.all_gather_gemm(x, weight, manager.layer("qkv"), fp8=state))
    finally:
        manager.abort()


def te_names(rank: int, size: int) -> dict[str, Any]:
    """Transformer Engine's calls: initialise with both modes, get either buffer, autocast a layer."""
    modes = te.UserBufferQuantizationMode
    shape = [CAPACITY, HIDDEN]
    manager = te.initialize_ub(
        shape, size, quantization_modes=[modes.NONE, modes.FP8], dtype=torch.float32, ub_cfgs=[{}, {}], timeout_s=20.0
    )
    te.set_ub_active_shape([7, HIDDEN])
    plain, quantised = te.get_ub("qkv_fprop"), te.get_ub("qkv_fprop", use_fp8=True)
    assert plain is not quantised and quantised is te.get_ub("qkv_fprop", use_fp8=True)
    result = {
        "dtypes": [str(one.get_buffer().dtype) for one in (plain, quantised)],
        "shapes": [tuple(one.get_buffer().shape) for one in (plain, quantised)],
        "regions": sorted(manager.memory_report()["regions"]),
        "estimate": tpo.memory_estimate((CAPACITY, HIDDEN), size, dtype=torch.float32, fp8=True)["symmetric_bytes"],
        "symmetric": manager.memory_report()["symmetric_bytes"],
    }
    layer = tpo.nn.Linear(HIDDEN, FEATURES * size, parallel_mode="column", manager=manager, ub_name="qkv")
    row = tpo.nn.Linear(FEATURES * size, HIDDEN, parallel_mode="row", manager=manager, ub_name="proj")
    x = _draw(7, HIDDEN, 3)[manager.partition.rows(rank)].requires_grad_()
    outputs = []
    for context in (
        te.fp8_autocast(enabled=False),
        te.fp8_autocast(fp8_recipe=te.Float8CurrentScaling(te.Format.E4M3)),
        te.fp8_autocast(fp8_recipe=te.DelayedScaling(amax_history_len=4)),
    ):
        with context:
            outputs.append(row(torch.relu(layer(x))))
        outputs[-1].square().sum().backward()  # outside of the block, as in Transformer Engine
    result["errors"] = [relative_error(one.detach(), outputs[0].detach()) for one in outputs[1:]]
    result["state"] = sorted(layer.state_dict())
    manager.check()
    te.destroy_ub()
    return result


def _train(
    manager: tpo.UserBufferManager, model: torch.nn.Module, steps: range, recompute: bool = False
) -> list[float]:
    losses = []
    for step in steps:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        num_tokens = (CAPACITY, 5, 33, 1, 17, 48)[step % 6]
        x, target = _draw(num_tokens, HIDDEN, step % 6), _draw(num_tokens, HIDDEN, 100 + step % 6)
        with manager.microbatch(num_tokens) as partition:
            own = partition.rows(manager.rank)
            if recompute:
                y = checkpoint(
                    model, x[own].requires_grad_(), use_reentrant=False, context_fn=tpo.checkpoint_context_fn
                )
            else:
                y = model(x[own].requires_grad_())
        manager.set_active_shape(3)  # recomputation goes back to its own
        loss = (y - target[own]).square().sum() / num_tokens
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        manager.check()
    return losses


def _model(manager: tpo.UserBufferManager, recipe: tpo.Float8CurrentScaling | None) -> torch.nn.Module:
    make = partial(tpo.nn.Linear, manager=manager, fp8_recipe=recipe, bias=False)
    torch.manual_seed(5)
    return torch.nn.Sequential(
        make(HIDDEN, FEATURES * manager.tp_size, parallel_mode="column", ub_name="fc1"),
        torch.nn.GELU(),
        make(FEATURES * manager.tp_size, HIDDEN, parallel_mode="row", ub_name="fc2"),
    )


def resume(rank: int, size: int) -> dict[str, Any]:
    """Save after three steps, load into a fresh model, go on: the same losses bit by bit. Recomputed: the same."""
    with _manager() as manager:
        recipe = tpo.DelayedScaling(amax_history_len=2)
        model = _model(manager, recipe)  # type: ignore[arg-type]
        _train(manager, model, range(3))
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        copied = copy.deepcopy(model)
        expected = _train(manager, model, range(3, 8))
        fresh = _model(manager, recipe)  # type: ignore[arg-type]
        file.seek(0)
        fresh.load_state_dict(torch.load(file))
        found = _train(manager, fresh, range(3, 8))
        assert any("amax_history" in name for name in model.state_dict())
        current = [_model(manager, tpo.Float8CurrentScaling()) for _ in range(2)]
        plain = _model(manager, None)
        for one in (*current, plain):
            one.load_state_dict(_model(manager, tpo.Float8CurrentScaling()).state_dict())
        return {
            "expected": expected,
            "resumed": found,
            "copied": _train(manager, copied, range(3, 8)),
            "history": model[0].fp8.state.input.amax_history.tolist(),
            "current": _train(manager, current[0], range(12)),
            "recomputed": _train(manager, current[1], range(12), recompute=True),
            "plain": _train(manager, plain, range(12)),
        }


def saved_for_backward(rank: int, size: int) -> dict[str, Any]:
    """What autograd keeps is FP8: the shard once, no gathered tensor, nothing that lies in a buffer."""
    found: list[tuple[str, tuple[int, ...]]] = []
    weight = _draw(FEATURES, HIDDEN, 1).requires_grad_()
    with _manager() as manager:

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            assert manager.channel is not None and not manager.channel.holds(tensor)
            found.append((str(tensor.dtype), tuple(tensor.shape)))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            x = _draw(8, HIDDEN, 0).requires_grad_()
            tpo.all_gather_gemm(x, weight, manager.layer("qkv"), fp8=tpo.Fp8State())
        with torch.no_grad():
            state = tpo.Fp8State(cache_weights=True)
            tpo.all_gather_gemm(x, weight, manager.layer("qkv"), fp8=state)
            first = state.quantized_weight(0, weight)
            tpo.all_gather_gemm(x, weight, manager.layer("qkv"), fp8=state)
            assert state.quantized_weight(0, weight) is first, "the forward did not find the cached weight"
    return {"saved": found}


def empty_and_infinite(rank: int, size: int) -> None:
    """Only one rank owns rows; an infinity on one rank is seen by all, as NaN, and only where it belongs."""
    weight = _draw(FEATURES, HIDDEN, 1)
    with _manager() as manager:
        for recipe in (tpo.Float8CurrentScaling(), tpo.DelayedScaling(), tpo.Float8RowwiseScaling()):
            state = tpo.Fp8State(recipe)
            with manager.microbatch(1):
                x = _draw(1, HIDDEN, 0)
                y = tpo.all_gather_gemm(x if rank == 0 else x[:0], weight, manager.layer("qkv"), fp8=state)
                assert isinstance(y, torch.Tensor) and relative_error(y, x @ weight.t()) < 0.0625
            x = _draw(4, HIDDEN, rank)
            x[1, 2] = float("inf") if rank == size - 1 else 1.0
            y = tpo.all_gather_gemm(x, weight, manager.layer("qkv"), fp8=state)
            assert isinstance(y, torch.Tensor)
            bad = y.isnan().all(1).nonzero().flatten().tolist()
            assert bad == [4 * (size - 1) + 1] and int(y.isnan().sum()) == FEATURES, (bad, recipe)


def histories(rank: int, size: int) -> list[list[float]]:
    """The histories of what travels are equal on all ranks; ``eval`` stops them."""
    seen: list[list[float]] = []
    with _manager() as manager:
        state = tpo.Fp8State(tpo.DelayedScaling(amax_history_len=3))
        weight = _draw(FEATURES, HIDDEN, 1 + rank).requires_grad_()
        for step in range(4):
            state.train(step != 3)
            x = (_draw(4, HIDDEN, rank) * (rank + 1) * (step + 1)).requires_grad_()
            y = tpo.all_gather_gemm(x, weight, manager.layer("qkv"), fp8=state)
            assert isinstance(y, torch.Tensor)
            y.sum().backward()
            quantizer: Quantizer = state.input
            seen.append(quantizer.amax_history.tolist())
    return seen


def fused_without_kernels(rank: int, size: int) -> Outcome:
    """Where kernels do not run, `fused` is refused before any rank waits, and other layers are not affected."""
    x, weight = _draw(4, HIDDEN, 0), _draw(FEATURES, HIDDEN, 1)
    with _manager(ub_cfgs={"qkv_fprop": {"method": "fused"}}) as manager:
        outcome = outcome_of(lambda: tpo.all_gather_gemm(x, weight, manager.layer("qkv"), fp8=tpo.Fp8State()))
        y = tpo.all_gather_gemm(x, weight, manager.layer("fc1"), fp8=tpo.Fp8State())
        assert isinstance(y, torch.Tensor) and relative_error(y, x.repeat(size, 1) @ weight.t()) < 0.0625
    return outcome
