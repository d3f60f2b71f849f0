"""Links of the documents: the file is there, and the heading too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder, pattern in ((ROOT, "*.md"), (ROOT / "docs", "**/*.md"), (ROOT / "benchmarks", "**/*.md"))
    for path in folder.glob(pattern)
)
LINK = re.compile(r"\]\(\s*(?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\s*\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Of every heading, as GitHub makes them: lower case, no punctuation, spaces as hyphens; repeated ones count up."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+)$", FENCE.sub("", text), re.MULTILINE):
        base = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        names = (base if number == 0 else f"{base}-{number}" for number in range(1000))
        found.add(next(name for name in names if name not in found))
    return found


def broken(document: Path) -> list[str]:
    """Links of ``document`` that lead nowhere."""
    text = document.read_text(encoding="utf-8")
    problems = []
    for found in LINK.finditer(re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))):
        if re.match(r"[a-z]+:", found["path"]):
            continue
        target = (document.parent / found["path"]).resolve() if found["path"] else document
        if not target.exists():
            problems.append(f"{found[0]}: no such file")
        elif found["anchor"] and found["anchor"] not in anchors(target.read_text(encoding="utf-8")):
            problems.append(f"{found[0]}: no such heading")
    return problems


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    assert broken(ROOT / name) == []


def test_broken_ones_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# One `two`, three\n# One `two`, three\n[x](#one-two-three-1) [y](a.md#one-two-three)\n"
    )
    assert broken(tmp_path / "a.md") == []
    (tmp_path / "b.md").write_text("[x](a.md#four) [y](c.md)\n```\n[z](d.md)\n```\n[w](https://example.org/q)\n")
    assert broken(tmp_path / "b.md") == ["](a.md#four): no such heading", "](c.md): no such file"]
