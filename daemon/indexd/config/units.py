"""What an operator may write for a size, a duration, a count or a path: text or a TOML value in, one type out.

Every parser raises ValueError with a text that completes the line ``key = value (from source) ...``. Arithmetic is
in integers until the last step, so ``0.1s`` is exactly 100 ms and no text, however long, overflows on the way.

RemotePath: a place behind a URI, as ``s3://bucket/store``, that goes wherever a Path of a local file goes.

``/``, ``name``, ``parent`` and comparison are Path's own; only ``indexd.storage.remote`` can open one. The URI's query,
by which an object store's region or endpoint is given, and its user stay with the authority when the path grows.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import unquote, urlsplit

from pydantic import BeforeValidator

from indexd.errors import UnsafeStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

JAVA_INT_MAX = 2**31 - 1
# Where Python puts the bytes of a file's name that are no UTF-8 (PEP 383).
_BYTES_AT = 0xDC00

SIZE_UNITS = {
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
MILLIS_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

_NUMBER = re.compile(r"([+-]?)([0-9][0-9_]*)(?:\.([0-9]+))?\s*([A-Za-z]*)", re.ASCII)
_LONGEST_NUMBER = 40  # characters; no value of a configuration needs more, and int() of a long text is quadratic
_WHOLE_INT_BITS = 256  # a TOML integer has no bound; past this only the message about it matters

_NOT_SIZE = "is not a size: write a whole number of bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB"
_NOT_MILLIS = "is not a duration: write a whole number of milliseconds, or a number with ms, s, m, h or d"
_NOT_SECONDS = "is not a duration: write a number of seconds, or a number with ms, s, m, h or d"
_NOT_COUNT = "is not a whole number"
_NOT_RATIO = "is not a ratio: write 0.7 or 70%"


def parse_size(value: object) -> int:
    """Bytes from ``4096`` or ``"1.5GiB"``; a fraction is allowed where it comes to whole bytes."""
    if isinstance(value, str):
        top, bottom = _ratio(value, SIZE_UNITS, 1, _NOT_SIZE)
        if top % bottom:
            raise ValueError(_NOT_SIZE)
        return top // bottom
    return _whole(value, _NOT_SIZE)


def parse_millis(value: object) -> int:
    """Milliseconds from ``50``, ``"50"``, ``"50ms"`` or ``"1.5s"``; parts of a millisecond are refused."""
    if isinstance(value, str):
        top, bottom = _ratio(value, MILLIS_UNITS, 1, _NOT_MILLIS)
        if top % bottom:
            raise ValueError(_NOT_MILLIS)
        return top // bottom
    return _whole(value, _NOT_MILLIS)


def parse_seconds(value: object) -> float:
    """Seconds from ``3``, ``0.5``, ``"3"``, ``"500ms"`` or ``"2m"``; never infinite and never NaN."""
    if isinstance(value, str):
        top, bottom = _ratio(value, MILLIS_UNITS, 1000, _NOT_SECONDS)
        return top / (bottom * 1000)
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(_NOT_SECONDS)
        return value
    return float(_whole(value, _NOT_SECONDS))


def parse_count(value: object) -> int:
    """A whole number from ``5``, ``"5"`` or ``"5_000_000"``; true, 5.0 and a number with a unit are refused."""
    if isinstance(value, str):
        top, bottom = _ratio(value, {}, 1, _NOT_COUNT)
        if bottom != 1:
            raise ValueError(_NOT_COUNT)
        return top
    return _whole(value, _NOT_COUNT)


def parse_ratio(value: object) -> float:
    """A part of the whole from ``0.7``, ``"0.7"`` or ``"70%"``."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(_NOT_RATIO)
    if isinstance(value, str):
        top, bottom = _ratio(value.strip().removesuffix("%"), {}, 1, _NOT_RATIO)
        return top / (bottom * 100) if value.strip().endswith("%") else top / bottom
    if value != value or abs(value) > 2**31:
        raise ValueError(_NOT_RATIO)
    return float(value)


