"""Launches that are prepared once: afterwards only addresses and the epoch change."""

from __future__ import annotations

import ctypes
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from tpoverlap.gemm.triton.kernel_driver import DATA_TYPES, KernelDriver, LaunchConfig
from tpoverlap.gemm.triton.parameters import MAP_BYTES, ParameterLayout
from tpoverlap.gemm.triton.tensor_maps import MapShape, TensorMaps
from tpoverlap.native import Recording

Addresses = tuple[int, ...]
"""Where the caller's tensors of this launch lie."""
_MASK: Final = 0xFFFFFFFF
_pack_epoch: Final = struct.Struct("<I").pack_into


class Described:
    """A tensor and a block shape: what a tensor map is made of."""

    __slots__ = ("block_shape", "tensor")

    def __init__(self, tensor: torch.Tensor, block_shape: tuple[int, int]) -> None:
        self.tensor = tensor
        self.block_shape = block_shape

    def full(self) -> Any:
        """Triton's own."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        tensor = self.tensor
        return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(self.block_shape))


class Prepared(ABC):
    """One launch, for the stream that was current when it was prepared."""

    @abstractmethod
    def launch(self, addresses: Addresses, epoch: int) -> None:
        """Launch it.

        Args:
            addresses: of the moving tensors, each of the same shape, strides and alignment as when it was prepared.
            epoch: what the kernel waits for and writes, modulo 2**32.
        """

    def place(self, addresses: Addresses) -> None:
        """Before a tape's launch: the addresses, as above."""
        raise NotImplementedError

    def record(self, recording: Recording, epoch: int) -> bool:
        """Write the launch down, with an operand for the epoch; `place` comes before each. False: Triton does it."""
        return False


class PackedLaunch(Prepared):
    """By one call of the driver, from a block of parameters that is kept: the usual case."""

    def __init__(
        self,
        driver: KernelDriver,
        maps: TensorMaps,
        layout: ParameterLayout,
        binary: Any,
        programs: int,
        arguments: Mapping[str, Any],
        moving: Mapping[str, int],
        keeps: Sequence[Any],
    ) -> None:
        self._driver, self._maps = driver, maps
        self._keeps = (*keeps, binary)
        self._start, self._function = driver.start, binary.function
        # A tensor map is copied from an address that is a multiple of 64.
        memory = bytearray(layout.size_bytes + 128)
        start = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
        first = (start + 127) & ~127
        self._block = memoryview(memory)[first - start : first - start + layout.size_bytes]
        self._parameters = (ctypes.c_uint64 * len(layout.offsets))(*[first + offset for offset in layout.offsets])
        self._parameters_at = ctypes.addressof(self._parameters)
        metadata = binary.metadata
        self._config = LaunchConfig(
            (programs, 1, 1), (32 * metadata.num_warps, 1, 1), metadata.shared, driver.current_stream(), 0, 0
        )
        self._config_at = ctypes.addressof(self._config)
        self._epoch_at = layout.places["epoch"][0]
        self._moving_maps: list[tuple[int, int, MapShape]] = []
        self._moving_pointers: list[tuple[int, int]] = []
        self._addresses: Addresses = ()
        described = iter(metadata.tensordesc_meta or ())
        for name, (offset, code) in layout.places.items():
            value = arguments[name]
            if code:
                if isinstance(value, torch.Tensor):
                    value = value.data_ptr()
                struct.pack_into(f"<{code}", self._block, offset, value)
                if name in moving:
                    assert code == "Q", f"{name} is no pointer"
                    self._moving_pointers.append((moving[name], offset))
                continue
            shape = self._put_map(value.tensor, offset, next(described))
            if name in moving:
                self._moving_maps.append((moving[name], offset, shape))

    def _put_map(self, tensor: torch.Tensor, offset: int, description: Mapping[str, Any]) -> MapShape:
        rows, columns = tensor.shape
        box = description["block_size"]
        shape = MapShape(
            rows, columns, tensor.stride(0) * tensor.element_size(), (box[0], box[1]), description["swizzle"],
            DATA_TYPES[tensor.dtype], tensor.element_size(),
        )  # fmt: skip
        assert description["elem_size"] == shape.itemsize, f"a map of {tensor.dtype} with {description}"
        self._block[offset : offset + MAP_BYTES] = self._maps.get(tensor.data_ptr(), shape)
        struct.pack_into("<iiqq", self._block, offset + MAP_BYTES, rows, columns, tensor.stride(0), 1)
        return shape

    def place(self, addresses: Addresses) -> None:
        if addresses != self._addresses:
            self._move(addresses)

    def record(self, recording: Recording, epoch: int) -> bool:
        recording.store(ctypes.addressof(ctypes.c_char.from_buffer(self._block, self._epoch_at)), epoch)
        recording.start(self._config_at, self._function, self._parameters_at, self)
        return True

    def launch(self, addresses: Addresses, epoch: int) -> None:
        if addresses != self._addresses:
            self._move(addresses)
        _pack_epoch(self._block, self._epoch_at, epoch & _MASK)
        status = self._start(self._config_at, self._function, self._parameters_at, 0)
        if status:
            self._driver.start_again(status, self._config_at, self._function, self._parameters_at)

    def _move(self, addresses: Addresses) -> None:
        block, before = self._block, self._addresses
        self._addresses = ()  # what follows may fail half-way
        for place, offset in self._moving_pointers:
            struct.pack_into("<Q", block, offset, addresses[place])
        for place, offset, shape in self._moving_maps:
            if not before or before[place] != addresses[place]:
                block[offset : offset + MAP_BYTES] = self._maps.get(addresses[place], shape)
        self._addresses = addresses


