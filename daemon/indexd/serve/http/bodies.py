"""Bodies: a message's body as it was asked for, within a number of bytes."""

from __future__ import annotations

import base64
import json
from typing import Any

from indexd.commitlog.decoder import Message
from indexd.query import unpack_body


class Bodies:
    """The bodies of one answer; together they are ``bytes_max`` long at most."""

    def __init__(self, form: str, bytes_max: int) -> None:
        self._form, self._left = form, bytes_max

    @property
    def are_asked(self) -> bool:
        """Whether there are any to be shown."""
        return self._form != "none"

    @property
    def is_full(self) -> bool:
        """Whether no further body has room."""
        return self._left <= 0

    def row(self, message: Message | None) -> dict[str, Any]:
        """body, bodyEncoding (utf-8, json, hex, base64), bodySize (of the whole), bodyTruncated, compression and so on.

        ``body`` is null where the message is not there or no room is left. What has no room is not unpacked either, so
        that all bodies of an answer cost no more than they may be long; how long the whole is then is not known (null).
        """
        if message is None:
            return dict.fromkeys(("body", "bodyEncoding", "bodySize", "compression")) | {
                "bodyTruncated": False,
                "bodyUnpacked": False,
            }
        body = unpack_body(message, max(self._left, 0))
        data = body.data[: max(self._left, 0)]
        self._left -= len(data)
        is_cut = body.is_cut or len(data) < len(body.data)
        shown, encoding = (None, None) if is_cut and not data else _show(data, self._form, is_cut=is_cut)
        return {
            "body": shown,
            "bodyEncoding": encoding,
            "bodySize": None if body.is_cut else len(body.data),
            "bodyTruncated": is_cut,
            "compression": body.compression,
            "bodyUnpacked": body.is_unpacked,
        }


def _show(data: bytes, form: str, *, is_cut: bool) -> tuple[Any, str]:
    # A form that the body does not have gives way to the next one that it has.
    if form == "hex":
        return data.hex(), "hex"
    if form == "json" and not is_cut:
        try:
            value = json.loads(data.decode("utf-8"), parse_constant=_refuse)
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # 1e999 and half a surrogate are no answer
        except (ValueError, RecursionError):
            pass
        else:
            return value, "json"
    if form in ("json", "text") and (text := _text(data, is_cut=is_cut)) is not None:
        return text, "utf-8"
    return base64.b64encode(data).decode("ascii"), "base64"


def _text(data: bytes, *, is_cut: bool) -> str | None:
    # Cut text may end in the middle of a character, which is left out.
    for end in range(len(data), max(len(data) - (3 if is_cut else 0), 0) - 1, -1):
        try:
            text = data[:end].decode("utf-8")
        except UnicodeDecodeError:
            continue
        return text if all(c.isprintable() or c in "\t\n\r" for c in text) else None
    return None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
