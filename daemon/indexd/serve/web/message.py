"""One message: its fields, properties and body, and the way to its neighbours."""

from __future__ import annotations

from dataclasses import replace

from indexd.commitlog.decoder import Message
from indexd.pages.markup import Child, Html, element, joined
from indexd.query.message import message_fields, unpack_body
from indexd.serve.web.asked import Asked
from indexd.serve.web.body import body_section
from indexd.serve.web.wording import age, moment, name, show_count

_TYPES = {0x0: "", 0x4: "prepared", 0x8: "commit", 0xC: "rollback"}
_TYPE_MASK = 0xC


def message_section(asked: Asked, found: Message, size_max: int, note: str | None = None) -> Html:
    """The message as a card; ``note`` is a line above it, ``size_max`` the most bytes of its body."""
    own = Asked(by="offset", q=str(found.phy_offset), topic=asked.topic, view=asked.view, at=asked.at, zone=asked.zone)
    head = element("h2", "Message at ", element("span", show_count(found.phy_offset), class_="num"))
    parts = [
        element("div", head, _ways(found, own), class_="bar"),
        None if note is None else element("p", note, class_="note"),
        _fields(found),
        _properties(found),
        body_section(own, unpack_body(found), size_max),
    ]
    return element("article", parts, class_="message", data_offset=str(found.phy_offset))


def _ways(found: Message, own: Asked) -> Html:
    # The next frame begins where this one ends; where a segment ends there the page says so.
    plain = replace(own, view="", at="")
    following = plain.link(q=str(found.phy_offset + found.size))
    queue = Asked(by="queue", topic=found.topic, most="16", zone=own.zone)
    from_here = queue.link(q=f"{found.queue_id}/{max(found.queue_offset - 7, 0)}")
    links = [
        element("a", "its queue", href=from_here, title="messages around it in its queue"),
        element("a", "next in the log", href=following, title="the message that begins where this one ends"),
        element("a", "link", href=own.link(), title="an address of this message"),
    ]
    return element("nav", links, aria_label="From here", class_="views")


def _fields(found: Message) -> Html:
    row = message_fields(found)
    topic = element("a", name(found.topic), href=Asked(by="key", topic=found.topic).link())
    kind = _TYPES[found.sys_flag & _TYPE_MASK]
    fields: list[tuple[str, Child]] = [
        ("topic", topic),
        ("stored", joined(moment(found.store_timestamp), _soft(age(found.store_timestamp)))),
        ("born", joined(moment(found.born_timestamp), _soft(row["bornHost"]))),
        ("queue / offset", f"{found.queue_id} / {show_count(found.queue_offset)}"),
        ("size", f"{show_count(found.size)} bytes"),
        ("store host", row["storeHost"]),
        ("message id", element("code", row["offsetMsgId"])),
        ("system flag", joined(f"0x{found.sys_flag:x}", _soft(kind) if kind else None)),
        ("tags code", str(found.tags_code)),
        ("reconsumed", f"{found.reconsume_times} times" if found.reconsume_times else None),
        ("prepared at", show_count(found.prepared_transaction_offset) if found.prepared_transaction_offset else None),
        ("flag", str(found.flag) if found.flag else None),
        ("body CRC", f"{found.body_crc:08x}"),
    ]
    cells = [
        element("div", element("dt", key), element("dd", value), class_="long" if key == "message id" else None)
        for key, value in fields
        if value is not None
    ]
    return element("dl", cells, class_="fields")


def _properties(found: Message) -> Html:
    if not found.properties:
        return element("p", "It has no properties.", class_="soft")
    rows = [
        element("tr", element("th", name(key), scope="row"), element("td", _value(found, key, value), class_="text"))
        for key, value in found.properties.items()
    ]
    caption = element("caption", "Properties")
    return element("div", element("table", caption, element("tbody", rows), class_="properties"), class_="scroll")


def _value(found: Message, key: str, value: str) -> Child:
    # What can be searched for is a link to that search.
    ways = {"KEYS": ("key", found.keys), "UNIQ_KEY": ("unique", [value]), "TAGS": ("tags", [value])}
    by, texts = ways.get(key, ("", []))
    if not texts:
        return name(value)
    links = [element("a", name(text), href=Asked(by=by, topic=found.topic, q=text).link()) for text in texts]
    return [part for link in links for part in (link, " ")][:-1]


def _soft(text: str) -> Html:
    return element("span", f" {text}", class_="soft")
