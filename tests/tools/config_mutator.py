"""Published configuration files, broken in seeded ways, as a slip of the hand, a merge or a bad tool breaks them."""

from __future__ import annotations

import random
from collections.abc import Callable

VALUES = (
    "0", "1", "-1", "2", "1.5", "1e400", ".inf", "0x" + "f" * 5000, "9" * 4400, "999999999999999999999", "true",
    "yes", "null", "~", "''", '"\\ud800"', '"\\e[31m"', '"\\0"', "[1, 2]", "{a: 1}", "{}", "[]", "&a x", "*a",
    "*nowhere", "!!binary aGk=", "!!python/name:os.system", "!!set {a}", "!!timestamp 2001-99-99", "2024-01-01",
    "2024-01-01 10:00:00", "190:20:30", "bulk", "pipeline", "ring_exchange", "fused", "sequential", "auto",
    "external", "RING", "${oc.env:HOME}", "${oc.env:TPOVERLAP_NO}", "${oc.decode:${oc.env:TPOVERLAP_NO,4}}",
    "${oc.decode:${oc.env:TPOVERLAP_NO,}}", "${oc.decode:'[1,'}", "${oc.env:A,{}", "${a}", "${.num_sm}",
    "${..fc1_fprop}", "${qkv_fprop}", "${oc.create:{a:1}}", "${oc.dict.keys:qkv_fprop}", "${${${",
    "$" * 50 + "{" * 50, "|", ">-", "? a", "- b", "<<: *a", "\t", "'unclosed", "[" * 60, "{a: " * 40, "é" * 200,
    "\u2028", "\x07",
)  # fmt: skip
KEYS = (
    "method", "num_sm", "cga_size", "set_sm_margin", "num_splits", "aggregate", "atomic_gemm", "use_ce", "fp8_buf",
    "num_max_streams", "comm_priority", "is_reduce_scatter", "num_sms", "qkv_fprop", "fc1_dgrad", "fc2_wgrad", "mtp",
    "<<", "1", "0x" + "f" * 5000, "? [a, b]", "''", '"a b"', "tpoverlap", "ub_tp_comm_overlap_cfg", "model", "fp8",
    "sequence_parallel", "tensor_model_parallel_size", "num_layers", "hidden_size", "trainer", "ub_tp_comm_overlap",
    '"\\ud800"', "true", "null", "=",
)  # fmt: skip

Lines = list[str]
Random = random.Random


def _value(lines: Lines, rng: Random) -> None:
    at = rng.randrange(len(lines))
    lines[at] = f"{lines[at].partition(':')[0]}: {rng.choice(VALUES)}"


def _key(lines: Lines, rng: Random) -> None:
    at = rng.randrange(len(lines))
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    lines[at] = f"{indent}{rng.choice(KEYS)}:{lines[at].partition(':')[2]}"


def _new_line(lines: Lines, rng: Random) -> None:
    lines.insert(
        rng.randrange(len(lines) + 1), f"{' ' * rng.choice((0, 2, 4, 6))}{rng.choice(KEYS)}: {rng.choice(VALUES)}"
    )


def _delete(lines: Lines, rng: Random) -> None:
    start = rng.randrange(len(lines))
    del lines[start : start + rng.randint(1, 5)]


def _duplicate(lines: Lines, rng: Random) -> None:
    start = rng.randrange(len(lines))
    lines[start:start] = lines[start : start + rng.randint(1, 8)]


def _move(lines: Lines, rng: Random) -> None:
    line = lines.pop(rng.randrange(len(lines)))
    lines.insert(rng.randrange(len(lines) + 1), line)


def _indent(lines: Lines, rng: Random) -> None:
    at = rng.randrange(len(lines))
    lines[at] = rng.choice((" " + lines[at], lines[at][1:], "\t" + lines[at].lstrip(), lines[at].lstrip()))


def _characters(lines: Lines, rng: Random) -> None:
    at = rng.randrange(len(lines))
    line = list(lines[at] or " ")
    for _ in range(rng.randint(1, 3)):
        line[rng.randrange(len(line))] = rng.choice("{}[]:,&*#?|-<>=!%@`'\"\\ \t\n${}0aZé\u2028\ufeff\x85")
    lines[at] = "".join(line)


def _anchor(lines: Lines, rng: Random) -> None:
    at = rng.randrange(len(lines))
    key = lines[at].partition(":")[0]
    lines[at] = rng.choice(
        (f"{key}: &a", f"{key}: *a", f"{key}: {{<<: *a}}", f"{key}: &a [*a, *a]", f"{key}: &a {{b: *a}}")
    )


def _flow(lines: Lines, rng: Random) -> None:
    at = rng.randrange(len(lines))
    key = lines[at].partition(":")[0]
    pairs = ", ".join(f"{rng.choice(KEYS)}: {rng.choice(VALUES)}" for _ in range(rng.randint(0, 3)))
    lines[at] = f"{key}: {{{pairs}}}"


def _truncate(lines: Lines, rng: Random) -> None:
    keep = rng.randrange(len(lines))
    lines[keep:] = [lines[keep][: rng.randrange(len(lines[keep]) + 1)]]


def _nest(lines: Lines, rng: Random) -> None:
    lines[:] = ["model:", "  ub_tp_comm_overlap_cfg:", *(f"    {line}" for line in lines)]


MUTATIONS: tuple[Callable[[Lines, Random], None], ...] = (
    _value, _value, _key, _new_line, _new_line, _delete, _duplicate, _move, _indent, _characters, _anchor, _flow,
    _truncate, _nest,
)  # fmt: skip


def mutated(text: str, seed: int) -> bytes:
    """``text`` after one to six mutations that ``seed`` determines; one in forty has its bytes broken as well."""
    rng = random.Random(seed)
    lines = text.split("\n")
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        rng.choice(MUTATIONS)(lines, rng)
        lines = lines or [""]
    content = bytearray("\n".join(lines).encode("utf-8", "surrogatepass"))
    if rng.random() < 1 / 40 and content:
        for _ in range(rng.randint(1, 8)):
            content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content)
