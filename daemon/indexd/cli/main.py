"""The entry: parses, loads the configuration, calls the command, and turns every end into an exit code.

The commands without a module of their own are here: run, --recover, demo, completion, help. What needs the compiler is
imported when it is called: queries share this program.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from indexd import __version__
from indexd.cli import broker_index, inspect, jobs, query, status
from indexd.cli.output import (
    SHELLS,
    Parser,
    add_command,
    common_options,
    completion_script,
    load_config,
    print_line,
    print_report,
)
from indexd.config import Config, prepare_compiler
from indexd.demo import run_demo
from indexd.errors import IndexdError, NoRoomError

EXIT_INTERRUPTED = 130
EXIT_INTERNAL = 70


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 ok, 1 findings, 2 usage, 3 unsafe store, 4 corrupt data, 5 busy, 70 internal."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    code = _code_of(lambda: _call(sys.argv[1:] if argv is None else list(argv)))
    sys.exit(_code_of(sys.stdout.flush) or code)


def _code_of(call: Callable[[], int | None]) -> int:
    try:
        return call() or 0
    except SystemExit as end:  # --help and the like
        return end.code if isinstance(end.code, int) else 0
    except OSError as error:
        # What is still buffered must not make the interpreter complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        has_enough = isinstance(error, BrokenPipeError)  # whoever reads our output
        return 0 if has_enough else _complain(f"the system refused: {error}", EXIT_INTERNAL)
    except KeyboardInterrupt as error:
        # A command that leaves something says so; Ctrl-C itself has no words.
        return _complain(str(error), EXIT_INTERRUPTED) if error.args else EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - whatever it is, it ends with the exit code that says so
        known = error if isinstance(error, IndexdError) else NoRoomError.of(error)
        if known is None:
            traceback.print_exc()
            known = IndexdError(f"an internal error: {error!r}")
        return _complain(known.line(), known.exit_code)


def _complain(line: str, code: int) -> int:
    with suppress(OSError):
        print(f"indexd: {line}", file=sys.stderr, flush=True)
    return code


def make_parser() -> Parser:
    """Every command with its options."""
    common = common_options()
    parser = Parser(
        prog="indexd",
        usage="indexd [OPTION ...] COMMAND ...",
        parents=[common],
        description="Keeps a RocketMQ broker's message index, beside it and without touching it.",
        epilog="Without a command: run. Exit codes: 0 ok, 1 findings, 2 usage, 3 unsafe store, 4 corrupt data, "
        "5 busy, 70 internal.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"indexd {__version__}")
    parser.set_defaults(function=run)
    parser.add_argument("--recover", action="store_true", help="verify and mend the data directory, then exit")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", prog="indexd", parser_class=Parser
    )
    add_command(commands, "run", [common], "follow the store and keep its index (the default)", ["http"], run)
    for module in (status, query, broker_index, inspect, jobs):
        module.register(commands, common)
    demo_parser = add_command(
        commands, "demo", [], "show the whole of indexd in under a minute, on its own log", function=demo
    )
    demo_parser.add_argument("--work", metavar="DIR", help="where everything is written (default: a new directory)")
    demo_parser.add_argument("--spark", action="store_true", help="also rebuild it by Spark, which takes a minute")
    add_command(
        commands, "completion", [], "print a script that completes indexd's words: for bash, zsh or fish"
    ).add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")
    add_command(commands, "help", [], "show the help of a command").add_argument(
        "words", nargs="*", metavar="COMMAND", help="the command"
    )
    return parser


def _call(argv: list[str]) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.command == "help":
        args = parser.parse_args([*args.words, "--help"])  # which prints it and ends
    if args.command == "completion":  # it needs no configuration, and must not stumble over one
        print_line(completion_script(parser, args.shell))
        return 0
    if args.recover and args.function is not run:
        parser.error(f"--recover is a command of its own, not an option of {args.command}")
    function: Callable[..., int] = recover if args.recover else args.function
    if function not in (demo, inspect.inspect, query.query, status.status):  # which never load numba
        prepare_compiler()
    return function(args, load_config(args))


def run(args: argparse.Namespace, config: Config) -> int:
    """Run until a signal says stop."""
    from indexd.service.start import run_daemon  # noqa: PLC0415 - loads numba

    run_daemon(config, lambda: load_config(args))
    return 0


def recover(args: argparse.Namespace, config: Config) -> int:
    """Verify and mend the data directory, catch up with the log, and say what was done."""
    from indexd.service.start import recover_now  # noqa: PLC0415 - loads numba

    print_report(args, str(config.store.data), recover_now(config))
    return 0


def demo(args: argparse.Namespace, config: Config) -> int:  # noqa: ARG001 - it sets its own
    """Run the demo."""
    run_demo(Path(args.work or tempfile.mkdtemp(prefix="indexd-demo-")), with_spark=args.spark)
    return 0
