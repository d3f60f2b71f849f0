"""Which backend a manager gets: what was asked for, else the first that proves itself on a few real bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpoverlap.errors import BackendUnavailableError, ConfigError
from tpoverlap.memory.base import Backend

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class BackendChoice:
    """A backend and the reason it was picked, as `explain` and the log line print it."""

    backend: Backend
    reason: str


def select_backend(name: str | type[Backend], group: ProcessGroup, device: torch.device) -> BackendChoice:
    """Pick and construct a backend. Collective: all ranks pick the same one.

    Args:
        name: "auto", "shared", "cuda" or "process_group"; or a class, such as
            `tpoverlap.testing.simulated.SimulatedBackend`.
        group: the tensor-parallel group.
        device: where activations live.

    Raises:
        ConfigError: no backend has that name.
        BackendUnavailableError: it was asked for by name and does not work, or none works.
    """
    from tpoverlap.memory.cuda import CudaSymmetricBackend
    from tpoverlap.memory.process_group import ProcessGroupBackend
    from tpoverlap.memory.shared import SharedMemoryBackend

    classes: dict[str, type[Backend]] = {
        "cuda": CudaSymmetricBackend,
        "shared": SharedMemoryBackend,
        "process_group": ProcessGroupBackend,
    }
    if isinstance(name, type):
        classes[name.name] = name
        name = name.name
    if name != "auto":
        if name not in classes:
            raise ConfigError(f"backend={name!r} is unknown; use 'auto', {', '.join(map(repr, classes))}")
        reason = classes[name].probe(group, device)
        if reason is not None:
            raise BackendUnavailableError(f"backend={name!r} was asked for but does not work here: {reason}")
        return BackendChoice(classes[name](group, device), f"backend={name!r} was asked for; its probe passed")
    preferred = "cuda" if device.type == "cuda" else "shared"
    rejected: list[str] = []
    for candidate in (preferred, "process_group"):
        reason = classes[candidate].probe(group, device)
        if reason is None:
            why = f"first for {device.type} whose probe passed"
            if rejected:
                why += "; not " + "; not ".join(rejected)
            return BackendChoice(classes[candidate](group, device), why)
        rejected.append(f"{candidate!r} ({reason})")
    raise BackendUnavailableError(f"no backend works for {device}: {'; '.join(rejected)}")
