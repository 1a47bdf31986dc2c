"""The types of settings: what an operator may write for a size, a duration, a count or a path, and how it is shown.

Text or a TOML value goes in, one type comes out. Every parser raises ValueError with a text that completes the line
``key = value (from source) ...``. Arithmetic is in fractions, so ``0.1s`` is exactly 100 ms. A path may be a URI where
it says so: a RemotePath, which goes wherever a Path of a local file goes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path, PosixPath
from typing import Annotated, Any, Self, TypeVar
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from indexd.errors import UnsafeStoreError

T = TypeVar("T")
N = TypeVar("N", bound=float)
JAVA_INT_MAX = 2**31 - 1
JAVA_TRIM = "".join(map(chr, range(0x21)))  # String.trim cuts every character up to the space

SIZE_UNITS = {
    "": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
MILLIS_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

_NUMBER = re.compile(r"([+-]?[0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z%]*)", re.ASCII)
_JAVA_INT = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)
_LONGEST_NUMBER = 40  # characters; no value of a configuration needs more, and int() of a long text is quadratic
_LARGEST = 2**64  # a TOML integer has no bound; past this only the message about it matters


def _numbers(units: Mapping[str, int | Fraction], complaint: str, kind: type[N]) -> Callable[[object], N]:
    # A parser of numbers of this kind, ints among floats too, and of texts: a number times the factor of its unit.
    def parse(value: object) -> N:
        number = None
        if isinstance(value, str):
            match = _NUMBER.fullmatch(value.strip()) if len(value) <= _LONGEST_NUMBER else None
            if match is not None and match[2].lower() in units:
                number = Fraction(match[1].replace("_", "")) * units[match[2].lower()]
        elif isinstance(value, int | float) and type(value) in (int, kind) and abs(value) < _LARGEST:  # no NaN is
            number = Fraction(value)
        if number is None or (kind is int and number.denominator != 1):
            raise ValueError(complaint)
        return kind(number)

    return parse


#: Bytes from ``4096`` or ``"1.5GiB"``; a fraction is allowed where it comes to whole bytes.
parse_size = _numbers(
    SIZE_UNITS,
    "is not a size: write a whole number of bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB",
    int,
)
#: Milliseconds from ``50``, ``"50"``, ``"50ms"`` or ``"1.5s"``; parts of a millisecond are refused.
parse_millis = _numbers(
    {"": 1, **MILLIS_UNITS},
    "is not a duration: write a whole number of milliseconds, or a number with ms, s, m, h or d",
    int,
)
#: Seconds from ``3``, ``0.5``, ``"3"``, ``"500ms"`` or ``"2m"``; never infinite and never NaN.
parse_seconds = _numbers(
    {"": 1, **{unit: Fraction(millis, 1000) for unit, millis in MILLIS_UNITS.items()}},
    "is not a duration: write a number of seconds, or a number with ms, s, m, h or d",
    float,
)
#: A whole number from ``5``, ``"5"`` or ``"5_000_000"``; true and a number with a unit are refused.
parse_count = _numbers({"": 1}, "is not a whole number", int)
#: A part of the whole from ``0.7``, ``"0.7"`` or ``"70%"``.
parse_ratio = _numbers({"": 1, "%": Fraction(1, 100)}, "is not a ratio: write 0.7 or 70%", float)


def parse_java_int(value: object) -> int:
    """A number of broker.conf as Java reads it: 32 bits, without a unit."""
    if _JAVA_INT.fullmatch(str(value)) and -(2**31) <= int(str(value)) < 2**31:
        return int(str(value))
    raise ValueError("is not a whole number of 32 bits; the broker ignores it and uses its default")


def parse_java_flag(value: object) -> bool:
    """A flag of broker.conf: for Boolean.parseBoolean all but "true" is false, "true " as well."""
    if str(value).lower() not in ("true", "false"):
        raise ValueError("is not true or false; the broker reads it as false")
    return str(value).lower() == "true"


def parse_choice(value: object) -> object:
    """A word of a closed list. TOML reads an unquoted ``flavour = 5.4`` as a float; it means the word."""
    return repr(value) if isinstance(value, float) else value


def parse_path(value: object) -> Path:
    """A path as written. ``~`` and ``${...}`` are for shells and build tools: nothing here expands them."""
    text = str(value) if isinstance(value, Path) else value
    if not isinstance(text, str) or not text.strip() or "\0" in text or text.startswith("~") or "${" in text:
        raise ValueError("is not a path: write it out in full; nothing expands ~ and ${...}")
    if "://" in text and not text.startswith((".", "/")):
        raise ValueError("is a URI: write a path of this machine")
    return Path(text)


def listed(
    parse: Callable[[object], T], separators: str = ",", *, passes_empty: bool = True
) -> Callable[[object], tuple[T, ...]]:
    """``parse`` for each of a list, or of one text with a separator between them, empty ones passed over or not.

    What is neither is for ``parse`` to refuse.
    """

    def parse_all(value: object) -> tuple[T, ...]:
        if isinstance(value, str):
            value = [part.strip() for part in re.split(f"[{separators}]", value) if part.strip() or not passes_empty]
        return tuple(parse(part) for part in (value if isinstance(value, list | tuple) else [value]))

    return parse_all


def matching(pattern: str, complaint: str) -> Callable[[object], str]:
    """A parser of texts of one line, left as they are written, that match ``pattern`` as a whole."""
    compiled = re.compile(pattern, re.ASCII)

    def parse(value: object) -> str:
        if not isinstance(value, str) or not value.isprintable() or not compiled.fullmatch(value):
            raise ValueError(complaint)
        return value

    return parse


def show_size(value: int) -> str:
    """The shortest exact way to write a size: ``4MiB``, ``6000000``."""
    unit = next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if value and value % SIZE_UNITS[unit.lower()] == 0), "")
    return f"{value // SIZE_UNITS[unit.lower()]}{unit}"


def printable(text: str) -> str:
    """One line of text that any terminal prints: line ends, controls and lone surrogates become escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def nearest(word: str, names: Iterable[str], otherwise: str, prefix: str = "") -> str:
    """The hint for a word that is none of these names, whatever its case; ``prefix`` stands before each of them."""
    known = {name.lower(): name for name in names}
    found = get_close_matches(word[:64].lower(), known, n=1)
    return f"did you mean {prefix}{known[found[0]]}?" if found else otherwise


