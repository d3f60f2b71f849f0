"""What takes seconds and several files want: the standard library's documents, and doctor's report of this machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tpoverlap.tools.cli import main
from tpoverlap.tools.train.corpus import Corpus, read_corpus


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
