"""``indexd --recover`` on a data directory of ``support.outputs``, and what it must come to."""

from __future__ import annotations

import json
from typing import Any

from support.daemon import assert_same_index, indexd_here
from support.outputs import INTERVAL, Built
from support.small_log import SIZES
from support.verifying import check, kinds

FLAGS = (*SIZES, "--sparse-interval", str(INTERVAL))


def recover(built: Built, *flags: str) -> dict[str, Any]:
    """What it says with --json; it must end well."""
    done = indexd_here("--recover", "--json", "--store", built.store, "--data", built.data, *FLAGS, *flags)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def check_whole(built: Built, base: Built) -> None:
    """What lies there is what an undisturbed build makes, and the frontier says so."""
    assert sorted(path.name for path in built.data.iterdir()) == sorted(
        {path.name for path in base.data.iterdir()} | {"lock"} & {path.name for path in built.data.iterdir()}
    )
    assert_same_index(built.data, base.data)
    ours, wanted = built.frontier, base.frontier
    assert sorted(ours.queues or ()) == sorted(wanted.queues or ())
    assert (ours.sparse, ours.refill_offset, ours.messages) == (wanted.sparse, None, wanted.messages)
    report = check(built.data, deep=True)
    assert (kinds(report), report.notes) == ({}, [])
