"""``scripts/simulate``: random worlds, one a seed, until the time or the seeds are over; see ``--help``.

With ``--mutants`` so many logs and data directories are damaged instead, and every intact message is asked for.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from indexd.config.compiled import prepare_compiler
from support.arguments import more_than_zero
from support.sim_fault import FaultMap

_SECONDS = 60.0
#: What is said of every tally, though it is 0.
_ALWAYS = (
    *("runs", "failures", "disk operations", "crashes", "kills", "recoveries", "crashes inside a recovery", "queries"),
    *("rewrites", "expired segments", "lost", "invented", "twice"),
)
_ALWAYS_OF_MUTANTS = ("mutants", "failures", "questions", "found", "said to be missing", "refused")
_LABELS = {
    "lost": "entries lost",
    "invented": "entries invented",
    "twice": "entries twice",
    "rewrites": "log rewritten",
}


def main() -> int:
    """Run; 1 when an invariant did not hold."""
    args = _arguments()
    prepare_compiler()
    from support.mutant_run import MutantRun  # PLC0415 - numba asks for its cache when it is imported
    from support.sim_random import RandomRun  # PLC0415 - the same

    tally: Counter[str] = Counter()
    first = args.seed if args.seed is not None else random.randrange(1 << 32)
    seeds = args.mutants or (1 if args.seed is not None else args.seeds)
    deadline = time.monotonic() + (args.seconds if seeds is None else float("inf"))
    done = 0
    while time.monotonic() < deadline and (seeds is None or done < seeds):
        seed = first + done
        root = Path(tempfile.mkdtemp(prefix="simulate-"))
        run: RandomRun | MutantRun
        if args.mutants:
            run = MutantRun(root, seed)
        else:
            run = RandomRun(root, seed, rewrites=args.rewrites, faults=args.faults)
        try:
            run.go()
        except Exception as error:  # noqa: BLE001 - whatever comes out of a run is what is looked for
            tally["failures"] += 1
            _report_failure(args, seed, error)
        finally:
            shutil.rmtree(root, ignore_errors=True)
        tally.update(run.tally())
        if args.seed is not None and seeds == 1 and not args.json:
            print("\n".join(run.history))
        done += 1
    _report(args, first, tally)
    return 1 if tally["failures"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    much = parser.add_mutually_exclusive_group()
    much.add_argument("--seconds", type=more_than_zero(float), default=_SECONDS, help="run for so long (60)")
    much.add_argument("--seeds", type=more_than_zero(int), help="run so many seeds")
    much.add_argument("--seed", type=int, help="replay one and say all that happens in it; of mutants the first")
    parser.add_argument("--mutants", type=more_than_zero(int), metavar="N", help="damage N logs and data directories")
    parser.add_argument("--faults", default="", help="a fault map for each run, beside the random ones (sim_fault.py)")
    parser.add_argument("--rewrites", action="store_true", help="the broker also loses and rewrites the end of its log")
    parser.add_argument("--json", action="store_true", help="one object a line")
    args = parser.parse_args()
    try:
        FaultMap.parse(args.faults)
    except ValueError as error:
        parser.error(str(error))
    return args


def _report_failure(args: argparse.Namespace, seed: int, error: Exception) -> None:
    flags = (" --rewrites" if args.rewrites else "") + (f" --faults '{args.faults}'" if args.faults else "")
    replay = f"scripts/simulate {'--mutants 1 ' if args.mutants else ''}--seed {seed}{flags}"
    if args.json:
        row = {"seed": seed, "error": type(error).__name__, "problem": str(error), "replay": replay}
        print(json.dumps(row), flush=True)
        return
    print(f"seed {seed}: {type(error).__name__}: {error}\n  replay: {replay}", flush=True)
    if args.seed is not None:
        traceback.print_exception(error, file=sys.stdout)


def _report(args: argparse.Namespace, first: int, tally: Counter[str]) -> None:
    rows = {name: tally[name] for name in (_ALWAYS_OF_MUTANTS if args.mutants else _ALWAYS)}
    rows |= {name: count for name, count in sorted(tally.items()) if name not in rows}
    if args.json:
        print(json.dumps({"first_seed": first, "tally": rows}))
        return
    print(f"seeds from {first} on")
    for name, count in rows.items():
        print(f"  {_LABELS.get(name, name):28}{count:>12,}")


if __name__ == "__main__":
    sys.exit(main())
