"""``tpoverlap predict``: will overlap help, from a cost model alone. Needs no GPU."""
