"""The table of few tokens: what it says of rows, and that the documents hold what the file gives."""

from __future__ import annotations

import json

import click
import pytest

from benchmarks.few_tokens_table import BEGIN, DOCUMENTS, END, RESULTS, ROOT, filled, table


def test_a_row() -> None:
    def times(base: float) -> dict[str, dict[str, float]]:
        labels = ("gemm", "plain", "kernel", "sequential")
        return {label: {"queued_us": base + i, "host_us": 10 * base + i} for i, label in enumerate(labels)}

    rows = [
        {"direction": direction, "T": t, "K": 64, "N": 32, "times": times(base)}
        for direction, base in (("gather", 1.0), ("scatter", 5.0))
        for t in (16, 8)
    ]
    lines = table({"rows": rows}, None).splitlines()
    assert lines[2] == "| 8 x 64 x 32 | 1 | **2** | 3 | 4 | 11 | 12 | 5 | **6** | 7 | 8 | 51 | 52 |"
    assert len(lines) == 4 and len(table({"rows": rows}, (1, 1)).splitlines()) == 2


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_hold_it(name: str) -> None:
    """Whoever adds results runs python -m benchmarks.few_tokens_table --write."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert filled(text, table(json.loads(RESULTS.read_text(encoding="utf-8")), DOCUMENTS[name])) == text


def test_a_document_without_its_place() -> None:
    with pytest.raises(click.ClickException, match="each once"):
        filled(f"{BEGIN} {BEGIN} {END}", "")