class _Map:
    """What Triton's launch needs of a ``TensorDescriptor``, without its checks: `describable` made them."""

    __slots__ = ("address", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.address = tensor.data_ptr()
        self.shape = list(tensor.shape)
        self.strides = list(tensor.stride())
        self.padding = "zero"
        self.round_f32_to_tf32 = False

    @property
    def base(self) -> _Map:
        """Stands in for the tensor."""
        return self

    def data_ptr(self) -> int:
        """The tensor's address."""
        return self.address


class TritonLaunch(Prepared):
    """By Triton's launch of a known binary, where the block of parameters is not known."""

    def __init__(
        self,
        names: Sequence[str],
        run: Callable[..., object],
        arguments: Sequence[Any],
        constants: tuple[Any, ...],
        moving: Mapping[str, int],
        keeps: Sequence[Any],
    ) -> None:
        self._run = run
        self._keeps = keeps
        # Addresses instead of tensors: Triton asks the driver about every pointer that comes as an object.
        self._arguments = [*map(_shown, arguments), *constants]
        self._epoch = list(names).index("epoch")
        self._moving = [(index, moving[name]) for index, name in enumerate(names) if name in moving]

    def launch(self, addresses: Addresses, epoch: int) -> None:
        arguments = self._arguments
        arguments[self._epoch] = signed32(epoch)
        for index, place in self._moving:
            value = arguments[index]
            if value.__class__ is _Map:
                value.address = addresses[place]
            else:
                arguments[index] = addresses[place]
        self._run(*arguments)


class InterpretedLaunch(Prepared):
    """For the interpreter, which wants tensors: it is prepared anew each time, so nothing moves."""

    def __init__(self, names: Sequence[str], run: Callable[[Sequence[Any]], object], arguments: Sequence[Any]) -> None:
        self._run, self._arguments, self._epoch = run, list(arguments), list(names).index("epoch")

    def launch(self, addresses: Addresses, epoch: int) -> None:
        self._arguments[self._epoch] = signed32(epoch)
        self._run(self._arguments)


def signed32(value: int) -> int:
    """``value`` modulo 2**32 as a signed word, which Triton always passes as 32 bits."""
    return ((value + 0x80000000) & _MASK) - 0x80000000


def _shown(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return _Map(value.tensor) if value.__class__ is Described else value
