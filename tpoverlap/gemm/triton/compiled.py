"""The binaries of the GEMM kernels by variant, and launches of them that are prepared once.

Triton's own launch looks at every argument to find the binary that fits: with this many, that costs more than 100 us. A
caller that names its variant gets the binary by one look-up.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from tpoverlap.gemm.triton.kernel_driver import KernelDriver
from tpoverlap.gemm.triton.parameters import LayoutError, ParameterLayout
from tpoverlap.gemm.triton.prepared import Described, InterpretedLaunch, PackedLaunch, Prepared, TritonLaunch
from tpoverlap.gemm.triton.tensor_maps import TensorMaps
from tpoverlap.gemm.triton.tiles import TileShape

logger = logging.getLogger("tpoverlap")


@dataclass(frozen=True)
class Kernel:
    """A kernel and its arguments' names, constants left out; a test compares. It is imported on first use."""

    name: str
    arguments: tuple[str, ...]

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
    "a0_scale",
    "a1_scale",
    "a2_scale",
    "b0_scale",
    "b1_scale",
    "b2_scale",
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


class CompiledKernels:
    """Binaries by variant. A variant names everything that a binary depends on; who launches must see to that."""

    def __init__(self, driver: KernelDriver | None) -> None:
        self._driver = driver
        self._maps = None if driver is None else TensorMaps(driver)
        self._compiled: dict[Any, tuple[Any, ParameterLayout | None]] = {}

    def descriptor(self, tensor: torch.Tensor, block_shape: tuple[int, int]) -> Any:
        """For a launch: ``tensor`` in blocks of that shape, by tensor map."""
        return Described(tensor, block_shape)

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
            binary = launch_slowly(kernel, 1, arguments(), constants, tile)
            self._compiled[kernel.name, variant] = binary, _layout(kernel, binary)

    def binary(self, kernel: Kernel, variant: Any) -> tuple[Any, ParameterLayout | None]:
        """A loaded variant, and how it takes its parameters (None: only Triton knows)."""
        return self._compiled[kernel.name, variant]

    def prepare(
        self,
        kernel: Kernel,
        variant: Any,
        programs: int,
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        tile: TileShape,
        moving: Mapping[str, int],
        keeps: Sequence[Any] = (),
    ) -> Prepared:
        """A launch of a loaded variant, on the current stream.

        Args:
            moving: arguments whose addresses each launch gives anew, with their place among these. Their tensors are
                not kept alive; those of all other arguments must live as long as ``keeps`` or the process.
            keeps: memory that the kernel uses and nobody else holds.
        """
        assert self._driver is not None and self._maps is not None, "not interpreted"
        binary, layout = self._compiled[kernel.name, variant]
        if layout is None:
            return TritonLaunch(kernel.arguments, binary[(programs, 1, 1)], arguments, constants, moving, keeps)
        given = dict(zip(kernel.arguments, arguments, strict=True))
        return PackedLaunch(self._driver, self._maps, layout, binary, programs, given, moving, keeps)


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
        moving: Mapping[str, int],
        keeps: Sequence[Any] = (),
    ) -> Prepared:
        def run(given: Sequence[Any]) -> None:
            launch_slowly(kernel, programs, given, constants, tile)

        return InterpretedLaunch(kernel.arguments, run, arguments)


def launch_slowly(
    kernel: Kernel, programs: int, arguments: Sequence[Any], constants: tuple[Any, ...], tile: TileShape
) -> Any:
    """Triton's own launch; returns the binary (None in the interpreter)."""
    given = [value.full() if value.__class__ is Described else value for value in arguments]
    return kernel.load()[(programs,)](*given, *constants, num_warps=tile.num_warps, num_stages=tile.num_stages)


def _layout(kernel: Kernel, binary: Any) -> ParameterLayout | None:
    """How ``binary`` takes its parameters; None, with a warning: only Triton knows, and launches it."""
    try:
        return packed_layout(kernel, binary)
    except (LayoutError, AttributeError) as error:
        logger.warning("kernel %s is launched by Triton, which takes longer: %s", kernel.name, error)
        return None


def packed_layout(kernel: Kernel, binary: Any) -> ParameterLayout:
    """How ``binary`` takes its parameters.

    Raises:
        LayoutError: in a way that a plain launch cannot serve.
    """
    metadata = binary.metadata
    for name, plain in (
        ("num_ctas", 1), ("launch_pdl", False), ("launch_cooperative_grid", False), ("global_scratch_size", 0),
        ("profile_scratch_size", 0),
    ):  # fmt: skip
        if getattr(metadata, name, plain) != plain:
            raise LayoutError(f"{name} is {getattr(metadata, name)}")
    layout = ParameterLayout.of(binary.src.signature, binary.asm["ptx"])
    if not set(layout.places) <= set(kernel.arguments):
        raise LayoutError(
            f"arguments {sorted(map(str, set(layout.places) - set(kernel.arguments)))} are not the kernel's"
        )
    described = sum(1 for _, code in layout.places.values() if not code)
    maps = list(metadata.tensordesc_meta or ())
    if len(maps) != described or not all(one and not one.get("is_im2col") for one in maps):
        raise LayoutError(f"{described} tensor maps, described by {maps}")
    return layout


def describable(tensor: torch.Tensor) -> bool:
    """Whether a tensor map can hold it: not empty, 16-byte aligned base and rows, unit stride along them."""
    return (
        tensor.numel() > 0
        and tensor.stride(1) == 1
        and tensor.data_ptr() % 16 == 0
        and tensor.stride(0) * tensor.element_size() % 16 == 0
    )
