"""Rank function of `test_layer_calls`: what the host does for a layer's forward and backward."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import tpoverlap as tpo
from tests.costs.call_ranks import _no_collective
from tests.costs.null_device import NullBackend
from tpoverlap.comm import collectives
from tpoverlap.nn import qkv_attention
from tpoverlap.nn.elementwise import gated, qkv_heads
from tpoverlap.nn.elementwise.launch import DirectKernel
from tpoverlap.tokens import TokenPartition
from tpoverlap.tools.bench.compute_only import Resident, without_collectives

TOKENS, HIDDEN, FFN, HEADS, GROUPS = 64, 32, 64, 4, 2


CUDA = "compute only, calls as on CUDA"
LABELS = ("with operations", "compute only", CUDA)


class _NoFunction:
    """In place of a Triton function and of its binary: launches nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self


@contextmanager
def _like_cuda() -> Iterator[None]:
    """The host calls what it calls on CUDA: kernels (that do nothing), one operator for attention and for norms."""

    def flash_forward(q: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
        return torch.empty_like(q), q, q, q

    def flash_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> Any:
        return q, k, v

    def one_operator(x: torch.Tensor, shape: tuple[int, ...], weight: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.layer_norm(x, shape, weight, None, eps)

    with ExitStack() as stack:
        for module in (gated, qkv_heads):
            stack.enter_context(mock.patch.object(module, "runs_kernels", lambda x: True))
            pair = (DirectKernel(_NoFunction(), 4), DirectKernel(_NoFunction(), 4))
            stack.enter_context(mock.patch.object(module, "_kernels", partial(tuple, pair)))
        stack.enter_context(mock.patch.object(qkv_attention, "_takes_flash", lambda mixed, layout: True))
        stack.enter_context(mock.patch.object(qkv_attention, "flash_forward", flash_forward))
        stack.enter_context(mock.patch.object(qkv_attention, "flash_backward", flash_backward))
        stack.enter_context(mock.patch.object(torch.nn.functional, "rms_norm", one_operator))
        yield


@dataclass(frozen=True)
class LayerCalls:
    """Of one forward and backward.

    Attributes:
        python: Python functions that were called.
        c: C functions that Python called.
        dispatches: torch's operations, views and allocations included.
        nodes: of the autograd graph, but for the parameters'.
        places: Python calls by file and function, for whoever wants to have fewer.
    """

    python: int
    c: int
    dispatches: int
    nodes: int
    places: dict[str, int]
    operations: dict[str, int]


def layer_calls(rank: int, size: int) -> dict[str, LayerCalls]:
    """The transformer layer: with its operations on a device that does nothing, and compute-only."""
    names = [
        name for name in ("all_gather_single", "all_gather_into_tensor", "all_to_all_single") if hasattr(dist, name)
    ]
    config = {f"{name}_{phase}": {"method": "ring_exchange"} for name in ("qkv", "fc1") for phase in ("fprop",)}
    with tpo.UserBufferManager(
        None, (TOKENS, HIDDEN), torch.float32, "cpu", config, backend=NullBackend, timeout_s=30.0
    ) as mgr:
        found = {}
        partition = TokenPartition.even(TOKENS, size)
        patches = [mock.patch.object(collectives.dist, name, _no_collective) for name in names]
        for patch in patches:
            patch.start()
        try:
            for label in LABELS:
                torch.manual_seed(0)
                layer = tpo.nn.TransformerLayer(
                    HIDDEN,
                    FFN,
                    HEADS,
                    GROUPS,
                    normalization="RMSNorm",
                    activation="swiglu",
                    bias=False,
                    rotary_base=10_000.0,
                    manager=mgr,
                )
                if label.startswith("compute only"):
                    draw = (torch.randn(TOKENS, HIDDEN) for _ in range(2))
                    without_collectives(layer, Resident(*draw))
                with _like_cuda() if label == CUDA else nullcontext():
                    found[label] = _count(_Step(layer, partition, rank))
        finally:
            for patch in patches:
                patch.stop()
        return found


class _Step:
    def __init__(self, layer: torch.nn.Module, partition: TokenPartition, rank: int) -> None:
        self._layer, self._partition = layer, partition
        self._sequences = tpo.nn.PackedSequences((0, TOKENS), TOKENS, torch.device("cpu"))
        self._x = torch.randn(partition.counts[rank], HIDDEN, requires_grad=True)
        self._wanted = [self._x, *layer.parameters()]
        self._dy = torch.ones(partition.counts[rank], HIDDEN)

    def forward(self) -> torch.Tensor:
        y = self._layer(self._x, self._sequences, partition=self._partition)
        assert isinstance(y, torch.Tensor)
        return y

    def __call__(self) -> None:
        torch.autograd.grad(self.forward(), self._wanted, self._dy)


class _Dispatches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _count(step: _Step) -> LayerCalls:
    for _ in range(3):
        step()
    counted = [_profiled(step) for _ in range(5)]
    python, c = (min(one[index] for one in counted) for index in (0, 1))
    with _Dispatches() as dispatches:
        step()
    return LayerCalls(
        python, c, dispatches.names.total(), _nodes(step.forward()), dict(counted[-1][2]), dict(dispatches.names)
    )


def _profiled(step: Callable[[], object]) -> tuple[int, int, Counter[str]]:
    events = {"call": 0, "c_call": 0}
    places: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event in events:
            events[event] += 1
            if event == "call":
                code = frame.f_code
                places["/".join(code.co_filename.split("/")[-2:]) + ":" + code.co_qualname] += 1

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return events["call"], events["c_call"] - 1, places  # the end of the profile is one


def _nodes(y: torch.Tensor) -> int:
    seen: set[Any] = set()
    open_nodes = [y.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen or type(node).__name__ == "AccumulateGrad":
            continue
        seen.add(node)
        open_nodes += [following for following, _ in node.next_functions]
    return len(seen)
