"""From options to a `TrainJob`: everything that can be wrong is found here, before any rank is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from tpoverlap.errors import BackendUnavailableError, ConfigError
from tpoverlap.gemm.fp8 import require_output_dtype
from tpoverlap.tools.train.batching import plan_steps
from tpoverlap.tools.train.corpus import Corpus, read_corpus
from tpoverlap.tools.train.fp8 import require_fp8
from tpoverlap.tools.train.job import BackwardMode, DType, Fp8Name, LayerStyle, TrainJob
from tpoverlap.tools.train.methods import choose
from tpoverlap.tools.train.outputs import require_writable
from tpoverlap.tools.train.weights import ModelConfig
from tpoverlap.tools.train.worker import torchrun_rank

DEFAULT_TP_SIZE = 2


@dataclass(frozen=True)
class TrainOptions:
    """The command line, as typed; None where a default depends on other things."""

    corpus: Sequence[Path] = ()
    tp: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: DType | None = None
    capacity: int = 2048
    steps: int = 20
    sequences_per_step: int = 4
    method: str = "auto"
    model: ModelConfig = field(default_factory=ModelConfig)
    learning_rate: float = 1e-3
    seed: int = 1
    check_reference: bool = False
    compare: bool = False
    compare_steps: int = 6
    json: Path | None = None
    plot: Path | None = None
    timeout_s: float = 120.0
    layer_style: LayerStyle = "plain"
    backward_mode: BackwardMode = "auto"
    pipeline_microbatches: int = 1
    fp8: Fp8Name | None = None


def make_job(options: TrainOptions, environ: Mapping[str, str]) -> tuple[TrainJob, Corpus]:
    """Validate ``options`` and read the corpus.

    Raises:
        ConfigError: a value that is wrong, in itself or together with another; a path that cannot be read or written.
        BackendUnavailableError: ``--device cuda`` without a GPU.
    """
    for option, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None:
            require_writable(path, option)
    if options.json is not None and options.plot is not None and options.json.resolve() == options.plot.resolve():
        raise ConfigError(f"--json and --plot are both {options.json}: give two files")
    tp_size, ranks_per_host = _ranks(options.tp, environ)
    options.model.validate(tp_size)
    choose(options.method, options.backward_mode)
    device_type, num_gpus = _device(options.device)
    dtype: DType = options.dtype or ("float32" if device_type == "cpu" or options.check_reference else "bfloat16")
    if options.fp8 is not None:
        require_fp8(options.model, tp_size, options.layer_style, device_type)
        if options.fp8 == "rowwise" and device_type == "cuda":
            dtype = options.dtype or "bfloat16"  # what its GEMMs write there
            require_output_dtype("--dtype", getattr(torch, dtype), torch.device("cuda"), rowwise=True)
    corpus = read_corpus(options.corpus)
    steps = plan_steps(
        corpus.documents,
        capacity_tokens=options.capacity,
        num_steps=options.steps * options.pipeline_microbatches,
        tp_size=tp_size,
        sequences_per_step=options.sequences_per_step,
        seed=options.seed,
    )
    job = TrainJob(
        model=options.model,
        steps=steps,
        tp_size=tp_size,
        device_type=device_type,
        num_gpus=num_gpus,
        ranks_per_host=ranks_per_host,
        dtype_name=dtype,
        capacity_tokens=options.capacity,
        method=options.method,
        learning_rate=options.learning_rate,
        seed=options.seed,
        compare_steps=min(options.compare_steps, options.steps) if options.compare else 0,
        want_gradients=options.check_reference,
        timeout_s=options.timeout_s,
        layer_style=options.layer_style,
        backward_mode=options.backward_mode,
        microbatches=options.pipeline_microbatches,
        fp8=options.fp8,
    )
    return job, corpus


def _ranks(tp: int | None, environ: Mapping[str, str]) -> tuple[int, int]:
    """(tp_size, ranks on this host)."""
    launched = torchrun_rank(environ)
    if launched is None:
        tp_size = DEFAULT_TP_SIZE if tp is None else tp
        return tp_size, tp_size
    world_size = launched[1]
    if tp is not None and tp != world_size:
        raise ConfigError(
            f"--tp {tp}, but torchrun started WORLD_SIZE={world_size} ranks: make them equal or leave out --tp"
        )
    return world_size, int(environ.get("LOCAL_WORLD_SIZE", world_size))


def _device(wanted: Literal["auto", "cpu", "cuda"]) -> tuple[Literal["cpu", "cuda"], int]:
    """(device type, GPUs of this host)."""
    if wanted == "cpu":
        return "cpu", 0
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus:
        return "cuda", num_gpus
    if wanted == "cuda":
        raise BackendUnavailableError("--device cuda, but torch sees no usable GPU here; use --device cpu or auto")
    return "cpu", 0
