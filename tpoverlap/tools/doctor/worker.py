"""Entry of a probe process: ``python -P worker.py '{"task": ..., "rank": ..., ...}'``.

It and the ``worker_*.py`` beside it (but for ``worker_methods.py``) import nothing of tpoverlap, so that they start
fast and still answer when the package itself does not import. Messages to the parent are lines on stdout:
``@tpoverlap-doctor ["section", {...}]``.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def emit(section: str, content: dict[str, Any]) -> None:
    """Tell the parent; what was told survives whatever happens next. A section told again replaces the former."""
    print(f"@tpoverlap-doctor {json.dumps([section, content])}", flush=True)


def main() -> None:
    """Run the task; an exception becomes the section ``error`` and exit code 1."""
    settings = json.loads(sys.argv[1])
    code = 0
    try:
        file = Path(__file__).with_name("worker_" + settings["task"].partition(":")[0] + ".py")
        runpy.run_path(str(file))[settings["task"].partition(":")[2]](settings, emit)
    except BaseException as error:
        text = str(error).strip().splitlines() or [""]
        emit("error", {"message": f"{type(error).__name__}: {text[0][:400]}"})
        code = 1
    sys.stdout.flush()
    # Not sys.exit: tearing down CUDA contexts and process groups can hang, and it is not what is being probed.
    os._exit(code)


if __name__ == "__main__":
    main()
