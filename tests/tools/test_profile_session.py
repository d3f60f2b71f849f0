"""``with tpo.profile(...)`` on real ranks: files, attribution, and what happens when something goes wrong."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpoverlap as tpo
from tpoverlap.comm import Transfer
from tpoverlap.testing.faults import before_transfers
from tpoverlap.testing.simulated import SimulatedBackend
from tpoverlap.tools.profile.model import PHASES

SIZES = (64, 32)
CONFIG = {"proj_fprop": {"method": "pipeline", "num_splits": 2}, "fc1_fprop": {"method": "sequential"}}
METHODS = {
    "qkv_fprop": "ring_exchange",
    "proj_fprop": "pipeline",
    "fc1_fprop": "sequential",
    "fc1_dgrad": "bulk",
    "fc1_wgrad": "bulk",
    "proj_dgrad": "ring_exchange",
    "qkv_dgrad": "bulk",
    "qkv_wgrad": "bulk",
}


def manager(backend: Any = "auto") -> tpo.UserBufferManager:
    return tpo.UserBufferManager(dist.group.WORLD, SIZES, torch.float32, "cpu", ub_cfgs=CONFIG, backend=backend)


class Net(torch.nn.Module):
    def __init__(self, mgr: tpo.UserBufferManager) -> None:
        super().__init__()
        self.qkv = tpo.nn.Linear(32, 96, False, parallel_mode="column", manager=mgr, ub_name="qkv")
        self.proj = tpo.nn.Linear(32, 32, False, parallel_mode="row", manager=mgr, ub_name="proj")
        self.fc1 = tpo.nn.Linear(32, 64, False, parallel_mode="column", manager=mgr, ub_name="fc1")

    def step(self, mgr: tpo.UserBufferManager, num_tokens: int) -> None:
        with mgr.microbatch(num_tokens) as partition:
            x = torch.ones(partition.counts[mgr.rank], 32, requires_grad=True)
            features = 32 // mgr.tp_size
            self.fc1(self.proj(self.qkv(x)[:, :features])).sum().backward()


def profiled_steps(
    rank: int, world_size: int, directory: str, backend: Any = "auto"
) -> tuple[dict[str, Any] | None, int]:
    with manager(backend) as mgr:
        net = Net(mgr)
        net.step(mgr, 9)
        with tpo.profile(directory) as result:  # the only open manager: found without being named
            for num_tokens in (11, 30, 64):
                net.step(mgr, num_tokens)
        assert mgr.channel is not None and mgr.channel.trace is None
        net.step(mgr, 5)  # no longer recorded
        return (result.report.as_dict() if result.report else None), len(result.spans)


@pytest.mark.parametrize("backend", ["shared", "process_group", SimulatedBackend], ids=str)
def test_a_training_step_is_attributed_to_its_gemms(backend: Any, rank_pool: Any, tmp_path: Path) -> None:
    directory = tmp_path / "new" / "out"
    (report, num_spans), (other, fewer_spans) = rank_pool(2).run(profiled_steps, str(directory), backend, timeout_s=60)
    assert other is None and report is not None and num_spans == 2 * fewer_spans > 0
    assert sorted(path.name for path in directory.iterdir()) == [
        "report.json",
        "timeline.png",
        "trace-rank0.json",
        "trace-rank1.json",
        "trace.json",
    ]
    assert report == json.loads((directory / "report.json").read_text())
    rows = {row["name"]: row for row in report["gemms"]}
    assert {name: row["method"] for name, row in rows.items()} == METHODS
    for row in rows.values():
        assert row["calls"] == 3 and row["tokens"] == [11, 64]
        assert row["wall_us"] >= row["compute_us"] > 0 and row["comm_us"] > 0
        assert row["exposed_us"] == pytest.approx(row["wall_us"] - row["compute_us"], abs=0.2)
        assert 0 <= row["overlapped_us"] <= row["comm_us"] + 0.1
    spans = json.loads((directory / "trace.json").read_text())["traceEvents"]
    plain = {event["args"]["gemm"] for event in spans if event.get("args", {}).get("phase") == "collective"}
    assert plain == ({"fc1_fprop"} if backend == "process_group" else set()), "sequential without mapped memory"
    assert (directory / "timeline.png").read_bytes()[:4] == b"\x89PNG"


def test_the_trace_holds_torchs_events_and_ours_on_one_clock(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(profiled_steps, str(tmp_path), timeout_s=60)
    events = json.loads((tmp_path / "trace-rank1.json").read_text())["traceEvents"]
    ours = [event for event in events if event.get("cat") == "tpoverlap"]
    assert {event["args"]["phase"] for event in ours} == set(PHASES) - {"collective"}
    assert {event["args"]["rank"] for event in ours} == {1}
    lanes = {
        event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] >= 900_000_000
    }
    assert {"caller", "comm", "compute0"} <= lanes
    # torch saw the same operation as a range of its own: ours lies inside it.
    label = "qkv_fprop all-gather ring_exchange T=30"
    (seen,) = [event for event in events if event["name"] == label and event["ph"] == "X"]
    (mine,) = [event for event in ours if event["name"] == "qkv_fprop operation" and event["args"]["num_tokens"] == 30]
    slack_us = 500.0
    assert seen["ts"] - slack_us <= mine["ts"] and mine["ts"] + mine["dur"] <= seen["ts"] + seen["dur"] + slack_us


def profiled_with_a_late_rank(rank: int, world_size: int, directory: str, how: str) -> list[dict[str, Any]]:
    """Rank 1's rows come late, or rank 1 comes late to the step."""

    def late(transfer: Transfer) -> None:
        time.sleep(0.02)

    with manager() as mgr:
        net = Net(mgr)
        rows_late = before_transfers(mgr, late, only_source=1) if how == "rows" else nullcontext()
        with rows_late, tpo.profile(directory, manager=mgr, torch_profiler=False) as result:
            for _ in range(3):
                if how == "step" and rank == 1:
                    time.sleep(0.03)
                net.step(mgr, 64)
        return result.report.as_dict()["gemms"] if result.report else []


