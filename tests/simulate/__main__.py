"""``scripts/simulate``: random worlds, one a seed, until the time or the seeds are over; see ``--help``.

With ``--mutants`` so many logs are damaged instead, and every intact message is asked for.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from itertools import count
from pathlib import Path

from indexd.cli.output import typed
from indexd.config.compiled import prepare_compiler


def main() -> int:
    """Run; 1 when an invariant did not hold."""
    args = _arguments()
    prepare_compiler()
    from support.mutants import MutantRun  # PLC0415 - numba asks for its cache when it is imported
    from support.simulation import RandomRun  # PLC0415 - the same

    tally: Counter[str] = Counter()
    first = args.seed if args.seed is not None else random.randrange(1 << 32)
    most = args.mutants or (1 if args.seed is not None else args.seeds)
    deadline, flags = time.monotonic() + args.seconds, " --mutants 1" if args.mutants else ""
    flags += " --rewrites" if args.rewrites else ""
    for seed in count(first) if most is None else range(first, first + most):
        if most is None and time.monotonic() > deadline:
            break
        with tempfile.TemporaryDirectory(prefix="simulate-", ignore_cleanup_errors=True) as name:
            root = Path(name)
            run = MutantRun(root, seed) if args.mutants else RandomRun(root, seed, rewrites=args.rewrites)
            try:
                run.go()
            except Exception as error:  # noqa: BLE001 - whatever comes out of a run is what is looked for
                tally["failures"] += 1
                print(f"seed {seed}: {type(error).__name__}: {error}")
                print(f"  replay: scripts/simulate{flags} --seed {seed}", flush=True)
                if args.seed is not None:
                    traceback.print_exception(error, file=sys.stdout)
        tally.update(run.tally)
        if args.seed is not None and most == 1:
            print("\n".join(run.history))
    print(f"seeds from {first} on")
    for name in sorted(tally):
        print(f"  {name:28}{tally[name]:>12,}")
    return 1 if tally["failures"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    much = parser.add_mutually_exclusive_group()
    much.add_argument("--seconds", type=typed(float, 0.001, 1e9), default=60.0, help="run for so long (60)")
    much.add_argument("--seeds", type=typed(int, 1), help="run so many seeds")
    much.add_argument("--seed", type=int, help="replay one and say all that happens in it; of mutants the first")
    parser.add_argument("--mutants", type=typed(int, 1), metavar="N", help="damage N logs")
    parser.add_argument("--rewrites", action="store_true", help="the broker also loses and rewrites the end of its log")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
