"""Record the two token-count walks of ``tpoverlap bench --suite dynamic`` from real text.

python -m benchmarks.record_walks tpoverlap/tools/bench/data/walks.json

The text is this Python's standard library; documents are its top-level functions and classes, a token is a byte, and
`tools/train` reads, shuffles and packs them as it does for training (its aligned steps, every fifth, are left out).
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from pathlib import Path
from typing import Any

import click

from tpoverlap.tools.train.batching import plan_steps
from tpoverlap.tools.train.corpus import Corpus, read_corpus

CAPACITY_TOKENS = 8192
NUM_PLANNED = 60  # every fifth is left out: 48 remain
SEED = 1
AS_MANY_AS_FIT = 1000
FIXED_DOCUMENTS = 6
FIXED_LONGEST = 3 * CAPACITY_TOKENS // 8  # so that six of them fit, whichever they are


def record(corpus: Corpus) -> dict[str, Any]:
    """Both walks, with what is needed to make them again."""
    short = [document for document in corpus.documents if len(document) <= FIXED_LONGEST]
    walks = {
        "packed": ("as many documents as fit in C", _walk(list(corpus.documents), AS_MANY_AS_FIT)),
        "fixed": (
            f"{FIXED_DOCUMENTS} documents of at most {FIXED_LONGEST} tokens a microbatch",
            _walk(short, FIXED_DOCUMENTS, exactly=True),
        ),
    }
    return {
        "recorded_by": "python -m benchmarks.record_walks tpoverlap/tools/bench/data/walks.json",
        "corpus": "standard library *.py of Python " + platform.python_version(),
        "corpus_bytes": corpus.size_bytes,
        "corpus_sha256": hashlib.sha256(b"\0".join(corpus.documents)).hexdigest(),
        "seed": SEED,
        "capacity_tokens": CAPACITY_TOKENS,
        "walks": {name: {"rule": rule, "num_tokens": tokens} for name, (rule, tokens) in walks.items()},
    }


def _walk(documents: list[bytes], num_documents: int, *, exactly: bool = False) -> list[int]:
    steps = plan_steps(
        documents,
        capacity_tokens=CAPACITY_TOKENS,
        num_steps=NUM_PLANNED,
        tp_size=2,
        sequences_per_step=num_documents,
        seed=SEED,
    )
    ordinary = [step for step in steps if not step.aligned]
    if exactly and any(len(step.documents) != num_documents for step in ordinary):
        raise click.ClickException(f"a step has no {num_documents} documents that fit in C: lower FIXED_LONGEST")
    return [step.num_tokens for step in ordinary]


@click.command()
@click.argument("target", type=click.Path(path_type=Path))
def main(target: Path) -> None:
    """Write the walks to TARGET."""
    recorded = record(read_corpus())
    text = json.dumps(recorded, indent=1) + "\n"
    # One line a walk: numbers one below the other are no easier to read.
    target.write_text(re.sub(r"\[[\d,\s]+\]", lambda found: "[" + " ".join(found.group()[1:-1].split()) + "]", text))
    for name, walk in recorded["walks"].items():
        tokens = walk["num_tokens"]
        click.echo(f"{name}: {len(tokens)} steps, mean T/C {sum(tokens) / len(tokens) / CAPACITY_TOKENS:.3f}")


if __name__ == "__main__":
    main()
