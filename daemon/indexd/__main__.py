"""``python -m indexd``, and where the command ``indexd`` begins: before all that takes time to import."""

from __future__ import annotations

import os
import signal
from types import FrameType

_EXIT_INTERRUPTED = 130  # as cli.main ends: it is imported below


def _leave(_: int, __: FrameType | None) -> None:
    # Inside an import an exception would come with a traceback, or be swallowed.
    os._exit(_EXIT_INTERRUPTED)


def main() -> None:
    """Ctrl-C ends it silently from the first moment on; who has it ignored is not asked."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from indexd.cli.main import main as run  # noqa: PLC0415 - it takes a fifth of a second

    try:
        signal.signal(signal.SIGINT, before)
        run()
    except KeyboardInterrupt:
        os._exit(_EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
