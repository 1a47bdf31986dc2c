"""From argv, environment and files to one validated Config, and from a wrong value to one line about it.

Precedence: flags, environment, the TOML file, broker.conf, defaults. A value that a stronger source replaces is not
looked at, so a flag can stand in for a broken line until someone mends it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ..errors import UnsafeStoreError, UsageError
from .broker_conf import read_broker_conf
from .facts import BrokerFacts, ConflictError
from .keys import KEYS, SECTIONS
from .model import Config, state_directory
from .sources import CONFIG_VARIABLE, Given, from_environment, from_flags, from_toml
from .units import parse_path, printable, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

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
