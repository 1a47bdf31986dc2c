"""Loads the configuration: flags, environment, TOML file, broker.conf and defaults become one Config, or one error.

Precedence: flags, environment, the TOML file, broker.conf, defaults. Every value keeps its source. One that a stronger
source replaces is not looked at, so a flag can stand in for a broken line until someone mends it. A name that nobody
knows is an error with the nearest one that exists.

broker.conf is read as java.util.Properties.load(InputStream) and RocketMQ's MixAll read it, in ISO 8859-1. The broker
ignores, without a word, a key that it does not know and a number that it cannot parse; we ignore the first and refuse
the second, since the file then does not say what its author thinks it says.
"""

from __future__ import annotations

import difflib
import grp
import os
import pwd
import re
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import ValidationError

from indexd.config.model import ENV_PREFIX, KEYS, SECTIONS, BrokerFacts, Config, env_name, flag_name, state_directory
from indexd.config.units import ConflictError, parse_choice, parse_java_int, parse_path, printable, shown
from indexd.errors import UnsafeStoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping
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
    data, file = read_file(path, source), printable(str(path))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{file} line {line} is not UTF-8 text", "name a TOML file") from None
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


def _not_toml(file: str, text: str, error: ValueError) -> UsageError:
    hint = _BROKER_HINT if _CAMEL_KEY.search(text) else "correct the file: it is not TOML"
    if match := _TOML_LINE.fullmatch(str(error)):
        return UsageError(f"{file} line {match[2]}, column {match[3]}: {printable(match[1])}", hint)
    end = f" line {text.count(chr(10)) + 1}" if str(error).endswith("(at end of document)") else ""
    return UsageError(f"{file}{end}: {printable(str(error))}", hint)


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


TEXT_KEYS = {
    "storePathRootDir": "store",
    "storePathCommitLog": "commit_log_paths",
    "readOnlyCommitLogStorePaths": "read_only_commit_log_paths",
    "messageDelayLevel": "message_delay_level",
    "brokerClusterName": "cluster",
    "brokerName": "node_id",
}
INT_KEYS = {
    "mappedFileSizeCommitLog": "segment_size",
    "mappedFileSizeConsumeQueue": "consume_queue_file_size",
    "maxHashSlotNum": "hash_slot_num",
    "maxIndexNum": "index_num",
    "maxMsgsNumBatch": "max_msgs_num_batch",
    "defaultQueryMaxNum": "default_query_max_num",
    "maxMessageSize": "max_message_size",
}
# Up to 4.5.1 these two were spelled with one p; a later broker ignores the old spelling, an older one the new.
OLD_NAMES = {
    "mappedFileSizeCommitLog": "mapedFileSizeCommitLog",
    "mappedFileSizeConsumeQueue": "mapedFileSizeConsumeQueue",
}
FACT_KEYS = {
    "messageIndexEnable": "message_index_enable",
    "messageIndexSafe": "message_index_safe",
    "indexFileWriteEnable": "index_file_write_enable",
    "indexRocksDBEnable": "index_rocksdb_enable",
    "storeType": "store_type",
    "enableDLegerCommitLog": "enable_dledger_commit_log",
    "enableControllerMode": "enable_controller_mode",
    "duplicationEnable": "duplication_enable",
    "transientStorePoolEnable": "transient_store_pool_enable",
    "flushDiskType": "flush_disk_type",
    "brokerRole": "broker_role",
    "listenPort": "listen_port",
    "brokerIP1": "broker_ip1",
}

_BLANKS = " \t\f"
_LINE_END = re.compile(r"\r\n|\r|\n")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_NAMED_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "f": "\f"}
_JAVA_TRIM = "".join(map(chr, range(0x21)))  # String.trim cuts every character up to the space


@dataclass(frozen=True, slots=True)
class Entry:
    """One property: its value as Properties.load gives it, and the line on which it starts, from 1."""

    value: str
    line: int


