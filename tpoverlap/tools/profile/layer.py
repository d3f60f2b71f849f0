"""The four linear layers of one decoder layer, forward and backward: every named GEMM once. No attention between them.

::

    x [T_r, H] -> qkv [T, 3H/R] -> its first H/R columns -> proj [T_r, H] -> fc1 [T, F/R] -> fc2 [T_r, H]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import tpoverlap as tpo
from tpoverlap.config import ResolvedConfig
from tpoverlap.errors import ConfigError


@dataclass(frozen=True)
class LayerSizes:
    """H, F and R."""

    hidden: int
    ffn: int
    tp_size: int

    def validate(self) -> None:
        """Raise ConfigError for sizes that R does not divide."""
        for name, value in (("hidden", self.hidden), ("ffn", self.ffn)):
            if value % self.tp_size:
                raise ConfigError(f"--{name} {value} is not divisible by --tp {self.tp_size}")


class GemmSet:
    """The layer on one rank, with a manager of its own.

    ``like``: take that one's weights, which exist once however many sets are compared. A step sets their gradients
    anew. None: random ones, which depend on the rank only.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        sizes: LayerSizes,
        capacity_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        ub_cfgs: dict[str, Any],
        timeout_s: float | None = None,
        like: GemmSet | None = None,
    ) -> None:
        self.manager = tpo.UserBufferManager(
            group, (capacity_tokens, sizes.hidden), dtype, device, ub_cfgs=ub_cfgs, timeout_s=timeout_s
        )
        self.sizes = sizes
        self._like = like
        hidden, ffn = sizes.hidden, sizes.ffn
        self.qkv = self._linear(hidden, 3 * hidden, "qkv", "column")
        self.proj = self._linear(hidden, hidden, "proj", "row")
        self.fc1 = self._linear(hidden, ffn, "fc1", "column")
        self.fc2 = self._linear(ffn, hidden, "fc2", "row")

    def _linear(self, width: int, out: int, name: str, mode: str) -> tpo.nn.Linear:
        linear = tpo.nn.Linear(width, out, False, parallel_mode=mode, manager=self.manager, ub_name=name)
        if self._like is not None:
            linear.weight = getattr(self._like, name).weight
            return linear
        generator = torch.Generator(linear.weight.device).manual_seed(1 + 16 * self.manager.rank + len(name))
        with torch.no_grad():
            linear.weight.normal_(0.0, width**-0.5, generator=generator)
        return linear

    def input(self, num_tokens: int) -> torch.Tensor:
        """Own rows [T_r, H] of a random input, the same for every set."""
        rows = tpo.TokenPartition.balanced(num_tokens, self.sizes.tp_size).counts[self.manager.rank]
        generator = torch.Generator(self.manager.device).manual_seed(7 + self.manager.rank)
        shape = (rows, self.sizes.hidden)
        x = torch.randn(shape, generator=generator, device=self.manager.device, dtype=torch.float32)
        return x.to(self.manager.dtype).requires_grad_()

    def step(self, x_shard_t: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Forward and backward; returns the output [T_r, H]."""
        for linear in (self.qkv, self.proj, self.fc1, self.fc2):
            linear.weight.grad = None
        x_shard_t.grad = None
        with self.manager.microbatch(num_tokens):
            heads = self.qkv(x_shard_t)[:, : self.sizes.hidden // self.sizes.tp_size]
            out: torch.Tensor = self.fc2(self.fc1(self.proj(heads)))
            out.backward(torch.ones_like(out))
        return out.detach()

    def close(self) -> None:
        """Collective."""
        self.manager.close()


def without_overlap(config: ResolvedConfig) -> dict[str, Any]:
    """The same names in the same directions, all on plain collectives."""
    return {
        name: {"method": "sequential", "is_reduce_scatter": options.is_reduce_scatter}
        for name, options in config.names.items()
    }
