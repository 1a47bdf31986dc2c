"""The entry: ``main`` parses, loads the configuration, calls the command, and turns every end into an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

from indexd import __version__
from indexd.cli import (
    audit,
    completion,
    demo,
    doctor,
    export,
    inspect,
    kafka,
    query,
    rebuild,
    repair,
    run,
    stats,
    status,
    verify,
)
from indexd.cli.output import Parser, add_command, common_options, config_file, given_flags
from indexd.config import load
from indexd.errors import IndexdError, NoRoomError

EXIT_INTERRUPTED = 130
EXIT_INTERNAL = 70


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 ok, 1 findings, 2 usage, 3 unsafe store, 4 corrupt data, 5 busy, 70 internal."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    code = _code_of(sys.argv[1:] if argv is None else list(argv))
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _give_up_output()
    except OSError as error:
        code = _refused(error)
    sys.exit(code)


def _code_of(argv: list[str]) -> int:
    try:
        return _call(argv)
    except SystemExit as end:  # --help and the like
        return end.code if isinstance(end.code, int) else 0
    except IndexdError as error:
        return _complain(error.line(), error.exit_code)
    except BrokenPipeError:
        # Whoever read our output has enough.
        return 0
    except OSError as error:
        return _refused(error)
    except KeyboardInterrupt as error:
        # A command that leaves something says so; Ctrl-C itself has no words.
        return _complain(str(error), EXIT_INTERRUPTED) if error.args else EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - whatever it is, it ends with the exit code that says so
        no_room = NoRoomError.of(error)
        if no_room is None:
            traceback.print_exc()
        return _complain((no_room or IndexdError(f"an internal error: {error!r}")).line(), EXIT_INTERNAL)


def _refused(error: OSError) -> int:
    _give_up_output()
    return _complain(f"the system refused: {error}", EXIT_INTERNAL)


def _complain(line: str, code: int) -> int:
    with suppress(OSError):
        sys.stderr.write(f"indexd: {line}\n")
        sys.stderr.flush()
    return code


def _give_up_output() -> None:
    # What is still buffered must not make the interpreter complain at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_parser() -> Parser:
    """Every command with its options."""
    common = common_options()
    parser = Parser(
        prog="indexd",
        parents=[common],
        description="Keeps a RocketMQ broker's message index, beside it and without touching it.",
        epilog="Without a command: run. Exit codes: 0 ok, 1 findings, 2 usage, 3 unsafe store, 4 corrupt data, "
        "5 busy, 70 internal.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"indexd {__version__}")
    parser.add_argument("--recover", action="store_true", help="verify and mend the data directory, then exit")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", parser_class=Parser)
    for module in (
        run,
        status,
        rebuild,
        query,
        verify,
        audit,
        repair,
        inspect,
        kafka,
        demo,
        doctor,
        export,
        stats,
    ):
        module.register(commands, common)
    completion.register(commands)
    text = "show the help of a command"
    add_command(commands, "help", [], text).add_argument("words", nargs="*", metavar="COMMAND", help="the command")
    return parser


def _call(argv: list[str]) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.command == "help":
        args = parser.parse_args([*args.words, "--help"])  # which prints it and ends
    if args.command == "completion":  # it needs no configuration, and must not stumble over one
        return completion.completion(args, parser)
    config = load(given_flags(args), config_file(args), os.environ)
    function = getattr(args, "function", None)
    if function is None or args.recover:
        if function is not None and args.command != "run":
            parser.error(f"--recover is a command of its own, not an option of {args.command}")
        function = run.recover if args.recover else run.run
    code: int = function(args, config)
    return code