class PropertiesError(ValueError):
    """What makes Properties.load throw, and the line of it."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


def parse_properties(text: str) -> dict[str, Entry]:
    """All properties of a file's text; of a key that is there twice the last value holds, as in the JDK."""
    found: dict[str, Entry] = {}
    for number, line in _logical_lines(text):
        end = 0
        while end < len(line) and line[end] not in "=:" + _BLANKS:
            end += 2 if line[end] == "\\" else 1
        rest = line[end:].lstrip(_BLANKS)
        if rest[:1] in ("=", ":"):
            rest = rest[1:].lstrip(_BLANKS)
        found[_unescape(line[:end], number)] = Entry(_unescape(rest, number), number)
    return found


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines without comments and blank ones, continuations joined, each with the number of its first line."""
    pending, start = "", 0
    for number, natural in enumerate(_LINE_END.split(text), 1):
        line = natural.lstrip(_BLANKS)
        if not pending:
            if not line or line[0] in "#!":
                continue
            start = number
        if (len(line) - len(line.rstrip("\\"))) % 2:
            pending += line[:-1]
            continue
        if pending or line:
            yield start, pending + line
        pending = ""
    if pending:
        yield start, pending


def _unescape(text: str, line: int) -> str:
    def replace(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] != "u":
            return _NAMED_ESCAPES.get(code, code)
        if len(code) == 1:
            raise PropertiesError(line, "a \\u is not followed by four hexadecimal digits")
        return chr(int(code[1:], 16))

    plain = _ESCAPE.sub(replace, text)
    if any("\ud800" <= c <= "\udfff" for c in plain):  # escapes are UTF-16 units: join the pairs
        plain = plain.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return plain


def read_broker_conf(
    path: Path, source: str, taken: Container[str], flavour: object
) -> tuple[dict[str, Given], BrokerFacts]:
    """Our keys that the file sets and nothing stronger (`taken`) does, and what it says of the broker itself.

    `source` says who named the file; `flavour` decides which spelling of the two renamed keys the broker reads.
    UsageError with file and line for anything that the broker would read otherwise than it is written.
    """
    text = read_file(path, source).decode("latin-1")
    try:
        entries = parse_properties(text)
    except PropertiesError as error:
        raise UsageError(
            f"{printable(str(path))} line {error.line}: {error}", "the broker does not start with it either"
        ) from None
    if parse_choice(flavour) in ("3.x", "4.0"):
        entries.update({new: entries[old] for new, old in OLD_NAMES.items() if new not in entries and old in entries})
    given: dict[str, Given] = {}
    for name, key in (TEXT_KEYS | INT_KEYS).items():
        entry = entries.get(name)
        if entry is None or key in taken:
            continue
        value: object = entry.value.strip(_JAVA_TRIM)
        try:
            if name in INT_KEYS:
                value = parse_java_int(entry.value)
            elif "${" in entry.value:
                raise ValueError("is not expanded, by Java's properties no more than here: write the path out")
        except ValueError as error:
            raise _refused(name, entry, path, str(error)) from None
        given[key] = Given(value, f"{printable(str(path))} line {entry.line}, {name}")
    java = {key: name for name, key in FACT_KEYS.items() if name in entries}
    texts = {key: entries[name].value for key, name in java.items()}
    for key in texts.keys() & {"store_type", "flush_disk_type", "broker_role", "broker_ip1"}:
        texts[key] = texts[key].strip(_JAVA_TRIM)
    try:
        return given, BrokerFacts.model_validate(texts)
    except ValidationError as errors:
        problem = errors.errors(include_url=False)[0]
        key = str(problem["loc"][0])
        words = ", ".join(get_args(BrokerFacts.model_fields[key].annotation))
        why = f"is not one of {words}" if words else str(problem["ctx"]["error"])
        raise _refused(java[key], entries[java[key]], path, why) from None


def _refused(name: str, entry: Entry, path: Path, why: str) -> UsageError:
    return UsageError(
        f"{name} = {shown(entry.value)} (from {printable(str(path))} line {entry.line}) {why}", "correct it there"
    )


DEFAULT_CONFIG_FILE = Path("/etc/indexd/indexd.toml")
DEFAULT = "default"
# The first release that can stop the files and keep the rest.
_SPLIT_FLAVOUR = "5.4"


def load(flags: Mapping[str, str | list[str] | None], config_file: Path | None, environ: Mapping[str, str]) -> Config:
    """The configuration that these sources make together, with `provenance` for every key.

    `flags` maps keys to the text on the command line, a list of texts for a key that may be repeated, None where a
    flag was not given; `config_file` is -c.
    Raises UsageError for what is wrong in a source, UnsafeStoreError where mode offload meets a broker that indexes.
    """
    given = _toml(config_file, environ) | from_environment(environ) | from_flags(flags)
    facts = BrokerFacts()
    if "broker_conf" in given:
        path = _checked_path("broker_conf", given["broker_conf"])
        flavour = given.get("flavour", Given(KEYS["flavour"].default, DEFAULT))
        below, facts = read_broker_conf(path, given["broker_conf"].source, given, flavour.value)
        given = below | given
    if "data" not in given:
        given["data"] = Given(state_directory(environ), f"{DEFAULT} ({_state_source(environ)})")
    config = _build(given, facts)
    refuse_double_index(config)
    return config


def refuse_double_index(config: Config) -> None:
    """Stop mode offload while the broker writes index files itself, or while nothing shows that it does not."""
    if config.store.run_mode != "offload":
        return
    path = config.store.broker_conf
    if path is None:
        raise UnsafeStoreError(
            "mode offload needs the broker's own configuration, to see that its indexing is off",
            "give it with --broker-conf",
        )
    if not writes_index(config.broker, config.index.flavour):
        return
    key = index_key(config.index.flavour)
    raise UnsafeStoreError(
        f"mode offload, but the broker still writes its index: {key} is true in {printable(str(path))}",
        f"set {key}=false there and restart the broker, or use mode shadow",
    )


def writes_index(broker: BrokerFacts, flavour: str) -> bool:
    """Whether a broker of this flavour, so configured, writes index files."""
    return broker.message_index_enable and (flavour != _SPLIT_FLAVOUR or broker.index_file_write_enable)


def index_key(flavour: str) -> str:
    """The key of broker.conf that turns its index files off and leaves the rest."""
    return "indexFileWriteEnable" if flavour == _SPLIT_FLAVOUR else "messageIndexEnable"


def _toml(config_file: Path | None, environ: Mapping[str, str]) -> dict[str, Given]:
    if config_file is not None:
        return from_toml(_checked_path("config", Given(config_file, "-c")), "-c")
    if CONFIG_VARIABLE in environ:
        source = f"environment {CONFIG_VARIABLE}"
        return from_toml(_checked_path("config", Given(environ[CONFIG_VARIABLE], source)), source)
    try:
        DEFAULT_CONFIG_FILE.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError:
        pass  # it is there and cannot be reached: reading it says why
    return from_toml(DEFAULT_CONFIG_FILE, DEFAULT)


def _checked_path(key: str, given: Given) -> Path:
    try:
        return parse_path(given.value)
    except ValueError as error:
        raise UsageError(f"{_quoted(key, given)} {error}") from None


def _state_source(environ: Mapping[str, str]) -> str:
    for name in ("STATE_DIRECTORY", "XDG_STATE_HOME"):
        if environ.get(name) and state_directory(environ) != state_directory({**environ, name: ""}):
            return f"${name}"
    return "home directory"


def _build(given: Mapping[str, Given], facts: BrokerFacts) -> Config:
    tables: dict[str, dict[str, object]] = {section: {} for section in SECTIONS}
    for key, value in given.items():
        tables[KEYS[key].section][key] = value.value
    provenance = {key: given[key].source if key in given else DEFAULT for key in KEYS}
    try:
        return Config.model_validate({**tables, "broker": facts, "provenance": provenance})
    except ValidationError as errors:
        # The first only: one line is what a unit's journal shows, and the next start shows the next.
        raise _complaint(errors.errors(include_url=False)[0], given) from None


def _complaint(error: Any, given: Mapping[str, Given]) -> UsageError:
    """One of pydantic's errors as ``key = value (from source) what is allowed``."""
    context = error.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, ConflictError):
        values = " and ".join(
            _quoted(key, given[key]) if key in given else f"{key} = {KEYS[key].default} (default)" for key in cause.keys
        )
        return UsageError(f"{values}: {cause}")
    key = error["loc"][1]
    if cause is not None:
        what = str(cause)
    elif error["type"] == "literal_error":
        what = f"is not one of {KEYS[key].type.replace('|', ', ')}"
    elif error["type"] in ("greater_than_equal", "less_than_equal"):
        what = f"is not in {KEYS[key].bounds}"
    else:
        what = f"is refused: {error['msg']}"
    return UsageError(f"{_quoted(key, given[key])} {what}")


