"""``tpoverlap tune``: measure, on the user's own devices, which method is best for each GEMM and each bucket of T."""
