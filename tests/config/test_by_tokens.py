"""The section ``tpoverlap: by_tokens:``: what is read, and every way to write it wrongly."""

from __future__ import annotations

from typing import Any

import pytest

from tpoverlap.config import check, resolve, to_yaml
from tpoverlap.errors import ConfigError

ROW = {"up_to": 8, "method": "sequential"}
GOOD = {"features": 4, "width": 8, "rows": [ROW, {"up_to": 9, "method": "pipeline", "num_splits": 2, "time_us": 1.5}]}


def config(entry: Any, name: str = "fc2_fprop") -> dict[str, Any]:
    return {"tpoverlap": {"by_tokens": {name: entry}}}


def test_a_good_section_is_kept_whole(tmp_path: Any) -> None:
    resolved = resolve(config(GOOD), 2)
    assert resolved.extras == config(GOOD)["tpoverlap"] and resolved.notes == ()
    assert resolved.digest != resolve(None, 2).digest, "ranks compare it"
    path = tmp_path / "ub.yaml"
    path.write_text(to_yaml(resolved))
    assert resolve(path, 2) == resolved


@pytest.mark.parametrize(
    ("entry", "key", "says"),
    [
        (5, "by_tokens.fc2_fprop", "must be a mapping"),
        (GOOD | {"feature": 4}, "by_tokens.fc2_fprop.feature", "did you mean 'features'?"),
        (GOOD | {"features": True}, "by_tokens.fc2_fprop.features", "at least 1"),
        (GOOD | {"width": "8"}, "by_tokens.fc2_fprop.width", "at least 1"),
        (GOOD | {"instead_of": "ring"}, "by_tokens.fc2_fprop.instead_of", "'ring'"),
        (GOOD | {"rows": []}, "by_tokens.fc2_fprop.rows", "at least one row"),
        (GOOD | {"fp8_rows": []}, "by_tokens.fc2_fprop.fp8_rows", "at least one row"),
        (GOOD | {"fp8_rows": [ROW, ROW]}, "by_tokens.fc2_fprop.fp8_rows[1].up_to", "above 8"),
        ({"features": 4, "width": 8}, "by_tokens.fc2_fprop.rows", "at least one row"),
        (GOOD | {"rows": [5]}, "by_tokens.fc2_fprop.rows[0]", "must be a mapping"),
        (GOOD | {"rows": [ROW, ROW]}, "by_tokens.fc2_fprop.rows[1].up_to", "above 8"),
        (GOOD | {"rows": [ROW | {"up_to": 0}]}, "by_tokens.fc2_fprop.rows[0].up_to", "above 0"),
        (GOOD | {"rows": [ROW | {"upto": 1}]}, "by_tokens.fc2_fprop.rows[0].upto", "did you mean 'up_to'?"),
        (GOOD | {"rows": [ROW | {"method": "auto"}]}, "by_tokens.fc2_fprop.rows[0].method", "'auto' is not one of"),
        (GOOD | {"rows": [ROW | {"method": "bulk"}]}, "by_tokens.fc2_fprop.rows[0].method", "'bulk' is not one of"),
        (GOOD | {"rows": [ROW | {"num_splits": 2}]}, "by_tokens.fc2_fprop.rows[0].num_splits", "pipeline only"),
        (GOOD | {"rows": [ROW | {"aggregate": True}]}, "by_tokens.fc2_fprop.rows[0].aggregate", "ring_exchange only"),
        (GOOD | {"rows": [ROW | {"time_us": "fast"}]}, "by_tokens.fc2_fprop.rows[0].time_us", "microseconds"),
    ],
)
def test_faults(entry: Any, key: str, says: str) -> None:
    notes = [note for note in check(config(entry), 2) if note.rule == "by-tokens-illegal"]
    assert [(note.key, note.level) for note in notes] == [(key, "error")]
    with pytest.raises(ConfigError, match="let tpoverlap tune write the section") as caught:
        resolve(config(entry), 2)
    assert says in str(caught.value)


def test_rows_of_either_kind_are_enough() -> None:
    for entry in (GOOD | {"fp8_rows": [ROW]}, {"features": 4, "width": 8, "fp8_rows": [ROW]}):
        assert resolve(config(entry), 2).extras == config(entry)["tpoverlap"]
    assert resolve(config(GOOD | {"fp8_rows": [ROW]}), 2).digest != resolve(config(GOOD), 2).digest


def test_names() -> None:
    assert not [note for note in check(config(GOOD, "mtp_fprop"), 2) if note.level == "error"], "a user's own name"
    assert [note.key for note in check(config(GOOD, "proj_wgrad"), 2)] == ["by_tokens.proj_wgrad"]
    assert [note.key for note in check({"tpoverlap": {"by_tokens": 3}}, 2)] == ["by_tokens"]
    pipeline = [note.key for note in check(config(GOOD, "fc1_fprop"), 2)]
    assert pipeline == ["by_tokens.fc1_fprop.rows[1].method"], "pipeline cannot all-gather"