def _quoted(key: str, given: Given) -> str:
    """``key = value (from source)``."""
    return f"{key} = {shown(given.value)} (from {given.source})"


def check_outside(config: Config, path: Path, flag: str) -> None:
    """Refuse a directory of ours that lies in the store or in one of its commitlog directories."""
    roots = (*((config.store.store,) if config.store.store else ()), *config.store.commit_log_directories)
    for root in roots:
        if path.resolve().is_relative_to(root.resolve()):
            raise UnsafeStoreError(
                f"{path} (from {flag}) lies inside the store, in {root}",
                f"nothing is written into a broker's store: give another {flag}",
            )


def make_private(path: Path) -> None:
    """Make a directory and its parents as a data directory is made, whatever the umask."""
    for step in reversed((path, *path.parents)):
        if not step.exists():
            step.mkdir(mode=0o700)
            step.chmod(0o750)


def why_not_trusted(path: Path) -> str | None:
    """Who else could put something into ``path``, which is resolved, or make it; None for root and this user alone."""
    for step in (path, *path.parents):
        if not step.exists():
            continue
        status = step.stat()
        if status.st_uid not in (0, os.geteuid()):
            return f"{step} belongs to user {status.st_uid}"
        others = stat.S_IWOTH | (0 if _is_of_one(status) else stat.S_IWGRP)
        # Where all may make files and nobody may touch another's, as in /tmp, a folder stays whose it is.
        if status.st_mode & others and not (status.st_mode & stat.S_ISVTX and step != path):
            return f"others may write to {step}"
    return None


def _is_of_one(status: os.stat_result) -> bool:
    # A group that is called as its one user, as many systems give to each: their umask is 002.
    try:
        user, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
