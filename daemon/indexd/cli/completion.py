"""completion: a script for bash, zsh or fish, made from the commands and options as they are.

The scripts are static: to complete a word starts no Python.

The commands and their options as a list, read off argparse's parsers.

The scripts: one text for each shell, from the same list of commands.

Options that the program itself has, every key of the configuration among them, are written once and named ``common``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from indexd.cli.output import add_command, print_line
from indexd.config import KEYS

SHELLS = ("bash", "zsh", "fish")


def register(commands: Any) -> None:
    """Add the command. It has no configuration keys: it prints what they are."""
    parser = add_command(
        commands, "completion", [], "print a script that completes indexd's words: for bash, zsh or fish"
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")


def completion(args: argparse.Namespace, program: argparse.ArgumentParser) -> int:
    """Print the script of all that ``program`` takes."""

    print_line(SCRIPTS[args.shell](list(commands_of(program))))
    return 0


_PATH = re.compile(r"PATH|FILE|DIR")
_WORD = re.compile(r"[a-z0-9][a-z0-9.+-]*")


@dataclass(frozen=True, slots=True)
class Option:
    """An option, or an argument without ``names``. Its value is one of ``words``, a path, or anything; or it has none.

    ``value`` is what help calls it. A value that may be left out is not waited for.
    """

    names: tuple[str, ...]
    text: str
    value: str
    takes_value: bool
    may_take_value: bool
    words: tuple[str, ...]
    is_path: bool


@dataclass(frozen=True, slots=True)
class Command:
    """What stands behind ``indexd``, ``()`` for the program itself; ``below`` are names and texts of its commands."""

    path: tuple[str, ...]
    options: tuple[Option, ...]
    below: tuple[tuple[str, str], ...]


def commands_of(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[Command]:
    """The program and every command below it, each before those below it."""
    options: list[Option] = []
    below: dict[str, tuple[argparse.ArgumentParser, str]] = {}
    for action in parser._actions:  # argparse has no other list of them
        if isinstance(action, argparse._SubParsersAction):
            texts = {each.dest: each.help or "" for each in action._choices_actions}
            below = {name: (inner, texts.get(name, "")) for name, inner in action.choices.items()}
        elif action.help != argparse.SUPPRESS:
            options.append(_option(action))
    yield Command(path, tuple(options), tuple((name, text) for name, (_, text) in below.items()))
    for name, (inner, _) in below.items():
        yield from commands_of(inner, (*path, name))


def _option(action: argparse.Action) -> Option:
    value = str(action.metavar or action.dest.upper())
    words: tuple[str, ...] = ()
    if action.choices is not None:
        words = tuple(str(choice) for choice in action.choices)
    elif action.dest in KEYS and "|" in value:  # in HOST:PORT|off the word is off
        words = tuple(part for part in value.split("|") if _WORD.fullmatch(part))
    takes_value = action.nargs in (None, "+") or (isinstance(action.nargs, int) and action.nargs > 0)
    text = (action.help or "").replace("%%", "%").split(" (default:")[0]
    is_path = takes_value and (action.type is Path or _PATH.match(value) is not None)
    return Option(tuple(action.option_strings), text, value, takes_value, action.nargs == "?", words, is_path)


Commands = list[Command]


def _common(commands: Commands) -> tuple[Option, ...]:
    # Those of the program that most commands have as well: not --version, not --recover.
    program, rest = commands[0], commands[1:]
    return tuple(option for option in program.options if sum(option in each.options for each in rest) > len(rest) // 2)


def _own(command: Command, common: tuple[Option, ...]) -> list[Option]:
    has_common = _has_common(command, common)
    return [option for option in command.options if not has_common or option not in common]


def _has_common(command: Command, common: tuple[Option, ...]) -> bool:
    return all(option in command.options for option in common)


def _names(options: Iterable[Option]) -> str:
    return " ".join(name for option in options for name in option.names)


def _positional_words(command: Command) -> list[str]:
    return [name for name, _ in command.below] + [
        word for option in command.options if not option.names for word in option.words
    ]


# --- bash

_BASH = """\
# indexd: completion for bash. Put it into ~/.local/share/bash-completion/completions/indexd.

