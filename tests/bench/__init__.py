"""``scripts/bench``: indexd and RocketMQ's own classes measured side by side."""

from indexd.config.compiled import prepare_compiler

prepare_compiler()  # numba asks for its cache when it is imported
