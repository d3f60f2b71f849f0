"""The binaries of the GEMM kernels, and a launch that skips what Triton does again at every call.

Triton's own launch looks at every argument to find the binary that fits: with this many, that costs more than 100 us. A
caller that names its variant gets the binary by one look-up.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from tpoverlap.gemm.triton.tiles import TileShape


@dataclass(frozen=True)
class Kernel:
    """A kernel and its arguments' names, constants left out; a test compares. It is imported on first use."""

    name: str
    arguments: tuple[str, ...]

    @property
    def epoch(self) -> int:
        """Where the epoch is."""
        return self.arguments.index("epoch")

    @property
    def counters(self) -> int | None:
        """Where the counters are, if there are any."""
        return self.arguments.index("counters") if "counters" in self.arguments else None

    def load(self) -> Any:
        """Triton's function."""
        return getattr(importlib.import_module(f"tpoverlap.gemm.triton.{self.name}"), self.name)


_TERMS: Final = (
    "a0",
    "a1",
    "a2",
    "b0",
    "b1",
    "b2",
    "K0",
    "K1",
    "K2",
    "a0_ld",
    "a1_ld",
    "a2_ld",
    "b0_ld",
    "b1_ld",
    "b2_ld",
)
TILE_GEMM: Final = Kernel("tile_gemm", (
    "table", "own_rows", "num_rows", "own", "own_ld", *_TERMS, "N", "own_shift", "left_shift", "out", "out_descriptor",
    "out_shift", "bias", "addend", "addend_ld", "received", "block_rows", "words_per_rank", "flags", "epoch", "limit",
    "error", "counters", "source", "pushes", "num_pushes", "pushers", "peers", "done",
))  # fmt: skip
SCATTER_GEMM: Final = Kernel("scatter_gemm", (
    "table", "remote_rows", "num_rows", "places", "parts", "peers", "done", "ticket", *_TERMS, "N", "out",
    "out_descriptor", "out_shift", "bias", "addend", "addend_ld", "received", "block_rows", "words_per_rank", "flags",
    "epoch", "limit", "error",
))  # fmt: skip


class _Map:
    """What a launch needs of a ``TensorDescriptor``, without its checks: `describable` made them."""

    __slots__ = ("address", "padding", "shape", "strides")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.address = tensor.data_ptr()
        self.shape = list(tensor.shape)
        self.strides = list(tensor.stride())
        self.padding = "zero"

    @property
    def base(self) -> _Map:
        """Stands in for the tensor."""
        return self

    def data_ptr(self) -> int:
        """The tensor's address."""
        return self.address


class _Described:
    """A tensor and a block shape: a full descriptor or a `_Map`, whichever the launch needs."""

    __slots__ = ("block_shape", "tensor")

    def __init__(self, tensor: torch.Tensor, block_shape: tuple[int, int]) -> None:
        self.tensor = tensor
        self.block_shape = block_shape

    def full(self) -> Any:
        """Triton's own."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        tensor = self.tensor
        return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(self.block_shape))


class Prepared:
    """A launch of which only the epoch and the counters change. Keeps addresses, not the caller's tensors.

    Attributes:
        keeps: memory that the kernel uses and nobody else holds.
    """

    def __init__(
        self, kernel: Kernel, run: Callable[..., object], arguments: list[Any], keeps: Sequence[Any] = ()
    ) -> None:
        self._run = run
        self._arguments = arguments
        self._epoch, self._counters = kernel.epoch, kernel.counters
        self.keeps = keeps

    def launch(self, epoch: int, counters: torch.Tensor | None) -> None:
        """Launch on the current stream."""
        arguments = self._arguments
        arguments[self._epoch] = signed32(epoch)
        if counters is not None and self._counters is not None:
            arguments[self._counters] = self._shown(counters)
        self._run(*arguments)

    def _shown(self, counters: torch.Tensor) -> Any:
        return counters.data_ptr()


class PreparedInterpreted(Prepared):
    """For the interpreter, which wants tensors."""

    def _shown(self, counters: torch.Tensor) -> Any:
        return counters


class CompiledKernels:
    """Binaries by variant. A variant names everything that a binary depends on; who launches must see to that."""

    def __init__(self) -> None:
        self._compiled: dict[Any, Any] = {}

    def descriptor(self, tensor: torch.Tensor, block_shape: tuple[int, int]) -> Any:
        """For a launch: ``tensor`` in blocks of that shape, by tensor map."""
        return _Described(tensor, block_shape)

    def load(
        self,
        kernel: Kernel,
        variant: Any,
        arguments: Callable[[], tuple[Any, ...]],
        constants: tuple[Any, ...],
        tile: TileShape,
    ) -> None:
        """Compile and load a variant, unless that was done before, by launching it with ``arguments()``."""
        if (kernel.name, variant) not in self._compiled:
            self._compiled[kernel.name, variant] = launch_slowly(kernel, 1, arguments(), constants, tile)

    def prepare(
        self,
        kernel: Kernel,
        variant: Any,
        programs: int,
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        tile: TileShape,
        keeps: Sequence[Any] = (),
    ) -> Prepared:
        """A launch of a loaded variant. ``arguments[0]``, the table, is kept alive, and ``keeps``; other tensors are
        not.
        """
        run = self._compiled[kernel.name, variant][(programs, 1, 1)]
        return Prepared(kernel, run, [arguments[0], *map(_for_launch, arguments[1:]), *constants], keeps)


class InterpretedKernels(CompiledKernels):
    """The interpreter has no binaries."""

    def load(
        self,
        kernel: Kernel,
        variant: Any,
        arguments: Callable[[], tuple[Any, ...]],
        constants: tuple[Any, ...],
        tile: TileShape,
    ) -> None:
        """Nothing to load."""

    def prepare(
        self,
        kernel: Kernel,
        variant: Any,
        programs: int,
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        tile: TileShape,
        keeps: Sequence[Any] = (),
    ) -> Prepared:
        def run(*given: Any) -> None:
            launch_slowly(kernel, programs, given, constants, tile)

        return PreparedInterpreted(kernel, run, list(arguments), keeps)


def launch_slowly(
    kernel: Kernel, programs: int, arguments: Sequence[Any], constants: tuple[Any, ...], tile: TileShape
) -> Any:
    """Triton's own launch; returns the binary (None in the interpreter)."""
    given = [value.full() if value.__class__ is _Described else value for value in arguments]
    return kernel.load()[(programs,)](*given, *constants, num_warps=tile.num_warps, num_stages=tile.num_stages)


def signed32(value: int) -> int:
    """``value`` modulo 2**32 as a signed word, which Triton always passes as 32 bits."""
    return ((value + 0x80000000) & 0xFFFFFFFF) - 0x80000000


def _for_launch(value: Any) -> Any:
    """Addresses instead of tensors: Triton asks the driver about every pointer that comes as an object, and a prepared
    launch must not keep activations alive.
    """
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return _Map(value.tensor) if value.__class__ is _Described else value


def describable(tensor: torch.Tensor) -> bool:
    """Whether a tensor map can hold it: not empty, 16-byte aligned base and rows, unit stride along them."""
    return (
        tensor.numel() > 0
        and tensor.stride(1) == 1
        and tensor.data_ptr() % 16 == 0
        and tensor.stride(0) * tensor.element_size() % 16 == 0
    )
