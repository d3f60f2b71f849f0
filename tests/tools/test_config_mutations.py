"""Broken files give a finding or a clean bill, never a traceback and never a hang."""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from pathlib import Path

import pytest

from tests.tools.config_mutator import mutated
from tpoverlap.config import check_file, resolve
from tpoverlap.errors import ConfigError
from tpoverlap.tools.config.check_report import exit_code, lines_of, summary_of, to_dict
from tpoverlap.tools.config.convert_file import converted
from tpoverlap.tools.config.text import printable

FILES = sorted((Path(__file__).parents[1] / "data" / "ub_configs").glob("*.yaml"))
FEW, ALL = 120, 10_000
HANG_S = 20.0  # the slowest takes a tenth of a second alone; two cores are shared


def survive(number: int, folder: Path) -> int:
    """Check, print, resolve and convert mutation ``number``; its exit code."""
    path = folder / FILES[number % len(FILES)].name
    path.write_bytes(mutated(FILES[number % len(FILES)].read_text(), seed=number))
    report = check_file(path)
    code = exit_code([report])
    assert code in (0, 1, 2) and (code == 0 or report.notes)
    "\n".join(map(printable, (*lines_of(report, notes=True), summary_of([report])))).encode()
    json.loads(json.dumps(to_dict([report], code)))
    with contextlib.suppress(ConfigError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resolve(path, 2)
        assert code < 2, "resolve accepts what check calls unreadable"
    for target in ("te", "tpoverlap"):
        with contextlib.suppress(ConfigError):
            converted(str(path), target, 2)  # type: ignore[arg-type]
    return code


def run(numbers: range, folder: Path) -> dict[int, int]:
    codes = dict.fromkeys((0, 1, 2), 0)
    for number in numbers:
        started = time.monotonic()
        try:
            codes[survive(number, folder)] += 1
        except Exception as error:
            raise AssertionError(f"mutation {number}, {FILES[number % len(FILES)].name}: {error!r}") from error
        assert time.monotonic() - started < HANG_S, f"mutation {number} took {time.monotonic() - started:.1f} s"
    return codes


def test_some_mutations(tmp_path: Path) -> None:
    codes = run(range(FEW), tmp_path)
    assert all(codes.values()), f"the mutations are too tame or too wild: {codes}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_mutations(tmp_path: Path) -> None:
    codes = run(range(ALL), tmp_path)
    assert min(codes.values()) > ALL // 20, codes
