"""What a file's name and its first comments claim about the run that it was made for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Final

from tpoverlap.config.surroundings import Statement, Value

GPUS: Final = ("a100", "h100", "h200", "h800", "h20", "gh200", "b100", "b200", "b300", "gb200", "gb300")

# topic -> pattern with the value as its group. (?<![a-z]) lets h100tp4mbs1 through, but no word that ends in "tp".
_PATTERNS: Final = (
    ("tp_size", re.compile(r"(?<![a-z])tp(\d{1,4})(?!\d)")),
    ("pp_size", re.compile(r"(?<![a-z])pp(\d{1,4})(?!\d)")),
    ("cp_size", re.compile(r"(?<![a-z])cp(\d{1,4})(?!\d)")),
    ("micro_batch", re.compile(r"(?<![a-z])mbs(\d{1,5})(?!\d)")),
    ("seq_len", re.compile(r"(?<![a-z])seqlen(\d{1,8}k?)(?![a-z0-9])")),
    ("hidden", re.compile(r"(?<![a-z0-9])h(\d{3,6})(?![a-z0-9])")),
    ("precision", re.compile(r"(?<![a-z0-9])(bf16|fp8)(?![a-z0-9])")),
    ("sequence_parallel", re.compile(r"(?<![a-z])sp(true|false)(?![a-z])")),
    ("num_gpus", re.compile(r"(?<![a-z0-9])(\d{1,6})gpus?(?![a-z])")),
    ("num_nodes", re.compile(r"(?<![a-z0-9.])(\d{1,5})n(?![a-z0-9])")),
    ("params", re.compile(r"(?<![a-z0-9.])(\d{1,4}(?:\.\d)?[mb])(?![a-z0-9])")),
)
_HEADER: Final = re.compile(r"\b(?:model\s+configs?\s*:|tp\d+\s+mbs\d+)", re.IGNORECASE)
_UNTUNED: Final = re.compile(r"not\s+tuned|need(?:s|ed)?\s+to\s+(?:be\s+)?tune|borrowed\s+from|dummy", re.IGNORECASE)
_COMMENT_LINES: Final = 20
_SCALE: Final = {"k": 1024, "m": 10**6, "b": 10**9}


def claims_of_name(path: str) -> dict[str, Statement]:
    """What the name of the file at ``path`` says; {} where it says nothing that is understood."""
    name = PurePath(path).name
    return {topic: Statement(value, f"the file name {name}") for topic, value in _claims(PurePath(name).stem)}


def claims_of_comments(text: str) -> tuple[dict[str, Statement], tuple[tuple[int, str], ...]]:
    """What the comments before the first key say about the run, and those which say that nobody tuned the file."""
    claims: dict[str, Statement] = {}
    remarks: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines()[:_COMMENT_LINES], 1):
        comment = line.strip()
        if comment and not comment.startswith("#"):
            break
        if _HEADER.search(comment):
            for topic, value in _claims(comment):
                claims.setdefault(topic, Statement(value, "the comment", number))
        if _UNTUNED.search(comment):
            remarks.append((number, comment.lstrip("# ")[:120]))
    return claims, tuple(remarks)


def _claims(text: str) -> Iterator[tuple[str, Value]]:
    lowered = text.lower()
    for topic, pattern in _PATTERNS:
        values = {match for match in pattern.findall(lowered) if topic != "hidden" or f"h{match}" not in GPUS}
        if len(values) == 1:  # two different ones claim nothing
            yield topic, _value(values.pop())


def _value(text: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    if text[-1] in _SCALE:
        return int(float(text[:-1]) * _SCALE[text[-1]])
    return int(text) if text.isdigit() else text