def parse_flag(value: object) -> bool:
    """true or false; the words in any case. 0, 1, yes and on are refused: a typo must not turn into an answer."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    raise ValueError("is not true or false")


def parse_choice(value: object) -> object:
    """A word of a closed list. TOML reads an unquoted ``flavour = 5.4`` as a float; it means the word."""
    return repr(value) if isinstance(value, float) else value


def parse_path(value: object) -> Path:
    """A path as written. ``~`` and ``${...}`` are for shells and build tools: nothing here expands them."""
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str):
        raise ValueError("is not a path: write it as text")
    if not value.strip():
        raise ValueError("is empty: give a path, or leave the key out for its default")
    if "\0" in value:
        raise ValueError("is not a path: it holds a NUL character")
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        raise ValueError("is not a path: it holds characters that no file name here can have") from None
    if value.startswith("~") or "${" in value:
        raise ValueError("is not expanded: write the path out in full")
    if "://" in value and not value.startswith((".", "/")):
        raise ValueError("is a URI: write a path of this machine")
    return Path(value)


def parse_optional_path(value: object) -> Path | None:
    """As :func:`parse_path`; None, which only Python code can write, means that the path is not given."""
    return None if value is None else parse_path(value)


def parse_paths(value: object, parse: Callable[[object], Path] = parse_path) -> tuple[Path, ...]:
    """Paths from a list, or from one text in which ``,`` separates them, as RocketMQ writes storePathCommitLog."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, (list, tuple)):
        raise ValueError("is not a list of paths: write a list, or one text with , between the paths")
    return tuple(parse(part) for part in value)


def parse_delay_levels(text: str) -> tuple[int, ...]:
    """Milliseconds of each level of a messageDelayLevel text such as ``1s 5s 2h``; index 0 is level 1."""
    levels = []
    for word in text.split():
        match = re.fullmatch(r"([0-9]{1,15})([smhd])", word, re.ASCII)
        if match is None:
            raise ValueError(f"is not a list of delay levels: {shown(word)} is not a number with s, m, h or d")
        levels.append(int(match[1]) * MILLIS_UNITS[match[2]])
    if not 1 <= len(levels) <= 1024 or max(levels) > 2**62:
        raise ValueError("is not a list of delay levels: write 1 to 1024 of them, such as 1s 5s 1m 2h")
    return tuple(levels)


def parse_delay_text(value: object) -> str:
    """A messageDelayLevel text, checked and left as it is written."""
    if not isinstance(value, str):
        raise ValueError("is not text: write the levels as in messageDelayLevel, such as 1s 5s 1m 2h")
    parse_delay_levels(value)
    return value


def show_size(value: int) -> str:
    """The shortest exact way to write a size: ``4MiB``, ``6000000``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = SIZE_UNITS[unit.lower()]
        if value and value % factor == 0:
            return f"{value // factor}{unit}"
    return str(value)


def printable(text: str) -> str:
    """One line of text that any terminal prints: line ends, controls and lone surrogates become escapes.

    A byte of a file's name that is no UTF-8 becomes that byte: ``\\xff``.
    """
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(char: str) -> str:
    code = ord(char) - _BYTES_AT
    return f"\\x{code:02x}" if 0x80 <= code <= 0xFF else char.encode("unicode_escape").decode("ascii")


def shown(value: object, limit: int = 120) -> str:
    """A value as an error message quotes it: text in double quotes, true and false as TOML has them, cut off."""
    if isinstance(value, str):
        text = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{printable(text[:limit])}{"..." if len(text) > limit else ""}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Path):
        return shown(str(value), limit)
    try:
        text = printable(repr(value))
    except ValueError:  # an integer past the limit of int-to-text conversion, alone or in a list
        return f"(a {type(value).__name__} too long to print)"
    return text if len(text) <= limit else f"{text[:limit]}..."


@dataclass(frozen=True, slots=True)
class Kind:
    """How a key's value is named in help (``size``) and how its default and bounds are written there."""

    name: str
    show: Callable[[Any], str]
    repeats: bool = False  # each of several flags counts, not the last alone


def _ratio(text: str, units: Mapping[str, int], bare: int, complaint: str) -> tuple[int, int]:
    """The number in `text` times its unit's factor (`bare` where it has none) as numerator and power of ten."""
    match = _NUMBER.fullmatch(text.strip()) if len(text) <= _LONGEST_NUMBER else None
    if match is None:
        raise ValueError(complaint)
    sign, whole, part, unit = match.groups(default="")
    factor = units.get(unit.lower()) if unit else bare
    if factor is None:
        raise ValueError(complaint)
    number = int(whole.replace("_", "") + part) * factor
    return (-number if sign == "-" else number), 10 ** len(part)


