"""status: where the daemon stands, asked of the daemon itself; once, or again and again until Ctrl-C.

A running daemon says in DATA/state where it serves HTTP; DATA/state is believed only while the process that wrote it
holds the lock. Without a daemon the frontier alone counts. What needs an operator the daemon decides: its ``findings``
are shown, and what only an outsider can see is added: that it does not run, or does not answer.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from indexd.cli.output import Parser, add_command, print_json, print_line, table_lines, typed, values, wants_json
from indexd.config import OFF, Config, flag_name, parse_seconds, split_address
from indexd.config.units import printable
from indexd.errors import IndexdError, UsageError
from indexd.findings import findings_of
from indexd.pages.wording import show_duration, show_local, show_size
from indexd.query.source import known_frontier, open_index, read_state
from indexd.storage.disk import Disk
from indexd.storage.lock import owner_pid
from indexd.storage.names import DataFiles

Row = dict[str, Any]
_WATCH_SECONDS = 2.0
_TIMEOUT_SECONDS = 5.0
_ANSWER_BYTES_MAX = 16 << 20
_NO_INDEXD = "what answers there is no indexd"
_EVENTS_MAX = 8
# Drains write the state, every few seconds; one that waits tries again after retry_max_seconds at the latest.
_STALE_SECONDS = 120.0
_WIDTH = 100
# What clears a terminal before each look.
_CLEAR = "\x1b[H\x1b[2J"
_NUMBER = re.compile(r"-?[0-9]{1,20}", re.ASCII)
# What stays a text even if it is nothing but digits. All other texts of digits are numbers of 64 bits.
_TEXTS = frozenset({
    "version", "bootId", "cluster", "nodeId", "flavour", "store", "data", "name", "names", "file", "reason", "why",
    "problem", "hint", "mode", "http", "kind", "stage", "output", "topic", "key",
})  # fmt: skip
_OFFSETS = {
    "commitLogMinOffset": "begins at",
    "durableOffset": "durable to",
    "phyOffset": "indexed to",
    "readOffset": "read to",
    "commitLogMaxOffset": "ends at",
}


def register(commands: Any, common: Parser) -> None:
    """Add the command."""
    text = "where the daemon stands: lag, outputs, events, what is the matter; of --data, or of --http HOST:PORT"
    parser = add_command(commands, "status", [common], text, ["http"], status)
    parser.add_argument(
        "--watch",
        nargs="?",
        type=typed(parse_seconds, 0.1, 3600),
        const=_WATCH_SECONDS,
        metavar="SECONDS",
        help="look again and again until Ctrl-C (default: every 2 s)",
    )
    parser.add_argument(
        "--ca", type=Path, metavar="FILE", help="speak https; certificates of who may vouch for the daemon, PEM"
    )


def status(args: argparse.Namespace, config: Config) -> int:
    """Look and show; 1 when the last look found something that needs an operator."""
    asker, before = Asker(config, args.ca), ""
    if args.watch is not None:
        before = _CLEAR if sys.stdout.isatty() else "\n"
    while True:
        look, has_reader = asker.look(), False
        with suppress(BrokenPipeError):  # whoever reads may have enough: then this look was the last
            if wants_json(args):
                told = {"events": look.events, "findings": look.findings, "notes": look.notes}
                when = {"at": int(look.at * 1000), "ageMilliseconds": int(look.age * 1000)}
                print_json({**look.row, "asked": look.asked, **when, **told})
            else:
                # In one piece, so that Ctrl-C leaves a whole look on the terminal.
                print_line(before + "\n".join(draw(look)))
            sys.stdout.flush()
            has_reader = True
        if args.watch is None or not has_reader:
            return int(bool(look.findings))
        time.sleep(args.watch)


# --- asking


@dataclass(frozen=True, slots=True)
class StatusSample:
    """The figures of one moment: ``row`` as the daemon's status has them, at ``at`` (Unix seconds), and who said so.

    Its ``phase`` is the daemon's, or ``stopped``, ``crashed`` or ``unreachable``; the last of these has a ``lastPhase``
    if the daemon wrote down where it stands.
    ``events`` are the last ones, oldest first. ``findings`` need an operator, ``notes`` do not. ``age`` is how many
    seconds before the look the figures were written down.
    """

    row: Row
    asked: str
    at: float = field(default_factory=time.time)
    events: list[Row] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    age: float = 0.0


class NoAnswerError(Exception):
    """Nothing came over HTTP, or nothing of use."""


class RefusedError(NoAnswerError):
    """Another token is wanted."""


class Asker:
    """Looks as often as asked: at the address of ``--http``, else at the daemon of the data directory.

    UsageError if a flag names a file without a token or without certificates, or an address where nobody can be asked.
    """

    def __init__(self, config: Config, authorities: Path | None) -> None:
        import ssl  # noqa: PLC0415 - no other command speaks HTTP

        self._disk, self._config, self._files = Disk(), config, DataFiles(config.store.data)
        # Only the flag says whom to ask; elsewhere the key is the daemon's own, and the daemon of --data is asked.
        self._address = config.http.http if self._is_flag("http") else None
        if self._address is not None and not _is_address(self._address):
            hint = "give HOST:PORT, or leave it out: --data knows it"
            raise UsageError(f"--http {self._address} is nowhere to ask", hint)
        self._headers = self._read_token()
        trusted, self._tls = authorities or config.http.http_tls_cert, None
        self._scheme = "http" if trusted is None else "https"
        if trusted is None:
            return
        try:
            self._tls = ssl.create_default_context(cafile=trusted)
        except OSError as error:
            raise UsageError(f"no certificates in {trusted}: {error.strerror or error}", "it must be PEM") from error
        if authorities is None:
            # The very certificate that this daemon shows, whatever name it has: no other one is accepted.
            self._tls.check_hostname = False
            self._tls.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN

    def look(self) -> StatusSample:
        """One look; UsageError where there is neither a daemon nor an index, and IndexdError of other kinds."""
        if self._address is not None:
            return self._at(self._address)
        pid = owner_pid(self._files.lock)
        if pid is None:
            return self._stopped()
        state = read_state(self._disk, self._files.state)
        if state.get("pid") != pid:
            return StatusSample({"phase": "opening", "pid": pid, "data": str(self._files.data)}, str(self._files.lock))
        address, findings = state.get("http"), list[str]()
        notes = ["it serves no HTTP, so this is what it wrote down last"]
        if _is_address(address):
            notes = [f"HTTP at {address} is served by another process"]
            try:
                look = self._over_http(address)
                if look.row.get("pid") == pid:
                    return look
            except NoAnswerError as error:
                said = [f"HTTP at {address}: {error}"]
                findings, notes = ([], said) if isinstance(error, RefusedError) else (said, [])
        return self._written(state, findings, notes)

    def _is_flag(self, key: str) -> bool:
        return self._config.provenance.get(key) == flag_name(key)

    def _read_token(self) -> dict[str, str]:
        file = self._config.http.http_token_file
        if file is None:
            return {}
        from indexd.serve.access_files import read_token  # noqa: PLC0415 - loads ssl

        try:
            return {"Authorization": f"Bearer {read_token(file).decode('ascii')}"}
        except UsageError as error:
            if not self._is_flag("http_token_file"):  # it may be there for the daemon alone, which answers 401 then
                return {}
            # The daemon's own hint makes a new token, over whatever file was named.
            hint = "name the file that holds the daemon's token with --http-token-file"
            raise UsageError(str(error), hint) from error

    def _get(self, address: str, path: str) -> Any:
        # The JSON of the answer, numbers of 64 bits as ints; NoAnswerError.
        from http import client as http  # noqa: PLC0415 - no other command speaks HTTP

        host, port = split_address(address)
        connect = http.HTTPConnection if self._tls is None else partial(http.HTTPSConnection, context=self._tls)
        with closing(connect(host, port, timeout=_TIMEOUT_SECONDS)) as connection:
            try:
                connection.request("GET", path, headers=self._headers)
                answer = connection.getresponse()
                body = answer.read(_ANSWER_BYTES_MAX)
            except (OSError, http.HTTPException) as error:
                words = getattr(error, "strerror", None) or str(error)  # or "timed out"
                if isinstance(error, ConnectionResetError | http.BadStatusLine):
                    words += "; if it speaks https, name its certificate with --ca"
                raise NoAnswerError(words if self._tls is None else f"TLS: {words}") from error
        if answer.status != http.OK:
            kind = RefusedError if answer.status in (401, 403) else NoAnswerError
            raise kind(f"{answer.status} {answer.reason}")
        try:
            return from_text64(json.loads(body))
        except ValueError as error:
            raise NoAnswerError(_NO_INDEXD) from error

    def _at(self, address: str) -> StatusSample:
        asked = f"{self._scheme}://{address}"
        try:
            return self._over_http(address)
        except RefusedError as error:
            hint = "name the file that holds it with --http-token-file"
            raise UsageError(f"{address} wants another token: {error}", hint) from error
        except NoAnswerError as error:
            return StatusSample({"phase": "unreachable"}, asked, findings=[f"no answer from {asked}: {error}"])

    def _over_http(self, address: str) -> StatusSample:
        row, events = self._get(address, "/api/v1/status"), []
        if not isinstance(row, dict) or "phase" not in row:
            raise NoAnswerError(_NO_INDEXD)
        with suppress(NoAnswerError):
            since = max(int(row.get("lastEvent") or 0) - _EVENTS_MAX, 0)
            events = self._get(address, f"/api/v1/events?since={since}").get("events", [])[-_EVENTS_MAX:]
        return StatusSample(row, f"{self._scheme}://{address}", events=events, findings=list(row.get("findings") or ()))

    def _written(self, state: Row, findings: list[str], notes: list[str]) -> StatusSample:
        now = time.time()
        age = max(now - state.get("writtenAt", now * 1000) / 1000, 0.0)
        if age > _STALE_SECONDS:
            findings.append(f"it last wrote down where it stands {age:.0f} s ago")
        if findings:  # it did not answer, or is silent for long: nobody knows what it does now
            state |= {"phase": "unreachable", "lastPhase": state["phase"]}
        findings += state.get("findings") or ()
        return StatusSample(state, str(self._files.state), now, [], findings, notes, age)

    def _stopped(self) -> StatusSample:
        frontier, clean = known_frontier(self._disk, self._files), not self._disk.exists(self._files.abort)
        crashed = "it crashed or was killed; the next start recovers (the abort flag is there)"
        row: Row = {
            "phase": "stopped" if clean else "crashed",
            "lastShutdownClean": clean,
            "store": frontier.store,
            "data": str(self._files.data),
            "flavour": frontier.flavour,
            "hashSlotNum": frontier.layout.hash_slot_num,
            "indexNum": frontier.layout.index_num,
            "beginOffset": frontier.begin_offset,
            "phyOffset": frontier.phy_offset,
            "filledOffset": frontier.filled_offset,
            "durableOffset": frontier.phy_offset,
            "storeTimestamp": frontier.store_timestamp,
            "messages": frontier.messages,
            "indexFiles": len(frontier.index),
            "indexEntries": sum(max(mark.header.entries, 0) for mark in frontier.index),
            "uncovered": [[gap.begin, gap.end, gap.reason] for gap in frontier.uncovered],
        }
        notes = []
        try:
            with closing(open_index(self._disk, self._config)) as index:
                coverage = index.look().coverage
            row |= {"commitLogMinOffset": coverage.log_begin or 0, "caughtUp": coverage.behind is None}
            if coverage.behind is not None and coverage.behind.reason is not None:
                row["corrupt"] = {"offset": coverage.behind.phy_offset, "reason": coverage.behind.reason}
        except IndexdError as error:
            notes.append(f"the log cannot be looked at: {error.line()}")
        findings = [f"no daemon runs: {'it was stopped' if clean else crashed}", *findings_of(row)]
        return StatusSample(row, str(self._files.frontier), findings=findings, notes=notes)


def _is_address(address: object) -> TypeGuard[str]:
    return isinstance(address, str) and address != OFF and split_address(address)[1] != 0


def from_text64(value: Any, name: str = "") -> Any:
    """``value`` with the texts of digits below it as ints, but for those that are names."""
    if isinstance(value, str):
        return int(value) if name not in _TEXTS and _NUMBER.fullmatch(value) else value
    if isinstance(value, dict):
        return {key: from_text64(item, key) for key, item in value.items()}
    return [from_text64(item, name) for item in value] if isinstance(value, list) else value


# --- drawing


def draw(look: StatusSample) -> Iterator[str]:
    """A look as lines of plain text: what is the matter, how far behind it is, then the rest."""
    row = look.row
    phase = row["phase"]
    if "lastPhase" in row:
        phase = f"does not answer (figures are {_span(look.age)} old)"
    words = [
        f"pid {row['pid']}" if row.get("pid") else "",
        f"up {_span(look.at - row['startedAt'] / 1000)}" if row.get("startedAt") else "",
        f"{row['cluster']} / {row.get('nodeId')}" if row.get("cluster") else "",
        f"mode {row['mode']}, indexd {row.get('version')}" if row.get("mode") else "",
    ]
    yield from _folded("", "  ".join([phase, *filter(None, words)]))
    when = f", written {_span(look.age)} ago, when it was {row.get('lastPhase', phase)}" if look.age else ""
    yield from _folded("", f"asked {look.asked}, {show_local(int(look.at * 1000))}{when}")
    for mark, texts in (("! ", look.findings), ("  ", look.notes)):
        for text in texts:
            yield from _folded(mark, text)
    yield ""
    for label, text in _lines(row):
        yield from _folded(f"{label:<10}", text)
    outputs = [
        (
            *(item[name] for name in ("output", "phyOffset", "durableOffset")),
            *(show_size(item[name]) for name in ("behindBytes", "bytes")),
            *(f"{item[name]:,}" for name in ("files", "entries")),
        )
        for item in row.get("outputs") or ()
    ]
    if outputs:
        head = ("output", "indexed to", "durable to", "behind", "bytes", "files", "entries")
        yield from ["", *table_lines(head, outputs)]
    yield from ["", "last events"] if look.events else []
    for event in look.events:
        text = f"{show_local(event['at'])}  {event.get('name')}  {values(event.get('fields') or {})}"
        yield from _folded("  ", text)


def _lines(row: Row) -> Iterator[tuple[str, str]]:
    if "summary" in row:
        yield "state", row["summary"]["words"]
    if "dispatchBehindBytes" in row:
        behind = f"{show_size(row['dispatchBehindBytes'])}, {_span(row['dispatchBehindMilliseconds'] / 1000)}"
        state = ("caught up" if row.get("caughtUp") else "reading on") + (" then" if "lastPhase" in row else "")
        yield "lag", f"{behind}, {row['dispatchBehindMessages']:,} messages, {state}"
    if "phyOffset" in row:
        yield "offsets", ", ".join(f"{word} {row[key]}" for key, word in _OFFSETS.items() if row.get(key) is not None)
        covered = f"log bytes {row.get('beginOffset', 0)} to {row['phyOffset']}"
        if gaps := row.get("uncovered"):
            covered += f", without {len(gaps)} of {show_size(sum(int(gap[1]) - int(gap[0]) for gap in gaps))}"
        yield "covered", covered + (", all of the log" if row.get("caughtUp") else "")
    # What is said member by member, as it is.
    for key in ("lastRecovery", "scrub", "broker", "remoting", "mqtt", "store", "data"):
        if row.get(key):
            yield {"lastRecovery": "opening"}.get(key, key), values({"": row[key]}).lstrip()


def _span(seconds: float) -> str:
    return show_duration(max(int(seconds * 1000), 0))


def _folded(label: str, text: str) -> Iterator[str]:
    # Lines of at most the width; nothing that a terminal obeys.
    indent = " " * len(label)
    yield from textwrap.wrap(label + printable(text), _WIDTH, subsequent_indent=indent, drop_whitespace=True) or [label]
