"""`fused` in one launch for few tokens: every candidate tile beside ring, sequential by copy engine ("sequential") and
by one small kernel ("kernel"), and NCCL + cuBLAS ("plain"). One command.

``python -m benchmarks.small_tokens --out FILE`` on a host with two GPUs takes a minute and a half; ``--device cpu``
runs tiny sizes in Triton's interpreter, which checks this script and no speed. After every row the rows so far are
written beside the file, as ``FILE.rows``, and in the end the file. From it come `_MOST_TOKENS` of
``fused_form.py`` and the table of ``gemm/triton/tiles.py``. ``--tiles none`` leaves the candidates out.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import small_tokens_ranks as ranks
from benchmarks.environment import environment
from tpoverlap.testing import RankPool

_START_S = 12.0
"""Kept back for starting and ending processes."""


def main(given: Sequence[str] | None = None) -> int:
    """Run, write the file, print the table; 1 if something was wrong or nothing was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--budget-s", type=float, default=90.0, help="no row is begun later than this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiles", default="", help="only these, by name, such as 64x64x128/4,64x128x64/5; none: none")
    arguments = parser.parse_args(given)
    started = time.monotonic()
    found: dict[str, Any] = {
        "format": "small tokens",
        "environment": environment(),
        "device": arguments.device,
        "rows": [],
    }
    arguments.out.write_text(json.dumps(found, indent=1, default=str))
    if arguments.device == "cuda":  # one cache for both ranks: what one compiled, the other one loads
        os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="small_tokens_triton_"))
    with tempfile.TemporaryDirectory() as folder:
        progress = arguments.out.with_name(arguments.out.name + ".rows")
        progress.unlink(missing_ok=True)
        tiles = tuple(filter(None, arguments.tiles.split(",")))
        call = (arguments.device, str(progress), folder, tiles, arguments.rounds, started + arguments.budget_s)
        environment_of_ranks = {"TRITON_INTERPRET": "1" if arguments.device == "cpu" else None}
        try:
            with RankPool(2, device=arguments.device, env=environment_of_ranks, grace_s=8.0) as pool:
                answers = pool.run(ranks.measure, *call, timeout_s=arguments.budget_s + _START_S)
            found["rows"] = answers[0]
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"[-6000:]
        if progress.exists():
            done = json.loads(progress.read_text())
            found["compile_s"] = done["compile_s"]
            found["rows"] = found["rows"] or done["rows"]
        for path in sorted(Path(folder).glob("rank*")):
            if "error" in found and path.read_text():
                found.setdefault("files", {})[path.name] = path.read_text()[:6000]
    found["seconds"] = round(time.monotonic() - started, 1)
    wanted = 2 * len(ranks.SHAPES[arguments.device]) * len(ranks.TOKENS[arguments.device])
    found["rows_left_out"] = wanted - len(found["rows"])
    arguments.out.write_text(json.dumps(found, indent=1, default=str))
    print_table(found)
    wrong = any(any(one) for row in found["rows"] for one in row["wrong"])
    return 1 if "error" in found or wrong or not found["rows"] else 0


def print_table(found: dict[str, Any]) -> None:
    """One line a row: queued/host us of each label, the fastest first."""
    if "error" in found:
        print(found["error"][:2000])
    for row in found["rows"]:
        times = sorted(row["times"].items(), key=lambda item: item[1]["queued_us"])
        shown = "  ".join(f"{label} {one['queued_us']:.0f}/{one['host_us']:.0f}" for label, one in times)
        wrong = f"  WRONG {row['wrong']}" if any(row["wrong"]) else ""
        print(f"{row['direction']} {row['T']}x{row['K']}x{row['N']}: {shown}{wrong}")
    print(f"(queued/host us)  {found['rows_left_out']} rows left out, {found['seconds']} s in all")


if __name__ == "__main__":
    raise SystemExit(main())
