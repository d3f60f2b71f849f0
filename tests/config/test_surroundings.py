"""What a file says beside its options: the training file round them, its first comments, its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpoverlap.config import Note, check_file
from tpoverlap.config.claims import claims_of_comments, claims_of_name

OPTIONS = "fc1_fprop: {method: ring_exchange}\n"


def training(**model: object) -> str:
    lines = [f"  {key}: {str(value).lower()}" for key, value in model.items()]
    return "\n".join(["model:", *lines, "  ub_tp_comm_overlap_cfg:", "    fc1_fprop: {method: ring_exchange}", ""])


# rule -> (file name, text that it fires on, line it blames, text beside it that is fine)
CASES: dict[str, tuple[str, str, int, str]] = {
    "te-atomic-needs-fp8": (
        "c.yaml",
        "# Model configs: A100/TP4/BF16\nfc2_fprop: {method: pipeline, atomic_gemm: 1}\n",
        2,
        "# Model configs: H100/TP4/FP8\nfc2_fprop: {method: pipeline, atomic_gemm: 1}\n",
    ),
    "fp8-buffer-in-bf16": (
        "userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192.yaml",
        "fc2_fprop:\n  method: pipeline\n  fp8_buf: 1\n",
        3,
        "fc2_fprop:\n  method: pipeline\n  fp8_buf: 0\n",
    ),
    "overlap-at-tp-1": (
        "c.yaml",
        training(tensor_model_parallel_size=1, ub_tp_comm_overlap=True),
        2,
        training(tensor_model_parallel_size=2, ub_tp_comm_overlap=True),
    ),
    "overlap-without-sequence-parallel": (
        "c.yaml",
        training(tensor_model_parallel_size=2, ub_tp_comm_overlap=True, sequence_parallel=False),
        4,
        training(tensor_model_parallel_size=2, ub_tp_comm_overlap=True, sequence_parallel=True),
    ),
    "overlap-switched-off": (
        "c.yaml",
        training(ub_tp_comm_overlap=False),
        2,
        training(ub_tp_comm_overlap=True),
    ),
    "fp8-training": ("c.yaml", training(fp8=True), 2, training(fp8=False)),
    "name-contradicts-contents": ("h100tp8mbs1.yaml", "# Model configs: H100/TP4\n" + OPTIONS, 1, OPTIONS),
    "not-tuned": ("c.yaml", "# NOT TUNED: borrowed\n" + OPTIONS, 1, "# tuned\n" + OPTIONS),
}


def findings(folder: Path, name: str, text: str, **kwargs: object) -> list[Note]:
    (folder / name).write_text(text)
    return list(check_file(folder / name, **kwargs).notes)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", CASES)
def test_rule_fires_once_with_its_line_and_is_quiet_beside(rule: str, tmp_path: Path) -> None:
    name, fires, line, quiet = CASES[rule]
    assert [note.line for note in findings(tmp_path, name, fires) if note.rule == rule] == [line]
    assert rule not in [note.rule for note in findings(tmp_path, name, quiet)]


def test_a_tp_size_that_the_file_contradicts(tmp_path: Path) -> None:
    text = training(tensor_model_parallel_size=4)
    (note,) = [n for n in findings(tmp_path, "c.yaml", text, tp_size=2) if n.rule == "tp-size-contradicted"]
    assert note.line == 2 and "checked for tp_size 2, but model.tensor_model_parallel_size says 4" in note.message
    assert "tp-size-contradicted" not in [n.rule for n in findings(tmp_path, "c.yaml", text, tp_size=4)]


def test_a_bf16_preset_under_fp8(tmp_path: Path) -> None:
    name, text = (
        "userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192.yaml",
        "fc2_fprop:\n  method: pipeline\n  fp8_buf: 1\n",
    )
    notes = {note.rule: note for note in findings(tmp_path, name, text, precision="fp8")}
    assert "says bf16" in notes["fp8-buffer-in-bf16"].message and notes["fp8-buffer-in-bf16"].target == "te"
    assert notes["name-contradicts-contents"].message.endswith("says precision bf16, but --dtype says fp8")


@pytest.mark.parametrize(
    ("name", "text", "tp_size", "source"),
    [
        ("c.yaml", OPTIONS, 2, "assumed"),
        ("h100tp4mbs1.yaml", OPTIONS, 4, "the file name h100tp4mbs1.yaml"),
        ("h100tp4mbs1.yaml", "## TP8 MBS1\n" + OPTIONS, 8, "the comment"),
        ("h100tp4mbs1.yaml", training(tensor_model_parallel_size=16), 16, "model.tensor_model_parallel_size"),
        ("c.yaml", training(tensor_model_parallel_size="${x}"), 2, "assumed"),
        ("c.yaml", training(tensor_model_parallel_size=0), 2, "assumed"),
    ],
)
def test_who_says_the_tp_size(name: str, text: str, tp_size: int, source: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    report = check_file(tmp_path / name)
    assert (report.tp_size, report.tp_source) == (tp_size, source)


def test_rules_that_depend_on_an_assumed_tp_size_keep_quiet(tmp_path: Path) -> None:
    text = "fc1_fprop: {method: ring_exchange, aggregate: 1, num_splits: 4}\n"
    quiet = {note.rule for note in findings(tmp_path, "c.yaml", text)}
    assert not quiet & {"aggregate-at-two", "ring-num-splits"}
    assert {note.rule for note in findings(tmp_path, "c.yaml", text, tp_size=2)} >= {
        "aggregate-at-two",
        "ring-num-splits",
    }


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ub_cfg_h100_h8192_tp4_mbs1_seqlen8192", {"hidden": 8192, "tp_size": 4, "micro_batch": 1, "seq_len": 8192}),
        ("h100tp4pp8mbs1", {"tp_size": 4, "pp_size": 8, "micro_batch": 1}),
        ("qwen2-5-32b-16gpu-sptrue-tp1", {"params": 32e9, "num_gpus": 16, "sequence_parallel": True, "tp_size": 1}),
        ("126m_perf", {"params": 126e6}),
        ("mlperf-24n__v2", {"num_nodes": 24}),
        ("userbuffers_fp8_b200_h768_tp2_cp2", {"precision": "fp8", "hidden": 768, "tp_size": 2, "cp_size": 2}),
        ("tp2_and_tp4", {}),
        ("http2_h100_v4.1_stp4", {}),
    ],
)
def test_what_names_claim(name: str, said: dict[str, object]) -> None:
    assert {topic: s.value for topic, s in claims_of_name(f"/tmp/tp16/{name}.yaml").items()} == said


def test_what_comments_claim() -> None:
    text = "# UB\n# Model configs: H100/70B/TP8/MBS1/SeqLen8K/FP8\nqkv_fprop: {}\n# Model configs: TP2\n# not tuned\n"
    claims, remarks = claims_of_comments(text)
    assert {topic: (s.value, s.line) for topic, s in claims.items()} == {
        "tp_size": (8, 2), "micro_batch": (1, 2), "seq_len": (8192, 2), "params": (70 * 10**9, 2),
        "precision": ("fp8", 2),
    }  # fmt: skip
    assert remarks == ()


def test_parameters_are_compared_with_room(tmp_path: Path) -> None:
    sizes = {"num_layers": 12, "hidden_size": 768, "ffn_hidden_size": 3072}
    assert "name-contradicts-contents" not in [n.rule for n in findings(tmp_path, "126m.yaml", training(**sizes))]
    wrong = training(**sizes | {"hidden_size": 12288, "ffn_hidden_size": 49152})
    assert "name-contradicts-contents" in [n.rule for n in findings(tmp_path, "126m.yaml", wrong)]