# What follows option $2 of command $1: kind is "", or how its value is completed.
_indexd_kind() {
    kind=
    case "$1 $2" in
@KINDS@
    esac
    [[ -n $kind ]] && return
    case "$2" in
@COMMON_KINDS@
    esac
}

_indexd() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} place= word kind i
    local names= words= paths= common='@COMMON@'
    # "=" is a word of its own for bash.
    if [[ $cur == "=" ]]; then
        cur=
    elif [[ $prev == "=" && COMP_CWORD -gt 1 ]]; then
        prev=${COMP_WORDS[COMP_CWORD-2]}
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if [[ $word == -* ]]; then
            _indexd_kind "$place" "$word"
            if [[ -n $kind ]]; then
                [[ ${COMP_WORDS[i+1]} == "=" ]] && ((i++))
                ((i++))
            fi
            continue
        fi
        case "${place:+$place }$word" in
            @PLACES@) place="${place:+$place }$word" ;;
        esac
    done
    case "$place" in
@COMMANDS@
    esac
    _indexd_kind "$place" "$prev"
    case "$kind" in
        "")
            if [[ $cur == -* ]]; then
                COMPREPLY=($(compgen -W "$names" -- "$cur"))
            else
                COMPREPLY=($(compgen -W "$words" -- "$cur"))
                [[ -n $paths ]] && compopt -o default 2>/dev/null
            fi ;;
        path) compopt -o default 2>/dev/null ;;
        words*) COMPREPLY=($(compgen -W "${kind#words }" -- "$cur")) ;;
    esac
}

complete -F _indexd indexd"""


def _bash_kind(option: Option) -> str:
    if option.words:
        return "'words " + " ".join(option.words) + "'"
    return "path" if option.is_path else "any"


def bash_script(commands: Commands) -> str:
    """For bash 4 and newer, with and without the package bash-completion."""
    common = _common(commands)
    kinds, places, cases = [], [], []
    for command in commands:
        place = " ".join(command.path)
        for option in _own(command, common):
            if option.takes_value and option.names:
                patterns = "|".join(f'"{place} {name}"' for name in option.names)
                kinds.append(f"        {patterns}) kind={_bash_kind(option)} ;;")
        if place:
            places.append(f'"{place}"')
        names = _names(_own(command, common)) + (" $common" if _has_common(command, common) else "")
        paths = "1" if any(option.is_path for option in command.options if not option.names) else ""
        words = " ".join(_positional_words(command))
        cases.append(f'        "{place}") names="{names}" words=\'{words}\' paths={paths} ;;')
    shared = [
        f"        {'|'.join(option.names)}) kind={_bash_kind(option)} ;;" for option in common if option.takes_value
    ]
    return _filled(
        _BASH,
        KINDS="\n".join(kinds),
        COMMON_KINDS="\n".join(shared),
        COMMON=_names(common),
        PLACES="|".join(places),
        COMMANDS="\n".join(cases),
    )


# --- zsh

_ZSH = """\
#compdef indexd
# indexd: completion for zsh. Put it into a directory of $fpath under the name _indexd, or evaluate it behind compinit.

