"""``tpoverlap train``: a small Llama-style decoder on real text, with another T at every step.

::

    corpus ─> batching ─> job ─> worker (spawn or torchrun) ─> loop (one rank) ─> report, plot
                           │                                     └ decoder (TP layers of tpoverlap)
                           └───> reference (the same model, one process, plain torch)
"""