def _whole(value: object, complaint: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(complaint)
    if value.bit_length() > _WHOLE_INT_BITS:
        raise ValueError(f"{complaint} that fits")
    return value


def _show_seconds(value: float) -> str:
    return f"{value:g}"


Size = Annotated[int, BeforeValidator(parse_size), Kind("size", show_size)]
Millis = Annotated[int, BeforeValidator(parse_millis), Kind("milliseconds", str)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Kind("seconds", _show_seconds)]
Count = Annotated[int, BeforeValidator(parse_count), Kind("integer", str)]
Flag = Annotated[bool, BeforeValidator(parse_flag), Kind("true|false", lambda value: str(value).lower())]
OptionalPath = Annotated[Path | None, BeforeValidator(parse_optional_path), Kind("path", lambda _: "not set")]
OnePath = Annotated[Path, BeforeValidator(parse_path), Kind("path", str)]
DelayLevels = Annotated[str, BeforeValidator(parse_delay_text), Kind("text", str)]


#: What pyarrow's file systems open.
SCHEMES = ("s3", "gs", "hdfs", "viewfs", "abfs", "abfss", "file")
# As Hadoop calls them.
_SAME = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# What means something else in a URI.
_ESCAPES = {ord(c): f"%{ord(c):02X}" for c in "%?#"}


class RemotePath(PosixPath):
    """Made by :func:`parse_place`. Its parts: the scheme, the authority with the query, and the names below them."""

    __slots__ = ()

    @property
    def scheme(self) -> str:
        """``s3``, ``hdfs``, ..."""
        return self.parts[0].removesuffix(":")

    @property
    def root_uri(self) -> str:
        """The URI of the file system, with user, password and query: not to be shown."""
        authority, _, query = self.parts[1].partition("?")
        return f"{self.scheme}://{'' if self.scheme == 'file' else authority}/{query and '?'}{query}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names below the root, as the file system knows them."""
        return self.parts[2:]

    def __str__(self) -> str:
        # As it is shown and written down; without the password that a URI may hold.
        if len(self.parts) < 2:
            return super().__str__()
        authority, _, query = self.parts[1].partition("?")
        user, at, host = authority.rpartition("@")
        user = "***" if ":" in user else user
        place = "" if self.scheme == "file" else f"{user}{at}{host}"
        return f"{self.scheme}://{place}/{'/'.join(self.names).translate(_ESCAPES)}{query and '?'}{query}"

    def __fspath__(self) -> str:
        # Whoever would open it as a file of this machine, or make one of that name.
        raise UnsafeStoreError(
            f"{self} is not on this machine", "give a path: a URI is for the commands that run on Spark"
        )

    def resolve(  # type: ignore[override]  # a file:// that is resolved is no URI any more
        self,
        strict: bool = False,  # noqa: ARG002 - Path's own signature
    ) -> Path:
        """Itself without user and query, or the local path that ``file://`` means: for telling whether two overlap."""
        if self.scheme == "file":
            return Path("/", *self.names).resolve()
        return RemotePath(self.parts[0], self.parts[1].partition("?")[0].rpartition("@")[2], *self.names)


def parse_place(value: object) -> Path:
    """A path, or a RemotePath where the text is a URI; percent escapes in a URI are what they stand for."""
    match = _URI.match(value) if isinstance(value, str) else None
    if match is None:
        return value if isinstance(value, RemotePath) else parse_path(value)
    parse_path(f"./{value}")  # refuses what no name can hold
    return _from_uri(str(value), match[1].lower())


def _from_uri(text: str, scheme: str) -> RemotePath:
    scheme = _SAME.get(scheme, scheme)
    if scheme not in SCHEMES:
        raise ValueError(f"is no place that can be read: write a path, or a URI with {', '.join(SCHEMES)}")
    try:
        uri = urlsplit(text)
    except ValueError as error:
        raise ValueError(f"is not a URI: {error}") from None
    names = [unquote(name) for name in uri.path.split("/") if name]
    if uri.fragment or not text.isprintable() or any(name in (".", "..") or "/" in name for name in names):
        raise ValueError("is not the URI of a directory: write it without . and .. and without #, %2F and line ends")
    if scheme == "file":
        if uri.netloc not in ("", "localhost"):
            raise ValueError(f"names the host {shown(uri.netloc)}: write file:///directory")
        return RemotePath("file:", "localhost", *names)
    if not uri.netloc:
        raise ValueError(f"names no bucket or host: write {scheme}://NAME/directory")
    return RemotePath(f"{scheme}:", uri.netloc + (uri.query and "?") + uri.query.replace("/", "%2F"), *names)


def _parse_optional_place(value: object) -> Path | None:
    # None, which only Python code can write, means that the place is not given.
    return None if value is None else parse_place(value)


def _parse_places(value: object) -> tuple[Path, ...]:
    return parse_paths(value, parse_place)


OptionalPlace = Annotated[Path | None, BeforeValidator(_parse_optional_place), Kind("path", lambda _: "not set")]
Places = Annotated[tuple[Path, ...], BeforeValidator(_parse_places), Kind("paths", lambda _: "not set")]
