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
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from bench import audit, http, key, rebuild, recover, remoting, source, spark, start, tail
from bench.ground import BYTES_PER_MESSAGE, BenchError, Ground, Report, progress
from indexd import __version__
from indexd.errors import IndexdError
from support.rocketmq import RocketMQError

_PROJECT = Path(__file__).resolve().parents[2]
_PARTS = {
    part.NAME: part.measure for part in (rebuild, tail, start, recover, key, http, remoting, audit, source, spark)
}
_PARTS["idle"] = start.measure_idle
_MESSAGES_LEAST = 1000
# Index files of both sides and a log that is written at full speed (messages a second that no machine here reaches).
_FREE_BYTES = 3 << 30
_FAST_WRITER = 500_000


def main() -> int:
    """Run the parts one after the other; 1 when something could not be measured."""
    args = _arguments()
    signal.signal(signal.SIGTERM, _on_signal)
    parent = Path(args.work) if args.work is not None else _PROJECT / "build"
    parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="bench-", dir=parent.resolve()))
    shown = Path(args.work or "build") / work.name
    report = Report(as_json=args.json, hidden={str(work): str(shown), str(_PROJECT): ".", str(Path.home()): "~"})
    try:
        ground = Ground(work, args.messages, args.seconds)
        try:
            return _measure(ground, report, [args.only] if args.only else list(_PARTS))
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            ground.end_processes()
    finally:
        if args.keep:
            progress(f"kept {shown}")
        else:
            shutil.rmtree(work, ignore_errors=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measure indexd beside RocketMQ's and Kafka's.")
    parser.add_argument("--only", choices=list(_PARTS), metavar="NAME", help=f"one part: {', '.join(_PARTS)}")
    parser.add_argument("--messages", type=_at_least(_MESSAGES_LEAST), default=3_000_000, metavar="N",
                        help="messages in the store of every part but tail, recover and key; 3,000,000 or"
                        " more: recover and key measure index files of default size, else of that share of it"
                        " (default: %(default)s)")  # fmt: skip
    parser.add_argument("--seconds", type=_at_least(5), default=20, metavar="S",
                        help="how long tail writes and idle watches (default: %(default)s)")  # fmt: skip
    parser.add_argument("--work", metavar="DIR", help="a directory on the disk to measure (default: build/ of the"
                        " project); everything made in it is removed at the end")  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="leave the files")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of tables")
    return parser.parse_args()


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return value

    return number


def _measure(ground: Ground, report: Report, parts: list[str]) -> int:
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    report.note(
        f"indexd {__version__}, Python {platform.python_version()}, {os.cpu_count()} processors, load average {load}"
    )
    if ground.java_missing is not None:
        report.note(f"RocketMQ's own classes cannot be run: {ground.java_missing}")
    for name in parts:
        try:
            _check_space(ground)
            _PARTS[name](ground, report)
        except (BenchError, RocketMQError, IndexdError, OSError, subprocess.SubprocessError) as error:
            report.failure(name, str(error))
    return report.end()


def _check_space(ground: Ground) -> None:
    tailed = ground.seconds * _FAST_WRITER
    needed = _FREE_BYTES + max(ground.messages, tailed) * BYTES_PER_MESSAGE
    free = shutil.disk_usage(ground.work).free
    if free < needed:
        raise BenchError(f"{free >> 30} GiB are free and up to {needed >> 30} GiB may be needed; give another --work")


def _on_signal(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
