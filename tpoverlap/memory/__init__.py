"""WHO OWNS BYTES: one arena a manager, its named regions, the backends that can provide it, and the GPU driver."""

from tpoverlap.memory.base import Arena, Backend, CpuArena
from tpoverlap.memory.layout import ArenaLayout, RegionSpec
from tpoverlap.memory.select import BackendChoice, select_backend

__all__ = ["Arena", "ArenaLayout", "Backend", "BackendChoice", "CpuArena", "RegionSpec", "select_backend"]