def shown(value: object, limit: int = 120) -> str:
    """A value as an error message quotes it: text in double quotes, true and false as TOML has them, cut off."""
    try:
        text = printable(json.dumps(value, ensure_ascii=False, default=str))
    except ValueError:  # an integer past the limit of int-to-text conversion, alone or in a list
        return f"(a {type(value).__name__} too long to print)"
    return text if len(text) <= limit else f"{text[:limit]}..."


_PYDANTIC = re.compile("^(Value error, |Input |String )")
_SAID = {"missing": "is missing", "extra_forbidden": "is not known here"}


def wrong_fields(error: ValidationError, called: Callable[[str], str] = str) -> list[str]:
    """What pydantic found wrong, a text each: of one field with what the asker calls it, or of several together."""
    texts = []
    for found in error.errors(include_url=False):
        said = _SAID.get(found["type"]) or _PYDANTIC.sub("", found["msg"])
        name = called(str(found["loc"][0]))[:80] if found["loc"] else ""
        given = f" {shown(found['input'])}" if name and found["type"] != "missing" else ""
        texts.append(f"{name}{given} {said}".strip())
    return texts


class Stage(BaseModel):
    """One frozen part of the configuration; a key that it does not know is refused."""

    # Built at first use: Config's one validator covers every stage, and each stage's own would double the start-up.
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, defer_build=True)

    def needs(self, key: str, other: str, why: str) -> Self:
        """Itself; ConflictError if ``key`` is set and ``other`` is not."""
        if getattr(self, key) is not None and not getattr(self, other):
            raise ConflictError((key, other), why)
        return self

    def together(self, key: str, other: str, why: str) -> Self:
        """Itself; ConflictError if one of them is set and the other is not."""
        return self.needs(key, other, why).needs(other, key, why)


