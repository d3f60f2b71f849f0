"""Small tables on the device, made once and found again: a new T costs one short copy that nobody waits for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import torch

from tpoverlap.gemm.triton.kernel_driver import KernelDriver

_MAX_TABLES: Final = 512


class DeviceTables:
    """Tables of one device, by the identity of what they were made from (which the entry keeps alive)."""

    def __init__(self, device: torch.device, driver: KernelDriver | None) -> None:
        self._device = device
        self._driver = driver
        self._on_host = device.type == "cpu"
        self._tables: OrderedDict[tuple[int, ...], tuple[Any, torch.Tensor]] = OrderedDict()

    def get(self, origin: Sequence[Any], rows: Sequence[Any], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """``rows`` on the device, for the current stream; ``origin``: cached objects that they were made from."""
        stream = 0 if self._driver is None else self._driver.current_stream()
        # By identity: hashing hundreds of rows would cost more than the rest of a launch.
        key = (*map(id, origin), stream)
        if key in self._tables:
            self._tables.move_to_end(key)
            return self._tables[key][1]
        host = torch.tensor(rows, dtype=dtype, pin_memory=not self._on_host)
        table = host.to(self._device, non_blocking=True)
        self._tables[key] = origin, table
        if len(self._tables) > _MAX_TABLES:
            self._tables.popitem(last=False)
        return table
