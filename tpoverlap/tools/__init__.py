"""The command line: ``tpoverlap train``, ``tpoverlap doctor``, ..."""
