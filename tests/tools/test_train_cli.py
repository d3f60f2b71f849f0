"""The command line: help is cheap, and every wrong input an error before any rank is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import tpoverlap.tools.train.worker as worker
from tests.tools.no_ranks import refuse_ranks
from tpoverlap.config import resolve
from tpoverlap.config.legality import legal_methods
from tpoverlap.errors import ConfigError
from tpoverlap.tools.cli import SUBCOMMANDS, main
from tpoverlap.tools.train.command import _layers
from tpoverlap.tools.train.methods import METHOD_CHOICES, USED_NAMES, choose


@pytest.fixture(autouse=True)
def no_rank_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_ranks(monkeypatch, worker)


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, ["train", "--device", "cpu", *arguments], env=env)


def test_train_is_a_subcommand_and_help_imports_little() -> None:
    assert SUBCOMMANDS["train"] == "tpoverlap.tools.train.command:train"
    code = (
        "import sys; from click.testing import CliRunner; from tpoverlap.tools.cli import main\n"
        "from tpoverlap.tools.train.command import train\n"
        "result = CliRunner().invoke(main, ['train', '--help']); assert result.exit_code == 0, result.output\n"
        "assert '--check-reference' in result.output\n"
        "assert not {'matplotlib', 'rich'} & set(sys.modules), 'help imported what only a run needs'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[2])


def test_unknown_subcommand_is_a_usage_error() -> None:
    result = CliRunner().invoke(main, ["trian"])
    assert result.exit_code == 2 and "trian" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--corpus", "/nowhere/at/all"], "does not exist"),
        (["--json", "/nowhere/run.json"], "cannot write --json"),
        (["--plot", "/nowhere/run.png"], "cannot write --plot"),
        (["--hidden", "250"], "hidden=250"),
        (["--tp", "3"], "heads=8 is not divisible by tp_size=3"),
        (["--ffn", "689"], "ffn=689 is not divisible by tp_size=2"),
        (["--capacity", "1"], "--capacity"),
        (["--capacity", "4", "--corpus", __file__], "raise --capacity"),
        (["--steps", "0"], "--steps"),
        (["--tp", "0"], "--tp"),
        (["--method", "ring"], "ring_exchange"),
        (["--dtype", "float64"], "--dtype"),
        (["--device", "tpu"], "--device"),
        (["--layers", "te"], "'te' is not a valid integer"),
        (["--layers", "0"], "--layers"),
        (["--backward-mode", "rs"], "rs_dgrad"),
        (["--backward-mode", "rs_dgrad", "--method", "bulk"], "--method bulk and --backward-mode rs_dgrad"),
        (["--pipeline-microbatches", "0"], "--pipeline-microbatches"),
        (["--fp8"], "add --layers te-style"),
        (["--fp8", "--layers", "te-style", "--ffn", "688"], "got ffn=688; choose --ffn 704"),
        (["--fp8", "rowwise", "--layers", "te-style", "--hidden", "240"], "choose --hidden 256"),
        (["--fp8", "mxfp8"], "'current', 'delayed', 'rowwise'"),
        (["stray.txt"], "given as --corpus"),
    ],
)
def test_wrong_options_are_usage_errors(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_empty_corpus_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    result = run("--corpus", str(tmp_path / "empty.txt"))
    assert result.exit_code == 2 and "empty corpus" in result.output


def test_output_is_checked_before_the_corpus_is_read(tmp_path: Path) -> None:
    result = run("--json", str(tmp_path), "--corpus", "/nowhere")
    assert result.exit_code == 2 and "cannot write --json" in result.output


def test_json_and_plot_must_be_two_files(tmp_path: Path) -> None:
    result = run("--json", str(tmp_path / "f"), "--plot", str(tmp_path / "f"))
    assert result.exit_code == 2 and "give two files" in result.output


def test_several_paths_may_follow_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    result = run("--corpus", str(tmp_path / "a.txt"), str(tmp_path / "missing.txt"))
    assert result.exit_code == 2 and "missing.txt does not exist" in " ".join(result.output.split())


def test_tp_must_be_torchruns_world_size() -> None:
    result = run("--tp", "2", env={"RANK": "0", "WORLD_SIZE": "4"})
    assert result.exit_code == 2 and "--tp 2, but torchrun started WORLD_SIZE=4 ranks" in " ".join(
        result.output.split()
    )


def test_cuda_without_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("--device", "cuda")
    assert result.exit_code == 2 and "no usable GPU" in result.output


@pytest.mark.parametrize("method", METHOD_CHOICES)
def test_every_name_is_either_configured_or_said_to_keep_its_default(method: str) -> None:
    choice = choose(method)
    if method == "auto":
        assert choice.ub_cfgs is None
        return
    assert choice.ub_cfgs is not None
    for name in USED_NAMES:
        reduce_scattered_dgrad = method in ("ring_exchange", "pipeline") and name in ("qkv_wgrad", "fc1_wgrad")
        assert (name in choice.ub_cfgs) + (name in choice.note) == (0 if reduce_scattered_dgrad else 1)


@pytest.mark.parametrize("method", METHOD_CHOICES)
def test_the_table_of_legal_names_agrees_with_the_rules(method: str) -> None:
    choice = choose(method)
    configured = choice.ub_cfgs or {}
    resolved = resolve(choice.ub_cfgs, 2).names
    assert all(resolved[name].method == method for name in configured)
    for name in set(USED_NAMES) & set(resolved) - set(configured) - {"qkv_wgrad", "fc1_wgrad"}:
        assert method == "auto" or method not in legal_methods(name, resolved[name].is_reduce_scatter)


@pytest.mark.parametrize("mode", ["bulk", "rs_dgrad"])
@pytest.mark.parametrize("method", METHOD_CHOICES)
def test_the_backward_mode_is_what_the_rules_make_of_it(method: str, mode: str) -> None:
    if (method, mode) == ("bulk", "rs_dgrad"):
        with pytest.raises(ConfigError, match="contradict"):
            choose(method, mode)
        return
    resolved = resolve(choose(method, mode).ub_cfgs, 2).names
    for name in ("qkv_dgrad", "fc1_dgrad"):
        assert resolved[name].is_reduce_scatter == (mode == "rs_dgrad")
        assert (resolved[name].method == "sequential") == (method == "sequential")


@pytest.mark.parametrize(
    ("given", "expected"),
    [((), (4, "plain")), ((2,), (2, "plain")), (("te-style",), (4, "te-style")), ((3, "te-style", 5), (5, "te-style"))],
)
def test_layers_take_a_number_and_a_kind(given: tuple[int | str, ...], expected: tuple[int, str]) -> None:
    assert _layers(given) == expected
