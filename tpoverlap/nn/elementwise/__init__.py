"""The layers' work between GEMMs: one pass over the data each, forward or backward.

Each operation is a file with the function users of this package call, its twin in plain torch (the CPU path, the
reference, and what a compiler fuses), and a file of Triton kernels that is imported on first use.
"""

from tpoverlap.nn.elementwise.gated import (
    gated_backward,
    gated_backward_twin,
    gated_forward,
    gated_forward_twin,
)
from tpoverlap.nn.elementwise.norms import NormKind, norm_backward, norm_forward, norm_twin, pays
from tpoverlap.nn.elementwise.qkv_heads import (
    HeadLayout,
    merge_rotate,
    merge_rotate_twin,
    split_rotate,
    split_rotate_twin,
)

__all__ = [
    "HeadLayout",
    "NormKind",
    "gated_backward",
    "gated_backward_twin",
    "gated_forward",
    "gated_forward_twin",
    "merge_rotate",
    "merge_rotate_twin",
    "norm_backward",
    "norm_forward",
    "norm_twin",
    "pays",
    "split_rotate",
    "split_rotate_twin",
]
