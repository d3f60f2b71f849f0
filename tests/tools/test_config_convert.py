"""`tpoverlap config convert`: the same meaning on the other side, and the file's own text again on the way back."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from tpoverlap.config import KNOWN_NAMES, SUPPORTED, OverlapConfig, check_file, resolve
from tpoverlap.config.defaults import transformer_engine_config
from tpoverlap.errors import ConfigError
from tpoverlap.tools.cli import main
from tpoverlap.tools.config.convert_file import converted
from tpoverlap.tools.config.preset_name import PresetName
from tpoverlap.tools.config.presets import FOLDER

DATA = Path(__file__).parents[1] / "data" / "ub_configs"
FILES = sorted([*DATA.glob("*.yaml"), *FOLDER.glob("*.yaml")])
LATER = SUPPORTED | {"fused", "atomic_gemm", "sm_copy", "fp8"}

AWKWARD = """# mine
fc2_fprop: {method: pipeline, num_max_streams: 2}   # why

qkv_fprop:
  method: auto  # ours
  aggregate: 0

  # about num_sm
  num_sm: 2
mtp: {is_reduce_scatter: false, num_sm: 1}
proj_fprop:
  # no overlap here

  method: sequential
other: [1,
  2]
tpoverlap: {}
fc1_dgrad: {}
qkv_dgrad:
  method: >-
    ring_exchange
fc1_fprop:
  use_ce: 1"""


def meaning(path: Path, tp_size: int) -> tuple[dict[str, OverlapConfig], dict[str, OverlapConfig]]:
    """What this library and what Transformer Engine make of a file, for the ten names that communicate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = resolve(path, tp_size, supported=LATER)
    ours = {name: options for name, options in config.names.items() if name in KNOWN_NAMES}
    return ours, {name: transformer_engine_config(name, config.explicit.get(name, {}), tp_size) for name in ours}


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(main, ["config", "convert", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem[-40:])
def test_published_files_there_and_back(path: Path, tmp_path: Path) -> None:
    text, tp_size = path.read_bytes().decode(), check_file(path).tp_size
    ours, theirs = meaning(path, tp_size)
    there = tmp_path / path.name
    there.write_bytes(converted(str(path), "tpoverlap", None).text.encode())
    assert (
        meaning(there, tp_size)[0] == theirs
    )  # what Transformer Engine makes of it is what this library makes of it now
    assert converted(str(there), "te", None).text == text
    there.write_bytes(converted(str(path), "te", None).text.encode())
    assert meaning(there, tp_size)[1] == ours
    assert converted(str(there), "tpoverlap", None).text == text


@pytest.mark.parametrize("text", [AWKWARD, AWKWARD + "\n", AWKWARD.replace("\n", "\r\n"), "", "# only this", "x: 1"])
@pytest.mark.parametrize("to", ["te", "tpoverlap"])
def test_awkward_files_there_and_back(text: str, to: Any, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(text.encode())
    there = converted(str(path), to, 4).text
    path.write_bytes(there.encode())
    assert all(
        comment in there for comment in ("# mine", "# why", "# about num_sm", "# no overlap here") if comment in text
    )
    assert converted(str(path), "tpoverlap" if to == "te" else "te", 4).text == text
    assert converted(str(path), to, 4).text == there  # it was converted already
    if to == "te":
        assert not [
            note for note in check_file(path, 4).notes if note.rule in ("te-refuses-option", "te-has-no-method")
        ]


def test_what_cannot_be_said_to_transformer_engine_is_remarked(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(AWKWARD)
    result = run(path, "--to", "te")
    assert "note: proj_fprop is sequential" in result.stderr and "note: qkv_fprop: method auto becomes" in result.stderr
    assert "# kept by tpoverlap config convert: method: auto  # ours" in result.stdout


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{fc1_fprop: {num_sm: 1}}\n", "in braces"),
        ("fc1_fprop: &a {num_sm: 1}\nfc2_fprop: *a\n", "alias"),
        ("fc1_fprop: {num_sms: 1}\n", "num_sms is no option"),
    ],
)
def test_files_that_cannot_be_converted(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    result = run(path, "--to", "te")
    assert result.exit_code == 1 and says in result.stderr and not result.stdout
    assert run(tmp_path / "none", "--to", "te").exit_code == 2


def test_in_place_keeps_the_file_when_it_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("fc2_fprop:\n  num_sm: 4\n")
    assert run(path, "--to", "tpoverlap", "-o", path).exit_code == 0
    assert "method: pipeline  # added by" in path.read_text()
    assert run(path, "--to", "te", "-o", tmp_path / "none" / "c.yaml").exit_code == 1
    assert [child.name for child in tmp_path.iterdir()] == ["c.yaml"]


def test_nemo_takes_its_name_from_the_training_file(tmp_path: Path) -> None:
    (path,) = DATA.glob("*dgxc*llama3.1_70b*")
    assert run(path, "--to", "nemo", "-o", tmp_path).exit_code == 1  # it does not say the GPU
    assert run(path, "--to", "nemo", "--gpu", "H100", "-o", tmp_path).exit_code == 0
    (made,) = tmp_path.iterdir()
    assert made.name == "userbuffers_bf16_h100_h8192_tp4_cp2_mbs1_seqlen8192.yaml"
    assert meaning(made, 4)[1] == meaning(path, 4)[0]
    assert not [note for note in check_file(made).notes if note.level != "note"]


@given(
    st.builds(
        PresetName,
        st.sampled_from(["bf16", "fp8"]),
        st.from_regex(r"[a-z][a-z0-9]{0,6}", fullmatch=True),
        *[st.integers(1, 10**6)] * 4,
        st.none() | st.integers(1, 64),
        st.booleans(),
    )
)
def test_preset_names_round_trip(name: PresetName) -> None:
    assert PresetName.parse(str(name)) == name


@pytest.mark.parametrize("name", ["", "userbuffers_fp16_h100_h1_tp1_mbs1_seqlen1", "userbuffers_bf16_h100_h8192_tp4"])
def test_other_names_are_none(name: str) -> None:
    with pytest.raises(ConfigError, match="is no NeMo preset name"):
        PresetName.parse(name)
