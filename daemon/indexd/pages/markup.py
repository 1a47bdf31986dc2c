"""Makes elements of HTML and SVG, for pages that need no template engine.

Whatever is not ``Html`` already is text and gets escaped, here and nowhere else.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from importlib.resources import files

from indexd.config.units import printable

# They hold nothing and have no end.
_VOID = frozenset({"input", "link", "meta", "br"})
# What a terminal may obey, when the page is read there.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Html(str):
    """Text that is markup: only ``element``, ``joined`` and what a package ships makes it."""

    __slots__ = ()


Child = Html | str | int | None | Iterable["Child"]
Attribute = str | int | float | bool | None


def element(name: str, /, *children: Child, **attributes: Attribute) -> Html:
    """``<name attribute="...">children</name>``.

    Attributes: ``class_`` is class, ``data_offset`` is data-offset; True stands alone, None and False are left out.
    """
    written = "".join(
        _attribute(key, value) for key, value in attributes.items() if value is not None and value is not False
    )
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{joined(*children)}</{name}>")


def joined(*children: Child) -> Html:
    """The children one behind the other; text is escaped."""
    return Html("".join(_escaped(child) for child in children))


def foreign(text: str) -> Html:
    """Text out of the log on one line, which neither breaks it nor turns the text around it."""
    return element("bdi", printable(text))


def page_style() -> str:
    """The rules that all pages share which are one file: colours in light and dark, tables, phones, paper."""
    return files(__package__ or "indexd.pages").joinpath("page.css").read_text(encoding="utf-8")


def _escaped(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str | int):
        return _CONTROL.sub(_visible, html.escape(str(child)))
    return "".join(_escaped(one) for one in child)


def _attribute(key: str, value: Attribute) -> str:
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{_CONTROL.sub(_reference, html.escape(str(value)))}"'


def _visible(control: re.Match[str]) -> str:
    return control[0].encode("unicode_escape").decode("ascii")


def _reference(control: re.Match[str]) -> str:
    # It keeps its value, in a field of a form too; HTML reads references to 128 to 159 as other characters.
    return f"&#{ord(control[0])};" if control[0] <= "\x7f" else _visible(control)
