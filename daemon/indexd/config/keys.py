"""The list of all keys, read off the models: the command line makes its flags from it, errors their bounds."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, get_args

from indexd.config.units import Kind

from .model import Config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic.fields import FieldInfo

SECTIONS = (
    *("store", "reader", "queue", "index", "outputs", "flush", "recovery", "query", "log"),
    *("node", "http", "remoting", "mqtt", "limits", "spark"),
)
ENV_PREFIX = "INDEXD_"

_DATA_DEFAULT = "$STATE_DIRECTORY, else $XDG_STATE_HOME/indexd, else ~/.local/state/indexd"


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """One key as help and errors show it; `section` is the TOML table and the attribute of Config alike."""

    section: str
    type: str
    default: str
    description: str
    is_bool: bool
    repeats: bool
    bounds: str = ""


def flag_name(key: str) -> str:
    """``hash_slot_num`` -> ``--hash-slot-num``."""
    return "--" + key.replace("_", "-")


def env_name(key: str) -> str:
    """``hash_slot_num`` -> ``INDEXD_HASH_SLOT_NUM``."""
    return ENV_PREFIX + key.upper()


def _info(section: str, field: FieldInfo) -> KeyInfo:
    kind = next((item for item in field.metadata if isinstance(item, Kind)), None)
    if kind is None:  # a closed list of words
        words = get_args(field.annotation)
        kind = Kind("|".join(words), str)
    limits = [
        kind.show(bound)
        for name in ("ge", "le")
        for item in field.metadata
        if (bound := getattr(item, name, None)) is not None
    ]
    return KeyInfo(
        section=section,
        type=kind.name,
        default=_DATA_DEFAULT if field.default_factory else kind.show(field.default),
        description=field.description or "",
        is_bool=field.annotation is bool,
        repeats=kind.repeats,
        bounds=" to ".join(limits),
    )


def _all_keys() -> dict[str, KeyInfo]:
    found: dict[str, KeyInfo] = {}
    for section in SECTIONS:
        model = Config.model_fields[section].annotation
        assert model is not None
        for key, field in model.model_fields.items():
            if key in found:
                raise AssertionError(f"the key {key} is in two sections")
            found[key] = _info(section, field)
    return found


KEYS: Mapping[str, KeyInfo] = MappingProxyType(_all_keys())
