"""status: where the daemon stands, asked of the daemon itself; once, or again and again until Ctrl-C.

What draws and what speaks HTTP is imported when the command is called: queries share this program.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from indexd.cli.output import Parser, add_command, print_json, wants_json
from indexd.config import OFF, Config, flag_name, parse_seconds, split_address
from indexd.errors import UsageError
from indexd.storage.disk import Disk

if TYPE_CHECKING:
    from indexd.cli.status_ask import Asker, Look

_WATCH_SECONDS = 2.0
_WATCH_BOUNDS = (0.1, 3600.0)
_RATE_SECONDS = 1.0


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
    # The key is where a daemon listens, or off; here the flag is whom to ask. Commands share the actions of their
    # parents, so this one needs its own, wherever argparse keeps it.
    flag = flag_name("http")
    shared = parser._option_string_actions[flag]
    own = parser._option_string_actions[flag] = copy.copy(shared)
    own.metavar, own.help = "HOST:PORT", "the daemon to ask (default: the one of --data)"
    for actions in (parser._actions, *(group._group_actions for group in parser._action_groups)):
        actions[:] = [own if action is shared else action for action in actions]
    parser.set_defaults(function=status)


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
    """Look and show; 1 when the last look found something that needs an operator."""
    from indexd.cli.status_ask import Asker, Client  # noqa: PLC0415 - loads ssl and HTTP

    looks = _looks(Asker(Disk(), config, _address(config), Client(config, args.ca)), args.watch)
    if wants_json(args):
        return _print_rows(looks)
    from indexd.cli.status_draw import Drawing  # noqa: PLC0415 - loads rich

    return Drawing(sys.stdout).show(looks, is_watching=args.watch is not None)


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
        code = int(bool(look.findings))
        try:
            print_json(look.to_json() | {"rates": rates})
            sys.stdout.flush()
        except BrokenPipeError:  # who reads has enough: this look was the last
            break
    return code


def _looks(asker: Asker, seconds: float | None) -> Iterator[tuple[Look, dict[str, float]]]:
    # With rates, for which it takes two.
    from indexd.cli.status_ask import Rates  # noqa: PLC0415 - as above

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
