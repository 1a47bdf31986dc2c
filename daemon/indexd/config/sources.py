"""Where values come from: flags, environment and the TOML file, each read into key -> value with its source.

Nothing is validated here but names: a key that nobody knows is an error with the nearest one that exists.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UsageError
from .keys import ENV_PREFIX, KEYS, SECTIONS, env_name, flag_name
from .units import printable, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"
LARGEST_FILE = 2**20  # bytes; a configuration is a few KiB, and -c may name a segment by mistake

_TOML_LINE = re.compile(r"(.*?) ?\(at line (\d+), column (\d+)\)", re.DOTALL)
_CAMEL_KEY = re.compile(r"^[ \t]*[a-z]+[A-Z]\w*[ \t]*[=:]", re.MULTILINE)
_BROKER_HINT = "it looks like a broker's properties file: give it as --broker-conf (key broker_conf), not as -c"


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was written, and by whom: ``--flavour``, ``environment INDEXD_FLAVOUR``, a file's line."""

    value: object
    source: str


def read_file(path: Path, source: str) -> bytes:
    """The whole of a small file. `source` says who named it; UsageError when it cannot be read or is no small file.

    A pipe or a device is refused and never waited for.
    """
    name = printable(str(path))
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(f"{name} (from {source}) is no file", "name a configuration file")
            data = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {name} (from {source}): {reason}", "check the path and its mode") from error
    if len(data) > LARGEST_FILE:
        raise UsageError(f"{name} (from {source}) is larger than 1 MiB", "name a configuration file")
    return data


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def from_flags(flags: Mapping[str, str | list[str] | None]) -> dict[str, Given]:
    """The flags that were given; None is a flag that was not."""
    for key in flags:
        if key not in KEYS:
            raise UsageError(f"unknown option {printable(flag_name(key))}", _nearest(key, KEYS))
    return {key: Given(value, flag_name(key)) for key, value in flags.items() if value is not None}


def from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """Every INDEXD_ variable but INDEXD_CONFIG, which names a file and is no key."""
    names = {env_name(key): key for key in KEYS}
    given: dict[str, Given] = {}
    for name, value in environ.items():
        if not name.startswith(ENV_PREFIX) or name == CONFIG_VARIABLE:
            continue
        if name not in names:
            known = [known.removeprefix(ENV_PREFIX) for known in (*names, CONFIG_VARIABLE)]
            hint = _nearest(name.removeprefix(ENV_PREFIX), known, ENV_PREFIX)
            raise UsageError(f"unknown environment variable {printable(name)}", hint)
        given[names[name]] = Given(value, f"environment {name}")
    return given


def from_toml(path: Path, source: str) -> dict[str, Given]:
    """The keys that the file sets. UsageError names file and line of what is not TOML or not a key."""
    text = _decode(path, read_file(path, source))
    file = printable(str(path))
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"{file}: tables or lists are nested too deeply") from None
    except ValueError as error:
        raise _not_toml(file, text, error) from None
    given: dict[str, Given] = {}
    for section, table in tables.items():
        if section not in SECTIONS:
            raise _unknown(section, f"{file}{_at(text, '', section)}", SECTIONS, "table")
        if not isinstance(table, dict):
            raise UsageError(f"{section} = {shown(table)} (from {file}{_at(text, '', section)}) is not a table")
        for key, value in table.items():
            place = f"{file}{_at(text, section, key)}"
            if key not in KEYS:
                raise _unknown(key, f"{place}, [{section}]", KEYS, "key")
            if KEYS[key].section != section:
                raise UsageError(f"{key} (from {place}) is under [{section}]", f"move it to [{KEYS[key].section}]")
            given[key] = Given(value, place)
    return given


def _decode(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{printable(str(path))} line {line} is not UTF-8 text", "name a TOML file") from None


def _not_toml(file: str, text: str, error: ValueError) -> UsageError:
    hint = _BROKER_HINT if _CAMEL_KEY.search(text) else "correct the file: it is not TOML"
    if match := _TOML_LINE.fullmatch(str(error)):
        return UsageError(f"{file} line {match[2]}, column {match[3]}: {printable(match[1])}", hint)
    if str(error).endswith("(at end of document)"):
        return UsageError(f"{file} line {text.count(chr(10)) + 1}: {printable(str(error))}", hint)
    return UsageError(f"{file}: {printable(str(error))}", hint)


def _unknown(name: str, place: str, known: Iterable[str], what: str) -> UsageError:
    if name in KEYS:
        return UsageError(f"{name} (from {place}) is in no table", f"put it under [{KEYS[name].section}]")
    hint = _BROKER_HINT if _CAMEL_KEY.match(f"{name}=") else _nearest(name, known)
    return UsageError(f"unknown {what} {shown(name)} (from {place})", hint)


def _nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """The hint about a name that nobody knows; a `prefix` that all names share would make them all look near."""
    choices = list(known)
    found = difflib.get_close_matches(word[:64], choices, n=1, cutoff=0.6)
    if found:
        return f"did you mean {prefix}{found[0]}?"
    return f"there are {', '.join(choices)}" if len(choices) <= len(SECTIONS) else "see indexd --help for all of them"


def _at(text: str, section: str, key: str) -> str:
    """`` line N`` of a key, found by eye: tomllib keeps no lines. Empty for a key that is written in another way."""
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*([\w-]+)\s*\]", line):
            table = header[1]
            if not section and table == key:
                return f" line {number}"
        elif table == section and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
            return f" line {number}"
    return ""
