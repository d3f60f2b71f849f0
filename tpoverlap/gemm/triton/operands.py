"""The operands of one launch: how they are stored, whether tensor maps can describe them, what a binary depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from tpoverlap.errors import ConfigError
from tpoverlap.gemm.tasks import Scaling
from tpoverlap.gemm.triton.compiled import CompiledKernels, describable
from tpoverlap.gemm.triton.tiles import TileShape

MAX_TERMS: Final = 3


@dataclass(frozen=True)
class Operands:
    """The terms of one launch: lefts [rows, K_i] and their matrices as they lie in memory.

    Attributes:
        stored: rows of unit stride: [N, K_i] if ``n_major``, else [K_i, N].
        scaling: of FP8 operands.
    """

    lefts: Sequence[torch.Tensor]
    stored: Sequence[torch.Tensor]
    n_major: bool
    scaling: Scaling | None = None

    @classmethod
    def of(
        cls, lefts: Sequence[torch.Tensor], matrices: Sequence[torch.Tensor], scaling: Scaling | None = None
    ) -> Operands:
        """From [K_i, N] views.

        Raises:
            ConfigError: too many terms, or a matrix that a kernel cannot read.
        """
        if len(matrices) > MAX_TERMS:
            raise ConfigError(
                f"method 'fused' adds up to {MAX_TERMS} products in one kernel, here are {len(matrices)} weights that "
                "share one gather; use method 'ring_exchange' for this name"
            )
        n_major = matrices[0].stride(0) == 1 and matrices[0].stride(1) >= matrices[0].shape[0]
        stored = [matrix.t() for matrix in matrices] if n_major else list(matrices)
        for matrix, tensor in zip(matrices, stored, strict=True):
            if tensor.stride(1) != 1:
                raise ConfigError(
                    f"method 'fused' needs weights with unit stride along one axis, and all of one gather along the "
                    f"same; got shape {list(matrix.shape)} with strides {list(matrix.stride())}: make them contiguous"
                )
        assert all(left.stride(1) == 1 or left.shape[1] == 1 for left in lefts), "rows are contiguous"
        if scaling is not None:
            scales = (*scaling.lefts, *scaling.rights)
            assert n_major and all(scale.is_contiguous() for scale in scales), (
                "FP8 operands lie along K, scales densely"
            )
        return cls(lefts, stored, n_major, scaling)

    def describable(self) -> bool:
        """Whether tensor maps can hold all of them."""
        return all(map(describable, self.lefts)) and all(map(describable, self.stored))

    @property
    def sums_twice(self) -> bool:
        """See `Scaling.sums_twice`."""
        return self.scaling is not None and self.scaling.sums_twice

    def constants(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """N_MAJOR, PRECISION, SCALES and FAST for results in ``dtype``."""
        scaling = self.scaling
        if scaling is None:
            return self.n_major, precision(dtype), 0, False
        return self.n_major, "tf32", 2 if scaling.is_rowwise else 1, scaling.fast

    def given(self, kernels: CompiledKernels, tile: TileShape, *, tma: bool, addressed: bool) -> list[Any]:
        """The arguments a0 .. b2_scale of a kernel."""
        unused = (0,) * (MAX_TERMS - len(self.lefts))
        scaling, unscaled = self.scaling, (0,) * len(self.lefts)
        a: list[Any] = list(self.lefts)
        b: list[Any] = list(self.stored)
        if tma:
            right_shape = (tile.columns, tile.depth) if self.n_major else (tile.depth, tile.columns)
            a = [kernels.descriptor(left, (tile.rows, tile.depth)) for left in self.lefts]
            b = [kernels.descriptor(right, right_shape) for right in self.stored]
        elif addressed:
            a = [self.lefts[0].data_ptr()]
        return [
            *a, *unused, *b, *unused,
            *[left.shape[1] for left in self.lefts], *unused,
            *[left.stride(0) for left in self.lefts], *unused,
            *[right.stride(0) for right in self.stored], *unused,
            *(scaling.lefts if scaling else unscaled), *unused, *(scaling.rights if scaling else unscaled), *unused,
        ]  # fmt: skip


def kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a binary depends on: type, alignment, sizes that the compiler may specialise on (none changes with T)."""
    return tensor.dtype, tensor.data_ptr() % 16 == 0, tensor.shape[-1], tensor.stride(0)


def precision(dtype: torch.dtype) -> str:
    """As torch multiplies: float32 in full unless the user allowed TF32."""
    return "tf32" if dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 else "ieee"
