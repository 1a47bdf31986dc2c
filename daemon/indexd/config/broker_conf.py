"""broker.conf: a Java properties file, read as java.util.Properties.load(InputStream) and RocketMQ's MixAll read it.

Written by the broker's operator, read by the broker at its start and by us. The bytes are ISO 8859-1. The broker
ignores, without a word, a key that it does not know and a number that it cannot parse; we ignore the first and refuse
the second, since the file then does not say what its author thinks it says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, get_args

from ..errors import UsageError
from .facts import BrokerFacts
from .sources import Given, read_file
from .units import parse_choice, printable, shown

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping
    from pathlib import Path

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
_JAVA_INT = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)


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
        if name in INT_KEYS:
            value = _java_int(name, entry, path)
        elif "${" in entry.value:
            _refuse(name, entry, path, "is not expanded, by Java's properties no more than here: write the path out")
        given[key] = Given(value, f"{printable(str(path))} line {entry.line}, {name}")
    return given, _facts(entries, path)


def _facts(entries: Mapping[str, Entry], path: Path) -> BrokerFacts:
    facts: dict[str, object] = {}
    for name, attribute in FACT_KEYS.items():
        if (entry := entries.get(name)) is None:
            continue
        words = get_args(BrokerFacts.model_fields[attribute].annotation)
        text = entry.value.strip(_JAVA_TRIM)
        if BrokerFacts.model_fields[attribute].annotation is bool:
            facts[attribute] = _java_boolean(name, entry, path)
        elif BrokerFacts.model_fields[attribute].annotation is int:
            facts[attribute] = _java_int(name, entry, path)
        elif words and text not in words:
            _refuse(name, entry, path, f"is not one of {', '.join(words)}")
        else:
            facts[attribute] = text
    return BrokerFacts.model_validate(facts)


def _java_int(name: str, entry: Entry, path: Path) -> int:
    number = int(entry.value) if _JAVA_INT.fullmatch(entry.value) else None
    if number is None or not -(2**31) <= number < 2**31:
        _refuse(name, entry, path, "is not a whole number of 32 bits; the broker ignores it and uses its default")
    return number


def _java_boolean(name: str, entry: Entry, path: Path) -> bool:
    if entry.value.lower() not in ("true", "false"):  # Boolean.parseBoolean: all but "true" is false, "true " as well
        _refuse(name, entry, path, "is not true or false; the broker reads it as false")
    return entry.value.lower() == "true"


def _refuse(name: str, entry: Entry, path: Path, why: str) -> NoReturn:
    raise UsageError(
        f"{name} = {shown(entry.value)} (from {printable(str(path))} line {entry.line}) {why}", "correct it there"
    )
