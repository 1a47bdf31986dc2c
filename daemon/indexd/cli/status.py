"""status: where the daemon stands, asked of the daemon itself; once, or again and again until Ctrl-C.

What draws and what speaks HTTP is imported when the command is called: queries share this program.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from indexd.cli.output import Parser, add_command, print_json, wants_json
from indexd.config import OFF, Config, flag_name, parse_seconds, split_address
from indexd.errors import UsageError
from indexd.storage.disk import Disk

if TYPE_CHECKING:
    from indexd.cli.status_ask import Asker, Look

_EXIT_FINDINGS = 1
_WATCH_SECONDS = 2.0
_WATCH_BOUNDS = (0.1, 3600.0)
_RATE_SECONDS = 1.0
# Over fewer seconds a rate would jump.
_RATE_WINDOW_SECONDS = 10.0
#: Rate -> the figure whose growth it is.
_RATES = {
    "writtenBytesPerSecond": "commitLogMaxOffset",
    "readBytesPerSecond": "readOffset",
    "readMessagesPerSecond": "readMessages",
}
_INDEXED = "indexedBytesPerSecond"


def register(commands: Any, common: Parser) -> None:
    """Add the command."""
    parser = add_command(
        commands, "status", [common], "where the daemon stands: lag, rates, files, what is the matter", ["http"]
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_interval,
        const=_WATCH_SECONDS,
        metavar="SECONDS",
        help="look again and again until Ctrl-C (default: every 2 s)",
    )
    parser.add_argument(
        "--ca", type=Path, metavar="FILE", help="speak https; certificates of who may vouch for the daemon, PEM"
    )
    _say_whom(parser)
    parser.set_defaults(function=status)


def _say_whom(parser: argparse.ArgumentParser) -> None:
    # The key is where a daemon listens, or off; here the flag is whom to ask. Commands share the actions of their
    # parents, so this one needs its own, wherever argparse keeps it.
    flag = flag_name("http")
    shared = parser._option_string_actions[flag]
    own = copy.copy(shared)
    own.metavar, own.help = "HOST:PORT", "the daemon to ask (default: the one of --data)"
    parser._option_string_actions[flag] = own
    for actions in (parser._actions, *(group._group_actions for group in parser._action_groups)):
        actions[:] = [own if action is shared else action for action in actions]


def _interval(text: str) -> float:
    try:
        seconds = parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None
    least, most = _WATCH_BOUNDS
    if not least <= seconds <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not in {least:g} to {most:g}")
    return seconds


def status(args: argparse.Namespace, config: Config) -> int:
    """Look and draw; 1 when the last look found something that needs an operator."""
    from indexd.cli.status_ask import (
        Asker,
        Client,
    )

    asker = Asker(Disk(), config, _address(config), Client(config, args.ca))
    if wants_json(args):
        return _print_rows(_looks(asker, args.watch))
    from indexd.cli.status_words import Drawing  # noqa: PLC0415 - loads rich

    return Drawing(sys.stdout).show(_looks(asker, args.watch), is_watching=args.watch is not None)


def _address(config: Config) -> str | None:
    # Only the flag says whom to ask; elsewhere the key is the daemon's own, and the daemon of --data is asked.
    if config.provenance.get("http") != flag_name("http"):
        return None
    address = config.http.http
    if address == OFF or split_address(address)[1] == 0:
        raise UsageError(f"--http {address} is nowhere to ask", "give HOST:PORT, or leave it out: --data knows it")
    return address


def _print_rows(looks: Iterator[tuple[Look, dict[str, float]]]) -> int:
    code = 0
    for look, rates in looks:
        code = _EXIT_FINDINGS if look.findings else 0
        try:
            print_json(look.to_json() | {"rates": rates})
            sys.stdout.flush()
        except BrokenPipeError:  # who reads has enough: this look was the last
            break
    return code


def _looks(asker: Asker, seconds: float | None) -> Iterator[tuple[Look, dict[str, float]]]:
    # With rates, for which it takes two.
    rates = Rates()
    look = asker.look()
    rates.add(look)
    if look.phase == "running" and seconds is None:
        time.sleep(_RATE_SECONDS)
        look = asker.look()
        rates.add(look)
    yield look, rates.now()
    while seconds is not None:
        time.sleep(seconds)
        look = asker.look()
        rates.add(look)
        yield look, rates.now()


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
        if last is not None and (_life(last) != _life(look) or _is_back(last, look)):
            self._seen.clear()
            self._drained.clear()
            last = None
        elif last is not None and last.at >= look.at:
            return
        self._seen.append(look)
        _forget_old(self._seen)
        if _is_all_indexed(look) or (last is not None and last.row.get("drains") != look.row.get("drains")):
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


def _is_all_indexed(look: Look) -> bool:
    built, end = look.row.get("phyOffset"), look.row.get("commitLogMaxOffset")
    return isinstance(built, int) and isinstance(end, int) and built >= end


def _life(look: Look) -> tuple[object, ...]:
    return look.row.get("pid"), look.row.get("bootId"), look.phase


def _is_back(last: Look, look: Look) -> bool:
    before, now = last.row.get("phyOffset"), look.row.get("phyOffset")
    return isinstance(before, int) and isinstance(now, int) and now < before
