"""What a GPU kernel or copy in a trace is, and which GEMM a range is about: by name, a trace has nothing else.

Names of kernels as torch.profiler shows them: cuBLAS (``nvjet_...``, ``sm90_xmma_gemm_...``, ``cutlass_...``),
Transformer Engine's userbuffers (``userbuffers_fp16_sum_inplace_gpu_rr_rs_oop``, ``kuserbuffers_pushsend``; with the
copy engine "Memcpy PtoP"), NCCL (``ncclDevKernel_AllGather_RING_LL``), torch symmetric memory, Triton. Ranges: our
labels, and Transformer Engine's ("transformer_engine._LayerNormLinear.backward.qkv.dgrad_gemm").
"""

from __future__ import annotations

import re
from typing import Final, Literal

from tpoverlap.tools.profile.model import GEMM_NAME

Kind = Literal["gemm", "comm", "reduce", "other"]

_COMM: Final = re.compile(
    r"userbuffers|nccl|ptop|peer.?to.?peer|nvshmem|symm_?mem|multimem|one_shot|two_shot|"
    r"all_?gather|reduce_?scatter|all_?reduce|all_?to_?all|send_?recv|(producer|consumer)(_batch)?_kernel|copy_rows",
    re.IGNORECASE,
)
_GEMM: Final = re.compile(
    r"gemm|nvjet|cutlass|cublas|xmma|wgmma|\bmatmul|tile_gemm|gathered_rows|partial_rows|splitk|streamk", re.IGNORECASE
)
_REDUCE: Final = re.compile(r"reduce_(bf16|fp16|fp8|fp32|in_f|out_)|reduce_fp8_in|sum_in_rank_order", re.IGNORECASE)
_TE_RANGE: Final = re.compile(r"\.(forward|backward)\b.*?[._](qkv|proj|fc1|fc2)(?![a-z0-9])(.*)$")
_LAYER_FUNCTION: Final = re.compile(
    r"^_?(LayerNorm)?(Linear|MLP)$|^_(GroupedLinear|LayerNorm\w+)$|^(ColumnLinear|RowLinear|BulkAllGather|BulkReduceScatter)$"
)


def kind_of(name: str, category: str = "kernel") -> Kind:
    """Of a device event. A copy between GPUs is communication; any other copy or fill is not."""
    if "memcpy" in category.lower() or "memset" in category.lower() or name.startswith(("Memcpy", "Memset")):
        return "comm" if re.search(r"ptop|peer", name, re.IGNORECASE) else "other"
    if _REDUCE.search(name):
        return "reduce"
    if _COMM.search(name):  # before GEMM: "userbuffers_..." may say anything else
        return "comm"
    return "gemm" if _GEMM.search(name) else "other"


def is_userbuffers(name: str) -> bool:
    """Whether it is one of Transformer Engine's own communication kernels."""
    return "userbuffers" in name.lower()


def gemm_of(range_name: str) -> str | None:
    """The GEMM that a range is about: "fc1_fprop"; None when its name does not say."""
    plain = GEMM_NAME.search(range_name)
    if plain is not None:
        return plain.group(0)
    found = _TE_RANGE.search(range_name)
    if found is None:
        return None
    where, block, rest = found.groups()
    if where == "forward":
        return f"{block}_fprop"
    return f"{block}_wgrad" if "wgrad" in rest else f"{block}_dgrad"


def is_layer_function(range_name: str) -> bool:
    """An autograd function of Transformer Engine or of ours: says which layer, but not which of its GEMMs."""
    return bool(_LAYER_FUNCTION.match(range_name.removesuffix("Backward")))
