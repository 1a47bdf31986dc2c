"""Asks where a daemon stands: the daemon itself over HTTP, else what lies in its data directory.

A running daemon says in DATA/state where it serves HTTP; DATA/state is believed only while the process that wrote it
holds the lock. Without a daemon the frontier alone counts. Rates come from several looks.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from indexd.config import OFF, Config, flag_name, split_address
from indexd.config.load import DEFAULT
from indexd.errors import DiskError, IndexdError, UsageError
from indexd.findings import findings_of
from indexd.index.format import IndexLayout
from indexd.index.reader import IndexFileReader
from indexd.query.source import known_frontier, open_index
from indexd.storage.disk import Disk
from indexd.storage.lock import owner_pid
from indexd.storage.names import DataFiles, is_index_name

# Over fewer seconds a rate would jump.
_RATE_WINDOW_SECONDS = 10.0
#: Rate -> the figure whose growth it is.
_RATES = {
    "writtenBytesPerSecond": "commitLogMaxOffset",
    "readBytesPerSecond": "readOffset",
    "readMessagesPerSecond": "readMessages",
}
_INDEXED = "indexedBytesPerSecond"


class Rates:
    """How fast figures grow over the looks of the last seconds. Another process or a log that was cut begins anew.

    What is indexed grows by whole drains, so it is measured from one drain to another; a look that finds the log
    indexed to its end counts as one. Over less its rate is not known: it would be nothing, or a whole drain's.
    """

    def __init__(self) -> None:
        self._seen: deque[Look] = deque()
        self._drained: deque[Look] = deque()

    def __repr__(self) -> str:
        return f"Rates({len(self._seen)} looks, {len(self._drained)} behind a drain)"

    def add(self, look: Look) -> None:
        """One more look; the same figures again add nothing."""
        last = self._seen[-1] if self._seen else None
        if last is not None and _is_another(last, look):
            self._seen.clear()
            self._drained.clear()
            last = None
        elif last is not None and last.at >= look.at:
            return
        self._seen.append(look)
        _forget_old(self._seen)
        is_all_indexed = _is_at_least(look.row.get("phyOffset"), look.row.get("commitLogMaxOffset"))
        if is_all_indexed or (last is not None and last.row.get("drains") != look.row.get("drains")):
            self._drained.append(look)
            _forget_old(self._drained)

    def now(self) -> dict[str, float]:
        """Those that are known, by name; bytes or messages a second."""
        if len(self._seen) < 2:
            return {}
        first, last = self._seen[0], self._seen[-1]
        found = {}
        for name, key in _RATES.items():
            grown = _grown(first, last, key)
            if grown is not None:
                found[name] = round(grown / (last.at - first.at), 1)
        if (indexed := self._indexed()) is not None:
            found[_INDEXED] = round(indexed, 1)
        return found

    def _indexed(self) -> float | None:
        if len(self._drained) < 2:
            return None
        first, last = self._drained[0], self._drained[-1]
        grown = _grown(first, last, "phyOffset")
        if grown is None:
            return None
        # Once the next drain is overdue, the time without one counts as well.
        seconds = last.at - first.at
        usual = seconds / (len(self._drained) - 1)
        return grown / max(seconds, self._seen[-1].at - first.at - usual)


def _forget_old(looks: deque[Look]) -> None:
    # What is left covers the window, or is two.
    while len(looks) > 2 and looks[-1].at - looks[1].at >= _RATE_WINDOW_SECONDS:
        looks.popleft()


def _grown(first: Look, last: Look, key: str) -> int | None:
    before, now = first.row.get(key), last.row.get(key)
    return max(now - before, 0) if isinstance(before, int) and isinstance(now, int) else None


def _is_at_least(number: object, other: object) -> bool:
    return isinstance(number, int) and isinstance(other, int) and number >= other


def _is_another(last: Look, look: Look) -> bool:
    # Of another process, or of a log that was cut.
    before, now = last.row.get("phyOffset"), look.row.get("phyOffset")
    is_back = _is_at_least(before, now) and before != now
    return (
        is_back or any(last.row.get(key) != look.row.get(key) for key in ("pid", "bootId")) or last.phase != look.phase
    )


_TIMEOUT_SECONDS = 5.0
_ANSWER_BYTES_MAX = 16 << 20
_NUMBER = re.compile(r"-?[0-9]{1,20}", re.ASCII)
# What stays a text even if it is nothing but digits. All other texts of digits are numbers of 64 bits.
_TEXTS = frozenset({
    "version", "bootId", "cluster", "nodeId", "flavour", "store", "data", "name", "names", "file", "reason", "why",
    "problem", "hint", "mode", "http", "kind", "stage", "output", "topic", "key",
})  # fmt: skip


class NoAnswerError(Exception):
    """Nothing came over HTTP, or nothing of use; ``status`` is HTTP's, 0 without an answer."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class Client:
    """GET from one address, with the token and the certificates of the configuration.

    UsageError if the flag names a file without a token, or one without certificates.
    """

    def __init__(self, config: Config, authorities: Path | None) -> None:
        self._token_file = config.http.http_token_file
        if config.provenance.get("http_token_file") == flag_name("http_token_file"):
            self._headers()
        trusted = authorities or config.http.http_tls_cert
        self.scheme = "http" if trusted is None else "https"
        self._context = None if trusted is None else _trusting(trusted, is_own=authorities is None)

    def get(self, address: str, path: str) -> Any:
        """The JSON of the answer, numbers of 64 bits as ints; NoAnswerError, UsageError without a token."""
        headers = self._headers()
        host, port = split_address(address)
        if self._context is None:
            connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_SECONDS)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_SECONDS, context=self._context)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            body = answer.read(_ANSWER_BYTES_MAX)
        except ssl.SSLError as error:
            raise NoAnswerError(f"TLS: {error.reason or error}") from error
        except TimeoutError as error:
            raise NoAnswerError(f"no answer within {_TIMEOUT_SECONDS:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError(self._reason(error)) from error
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise NoAnswerError(f"{answer.status} {answer.reason}", answer.status)
        try:
            return from_text64(json.loads(body))
        except ValueError as error:
            raise NoAnswerError("what answers there is no indexd") from error

    def _reason(self, error: Exception) -> str:
        reason = getattr(error, "strerror", None) or str(error)
        if self._context is None and isinstance(error, ConnectionResetError | http.client.BadStatusLine):
            return f"{reason}; if it speaks https, name its certificate with --ca"
        return reason

    def _headers(self) -> dict[str, str]:
        if self._token_file is None:
            return {}
        from indexd.serve.http.guard import read_token  # noqa: PLC0415 - loads the server

        try:
            token = read_token(self._token_file)
        except UsageError as error:
            # The daemon's own hint makes a new token, over whatever file was named.
            raise UsageError(
                str(error), "name the file that holds the daemon's token with --http-token-file"
            ) from error
        return {"Authorization": f"Bearer {token.decode('ascii')}"}


def _trusting(path: Path, *, is_own: bool) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=path)
    except OSError as error:
        raise UsageError(f"no certificates in {path}: {error.strerror or error}", "it must be PEM") from error
    if is_own:
        # The very certificate that this daemon shows, whatever name it has: no other one is accepted.
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def from_text64(value: Any, name: str = "") -> Any:
    """``value`` with the texts of digits below it as ints, but for those that are names."""
    if isinstance(value, str):
        return int(value) if name not in _TEXTS and _NUMBER.fullmatch(value) else value
    if isinstance(value, dict):
        return {key: from_text64(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [from_text64(item, name) for item in value]
    return value


Row = dict[str, Any]

_EVENTS_MAX = 8
_FILES_MAX = 8
_REFUSED = (http.client.UNAUTHORIZED, http.client.FORBIDDEN)
# Drains write the state, every few seconds; one that waits tries again after retry_max_seconds at the latest.
_STALE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Look:
    """The figures of one moment: ``row`` as Board.row() has them, at ``at`` (Unix seconds), and who said so.

    ``files`` are the newest index files, newest first, ``events`` the last ones, oldest first. ``findings`` need an
    operator, ``notes`` do not. ``age`` is how many seconds before the look the figures were written down.
    """

    row: Row
    asked: str
    at: float
    files: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    age: float = 0.0

    @property
    def phase(self) -> str:
        """``opening``, ``recovering``, ``running``, ``stopping``; of our own ``stopped``, ``crashed``, ``unreachable``.

        One that is unreachable has a ``lastPhase`` if it wrote down where it stands.
        """
        return str(self.row.get("phase", "running"))

    @property
    def is_over(self) -> bool:
        """No daemon runs."""
        return self.phase in ("stopped", "crashed")

    def to_json(self) -> Row:
        """The row, and beside it who was asked, when, and the rest."""
        return {
            **self.row,
            "asked": self.asked,
            "at": int(self.at * 1000),
            "ageMilliseconds": int(self.age * 1000),
            "newestFiles": self.files,
            "events": self.events,
            "findings": self.findings,
            "notes": self.notes,
        }


class Asker:
    """Looks as often as asked; ``address`` is where to ask, None for the daemon of the data directory."""

    def __init__(self, disk: Disk, config: Config, address: str | None, client: Client) -> None:
        self._disk, self._config, self._address, self._client = disk, config, address, client
        self._files = DataFiles(config.store.data)

    def look(self) -> Look:
        """One look; UsageError where there is neither a daemon nor an index, and IndexdError of other kinds."""
        if self._address is not None:
            return self._at(self._address)
        pid = owner_pid(self._files.lock)
        if pid is None:
            return self._stopped()
        state = self._state(pid)
        address = self._configured_address() if state is None else state.get("http")
        notes: list[str] = []
        findings: list[str] = []
        if not isinstance(address, str) or address == OFF or split_address(address)[1] == 0:
            if state is not None:
                notes.append("it serves no HTTP, so this is what it wrote down last")
        else:
            try:
                look = self._over_http(address)
            except NoAnswerError as error:
                text = f"HTTP at {address}: {error}"
                is_refused = error.status in _REFUSED
                # Before there is a state it is not known that HTTP is served at all.
                (notes if is_refused or state is None else findings).append(text)
            except UsageError as error:
                notes.append(f"HTTP at {address} was not asked: {error}")
            else:
                if look.row.get("pid") == pid:
                    return look
                notes.append(f"HTTP at {address} is served by another process")
        return self._from_state(pid, state, findings, notes)

    def _configured_address(self) -> str | None:
        # Where a daemon without a state listens, if somebody said so: at the default port anybody may.
        return None if self._config.provenance.get("http") == DEFAULT else self._config.http.http

    def _at(self, address: str) -> Look:
        try:
            return self._over_http(address)
        except NoAnswerError as error:
            if error.status in _REFUSED:
                raise UsageError(
                    f"{address} wants another token: {error}", "name the file that holds it with --http-token-file"
                ) from error
            asked = f"{self._client.scheme}://{address}"
            return Look({"phase": "unreachable"}, asked, time.time(), findings=[f"no answer from {asked}: {error}"])

    def _over_http(self, address: str) -> Look:
        row = self._client.get(address, "/api/v1/status")
        at = time.time()
        if not isinstance(row, dict) or "phase" not in row:
            raise NoAnswerError("what answers there is no indexd")
        findings = row.get("findings", findings_of(row))  # an older daemon leaves it to us
        look = Look(row, f"{self._client.scheme}://{address}", at, findings=findings)
        since = max(int(row.get("lastEvent") or 0) - _EVENTS_MAX, 0)
        for path, name, found in (
            (f"/api/v1/events?since={since}", "events", look.events),
            ("/api/v1/index-files", "indexFiles", look.files),
        ):
            try:
                answer = self._client.get(address, path)
            except NoAnswerError as error:
                if error.status != http.client.SERVICE_UNAVAILABLE:  # while it opens there are none yet
                    look.notes.append(f"no {name}: {error}")
                continue
            if isinstance(answer, dict) and isinstance(answer.get(name), list):
                found.extend(answer[name])
        look.files[:] = sorted(look.files, key=lambda file: str(file["name"]), reverse=True)[:_FILES_MAX]
        del look.events[:-_EVENTS_MAX]
        return look

    def _state(self, pid: int) -> Row | None:
        try:
            row = json.loads(self._disk.read(self._files.state))
        except (DiskError, ValueError):
            return None
        return row if isinstance(row, dict) and row.get("pid") == pid else None

    def _from_state(self, pid: int, state: Row | None, findings: list[str], notes: list[str]) -> Look:
        now = time.time()
        if state is None:
            there = {"phase": self._phase_without_state(), "pid": pid, "data": str(self._files.data)}
            return Look(there, str(self._files.lock), now, findings=findings, notes=notes)
        row: Row = {"phase": "recovering" if "recovering" in state else "running", **state}
        at = row["writtenAt"] / 1000 if isinstance(row.get("writtenAt"), int) else now
        age = max(now - at, 0.0)
        if age > _STALE_SECONDS:
            findings.append(f"it last wrote down where it stands {age:.0f} s ago")
        if findings:  # it did not answer, or is silent for long: nobody knows what it does now
            row |= {"phase": "unreachable", "lastPhase": row["phase"]}
        files = self._index_files(row)
        return Look(row, str(self._files.state), at, files, [], [*findings, *findings_of(row)], notes, age)

    def _phase_without_state(self) -> str:
        # A start is counted, then the flag goes up; a stop takes both away and the state last. What has neither stops
        # if DATA changed since the lock was taken, else it has only begun.
        if self._disk.exists(self._files.abort) or self._disk.exists(self._files.starts):
            return "opening"
        changed = self._disk.stamp(self._files.data).mtime_ns > self._disk.stamp(self._files.lock).mtime_ns
        return "stopping" if changed else "opening"

    def _stopped(self) -> Look:
        frontier = known_frontier(self._disk, self._files)
        clean = not self._disk.exists(self._files.abort)
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
        how = (
            "it was stopped" if clean else "it crashed or was killed; the next start recovers (the abort flag is there)"
        )
        notes = []
        try:
            index = open_index(self._disk, self._config)
            try:
                coverage = index.look().coverage
            finally:
                index.close()
            row["commitLogMinOffset"] = coverage.log_begin or 0
            row["caughtUp"] = coverage.behind is None
            if coverage.behind is not None and coverage.behind.reason is not None:
                row["corrupt"] = {"offset": coverage.behind.phy_offset, "reason": coverage.behind.reason}
        except IndexdError as error:
            notes.append(f"the log cannot be looked at: {error.line()}")
        findings = [f"no daemon runs: {how}", *findings_of(row)]
        return Look(row, str(self._files.frontier), time.time(), self._index_files(row), [], findings, notes)

    def _index_files(self, row: Mapping[str, Any]) -> list[Row]:
        # The newest, from their headers; those that go meanwhile, or cannot be read, are left out.
        found: list[Row] = []
        try:
            layout = IndexLayout(int(row["hashSlotNum"]), int(row["indexNum"]))
            listed = self._disk.list_dir(self._files.index)
        except (KeyError, TypeError, ValueError, DiskError):
            return found
        names = sorted(
            (name for name, size in listed if is_index_name(name) and size == layout.file_size), reverse=True
        )
        for name in names[:_FILES_MAX]:
            try:
                with self._disk.open_read(self._files.index / name) as file:
                    header = IndexFileReader(file, layout).header()
            except IndexdError:
                continue
            found.append({
                "name": name,
                "entries": max(header.entries, 0),
                "beginTimestamp": header.begin_timestamp,
                "endTimestamp": header.end_timestamp,
                "beginPhyOffset": header.begin_phy_offset,
                "endPhyOffset": header.end_phy_offset,
            })  # fmt: skip
        return found
