"""``scripts/bench``: measures indexd and RocketMQ's own classes side by side; see ``--help``."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import beside, keyed, whole
from bench.ground import BenchError, Ground, Report, progress
from indexd import __version__
from indexd.cli.output import typed
from indexd.errors import IndexdError
from support.rocketmq import RocketMQError

_PROJECT = Path(__file__).resolve().parents[2]
# Index files of both sides and a log that is written at full speed (messages a second that no machine here reaches);
# what a message takes in the log, with room to spare.
_FREE_BYTES, _FAST_WRITER, _BYTES_PER_MESSAGE = 3 << 30, 500_000, 450


def main() -> int:
    """Run the parts one after the other; 1 when something could not be measured."""
    parts = whole.PARTS | beside.PARTS | keyed.PARTS
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measure indexd beside RocketMQ's and Kafka's.")
    parser.add_argument("--only", choices=list(parts), metavar="NAME", help=f"one part: {', '.join(parts)}")
    parser.add_argument("--messages", type=typed(int, 1), default=3_000_000, metavar="N",
                        help="messages in the store of every part but tail, recover and key; 3,000,000 or"
                        " more: recover and key measure index files of default size, else of that share of it"
                        " (default: %(default)s)")  # fmt: skip
    parser.add_argument("--seconds", type=typed(int, 1), default=20, metavar="S",
                        help="how long tail writes and idle watches (default: %(default)s)")  # fmt: skip
    parser.add_argument("--work", metavar="DIR", help="a directory on the disk to measure (default: build/ of the"
                        " project); everything made in it is removed at the end")  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="leave the files")
    args = parser.parse_args()
    # Whatever runs is ended by the blocks that are left then.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parent = Path(args.work) if args.work is not None else _PROJECT / "build"
    parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="bench-", dir=parent.resolve()))
    shown = Path(args.work or "build") / work.name
    report = Report({str(work): str(shown), str(_PROJECT): ".", str(Path.home()): "~"})
    try:
        ground = Ground(work, args.messages, args.seconds)
        load = " ".join(f"{value:.2f}" for value in os.getloadavg())
        system = f"Python {platform.python_version()}, {os.cpu_count()} processors, load average {load}"
        report.note("system", f"indexd {__version__}, {system}")
        if ground.java_missing is not None:
            report.note("system", f"RocketMQ's own classes cannot be run: {ground.java_missing}")
        for name in [args.only] if args.only else parts:
            needed = _FREE_BYTES + max(args.messages, args.seconds * _FAST_WRITER) * _BYTES_PER_MESSAGE
            if (free := shutil.disk_usage(work).free) < needed:
                report.failure(name, f"{free >> 30} GiB are free and {needed >> 30} may be needed; give another --work")
                continue
            try:
                parts[name](ground, report)
            except (BenchError, RocketMQError, IndexdError, AssertionError, OSError, subprocess.SubprocessError) as why:
                report.failure(name, str(why))
        return report.end()
    finally:
        if args.keep:
            progress(f"kept {shown}")
        else:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
