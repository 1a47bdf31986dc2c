"""indexd: a daemon beside an Apache RocketMQ broker that owns its message index.

The stages, in the order the data takes::

    commitlog   segment files -> frames -> DispatchBatch (arrays, one row a message)
    dispatch    tail loop -> bounded queue -> drain every 3 s
    output      what the key index, the ConsumeQueues and the sparse indexes have in common
    index       IndexFile, IndexService: key -> physical offset, byte for byte RocketMQ's
    flush       full files to the disk, then checkpoint and frontier; the abort flag
    recovery    what is on disk -> a plan -> the files as they durably were
    query       by key, by unique key, one message
    verify      everything read again and held against everything else
    audit       a broker's own index held against its log
    repair      what is missing or wrong there built beside it, and put in its place
    spark       rebuild, audit, export and statistics as tasks over many machines
    serve       metrics, HTTP, the page, MQTT
    service     opens, recovers, starts the tasks, stops them in order
    cli         argv -> Config -> one call

``errors``, ``findings``, ``config``, ``pages`` (how things are said) and ``storage`` (the one seam to the disk) lie
below them all; ``demo`` shows the whole.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["open_data"]


def __getattr__(name: str) -> Any:
    # The queries are loaded when they are first asked for: every part of the program imports this package.
    if name == "open_data":
        return import_module("indexd.query").open_data
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
