"""For tests of what a command refuses: it must do so before it starts a rank."""

from __future__ import annotations

from types import ModuleType

import pytest


def refuse_ranks(monkeypatch: pytest.MonkeyPatch, worker: ModuleType) -> None:
    """Starting a rank through ``worker`` fails the test, whatever torchrun left in the environment."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(worker, "spawn", refuse)
    monkeypatch.setattr(worker, "run_under_torchrun", refuse)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
