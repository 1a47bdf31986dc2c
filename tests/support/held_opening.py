"""A daemon whose opening stands still until a test has seen enough of it, whatever the machine has to do besides.

::

    gate = tmp_path / "gate"
    with Daemon(store, data, *SIZES, tracer=held_until(gate)) as daemon:
        daemon.wait_event("starting")       # nothing of DATA is opened yet
        gate.touch()
        daemon.wait_event("running")
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from unittest import mock

from indexd.cli.main import main
from indexd.config import Config
from indexd.config.compiled import prepare_compiler

_PAUSE = 0.01


def held_until(gate: Path) -> tuple[str, ...]:
    """Words before a daemon's command: it waits in its phase ``opening``, before recovery, until ``gate`` exists."""
    return (sys.executable, "-P", __file__, str(gate))


def _run(gate: Path, words: list[str]) -> None:
    prepare_compiler()
    # These load numba.
    from indexd.recovery.settings import load_kernels
    from indexd.service import start

    def wait_and_load(config: Config) -> None:
        while not gate.exists():
            time.sleep(_PAUSE)  # signals are taken meanwhile, as they are by an opening that takes long
        load_kernels(config)

    with mock.patch.object(start, "load_kernels", wait_and_load):
        main(words)


if __name__ == "__main__":
    # Behind the gate comes the command itself, which is what runs here already.
    _run(Path(sys.argv[1]), sys.argv[3:])
