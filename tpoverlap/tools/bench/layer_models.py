"""The layers of the layers suite: one manager a hidden size, one set of parameters a layer, one module a variant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

import tpoverlap as tpo
from tpoverlap.errors import ConfigError
from tpoverlap.gemm.fp8 import require_device
from tpoverlap.tokens import TokenPartition
from tpoverlap.tools.bench.compute_only import Resident, without_collectives
from tpoverlap.tools.bench.layer_items import (
    AUTO_RS,
    COMPUTE_ONLY,
    RING_BULK,
    RING_RS,
    TWIN,
    Kind,
    LayerItem,
    sequence_offsets,
)
from tpoverlap.tools.bench.methods import AUTO
from tpoverlap.tools.bench.session import Session
from tpoverlap.tools.bench.variants import PADDED

Step = Callable[[], tuple[torch.Tensor, ...]]
"""Forward and backward: (y, dx, the gradient of each parameter)."""

_SEED = 20
_COLUMN, _ROW = ("qkv", "fc1"), ("proj", "fc2")
_RS_PREFIX, _RING_PREFIX = "scattering_", "ring_"
_NO_OVERLAP: Final = dict.fromkeys(
    ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"), False
)
_MADE_OF: Final[Mapping[str, tuple[str, Mapping[str, bool]]]] = {
    AUTO: ("", {}),
    AUTO_RS: (_RS_PREFIX, {}),
    RING_BULK: (_RING_PREFIX, {"ub_bulk_dgrad": True, "ub_bulk_wgrad": True}),
    RING_RS: (_RING_PREFIX, {"ub_overlap_rs_dgrad": True}),
    TWIN: ("", _NO_OVERLAP),
    COMPUTE_ONLY: ("", {}),
}
"""Prefix of the GEMMs' names, and Transformer Engine's flags."""


def overlap_configs() -> dict[str, dict[str, Any]]:
    """``ub_cfgs``. The standard names have none, so their methods follow T; a flag would stop that (`LayerView`)."""
    configs: dict[str, dict[str, Any]] = {}

    def add(name: str, method: str, scatters: bool) -> None:
        configs[name] = {"method": method, "is_reduce_scatter": scatters}

    for prefix, method in ((_RS_PREFIX, "auto"), (_RING_PREFIX, "ring_exchange")):
        for layer in _COLUMN:
            add(f"{prefix}{layer}_fprop", method, False)
        for layer in _ROW:
            add(f"{prefix}{layer}_fprop", method, True)
            add(f"{prefix}{layer}_dgrad", method, False)
    for layer in _COLUMN:
        add(f"{_RS_PREFIX}{layer}_dgrad", "auto", True)
        add(f"{_RING_PREFIX}{layer}_dgrad", "bulk", False)
        add(f"{_RING_PREFIX}{layer}_wgrad", "bulk", True)
    return configs


def why_no_fp8(device: torch.device) -> str | None:
    """Why FP8 layers cannot run on ``device``; None where they can."""
    try:
        require_device(device)
    except ConfigError as error:
        return str(error)
    return None


class LayerStage:
    """Everything of one hidden size, for all T. Construction is collective; so are `renew` and `close`.

    Args:
        session: gives group, device, dtype and time-out.
        hidden: H.
        capacity_tokens: C.
    """

    def __init__(self, session: Session, hidden: int, capacity_tokens: int) -> None:
        self.session, self.hidden, self.capacity_tokens = session, hidden, capacity_tokens
        self._x, self._dy, activation, gradient = (self._draw(seed) for seed in (1, 2, 3, 4))
        self._resident = Resident(activation, gradient)
        self._layers: dict[tuple[Kind, bool], dict[str, torch.nn.Module]] = {}
        self.manager = self._make_manager()

    def _draw(self, seed: int) -> torch.Tensor:
        """[C, H] random numbers, the same on every rank."""
        generator = torch.Generator(self.session.device).manual_seed(seed)
        shape = (self.capacity_tokens, self.hidden)
        return torch.randn(*shape, device=self.session.device, dtype=self.session.job.dtype, generator=generator)

    def _make_manager(self) -> tpo.UserBufferManager:
        session = self.session
        return tpo.UserBufferManager(
            session.group,
            (self.capacity_tokens, self.hidden),
            dtype=session.job.dtype,
            device=session.device,
            ub_cfgs=overlap_configs(),
            quantization_modes=["none"] if why_no_fp8(session.device) else ["none", "fp8"],
            timeout_s=session.job.timeout_s,
        )

    def step(self, item: LayerItem, label: str) -> Step:
        """One forward and backward of a variant. It belongs to the manager of now: ask again after `renew`."""
        layer = self._layers_of(item)[AUTO if label == PADDED else label]
        num_tokens = item.capacity_tokens if label == PADDED else item.num_tokens
        partition = TokenPartition.balanced(num_tokens, self.session.tp_size)
        rows = partition.rows(self.session.rank)
        x, dy = self._x[rows].detach().requires_grad_(), self._dy[rows]
        leaves = (x, *layer.parameters())
        sequences = tpo.nn.PackedSequences(
            sequence_offsets(num_tokens, item.sequence_unit), num_tokens, self.session.device
        )

        def step() -> tuple[torch.Tensor, ...]:
            y = layer(x, sequences, partition=partition) if item.kind == "transformer" else layer(x, partition)
            return (y, *torch.autograd.grad(y, leaves, dy))

        return step

    def names(self, item: LayerItem) -> tuple[str, ...]:
        """What a step returns."""
        return ("y", "dx", *(f"d {name}" for name, _ in self._layers_of(item)[AUTO].named_parameters()))

    def operations(self) -> Counter[str]:
        """Operations that the manager has begun so far, under all names: how many by which method."""
        counted: Counter[str] = Counter()
        for row in self.manager.stats().values():
            for key, count in row.items():
                if key.startswith("method_"):
                    counted[key.removeprefix("method_")] += count
        return counted

    def _layers_of(self, item: LayerItem) -> dict[str, torch.nn.Module]:
        """A module a variant. Its parameters are those of the first one: nothing is drawn or kept twice."""
        key = (item.kind, item.is_fp8)
        if key not in self._layers:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(_SEED)  # `renew` has to draw the same weights: the twin's results are kept
                self._layers[key] = {label: self._make_layer(item, label) for label in item.variants if label != PADDED}
            first, *others = self._layers[key].values()
            for other in others:
                for name, parameter in first.named_parameters():
                    owner, _, leaf = name.rpartition(".")
                    setattr(other.get_submodule(owner), leaf, parameter)
            without_collectives(self._layers[key][COMPUTE_ONLY], self._resident)
        return self._layers[key]

    def _make_layer(self, item: LayerItem, label: str) -> torch.nn.Module:
        prefix, flags = _MADE_OF[label]
        size = item.size
        qkv, proj, fc1, fc2 = (f"{prefix}{name}" for name in ("qkv", "proj", "fc1", "fc2"))
        common: dict[str, Any] = {
            "normalization": "RMSNorm",
            "activation": "swiglu",
            "bias": False,
            "manager": self.manager,
            "device": self.session.device if label == AUTO else "meta",
            "fp8_recipe": tpo.Float8CurrentScaling() if item.is_fp8 else None,
            **flags,
        }
        if item.kind == "mlp":
            return tpo.nn.LayerNormMLP(size.hidden, size.ffn, ub_names=(fc1, fc2), **common)
        return tpo.nn.TransformerLayer(
            size.hidden,
            size.ffn,
            size.heads,
            size.groups,
            kv_channels=size.head_dim,
            ub_names=(qkv, proj, fc1, fc2),
            **common,
        )

    def renew(self) -> None:
        """A new manager, and layers on it, in place of one that a failed operation left unusable."""
        self.manager.abort()
        self._layers.clear()
        self.manager = self._make_manager()

    def close(self) -> None:
        """Free the buffers and the layers."""
        self._layers.clear()
        self.manager.close()
