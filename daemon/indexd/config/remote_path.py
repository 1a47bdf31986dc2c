"""RemotePath: a place behind a URI, as ``s3://bucket/store``, that goes wherever a Path of a local file goes.

``/``, ``name``, ``parent`` and comparison are Path's own; only ``indexd.storage.remote`` can open one. The URI's query,
by which an object store's region or endpoint is given, and its user stay with the authority when the path grows.
"""

from __future__ import annotations

import re
from pathlib import Path, PosixPath
from typing import Annotated
from urllib.parse import unquote, urlsplit

from pydantic import BeforeValidator

from ..errors import UnsafeStoreError
from .units import Kind, parse_path, parse_paths, shown

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
