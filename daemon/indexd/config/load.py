"""Loads the configuration: flags, environment, TOML file, broker.conf and defaults become one Config, or one error.

Precedence: flags, environment, the TOML file, broker.conf, defaults. Every value keeps its source. One that a stronger
source replaces is not looked at, so a flag can stand in for a broken line until someone mends it. A name that nobody
knows is an error with the nearest one that exists.

broker.conf is read as java.util.Properties.load(InputStream) and RocketMQ's MixAll read it, in ISO 8859-1. The broker
ignores, without a word, a key that it does not know and a number that it cannot parse; we ignore the first and refuse
the second, since the file then does not say what its author thinks it says.
"""

from __future__ import annotations

import re
import stat
import tomllib
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from indexd.config.model import ENV_PREFIX, KEYS, SECTIONS, BrokerFacts, Config, env_name, flag_name, state_directory
from indexd.config.units import (
    JAVA_TRIM,
    ConflictError,
    nearest,
    parse_choice,
    parse_java_int,
    parse_path,
    printable,
    shown,
)
from indexd.errors import UnsafeStoreError, UsageError

CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"
_ALL = "see indexd --help-all for all of them"
LARGEST_FILE = 2**20  # bytes; a configuration is a few KiB, and -c may name a segment by mistake


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was written, and by whom: ``--flavour``, ``environment INDEXD_FLAVOUR``, a file."""

    value: object
    source: str


def read_file(key: str, given: Given) -> tuple[str, bytes]:
    """Name and content of the small file that a key gives; UsageError when it cannot be read or is no small file.

    A pipe or a device is refused and never waited for.
    """
    try:
        path = parse_path(given.value)
    except ValueError as error:
        raise UsageError(f"{_quoted(key, given)} {error}") from None
    name = printable(str(path))
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST_FILE:
            raise UsageError(f"{name} (from {given.source}) is no file of up to 1 MiB", "name a configuration file")
        return name, path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read {name} (from {given.source}): {error.strerror}", "check the path and its mode"
        ) from error


def from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """Every INDEXD_ variable but INDEXD_CONFIG, which names a file and is no key."""
    names = {env_name(key): key for key in KEYS}
    own = {name: value for name, value in environ.items() if name.startswith(ENV_PREFIX) and name != CONFIG_VARIABLE}
    for name in own:
        if name not in names:
            # A prefix that all names share would make them all look near.
            known = [known.removeprefix(ENV_PREFIX) for known in (*names, CONFIG_VARIABLE)]
            raise UsageError(
                f"unknown environment variable {printable(name)}",
                nearest(name.removeprefix(ENV_PREFIX), known, _ALL, ENV_PREFIX),
            )
    return {names[name]: Given(value, f"environment {name}") for name, value in own.items()}


def from_toml(at: Given) -> dict[str, Given]:
    """The keys that the file sets. UsageError names the file and what of it is not TOML, or the key that is not one."""
    file, content = read_file("config", at)
    try:
        tables = tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{file} is not TOML: {printable(str(error)[:200])}",
            "write TOML; a broker's properties file is given as --broker-conf (key broker_conf), not as -c",
        ) from None
    given: dict[str, Given] = {}
    for section, table in tables.items():
        if section not in SECTIONS or not isinstance(table, dict):
            hint = f"put it under [{KEYS[section].section}]" if section in KEYS else nearest(section, SECTIONS, _ALL)
            raise UsageError(f"{shown(section)} (from {file}) is no table of settings", hint)
        for key, value in table.items():
            if key not in KEYS:
                raise UsageError(f"unknown key {shown(key)} (from {file}, [{section}])", nearest(key, KEYS, _ALL))
            if KEYS[key].section != section:
                raise UsageError(f"{key} (from {file}) is under [{section}]", f"move it to [{KEYS[key].section}]")
            given[key] = Given(value, file)
    return given


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
#: What it says of the broker itself.
_FACTS = {field.alias for field in BrokerFacts.model_fields.values()}
# Up to 4.5.1 these two were spelled with one p; a later broker ignores the old spelling, an older one the new.
OLD_NAMES = {
    "mappedFileSizeCommitLog": "mapedFileSizeCommitLog",
    "mappedFileSizeConsumeQueue": "mapedFileSizeConsumeQueue",
}

_LINE_END = re.compile(r"\r\n|\r|\n")


def parse_properties(text: str) -> dict[str, tuple[str, int]]:
    """All properties of a file's text, each with the line on which it starts, from 1; of a key that is there twice the
    last value holds, as in the JDK. ValueError for what makes Properties.load throw.
    """
    import javaproperties  # noqa: PLC0415 - few commands are given a broker.conf

    found, line = dict[str, tuple[str, int]](), 1
    try:
        for element in javaproperties.parse(StringIO(text, newline="")):
            if isinstance(element, javaproperties.KeyValue):
                found[element.key] = (element.value, line)
            line += len(_LINE_END.findall(element.source))
    except javaproperties.InvalidUEscapeError:
        raise ValueError(f"line {line}: a \\u is not followed by four hexadecimal digits") from None
    return found


def from_broker_conf(at: Given, taken: Container[str], flavour: object) -> dict[str, Given]:
    """Our keys that the file sets and nothing stronger (`taken`) does, and what it says of the broker itself, by alias.

    `flavour` decides which spelling of the two renamed keys the broker reads.
    UsageError with file and line for anything that the broker would read otherwise than it is written.
    """
    file, content = read_file("broker_conf", at)
    try:
        entries = parse_properties(content.decode("latin-1"))
    except ValueError as error:
        raise UsageError(f"{file} {error}", "the broker does not start with it either") from None
    if parse_choice(flavour) in ("3.x", "4.0"):
        entries.update({new: entries[old] for new, old in OLD_NAMES.items() if new not in entries and old in entries})
    given: dict[str, Given] = {}
    for name, (written, line) in entries.items():
        if name in _FACTS:
            given[name] = Given(written, f"{file} line {line}")
        key = TEXT_KEYS.get(name) or INT_KEYS.get(name)
        if key is None or key in taken:
            continue
        try:
            value = parse_java_int(written) if name in INT_KEYS else written.strip(JAVA_TRIM)
        except ValueError as error:
            raise UsageError(f"{_quoted(name, Given(written, f'{file} line {line}'))} {error}") from None
        given[key] = Given(value, f"{file} line {line}, {name}")
    return given


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
    given = _toml(config_file, environ) | from_environment(environ)
    given |= {key: Given(value, flag_name(key)) for key, value in flags.items() if value is not None}
    if "broker_conf" in given:
        flavour = given["flavour"].value if "flavour" in given else KEYS["flavour"].default
        given = from_broker_conf(given["broker_conf"], given, flavour) | given
    if "data" not in given:
        given["data"] = Given(state_directory(environ), DEFAULT)
    config = _build(given)
    refuse_double_index(config)
    return config


def refuse_double_index(config: Config) -> None:
    """Stop mode offload while the broker writes index files itself, or while nothing shows that it does not."""
    if config.store.run_mode != "offload":
        return
    path, key = config.store.broker_conf, index_key(config.index.flavour)
    if path is None:
        raise UnsafeStoreError(
            "mode offload needs the broker's own configuration, to see that its indexing is off",
            "give it with --broker-conf",
        )
    if writes_index(config.broker, config.index.flavour):
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
        return from_toml(Given(config_file, "-c"))
    if CONFIG_VARIABLE in environ:
        return from_toml(Given(environ[CONFIG_VARIABLE], f"environment {CONFIG_VARIABLE}"))
    with suppress(PermissionError):  # reading it says why
        if not DEFAULT_CONFIG_FILE.exists() and not DEFAULT_CONFIG_FILE.is_symlink():
            return {}
    return from_toml(Given(DEFAULT_CONFIG_FILE, DEFAULT))


def _build(given: Mapping[str, Given]) -> Config:
    tables: dict[str, dict[str, object]] = {section: {} for section in (*SECTIONS, "broker")}
    for key, value in given.items():
        tables[KEYS[key].section if key in KEYS else "broker"][key] = value.value
    provenance = {key: given[key].source if key in given else DEFAULT for key in KEYS}
    try:
        return Config.model_validate({**tables, "provenance": provenance})
    except ValidationError as errors:
        # The first only: one line is what a unit's journal shows, and the next start shows the next.
        raise _complaint(errors.errors(include_url=False)[0], given) from None


def _complaint(error: Any, given: Mapping[str, Given]) -> UsageError:
    """One of pydantic's errors as ``key = value (from source) what is allowed``."""
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ConflictError):
        values = " and ".join(
            _quoted(key, given[key]) if key in given else f"{key} = {KEYS[key].default} (default)" for key in cause.keys
        )
        return UsageError(f"{values}: {cause}")
    key = error["loc"][1]
    if cause is not None or key not in KEYS:
        return UsageError(f"{_quoted(key, given[key])} {cause or 'is no setting'}")
    what = {
        "ip_v4_network": "is not a list of networks: write 10.0.0.0/8 or 10.1.2.3, several with , between",
        "bool_type": "is not true or false",
        "bool_parsing": "is not true or false",
        "literal_error": f"is not one of {KEYS[key].type.replace('|', ', ')}",
        "greater_than_equal": f"is not in {KEYS[key].bounds}",
        "less_than_equal": f"is not in {KEYS[key].bounds}",
    }
    return UsageError(f"{_quoted(key, given[key])} {what.get(error['type'], error['msg'])}")


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
