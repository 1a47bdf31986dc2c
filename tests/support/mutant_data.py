"""The ways in which a data directory can be damaged: one random one at a call."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from indexd.index.format import IndexLayout
from support.reading import patch

#: What is said of bytes that were overwritten, the file's size and name the same: only a whole reading sees them all.
IN_PLACE = "in place: "


def damage_data(data: Path, layout: IndexLayout, rand: random.Random) -> str:
    """Damage it; what was done, in words, which begin with ``IN_PLACE`` where sizes and names stay."""
    files = sorted(path for path in data.rglob("*") if path.is_file() and path.name != "lock")
    group = rand.choice(["index", "index", "consumequeue", "sparse", "records"])
    records = [path for path in files if path.parent == data]
    own = records if group == "records" else [path for path in files if (data / group) in path.parents]
    path = rand.choice(own or files)
    name = path.relative_to(data)
    kind = rand.choice(["bit"] * 6 + ["remove", "cut", "grow", "zero", "copy", "swap", "strange"])
    if kind == "bit":
        return _flip(path, data, layout, rand)
    if kind == "remove":
        path.unlink()
    elif kind == "cut":
        with path.open("r+b") as file:
            file.truncate(rand.randrange(max(path.stat().st_size, 1)))
    elif kind == "grow":
        with path.open("ab") as file:
            file.write(bytes(rand.choice([1, 20, 4096])))
    elif kind == "zero":
        path.write_bytes(bytes(path.stat().st_size))
        return f"{IN_PLACE}{name} all zeros"
    elif kind == "copy":  # another of the same kind, made later
        number = "".join(c for c in path.name if c.isdigit())
        other = path.with_name(path.name.replace(number, f"{int(number) + 1:0{len(number)}d}") if number else "more")
        shutil.copyfile(path, other)
        return f"a copy of {name} as {other.name}"
    elif kind == "swap":
        other = rand.choice([one for one in own if one.suffix == path.suffix] or [path])
        ours, theirs = path.read_bytes(), other.read_bytes()
        path.write_bytes(theirs)
        other.write_bytes(ours)
        is_in_place = len(ours) == len(theirs)
        return f"{IN_PLACE if is_in_place else ''}{name} and {other.relative_to(data)} the other way round"
    else:
        path.with_name(rand.choice(["strange", "1", path.name + ".tmp"])).write_bytes(rand.randbytes(40))
        return f"a strange file beside {name}"
    return f"{kind} of {name}"


def _flip(path: Path, data: Path, layout: IndexLayout, rand: random.Random) -> str:
    content = path.read_bytes()
    begin, end = 0, len(content.rstrip(b"\0"))
    where = ""
    if data / "index" in path.parents:
        entries = layout.entry_position(0)
        where = rand.choice(["header", "slot", "entry"])
        begin, end = {"header": (0, 40), "slot": (40, entries), "entry": (entries, end)}[where]
        if where == "slot":
            used = [at for at in range(40, entries, 4) if any(content[at : at + 4])]
            begin = rand.choice(used or [40])
            end = begin + 4
    at = rand.randrange(begin, max(end, begin + 1))
    if at >= len(content):
        return f"{IN_PLACE}nothing"
    bit = rand.randrange(8)
    patch(path, at, bytes([content[at] ^ 1 << bit]))
    return f"{IN_PLACE}bit {bit} of byte {at}{' (' + where + ')' if where else ''} of {path.relative_to(data)}"
