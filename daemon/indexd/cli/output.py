"""Arguments and output of every command: options and their help, words or JSON lines, tables, progress, completion.

Each configuration key is an option of every command. A command adds its own, and prints words for people, or with
``--json`` one object a line for programs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from tqdm import tqdm

from indexd.config import KEYS, SECTIONS, Config, flag_name, load, parse_count, printable
from indexd.errors import UsageError
from indexd.findings import Findings
from indexd.pages.wording import show_local, show_size

V = TypeVar("V")
EXIT_FINDINGS = 1
_LINES_PER_KIND = 20
_LIST_MAX = 20
SHELLS = ("bash", "zsh", "fish")
_PATH = re.compile(r"PATH|FILE|DIR")
_CAPITAL = re.compile("(?<=[a-z])[A-Z]")
_WORD = re.compile(r"[a-z0-9][a-z0-9.+-]*")


def print_json(row: dict[str, Any]) -> None:
    """One object, one line; text in any script stays readable where standard output can hold it.

    A file's name that is no UTF-8 makes the whole line ASCII: a lone surrogate for each such byte, as ``os.fsencode``
    takes it back.
    """
    line = json.dumps(row, ensure_ascii=False, separators=(",", ":"))
    try:
        line.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        line = json.dumps(row, separators=(",", ":"))
    sys.stdout.write(line + "\n")


def print_line(text: str = "") -> None:
    """One line of words; a lone surrogate or what the terminal cannot show becomes an escape."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def show_field(name: str, value: Any) -> str:
    """A member of a row in words: lists in short, sizes and times so that people can read them."""
    if isinstance(value, list | tuple):
        return f"{len(value)} of them" if len(value) > _LIST_MAX else printable(", ".join(map(_value, value))) or "-"
    if name.endswith("imestamp") and value:
        return f"{value} ({show_local(value)})"
    if name in ("size", "bytes") and value is not None:
        return f"{value} ({show_size(value)})"
    return "-" if value is None else printable(_value(value))


def print_fields(title: str, row: Mapping[str, Any]) -> None:
    """A line for each member of a row."""
    print_line(title)
    for name, value in row.items():
        print_line(f"  {name:<20} {show_field(name, value)}")


def print_report(args: argparse.Namespace, title: str, row: dict[str, Any]) -> None:
    """What a job came to, for programs or for people."""
    if wants_json(args):
        print_json(row)
    else:
        print_fields(printable(title), row)


