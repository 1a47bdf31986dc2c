"""``scripts/soak``: daemon and writer under random faults, verified deeply after each round; see ``--help``."""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from indexd.config.compiled import prepare_compiler
from indexd.errors import IndexdError
from soak.world import Stop, Tally
from support.arguments import more_than_zero

_PROJECT = Path(__file__).resolve().parents[2]
_SECONDS = 60.0


def main() -> int:
    """Run rounds; 1 when something did not hold."""
    args = _arguments()
    prepare_compiler()
    from soak.rounds import WORDS, Rounds  # PLC0415 - numba asks for its cache when it is imported

    stop = Stop()
    seed = args.seed if args.seed is not None else random.randrange(1 << 32)
    tally = Tally(seed)
    parent = args.work or _PROJECT / "build"
    parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="soak-", dir=parent.resolve()))
    _progress(f"seed {seed}, in {work}")
    started = time.monotonic()
    rounds = None
    ended: str | int | None = 0
    try:
        rounds = Rounds(work, tally, stop, _progress)
        rounds.compile()
        started = time.monotonic()
        rounds.run(started + args.seconds, args.rounds, args.queries)
    except (AssertionError, IndexdError, OSError, subprocess.SubprocessError) as error:
        tally.failure = f"round {tally.figures['rounds'] + 1}: {type(error).__name__}: {error}"
    except SystemExit as stopped:  # what was survived until then counts
        ended = stopped.code
    finally:
        stop.ignore()
        if rounds is not None:
            rounds.close(keep=tally.failure is not None or args.keep)
        if tally.failure is None and not args.keep:
            shutil.rmtree(work, ignore_errors=True)
    seconds = time.monotonic() - started
    print(tally.to_json(seconds) if args.json else tally.to_text(seconds, WORDS), flush=True)
    if tally.failure is not None:
        _progress(f"seed {seed} failed; all files and what happened are in {work}")
    return 1 if tally.failure is not None else int(ended or 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--seconds", type=more_than_zero(float), default=_SECONDS, metavar="N",
                        help="no round begins after so long (default: 60)")  # fmt: skip
    parser.add_argument(
        "--rounds", type=more_than_zero(int), metavar="N", help="so many rounds at most; two try every fault once"
    )
    parser.add_argument("--seed", type=int, help="repeat the choices of a run, as far as timing allows")
    parser.add_argument("--queries", type=more_than_zero(int), default=5000, metavar="N",
                        help="ask for so many keys after each round (default: 5000); the entries in the files are"
                        " compared all")  # fmt: skip
    parser.add_argument("--work", type=Path, metavar="DIR", help="where to make a directory for it (default: build/)")
    parser.add_argument("--keep", action="store_true", help="leave the files, as after a failure")
    parser.add_argument("--json", action="store_true", help="one object instead of tables")
    return parser.parse_args()


def _progress(text: str) -> None:
    sys.stderr.write(f"soak: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
