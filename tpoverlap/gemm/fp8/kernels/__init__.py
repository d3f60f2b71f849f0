"""Triton kernels that quantise, transpose and unpack; their twins in plain torch are `tpoverlap.gemm.fp8.plain`.

Importing this package imports no Triton; a launch does, on first use.
"""
