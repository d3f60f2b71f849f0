"""nn.Linear: a column- or row-parallel linear layer whose collectives overlap its GEMMs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from tpoverlap.errors import ConfigError
from tpoverlap.gemm.fp8 import Fp8State, Recipe
from tpoverlap.nn.fp8 import state_of
from tpoverlap.nn.functional import all_gather_gemm, gemm_reduce_scatter
from tpoverlap.tokens import TokenPartition

if TYPE_CHECKING:
    from tpoverlap.manager import UserBufferManager


class Linear(torch.nn.Module):
    """y = x W^T + b with sequence-parallel input (column) or output (row).

    =======================  =======================================  ========================================
    ``parallel_mode``        forward                                  weight on this rank
    =======================  =======================================  ========================================
    "column"                 x_shard [T_r, in] -> y [T, out / R]      [out / R, in], rows r*out/R .. of the full
    "row"                    x [T, in / R] -> y_shard [T_r, out]      [out, in / R], columns r*in/R .. of it
    =======================  =======================================  ========================================

    Which collective hides behind which GEMM, in fprop, dgrad and wgrad: the tables of `tpoverlap.nn.column` and
    `tpoverlap.nn.row`. A row bias is replicated and each rank sees only its rows' gradient, so it is marked
    ``sequence_parallel``: call `sync_replicated_grads`.

    Args:
        in_features, out_features: of the full layer.
        bias: whether to add one.
        parallel_mode: "column" or "row".
        manager: whose buffers to use.
        ub_name: "qkv", "proj", "fc1", "fc2" or a registered name; layers that share a name share its buffers.
        device, dtype: of the parameters; None: the manager's.
        fp8_recipe: run in FP8; None: only inside `fp8_autocast`.

    Raises:
        ConfigError: the cut feature size is not divisible by R, or the mode contradicts the name's configuration.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        parallel_mode: str,
        manager: UserBufferManager,
        ub_name: str,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        fp8_recipe: Recipe | None = None,
    ) -> None:
        super().__init__()
        if parallel_mode not in ("column", "row"):
            raise ConfigError(f"parallel_mode must be 'column' or 'row', got {parallel_mode!r}")
        self.in_features, self.out_features, self.parallel_mode = in_features, out_features, parallel_mode
        self.manager, self.ub_name = manager, ub_name
        self.comm = manager.layer(ub_name, row=parallel_mode == "row")
        cut = out_features if parallel_mode == "column" else in_features
        if cut % manager.tp_size:
            which = "out_features" if parallel_mode == "column" else "in_features"
            raise ConfigError(f"{ub_name}: {which}={cut} is not divisible by tp_size={manager.tp_size}")
        rows = out_features // manager.tp_size if parallel_mode == "column" else out_features
        columns = in_features if parallel_mode == "column" else in_features // manager.tp_size
        device = manager.device if device is None else device
        dtype = manager.dtype if dtype is None else dtype
        self.weight = torch.nn.Parameter(torch.empty(rows, columns, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        if self.bias is not None and parallel_mode == "row":
            self.bias.sequence_parallel = True  # type: ignore[attr-defined]  # Megatron's flag, read by sync_replicated_grads
        self.fp8_recipe = fp8_recipe
        self.fp8: Fp8State | None = None if fp8_recipe is None else Fp8State(fp8_recipe, 1, device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As ``torch.nn.Linear``, by the full layer's fan-in. Ranks draw different shards also from one seed.

        (A seed that is the same on every rank is what replicated parameters need; the shards must not follow it.)
        """
        bound = 1 / math.sqrt(self.in_features)
        if self.weight.device.type != "meta":
            seed = int(torch.randint(2**62, ()).item()) + self.manager.rank
            generator = torch.Generator(self.weight.device).manual_seed(seed)
            torch.nn.init.uniform_(self.weight, -bound, bound, generator=generator)
        if self.bias is not None:
            # Zero: a row bias is replicated, and drawing it would give every rank another one.
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor, partition: TokenPartition | None = None) -> torch.Tensor:
        """[T_r, in] -> [T, out/R] (column), or [T, in/R] -> [T_r, out] (row)."""
        fp8 = state_of(self, self.fp8_recipe, 1, self.weight.device)
        if self.parallel_mode == "row":
            return gemm_reduce_scatter(x, self.weight, self.comm, self.bias, partition, fp8)
        result = all_gather_gemm(x, self.weight, self.comm, self.bias, partition, fp8=fp8)
        assert isinstance(result, torch.Tensor), "one weight gives one output"
        return result

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"parallel_mode={self.parallel_mode!r}, ub_name={self.ub_name!r}, tp_size={self.manager.tp_size}"
        )
