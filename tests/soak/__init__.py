"""``scripts/soak``: daemon and writer beside each other under random faults, everything verified after each round."""

from indexd.config.compiled import prepare_compiler

prepare_compiler()  # numba asks for its cache when it is imported
