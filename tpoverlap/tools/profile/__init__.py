"""``tpoverlap profile`` and ``tpo.profile``: where the time of each named GEMM goes, and what to change.

=================  ==========================================================================================
``model``          spans: what a stream did, for which GEMM, on which rank. The only thing that analysis sees
``intervals``      unions and intersections of times
``figures``        spans -> per name: compute, communication, overlapped, exposed, waited for
``advice``         figures + options -> words, each with its figures and the line to change
``session``        ``with tpo.profile("out"):`` on every rank; ``chrome``, ``picture`` and ``report`` write its files
``trace_file``     ``profile read``: torch.profiler's JSON, ours or another library's; ``kernels`` sorts it
``layer``,         ``profile run``: the GEMMs of one decoder layer, measured alone, overlapped and, with ``--try``,
``experiment``     with the advised options, in turns
=================  ==========================================================================================
"""