_indexd() {
    local curcontext="$curcontext" state line place
    local -a common commands
    typeset -A opt_args
    common=(
@COMMON@
    )
@BODY@
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _indexd "$@"
else
    compdef _indexd indexd
fi"""


def zsh_script(commands: Commands) -> str:
    """For zsh 5 and newer, as a file of $fpath or evaluated."""
    common = _common(commands)
    shared = "\n".join(f"        {spec}" for option in common for spec in _zsh_specs(option, 1))
    return _filled(_ZSH, COMMON=shared, BODY="\n".join(_zsh_body(commands, (), common, 1)))


def _zsh_body(commands: Commands, path: tuple[str, ...], common: tuple[Option, ...], depth: int) -> list[str]:
    command = next(each for each in commands if each.path == path)
    pad = "    " * depth
    specs = [
        spec
        for place, option in enumerate(_positional_last(_own(command, common)))
        for spec in _zsh_specs(option, place + 1)
    ]
    if _has_common(command, common):
        specs.insert(0, "$common")
    if not command.below:
        return [f"{pad}_arguments \\", *(f"{pad}    {spec} \\" for spec in specs), f"{pad}    && return"]
    lines = [f"{pad}_arguments -C \\", *(f"{pad}    {spec} \\" for spec in specs)]
    # "(-)": what follows the name of a command are that command's options, not these with the same names.
    lines += [f"{pad}    '(-)1: :->command' '(-)*:: :->rest' && return", f"{pad}case $state in", f"{pad}command)"]
    lines.append(f"{pad}    commands=(")
    lines += [f"{pad}        {_quoted(name + ':' + text)}" for name, text in command.below]
    lines += [f"{pad}    )", f"{pad}    _describe -t commands command commands && return ;;", f"{pad}rest)"]
    lines.append(f"{pad}    case $words[1] in")
    for name, _ in command.below:
        lines += [f"{pad}    {name})", *_zsh_body(commands, (*path, name), common, depth + 2), f"{pad}        ;;"]
    return [*lines, f"{pad}    esac ;;", f"{pad}esac"]


def _positional_last(options: list[Option]) -> list[Option]:
    # The number of an argument without a name is its place among those; options come behind and need none.
    return sorted(options, key=lambda option: bool(option.names))


def _zsh_specs(option: Option, place: int) -> list[str]:
    value = option.value.replace("\\", "\\\\").replace(":", "\\:")
    action = f"({' '.join(option.words)})" if option.words else "_files" if option.is_path else " "
    if not option.names:
        return [_quoted(f"{place}:{value}:{action}")]
    text = "".join("\\" + char if char in "\\[]:" else char for char in option.text)
    rest = f":{value}:{action}" if option.takes_value else ""
    specs = [_quoted(f"{name}{'=' if rest and name.startswith('--') else ''}[{text}]{rest}") for name in option.names]
    # zsh would take the next option for a value that is left out: the value is an argument like any other for it.
    return [*specs, _quoted(f"*:{value}:()")] if option.may_take_value else specs


# --- fish

_FISH = """\
# indexd: completion for fish. Put it into ~/.config/fish/completions/indexd.fish.

# The command so far: "" for the program itself, "kafka check" for one below another.
function __indexd_place
    set -l valued @VALUED@
    set -l places @PLACES@
    set -l place
    set -l skip 0
    for word in (commandline -opc)[2..-1]
        if test $skip = 1
            set skip 0
        else if contains -- $word $valued
            set skip 1
        else if contains -- (string join ' ' -- $place $word) $places
            set -a place $word
        end
    end
    string join ' ' -- $place
end

function __indexd_at
    set -l place (__indexd_place)
    contains -- "$place" $argv
end

complete -c indexd -f
@LINES@"""


def fish_script(commands: Commands) -> str:
    """For fish 3 and newer."""
    common = _common(commands)
    lines = []
    sharing = " ".join(_quoted(" ".join(each.path)) for each in commands if _has_common(each, common))
    lines += [_fish_line(f"__indexd_at {sharing}", option) for option in common]
    for command in commands:
        at = f"__indexd_at {_quoted(' '.join(command.path))}"
        for name, text in command.below:
            lines.append(f"complete -c indexd -n {_fish_quoted(at)} -a {name} -d {_fish_quoted(text)}")
        lines += [_fish_line(at, option) for option in _own(command, common)]
    valued = [name for each in commands for option in each.options if option.takes_value for name in option.names]
    places = " ".join(_quoted(" ".join(each.path)) for each in commands if each.path)
    return _filled(_FISH, VALUED=" ".join(dict.fromkeys(valued)), PLACES=places, LINES="\n".join(lines))


def _fish_line(condition: str, option: Option) -> str:
    words = ["complete -c indexd -n", _fish_quoted(condition)]
    words.extend(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
    if option.words:
        words.append("-a " + _fish_quoted(" ".join(option.words)))
    if option.names and option.takes_value:
        words.append("-r" if option.is_path else "-x")
    if option.is_path:
        words.append("-F")
    return " ".join([*words, f"-d {_fish_quoted(option.text)}"])


def _filled(template: str, **parts: str) -> str:
    for name, text in parts.items():
        template = template.replace(f"@{name}@", text)
    return template


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS: dict[str, Callable[[Commands], str]] = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
