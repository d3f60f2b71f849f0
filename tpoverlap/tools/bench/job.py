"""What the ranks are told: plain picklable data, validated in full before any rank starts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch

from tpoverlap.errors import BackendUnavailableError, ConfigError
from tpoverlap.gemm.fp8 import require_device
from tpoverlap.tools.train.outputs import require_writable
from tpoverlap.tools.train.worker import torchrun_rank

Direction = Literal["ag", "rs"]
DIRECTIONS: tuple[Direction, ...] = ("ag", "rs")
DEFAULT_TP_SIZE = 2
Name = TypeVar("Name", bound=str)
Numbers = Literal["bfloat16", "fp8"]
"""What a row multiplies: the run's dtype (float32 on CPUs), or FP8."""
_LARGEST = 1 << 24
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")


@dataclass(frozen=True)
class BenchJob:
    """One run.

    Attributes:
        suites: names, in the order in which they run.
        num_gpus: GPUs of this host, 0 on CPU. More ranks than GPUs share them: then times say nothing.
        directions: "ag" (all-gather + GEMM), "rs" (GEMM + reduce-scatter).
        tokens: T instead of the suite's own; empty: the suite's.
        shapes: (T, K, N) instead of the suite's own; empty: the suite's.
        rounds: interleaved rounds a row; the median over them counts.
        queued_operations: operations queued behind a delay kernel, a round.
        minutes: no row is begun after so long; None: all rows.
        timeout_s: bound of every wait for a peer.
        numbers: of the gemm suite's rows: "bfloat16" (what `dtype` is) and "fp8", in this order.
        json_path: rewritten after every row; None: no file.
    """

    suites: tuple[str, ...]
    device_type: Literal["cpu", "cuda"]
    num_gpus: int
    tp_size: int
    ranks_per_host: int
    directions: tuple[Direction, ...] = DIRECTIONS
    tokens: tuple[int, ...] = ()
    shapes: tuple[tuple[int, int, int], ...] = ()
    quick: bool = False
    rounds: int = 5
    queued_operations: int = 50
    minutes: float | None = None
    timeout_s: float = 60.0
    json_path: str | None = None
    numbers: tuple[Numbers, ...] = ("bfloat16",)

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16 on GPUs; float32 on CPUs, where bfloat16 is emulated more often than not."""
        return torch.bfloat16 if self.device_type == "cuda" else torch.float32

    @property
    def shares_gpus(self) -> bool:
        """More ranks than GPUs: NCCL refuses two ranks on one GPU, so the group is Gloo's."""
        return self.device_type == "cuda" and self.ranks_per_host > self.num_gpus

    @property
    def is_judged(self) -> bool:
        """Whether ``data/targets.json`` is about this machine: two ranks, a GPU each. Elsewhere there is no verdict."""
        return self.device_type == "cuda" and self.tp_size == 2 and not self.shares_gpus

    @property
    def group_backend(self) -> str:
        """``torch.distributed`` backend of the TP group."""
        return "gloo" if self.device_type == "cpu" or self.shares_gpus else "cpu:gloo,cuda:nccl"

    def device(self, rank: int) -> torch.device:
        """Device of ``rank`` on its host."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", rank % self.ranks_per_host % self.num_gpus)


def parse_shape(text: str) -> tuple[int, int, int]:
    """``TxKxN`` -> (T, K, N). Raises ConfigError."""
    found = _SHAPE.fullmatch(text.strip().lower())
    shape = tuple(map(int, found.groups())) if found else ()
    if len(shape) != 3 or min(shape) < 1 or max(shape) > _LARGEST:
        raise ConfigError(
            f"--shape {text!r} is not TxKxN with whole numbers from 1 to {_LARGEST}; write 8192x8192x4096 for example"
        )
    return shape


def parse_tokens(text: str) -> tuple[int, ...]:
    """``16,128,4096`` -> numbers, ascending, each once. Raises ConfigError."""
    try:
        tokens = sorted({int(part) for part in text.split(",")})
    except ValueError:
        tokens = []
    if not tokens or tokens[0] < 1 or tokens[-1] > _LARGEST:
        raise ConfigError(
            f"--tokens {text!r} is not a list of whole numbers from 1 to {_LARGEST}; write 16,128,4096 for example"
        )
    return tuple(tokens)


def require_numbers(numbers: Sequence[str], suites: Sequence[str], device_type: str) -> None:
    """Raise ConfigError where FP8 rows were asked for that cannot be."""
    if "fp8" not in numbers:
        return
    if "gemm" not in suites:
        raise ConfigError("--numbers fp8 is about suite gemm (suite layers has FP8 rows of its own): add --suite gemm")
    if device_type == "cuda":
        require_device(torch.device("cuda", 0))


def require_files(json_path: Path | None, plot_path: Path | None) -> None:
    """Raise ConfigError unless both can be written and are two files."""
    for option, path in (("--json", json_path), ("--plot", plot_path)):
        if path is not None:
            require_writable(path, option)
    if json_path is not None and plot_path is not None and json_path.resolve() == plot_path.resolve():
        raise ConfigError(f"--json and --plot are both {json_path}: give two files")


def ranks_of(tp: int | None, environ: Mapping[str, str]) -> tuple[int, int]:
    """(tp_size, ranks on this host), from ``--tp`` or from torchrun. Raises ConfigError where they disagree."""
    launched = torchrun_rank(environ)
    if launched is None:
        tp_size = DEFAULT_TP_SIZE if tp is None else tp
        return tp_size, tp_size
    world_size = launched[1]
    if tp is not None and tp != world_size:
        raise ConfigError(
            f"--tp {tp}, but torchrun started WORLD_SIZE={world_size} ranks: make them equal or leave out --tp"
        )
    if world_size < 2:
        raise ConfigError("one rank communicates nothing, so there is nothing to compare; start two or more")
    return world_size, int(environ.get("LOCAL_WORLD_SIZE", world_size))


def device_of(wanted: str) -> tuple[Literal["cpu", "cuda"], int]:
    """(device type, GPUs of this host) for "auto", "cpu" or "cuda". Raises BackendUnavailableError without a GPU."""
    if wanted == "cpu":
        return "cpu", 0
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus:
        return "cuda", num_gpus
    if wanted == "cuda":
        raise BackendUnavailableError("--device cuda, but torch sees no usable GPU here; use --device cpu or auto")
    return "cpu", 0


def unique(names: Sequence[Name]) -> tuple[Name, ...]:
    """Each once, in the order given."""
    return tuple(dict.fromkeys(names))
