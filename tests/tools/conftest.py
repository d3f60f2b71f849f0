"""What takes seconds and several files want: the standard library's documents, and doctor's report of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from click.testing import CliRunner, Result

from tpoverlap.testing import RankPool
from tpoverlap.tools.cli import main
from tpoverlap.tools.train.corpus import Corpus, read_corpus
from tpoverlap.tools.train.job import ProgressListener, TrainJob, TrainOutcome
from tpoverlap.tools.train.worker import train_on_rank


@pytest.fixture(scope="session")
def default_corpus() -> Corpus:
    return read_corpus()


@pytest.fixture(scope="session")
def doctors_report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path, float]:
    """The real ``doctor --json PATH``: what it printed, the path and the seconds it took."""
    path = tmp_path_factory.mktemp("doctor") / "doctor.json"
    started = time.monotonic()
    result = CliRunner().invoke(main, ["doctor", "--json", str(path)])
    return result, path, time.monotonic() - started


# -- ranks that are there already instead of the commands' own, whose start takes longer than their work ---------------


def _train(rank: int, world_size: int, job: TrainJob) -> TrainOutcome:
    group = dist.group.WORLD
    assert group is not None
    return train_on_rank(job, group, rank, lambda progress: None)


@pytest.fixture
def trains_on_shared_ranks(rank_pool: Callable[[int], RankPool], monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(job: TrainJob, on_progress: ProgressListener) -> TrainOutcome:
        outcome: TrainOutcome = rank_pool(job.tp_size).run(_train, job, timeout_s=100.0)[0]
        return outcome

    monkeypatch.setattr("tpoverlap.tools.train.worker.spawn", spawn)


@pytest.fixture
def benches_on_shared_ranks(rank_pool: Callable[[int], RankPool], monkeypatch: pytest.MonkeyPatch) -> None:
    def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
        assert options["device"] == "cpu" and options["env"] is None
        return rank_pool(world_size).run(fn, *args, timeout_s=100.0)

    @contextmanager
    def existing(world_size: int, *, device: str, env: Mapping[str, str | None], grace_s: float) -> Iterator[RankPool]:
        assert device == "cpu"
        yield rank_pool(world_size)

    monkeypatch.setattr("tpoverlap.tools.bench.worker.run_ranks", run_ranks)
    monkeypatch.setattr("benchmarks.bulk_beside.RankPool", existing)
