"""`tpoverlap bench` before any rank starts: help is cheap, every wrong input is an error, and so is an empty run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import tpoverlap.tools.bench.worker as worker
from tests.tools.no_ranks import refuse_ranks
from tpoverlap.tools.bench.command import _SUITES
from tpoverlap.tools.bench.report import BenchReport, headline
from tpoverlap.tools.bench.suites import SUITE_NAMES
from tpoverlap.tools.cli import SUBCOMMANDS, main


@pytest.fixture(autouse=True)
def no_rank_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_ranks(monkeypatch, worker)


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, ["bench", "--device", "cpu", *arguments], env=env)


def test_bench_is_a_subcommand_and_help_imports_little() -> None:
    assert SUBCOMMANDS["bench"] == "tpoverlap.tools.bench.command:bench"
    assert _SUITES == SUITE_NAMES, "the option's choices and the registry differ"
    code = (
        "import sys; from click.testing import CliRunner; from tpoverlap.tools.cli import main\n"
        "result = CliRunner().invoke(main, ['bench', '--help']); assert result.exit_code == 0, result.output\n"
        "assert '--only-direction' in result.output\n"
        "assert not {'matplotlib', 'rich'} & set(sys.modules), 'help imported what only a run needs'\n"
        "assert 'tpoverlap.tools.bench.worker' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "/nowhere/b.json"], "cannot write --json"),
        (["--plot", "/nowhere/b.png"], "cannot write --plot"),
        (["--suite", "gem"], "gem"),
        (["--tokens", "16,x"], "--tokens '16,x'"),
        (["--tokens", "0"], "--tokens '0'"),
        (["--tokens", "1"], "less than one row a rank"),
        (["--shape", "8x8"], "TxKxN"),
        (["--numbers", "fp4"], "'bfloat16', 'fp8'"),
        (["--numbers", "fp8", "--suite", "host"], "add --suite gemm"),
        (["--numbers", "fp8", "--shape", "64x40x48"], "multiples of 16, got 64x40x48"),
        (["--tp", "1"], "--tp"),
        (["--rounds", "0"], "--rounds"),
        (["--minutes", "0"], "--minutes"),
        (["--only-direction", "up"], "--only-direction"),
    ],
)
def test_wrong_options_are_usage_errors(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.output, result.output


def test_files_have_to_differ(tmp_path: Path) -> None:
    result = run("--json", str(tmp_path / "x"), "--plot", str(tmp_path / "x"))
    assert result.exit_code == 2 and "give two files" in result.output


def test_torchrun_has_the_last_word_on_ranks() -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2"}
    assert "--tp 3, but torchrun started WORLD_SIZE=2" in run("--tp", "3", env=env).output
    assert "start two or more" in run(env={"RANK": "0", "WORLD_SIZE": "1"}).output


@pytest.mark.parametrize("measured", [True, False])
def test_nothing_measured_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measured: bool) -> None:
    row = {
        "suite": "host",
        "label": "torch.mm",
        "host_us": {},
        "measured": measured,
        "problems": [],
        "judged": False,
        "operation": "torch.mm",
    }
    monkeypatch.setattr(worker, "spawn", lambda job, where: BenchReport(where, [row], []))
    result = run("--suite", "host", "--json", str(tmp_path / "b.json"))
    assert result.exit_code == (0 if measured else 1), result.output
    assert ("nothing was measured" in result.output) is not measured


def test_the_header_says_what_figures_are_worth() -> None:
    where = {
        "gpus": ["H"] * 2, "ranks_share_gpus": False, "device": "cuda", "cpu": "C", "cpu_cores": 2, "date": "d",
        "tpoverlap": "v", "commit": "c", "tp_size": 2, "dtype": "bfloat16", "torch": "t", "cuda": "u", "nccl": "n",
        "triton": "r", "rounds": 5,
    }  # fmt: skip
    text = "\n".join(headline(where))
    assert "2 ranks on 2 x H" in text and "GPU of its own" in text
    assert "SHARE" in "\n".join(headline({**where, "ranks_share_gpus": True}))
    assert "say NOTHING about GPUs" in "\n".join(headline({**where, "device": "cpu", "gpus": []}))