def table_lines(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Columns as wide as their widest cell; ``-`` for nothing, and nothing that a terminal would obey."""
    table = [[("-" if cell in (None, "") else printable(str(cell))) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def values(fields: Mapping[str, Any]) -> str:
    """Names and values, without those that are not known or empty; ``checkedAt`` is a time, and reads checked at."""
    found = {
        _CAPITAL.sub(lambda letter: f" {letter[0].lower()}", name): show_local(value)
        if name.endswith("At") and isinstance(value, int)
        else _value(value)
        for name, value in fields.items()
        if value is not None
    }
    return ", ".join(f"{name} {words}" for name, words in found.items() if words)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return values(value)
    return "; ".join(map(_value, value)) if isinstance(value, list | tuple) else str(value)


def print_findings(findings: Findings, *, json_lines: bool, kind: str = "finding") -> None:
    """A line for each, of words no more than some of a kind and how many more there are."""
    shown: Counter[str] = Counter()
    for found in findings.kept:
        shown[found.what] += 1
        if json_lines:
            print_json({"kind": kind} | asdict(found))
        elif shown[found.what] <= _LINES_PER_KIND:
            print_line(f"{printable(found.file)} byte {found.position}: {printable(found.text)}")
    for what, count in findings.counts.items() if not json_lines else ():
        if count > min(shown[what], _LINES_PER_KIND):
            print_line(f"and {count - min(shown[what], _LINES_PER_KIND):,} more of the kind {what}")


def typed(parse: Callable[[Any], V], least: float | None = None, most: float = float("inf")) -> Callable[[str], V]:
    """For argparse: what ``parse`` makes of a text, of numbers those from ``least`` to ``most``."""

    def read(text: str) -> V:
        try:
            found = parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{printable(text)!r} {error}") from None
        if least is not None and not least <= cast("float", found) <= most:
            bounds = f"from {least} to {most}" if most < float("inf") else f"{least} or more"
            raise argparse.ArgumentTypeError(f"{printable(text)!r} is not {bounds}")
        return found

    return read


#: An offset or a time: a whole number of 64 bits that is not negative.
count64 = typed(parse_count, 0, 2**63 - 1)


def some_name(text: str) -> str:
    """A topic or a key, for argparse."""
    if not text:
        raise argparse.ArgumentTypeError("an empty text names nothing")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise argparse.ArgumentTypeError(f"{printable(text)} is not UTF-8")
    return text


# No thread of its own, which there may be no memory for.
tqdm.monitor_interval = 0


@contextmanager
def progress_bar(text: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes, to be told (done, in all); shows nothing when standard error is no terminal."""
    is_hidden = not sys.stderr.isatty()
    with tqdm(desc=text, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr, disable=is_hidden) as bar:

        def show(done: int, total: int) -> None:
            bar.total = max(total, done)
            bar.update(done - bar.n)

        yield show


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are UsageErrors, one line like every other error, and whose help is one screen."""

    #: The configuration keys whose flags ``--help`` shows; ``--help-all`` shows all.
    shown_keys: frozenset[str] = frozenset({"store", "data", "broker_conf"})

    def __init__(self, **kwargs: Any) -> None:
        layout = partial(argparse.HelpFormatter, max_help_position=28)
        super().__init__(allow_abbrev=False, formatter_class=layout, **kwargs)
        if self.add_help:
            self.add_argument(
                "--help-all",
                action=_HelpAll,
                nargs=0,
                default=argparse.SUPPRESS,
                help="show this help with every setting and exit",
            )

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting."""
        raise UsageError(message, f"see {self.prog} --help")

    def print_help(self, file: Any = None) -> None:
        """The command's own options, and of the settings ``shown_keys`` alone; ``format_help`` has all."""
        for action in self._actions:
            if action.dest in KEYS and action.dest not in self.shown_keys:
                action.help = argparse.SUPPRESS
            elif action.dest in KEYS and (action.help or "").startswith(KEYS[action.dest].description):
                action.help = first_clause(KEYS[action.dest].description)
        super().print_help(file)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if not isinstance(action, argparse._SubParsersAction) or value in action.choices:
            return super()._check_value(action, value)
        close = get_close_matches(value, action.choices) or [each for each in action.choices if each.startswith(value)]
        hint = f"did you mean {' or '.join(close)}?" if close else f"its commands are {', '.join(action.choices)}"
        raise UsageError(f"{self.prog} has no command {printable(value)!r}", hint)


class _HelpAll(argparse.Action):
    """``--help-all``."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser._print_message(parser.format_help(), sys.stdout)
        parser.exit()


def first_clause(text: str) -> str:
    """What stands before the first comma, colon or semicolon."""
    return re.split("[,:;] ", text)[0]


def common_options() -> Parser:
    """The parent parser of every command: -c, --json and a flag for each key."""
    # Without defaults: those of a sub-command would overwrite what was given before it.
    parser = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("-c", "--config", metavar="FILE", help="indexd's configuration (TOML)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of words")
    groups = {section: parser.add_argument_group(f"configuration keys of [{section}]") for section in SECTIONS}
    for key, info in KEYS.items():
        groups[info.section].add_argument(
            flag_name(key),
            dest=key,
            metavar=info.type if "|" in info.type else info.type.upper().replace(" ", "_"),
            help=f"{info.description} (default: {info.default})".replace("%", "%%"),
            action="append" if info.repeats else "store",
        )
    return parser


def load_config(args: argparse.Namespace) -> Config:
    """The configuration with what the command line gives of it."""
    flags = {key: getattr(args, key, None) for key in KEYS}
    return load(flags, Path(args.config) if "config" in args else None, os.environ)


def wants_json(args: argparse.Namespace) -> bool:
    """Whether --json was given."""
    return bool(getattr(args, "json", False))


def add_command(
    commands: Any,
    name: str,
    parents: Sequence[argparse.ArgumentParser],
    text: str,
    shows: Collection[str] = (),
    function: Callable[..., int] | None = None,
) -> Parser:
    """A sub-command described by ``text``, done by ``function``; ``shows``: keys that its help shows, too."""
    parser: Parser = commands.add_parser(name, parents=list(parents), help=first_clause(text), description=text)
    parser.shown_keys = parser.shown_keys.union(shows)
    parser.set_defaults(function=function)
    return parser


def completion_script(program: argparse.ArgumentParser, shell: str) -> str:
    """What completes the words of ``program`` in bash, zsh or fish, made by shtab; it starts no Python."""
    import shtab  # noqa: PLC0415 - no other command loads it

    for _, parser in parsers_of(program):
        for action in parser._actions:  # argparse has no other list of them
            _describe(action, shtab.FILE)
            if shell == "zsh" and isinstance(action.metavar, str):
                action.metavar = action.metavar.replace(":", " ")  # what zsh separates the parts by
    return shtab.complete(program, shell)


def parsers_of(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """The program, ``()``, and every command below it with its words."""
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from parsers_of(below, (*path, name))


def _describe(action: argparse.Action, file: Any) -> None:
    # What shtab cannot know: which values are paths, and the words of a setting such as exact|rocketmq.
    value = str(action.metavar or action.dest.upper())
    takes_value = action.nargs in (None, "+") or (isinstance(action.nargs, int) and action.nargs > 0)
    if action.help:
        action.help = action.help.split(" (default:")[0]
    if takes_value and (action.type is Path or _PATH.match(value)):
        action.complete = file  # type: ignore[attr-defined]  # shtab's own attribute
    elif action.choices is None and action.dest in KEYS and "|" in value:
        action.choices = [word for word in value.split("|") if _WORD.fullmatch(word)] or None
