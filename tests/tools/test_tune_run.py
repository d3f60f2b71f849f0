"""``tpoverlap tune`` on two CPU ranks: interrupted, continued, and its cache and file followed by managers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import tpoverlap as tpo
from tpoverlap.testing import RankPool
from tpoverlap.tools.cli import SUBCOMMANDS, main
from tpoverlap.tools.tune.decide import winner

SIZES = ("--hidden", "16", "--ffn", "24", "--heads", "2", "--tp", "2")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["tune", *SIZES, *arguments])


@pytest.fixture
def shared_ranks(rank_pool: Callable[[int], RankPool], monkeypatch: pytest.MonkeyPatch) -> RankPool:
    """The command's own pool would take seconds to start."""

    @contextmanager
    def existing(world_size: int, *, device: str) -> Iterator[RankPool]:
        assert device == "cpu"
        yield rank_pool(world_size)

    monkeypatch.setattr("tpoverlap.testing.RankPool", existing)
    return rank_pool(2)


def follow(rank: int, size: int, yaml: str | None, cache: str | None) -> dict[str, Any]:
    """What a manager with the file, or the cache, says and does at a T of the measured range."""
    with tpo.UserBufferManager(
        None, (32, 16), dtype=torch.float32, ub_cfgs=yaml, tuning_cache=cache or False, timeout_s=20.0
    ) as manager:
        x, weight = torch.ones(32 // size, 16), torch.ones(24 // size, 16)
        tpo.all_gather_gemm(x, weight, manager.layer("fc1"))
        ran = [key for key, value in manager.stats()["fc1_fprop"].items() if key.startswith("method_") and value]
        return {"ran": ran, "explain": manager.explain("fc1_fprop", 32)}


def test_interrupted_then_continued_then_followed(
    tmp_path: Path, shared_ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, cache = tmp_path / "ub.yaml", tmp_path / "cache"
    state = tmp_path / "ub.yaml.state.json"
    arguments = ("--device", "cpu", "--tokens", "9:32", "--rounds", "3", "-o", str(output), "--cache-dir", str(cache))
    calls: list[int] = []

    def counting(times: Any, default: int) -> int:
        calls.append(default)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return winner(times, default)

    monkeypatch.setattr("tpoverlap.tools.tune.session.winner", counting)
    assert run(*arguments).exit_code == 1 and not output.exists()
    first = json.loads(state.read_text())["results"]
    assert len(first) == 3
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert not state.exists() and len(calls) == 4 + 6, (
        "nine buckets, of which three were there and the fourth was begun"
    )
    assert "wrote" in result.output and "fc1_wgrad" in result.output
    (cached,) = cache.iterdir()
    entries = json.loads(cached.read_text())["entries"]
    row = entries["gather width 16 features 12 R 2 itemsize 4"][-1]
    assert row["up_to"] == 32
    for one in shared_ranks.run(follow, str(output), None, timeout_s=60.0):
        assert one["ran"] == [f"method_{row['method']}"] and "by_tokens" in one["explain"], one
        assert f"{row['sequential_us']:.1f} us" in one["explain"]
    for one in shared_ranks.run(follow, None, str(cache), timeout_s=60.0):
        assert one["ran"] == [f"method_{row['method']}"] and "tuned cache" in one["explain"], one


def test_no_budget_writes_no_guess(tmp_path: Path, shared_ranks: RankPool) -> None:
    output = tmp_path / "ub.yaml"
    arguments = ("--device", "cpu", "--tokens", "32", "--no-cache", "-o", str(output))
    result = run(*arguments, "--minutes", "0")
    assert result.exit_code == 0 and "0 of" in result.output and "goes on from there" in result.output
    assert "method:" not in output.read_text(), "nothing was measured, so every name keeps its default"


def test_is_a_subcommand() -> None:
    assert SUBCOMMANDS["tune"] == "tpoverlap.tools.tune.command:tune"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--tokens", "64"),
            "needs as many, torch sees 0. Without them ask the cost model: tpoverlap predict --hidden 16",
        ),
        (("--device", "cpu"), "give --tokens or --tokens-from, one of them"),
        (("--device", "cpu", "--tokens", "4", "--tokens-from", "x"), "give --tokens or --tokens-from, one of them"),
        (("--device", "cpu", "--tokens-from", "/nowhere.json"), "cannot read --tokens-from"),
        (("--device", "cpu", "--tokens", "4:2"), "give T, several"),
        (("--device", "cpu", "--tokens", "4", "--kv-heads", "0"), "--kv-heads"),
        (("--device", "cpu", "--tokens", "4", "-o", "/nowhere/ub.yaml"), "cannot write -o"),
    ],
)
def test_wrong_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("-o", str(tmp_path / "ub.yaml"), *arguments)
    assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output
    assert list(tmp_path.iterdir()) == []
