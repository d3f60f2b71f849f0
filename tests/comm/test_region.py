"""Kept views of a slot: the caller and the comm thread make them at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from tpoverlap.comm.region import Region
from tpoverlap.memory.base import Arena
from tpoverlap.memory.layout import ArenaLayout, RegionSpec


class _OneRank(Arena):
    def __init__(self, size_bytes: int) -> None:
        self.rank, self.tp_size, self.size_bytes = 0, 1, size_bytes
        self._bytes = torch.zeros(size_bytes, dtype=torch.uint8)

    def bytes_of(self, rank: int) -> torch.Tensor:
        return self._bytes

    def close(self) -> None:
        pass


class _SlowToLookAt(dict[Any, Any]):
    """Another thread has its turn between a look at the keys and what follows from it."""

    def __iter__(self) -> Iterator[Any]:
        keys = super().__iter__()
        time.sleep(1e-3)
        return keys


def test_two_threads_make_views() -> None:
    layout = ArenaLayout(1, (RegionSpec("ag", 4096),))
    region = Region("ag", _OneRank(layout.total_bytes), layout, 0, _views=_SlowToLookAt())
    errors: list[BaseException] = []

    def make(first: int) -> None:
        try:
            for rows in range(first, first + 100):  # more than are kept, and no two alike
                assert region.view(0, 1, 0, (rows, 1), torch.float32).shape == (rows, 1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=make, args=(first,)) for first in (1, 201, 401)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
