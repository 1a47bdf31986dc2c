"""Text as Java reads it: UTF-8 with Java's replacement, String.hashCode, the property text (spec 2.4, 3.3, 11).

Plain Python for queries, inspection and tests; ``bytes_kernel`` and ``fields_kernel`` are the compiled twins.
"""

from __future__ import annotations

import codecs
import unicodedata

NAME_VALUE_SEPARATOR = "\x01"
PROPERTY_SEPARATOR = "\x02"


def _replace_as_java(error: UnicodeError) -> tuple[str, int]:
    # Python replaces an encoded surrogate (ED A0..BF xx) by three characters, Java by one.
    if not isinstance(error, UnicodeDecodeError):
        raise error
    data, start = error.object, error.start
    if data[start] == 0xED and start + 1 < len(data) and 0xA0 <= data[start + 1] <= 0xBF:
        whole = start + 2 < len(data) and 0x80 <= data[start + 2] <= 0xBF
        return "�", start + 3 if whole else start + 2
    return "�", error.end


codecs.register_error("indexd-java", _replace_as_java)


def decode_utf8(data: bytes) -> str:
    """What ``new String(data, UTF_8)`` gives; never raises."""
    return data.decode("utf-8", "indexd-java")


def utf16_units(text: str) -> list[int]:
    """The UTF-16 code units of ``text``: two for a character beyond U+FFFF."""
    data = text.encode("utf-16-be", "surrogatepass")
    return [data[i] << 8 | data[i + 1] for i in range(0, len(data), 2)]


def java_hash(text: str) -> int:
    """``String.hashCode``, as the signed 32-bit value."""
    value = 0
    for unit in text.encode() if text.isascii() else utf16_units(text):
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def key_hash(text: str) -> int:
    """The hash that an index entry stores: the absolute value, and 0 for -2^31 (spec 3.3)."""
    value = abs(java_hash(text))
    return 0 if value == 1 << 31 else value


def decode_properties(text: str) -> dict[str, str]:
    """The property text as a mapping; pairs without a name or a value are dropped, the last of two wins (spec 2.4)."""
    found: dict[str, str] = {}
    for pair in text.split(PROPERTY_SEPARATOR):
        name, separator, value = pair.partition(NAME_VALUE_SEPARATOR)
        if separator and name and value:
            found[name] = value
    return found


def split_keys(keys: str | None) -> list[str]:
    """The pieces of KEYS that are indexed, in order, repeats kept: split at single spaces, empty ones left out."""
    return [piece for piece in (keys or "").split(" ") if piece]


# Digits of Long.MAX_VALUE.
_LONG_DIGITS = 19


def parse_java_number(text: str, bits: int) -> int | None:
    """``Long.parseLong`` (64) and its smaller sisters: one sign, digits of any script; None where Java throws.

    Java looks at UTF-16 units, so a digit beyond U+FFFF is none.
    """
    if text.isdigit() and text.isascii() and len(text) <= _LONG_DIGITS:  # most are, by far
        value = int(text)
        return value if value < 1 << bits - 1 else None
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not digits.isdecimal() or max(digits) > "\uffff":
        return None
    value = 0
    for digit in digits:
        value = 10 * value + unicodedata.decimal(digit)
        if value >> bits:
            return None
    value = -value if text[0] == "-" else value
    return value if -(1 << bits - 1) <= value < 1 << bits - 1 else None
