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


def held_until(gate: Path, phase: str = "opening") -> tuple[str, ...]:
    """Words before a daemon's command: it waits until ``gate`` exists, in its phase ``opening``, before recovery, or in
    ``recovering``, with something of a step still to do."""
    return (sys.executable, "-P", __file__, phase, str(gate))


def _run(phase: str, gate: Path, words: list[str]) -> None:
    prepare_compiler()
    # These load numba.
    from indexd.recovery.open import load_kernels
    from indexd.serve.board import Board
    from indexd.service import start

    recovering = Board.recovering

    def wait() -> None:
        while not gate.exists():
            time.sleep(_PAUSE)  # signals are taken meanwhile, as they are by an opening that takes long

    def wait_and_load(config: Config) -> None:
        if phase == "opening":
            wait()
        load_kernels(config)

    def recover_and_wait(board: Board, step: str, done: int, total: int) -> None:
        recovering(board, step, done, total)
        if phase == "recovering" and total:
            wait()

    with (
        mock.patch.object(start, "load_kernels", wait_and_load),
        mock.patch.object(Board, "recovering", recover_and_wait),
    ):
        main(words)


if __name__ == "__main__":
    # Behind the gate comes the command itself, which is what runs here already.
    _run(sys.argv[1], Path(sys.argv[2]), sys.argv[4:])
