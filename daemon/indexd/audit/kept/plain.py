"""What tasks come to as plain JSON, and back: read by the types that a part declares, so nothing else comes out.

A file of kept parts may be anybody's, so nothing of it is run and nothing is believed: what does not have the declared
type raises ValueError.
"""

from __future__ import annotations

import types
from collections import Counter
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from indexd.audit.holes import Holes
from indexd.audit.notes import Notes
from indexd.findings import Finding

_INT_MAX = 1 << 63


def to_plain(value: object) -> Any:
    """Lists, texts and numbers: a dataclass as the list of its fields, a dictionary as a list of pairs."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Holes):
        # The first hole may be the last one, too, and they must stay one.
        return [value.first is value.last, *_fields_to_plain(value)]
    if isinstance(value, Notes):
        return [to_plain(dict(value.counts)), [to_plain(finding) for finding in value.kept()]]
    if is_dataclass(value):
        return _fields_to_plain(value)
    if isinstance(value, dict):
        return [[to_plain(key), to_plain(item)] for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return [to_plain(item) for item in sorted(value)]
    raise TypeError(f"{type(value).__name__} cannot be kept")


def from_plain(hint: Any, plain: Any) -> Any:
    """The value of the type ``hint`` that ``plain`` was made from. ValueError for what is none."""
    if hint in (int, bool, str, float, type(None)):
        return _scalar(hint, plain)
    origin, given = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        return _either(given, plain)
    if not isinstance(plain, list):
        raise ValueError(f"a list is expected, not {type(plain).__name__}")
    if hint is Notes:
        return _notes(plain)
    if hint is Holes:
        return _holes(plain)
    if is_dataclass(hint):
        return _dataclass(hint, plain)
    if origin in (dict, Counter):
        return origin({_key(given[0], key): _item(origin, given, item) for key, item in map(_pair, plain)})
    if origin is tuple and not (len(given) == 2 and given[1] is Ellipsis):
        if len(given) != len(plain):
            raise ValueError(f"{len(given)} values are expected, not {len(plain)}")
        return tuple(from_plain(one, item) for one, item in zip(given, plain, strict=True))
    if origin in (list, tuple, set, frozenset):
        return origin(from_plain(given[0], item) for item in plain)
    raise ValueError(f"{hint} cannot be kept")


def _fields_to_plain(value: object) -> list[Any]:
    return [to_plain(getattr(value, field.name)) for field in fields(value)]  # type: ignore[arg-type]  # a dataclass


def _scalar(hint: Any, plain: Any) -> Any:
    if type(plain) is not hint or (hint is int and not -_INT_MAX <= plain < _INT_MAX):
        raise ValueError(f"{hint.__name__} is expected, not {type(plain).__name__}")
    return plain


def _either(hints: tuple[Any, ...], plain: Any) -> Any:
    if plain is None and type(None) in hints:
        return None
    for hint in hints:
        try:
            return from_plain(hint, plain)
        except ValueError:
            continue
    raise ValueError(f"{type(plain).__name__} is none of {hints}")


def _pair(plain: Any) -> tuple[Any, Any]:
    if not isinstance(plain, list) or len(plain) != 2:
        raise ValueError("a pair is expected")
    return plain[0], plain[1]


def _key(hint: Any, plain: Any) -> Any:
    return from_plain(hint, plain)


def _item(origin: Any, given: tuple[Any, ...], plain: Any) -> Any:
    return from_plain(int if origin is Counter else given[1], plain)


def _holes(plain: list[Any]) -> Holes:
    if not plain or not isinstance(plain[0], bool):
        raise ValueError("holes are expected")
    found: Holes = _dataclass(Holes, plain[1:])
    if plain[0]:
        found.last = found.first
    return found


def _notes(plain: list[Any]) -> Notes:
    counts, kept = _pair(plain)
    found = Notes()
    found.counts = from_plain(Counter[tuple[str, str]], counts)
    for finding in from_plain(list[Finding], kept):
        found.keep(finding.file, finding.position, finding.what, finding.text)
    return found


def _dataclass(hint: Any, plain: list[Any]) -> Any:
    hints = _hints(hint)
    if len(hints) != len(plain):
        raise ValueError(f"{len(hints)} fields are expected, not {len(plain)}")
    return hint(**{name: from_plain(one, item) for (name, one), item in zip(hints.items(), plain, strict=True)})


@lru_cache(64)
def _hints(hint: Any) -> dict[str, Any]:
    found = get_type_hints(hint)
    return {field.name: found[field.name] for field in fields(hint)}