@pytest.mark.parametrize(("how", "names"), [("rows", ("qkv_fprop", "proj_dgrad")), ("step", ("qkv_fprop",))])
def test_the_late_rank_is_named(how: str, names: tuple[str, ...], rank_pool: Any, tmp_path: Path) -> None:
    rows, _ = rank_pool(2).run(profiled_with_a_late_rank, str(tmp_path), how, timeout_s=60)
    waited = {row["name"]: row for row in rows}
    for name in names:
        assert waited[name]["waited_for_rank"] == 1 and waited[name]["wait_us"]["1"] > 10_000
    advice = json.loads((tmp_path / "report.json").read_text())["advice"]
    assert any(one["rule"] == "late-rank" and "rank 1" in one["text"] for one in advice)


def failing_block(rank: int, world_size: int, directory: str) -> list[str]:
    with manager() as mgr:
        net = Net(mgr)
        with pytest.raises(ZeroDivisionError), tpo.profile(directory, manager=mgr, torch_profiler=False):
            net.step(mgr, 10)
            raise ZeroDivisionError
        net.step(mgr, 10)  # the manager goes on
        with (
            tpo.profile(directory, manager=mgr, torch_profiler=False),
            pytest.raises(tpo.ConfigError, match="traced already"),
            tpo.profile(directory, manager=mgr),
        ):
            pass
        with manager(), pytest.raises(tpo.ConfigError, match="2 open managers"), tpo.profile(directory):
            pass
    with pytest.raises(tpo.ConfigError, match="0 open managers"), tpo.profile(directory):
        pass
    return sorted(path.name for path in Path(directory).iterdir())


def test_a_block_that_raises_keeps_its_own_trace(rank_pool: Any, tmp_path: Path) -> None:
    first, _ = rank_pool(2).run(failing_block, str(tmp_path), timeout_s=60)
    assert "trace-rank0.json" in first


def unwritable(rank: int, world_size: int, path: str) -> None:
    with manager() as mgr, pytest.raises(tpo.ConfigError, match="cannot write to"), tpo.profile(path, manager=mgr):
        pass


def test_a_directory_that_cannot_be_written(rank_pool: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    rank_pool(2).run(unwritable, str(tmp_path / "file"), timeout_s=60)


def one_rank(rank: int, world_size: int, directory: str) -> dict[str, Any]:
    alone = [dist.new_group([member]) for member in range(world_size)][rank]
    with tpo.UserBufferManager(alone, SIZES, torch.float32, "cpu") as mgr:
        net = Net(mgr)
        with tpo.profile(f"{directory}/{rank}", torch_profiler=False) as result:
            net.step(mgr, 7)
        assert result.report is not None
        return result.report.as_dict()


def test_one_rank_alone_has_nothing_to_attribute(rank_pool: Any, tmp_path: Path) -> None:
    for report in rank_pool(2).run(one_rank, str(tmp_path), timeout_s=60):
        assert report["gemms"] == [] and "nothing is communicated" in report["notes"][0]
