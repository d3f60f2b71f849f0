"""Tensor maps that were encoded before: weights, slots and most activations come back at the same address."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

from tpoverlap.gemm.triton.kernel_driver import KernelDriver

_MAX_MAPS: Final = 4096
"""512 KiB of them."""


class MapShape(NamedTuple):
    """What a tensor map describes, but for its address.

    Attributes:
        rows, columns: of the matrix.
        row_bytes: from one row to the next.
        box: rows and columns of one bulk copy.
        swizzle: the driver's number for it.
        data_type: the driver's number for it (`DATA_TYPES`).
        itemsize: bytes of one element.
    """

    rows: int
    columns: int
    row_bytes: int
    box: tuple[int, int]
    swizzle: int
    data_type: int
    itemsize: int


class TensorMaps:
    """The maps of one device, least recently used ones dropped."""

    def __init__(self, driver: KernelDriver) -> None:
        self._driver = driver
        self._maps: OrderedDict[tuple[int, MapShape], bytes] = OrderedDict()

    def get(self, address: int, shape: MapShape) -> bytes:
        """The 128 bytes for a matrix at ``address``."""
        key = (address, shape)
        found = self._maps.get(key)
        if found is not None:
            self._maps.move_to_end(key)
            return found
        found = self._maps[key] = self._driver.encode(address, *shape)
        if len(self._maps) > _MAX_MAPS:
            self._maps.popitem(last=False)
        return found
