"""``scripts/simulate``: random runs of the simulation in ``support``, for as long as asked."""