class ConflictError(ValueError):
    """Keys that are each allowed but not together; `keys` are those to name, with values and sources."""

    def __init__(self, keys: tuple[str, ...], text: str) -> None:
        super().__init__(text)
        self.keys = keys


@dataclass(frozen=True, slots=True)
class Kind:
    """How a key's value is named in help (``size``) and how its default and bounds are written there."""

    name: str
    show: Callable[[Any], str]
    repeats: bool = False  # each of several flags counts, not the last alone


Size = Annotated[int, BeforeValidator(parse_size), Kind("size", show_size)]
Millis = Annotated[int, BeforeValidator(parse_millis), Kind("milliseconds", str)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Kind("seconds", lambda value: f"{value:g}")]
Count = Annotated[int, BeforeValidator(parse_count), Kind("integer", str)]
Flag = Annotated[bool, Kind("true|false", lambda value: str(value).lower())]
OnePath = Annotated[Path, BeforeValidator(parse_path), Kind("path", str)]
OptionalPath = Annotated[OnePath | None, Kind("path", lambda _: "not set")]
DelayLevels = Annotated[
    str,
    BeforeValidator(
        matching(
            r"\s*[0-9]{1,9}[smhd](\s+[0-9]{1,9}[smhd]){0,1023}\s*",
            "is not a list of delay levels: write 1 to 1024 of them, such as 1s 5s 1m 2h",
        )
    ),
    Kind("text", str),
]


#: What pyarrow's file systems open.
SCHEMES = ("s3", "gs", "hdfs", "viewfs", "abfs", "abfss", "file")
# As Hadoop calls them.
_SAME = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# What means something else in a URI.
_ESCAPES = {ord(c): f"%{ord(c):02X}" for c in "%?#"}


class RemotePath(PosixPath):
    """A place behind a URI, as ``s3://bucket/store``, made by :func:`parse_place`.

    Its parts: the scheme, the authority with the query, by which an object store's region or endpoint is given, and the
    names below them. ``/``, ``name``, ``parent`` and comparison are Path's own; ``indexd.storage.remote`` opens one.
    """

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
    text, scheme = str(value), _SAME.get(match[1].lower(), match[1].lower())
    if scheme not in SCHEMES:
        raise ValueError(f"is no place that can be read: write a path, or a URI with {', '.join(SCHEMES)}")
    try:
        uri = urlsplit(text)
    except ValueError as error:
        raise ValueError(f"is not a URI: {error}") from None
    names = [unquote(name) for name in uri.path.split("/") if name]
    is_odd = any(name in (".", "..") or "/" in name or "\0" in name for name in names) or bool(uri.fragment)
    # Only a file has no host, or this one.
    if is_odd or not text.isprintable() or "${" in text or (scheme == "file") != (uri.netloc in ("", "localhost")):
        raise ValueError(
            "is not the URI of a directory: write file:///directory, or its bucket or host behind ://; without . and "
            ".., #, %2F and line ends"
        )
    host = "localhost" if scheme == "file" else uri.netloc + (uri.query and "?") + uri.query.replace("/", "%2F")
    return RemotePath(f"{scheme}:", host, *names)


OptionalPlace = Annotated[Annotated[Path, BeforeValidator(parse_place)] | None, Kind("path", lambda _: "not set")]
Places = Annotated[
    tuple[Path, ...],
    BeforeValidator(listed(parse_place, passes_empty=False)),
    Kind("paths", lambda _: "not set"),
]
