"""Rank functions of `test_set_up`."""

from __future__ import annotations

import linecache
import time
import warnings
from pathlib import Path

import torch

import tpoverlap as tpo
from tests.manager.ranks import CAPACITY, WIDTH, Outcome, assert_right, make_manager, outcome_of
from tests.manager.set_ups import BAD_SET_UPS, DIFFERENT
from tpoverlap.config import ConfigWarning, resolve
from tpoverlap.tokens import TokenPartition


def refuse(rank: int, size: int, offender: int | None) -> dict[str, Outcome]:
    """Every bad set-up, on rank ``offender`` or on all. Every rank must get its error at once."""
    outcomes: dict[str, Outcome] = {}
    for name, case in BAD_SET_UPS.items():
        options = case.options(size) if offender is None or rank == offender else {}
        started = time.monotonic()
        outcomes[name] = outcome_of(lambda o=options: make_manager(**o))  # type: ignore[misc]
        assert time.monotonic() - started < 15.0, f"{name}: somebody waited for a time-out"
    with make_manager() as manager:  # nothing is left behind: the next set-up works
        assert_right(manager, TokenPartition.balanced(CAPACITY, size))
    return outcomes


def disagree(rank: int, size: int) -> dict[str, Outcome]:
    """The last rank is given something else."""
    outcomes = {}
    for name, (common, different, _) in DIFFERENT.items():
        options = different if rank == size - 1 else common
        options = options(size) if callable(options) else options
        outcomes[name] = outcome_of(lambda o=options: make_manager(**o))  # type: ignore[misc]
    return outcomes


def different_files(rank: int, size: int, folder: str) -> Outcome:
    """Every rank has a file of its own: the last rank's has another bucket, and a key that the others leave out."""
    odd = rank == size - 1
    rows = f"[{{up_to: {16 if odd else 8}, method: sequential}}, {{up_to: 24, method: ring_exchange}}]"
    path = Path(folder) / f"rank{'_last' if odd else 's'}.yaml"
    path.write_text(
        f"proj_fprop: {{method: ring_exchange{', num_sm: 1' if odd else ''}}}\n"
        f"tpoverlap: {{by_tokens: {{qkv_fprop: {{features: 6, width: 16, rows: {rows}}}}}}}\n"
    )
    return outcome_of(lambda: make_manager(ub_cfgs=path))


def different_steps(rank: int, size: int) -> Outcome:
    """Rank 0 registers a name while the others make another manager."""
    with make_manager() as manager:
        return outcome_of(make_manager if rank else lambda: manager.register("vision", width=8))


def backend_that_does_not_work(rank: int, size: int, offender: int | None) -> Outcome:
    options = {"backend": "cuda"} if offender is None or rank == offender else {}
    return outcome_of(lambda: make_manager(**options))


def device_that_is_not_there(rank: int, size: int, offender: int | None) -> Outcome:
    options = {"device": "cuda:7"} if offender is None or rank == offender else {}
    return outcome_of(lambda: make_manager(**options))


def bad_groups(rank: int, size: int) -> dict[str, Outcome]:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (size, 1))
    return {
        "text": outcome_of(lambda: tpo.UserBufferManager("world", (CAPACITY, WIDTH))),
        "two-dimensional mesh": outcome_of(lambda: tpo.UserBufferManager(mesh, (CAPACITY, WIDTH))),
    }


def good_groups(rank: int, size: int) -> None:
    """None, a ProcessGroup and a 1-D DeviceMesh are the same group."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (size,))
    for group in (None, torch.distributed.group.WORLD, mesh):
        with tpo.UserBufferManager(group, [CAPACITY, WIDTH], dtype=torch.float32) as manager:  # type: ignore[arg-type]
            assert manager.tp_size == size
            assert manager.timeout_s == 60.0, "the group's own time-out, which the pool set"
            assert_right(manager, TokenPartition.balanced(CAPACITY, size))


def registrations(rank: int, size: int, offender: int | None) -> dict[str, Outcome]:
    """Illegal register() calls, on one rank (the others do it right) or on all; none registers anything."""
    cases = {
        "no width": ("vision", {"width": 0}),
        "width is a fraction": ("vision", {"width": 2.5}),
        "no tokens": ("vision", {"width": 8, "max_tokens": 0}),
        "rows": ("vision", {"width": 8, "max_rows_per_rank": -1}),
        "no name": ("", {"width": 8}),
        "blank in the name": ("vision tower", {"width": 8}),
        "no text": (7, {"width": 8}),
        "a standard layer": ("fc1", {"width": 8}),
        "a standard name": ("fc1_fprop", {"width": 8}),
        "a standard name without communication": ("fc2_wgrad", {"width": 8}),
        "taken": ("taken", {"width": 4}),
        "partly taken": ("taken_dgrad", {"width": 4}),
    }
    outcomes: dict[str, Outcome] = {}
    with make_manager() as manager:
        manager.register("taken", width=4)
        before = manager.memory_report()
        plan = manager.plan()
        for name, (given, options) in cases.items():
            offends = offender is None or rank == offender
            wanted, arguments = (given, options) if offends else ("vision", {"width": 8})
            outcomes[name] = outcome_of(lambda w=wanted, a=arguments: manager.register(w, **a))  # type: ignore[misc]
        outcomes["different"] = outcome_of(lambda: manager.register("vision", width=8 + (rank == size - 1)))
        assert manager.plan() == plan and manager.memory_report() == before
        manager.register("vision", width=8)
        manager.set_active_shape(7)
        assert_right(manager, TokenPartition.balanced(7, size), manager.layer("vision"), None, width=8)
        assert_right(manager, TokenPartition.balanced(7, size))
    return outcomes


def warned_at(rank: int, size: int) -> dict[str, str]:
    """Mark in the line, and file, of a configuration's warning, by how it was passed."""
    from tpoverlap import te

    odd = {"mtp_fprop": {"num_sm": 1}}  # does not say is_reduce_scatter
    lines = {}
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        tpo.UserBufferManager(None, (CAPACITY, WIDTH), torch.float32, ub_cfgs=odd).close()  # here: manager
        te.initialize_ub([CAPACITY, WIDTH], size, dtype=torch.float32, ub_cfgs=odd)  # here: te
        te.destroy_ub()
        tpo.memory_estimate((CAPACITY, WIDTH), 2, odd)  # here: estimate
        resolve(odd, 2)  # here: resolve
    for warning in issued:
        assert warning.category is ConfigWarning
        lines[linecache.getline(warning.filename, warning.lineno).rpartition("here: ")[2].strip()] = warning.filename
    return lines


def without_process_group(rank: int, size: int) -> dict[str, Outcome]:
    """In a process of its own, whose group is destroyed first."""
    from tpoverlap import te

    torch.distributed.destroy_process_group()
    return {
        "manager": outcome_of(lambda: make_manager()),
        "te": outcome_of(lambda: te.initialize_ub([CAPACITY, WIDTH], size)),
        "sync": outcome_of(lambda: tpo.sync_replicated_grads(torch.nn.Linear(2, 2), None)),
    }
