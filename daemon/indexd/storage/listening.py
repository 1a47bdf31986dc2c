"""On which TCP ports a process of this machine listens, as /proc tells it; nobody is asked anything."""

from __future__ import annotations

import ipaddress
import re
import struct
from contextlib import suppress
from pathlib import Path

_SOCKET = re.compile(r"socket:\[([0-9]+)\]")
_LISTEN = "0A"
_ADDRESS, _STATE, _INODE = 1, 3, 9


def listening(pid: int, proc: Path = Path("/proc")) -> dict[int, str]:
    """Port -> host by which it is reached from here; OSError where that cannot be seen."""
    process = proc / str(pid)
    if (process / "ns" / "net").readlink() != (proc / "self" / "ns" / "net").readlink():
        raise OSError(0, "it has a network of its own")
    inodes: set[str] = set()
    for link in (process / "fd").iterdir():
        with suppress(FileNotFoundError):
            found = _SOCKET.fullmatch(str(link.readlink()))
            inodes.update(found.groups() if found else ())
    ports: dict[int, str] = {}
    for name in ("tcp6", "tcp"):
        with suppress(FileNotFoundError):  # a kernel without IPv6
            for line in (process / "net" / name).read_text("ascii").splitlines()[1:]:
                fields = line.split()
                if fields[_STATE] == _LISTEN and fields[_INODE] in inodes:
                    host, _, port = fields[_ADDRESS].partition(":")
                    ports[int(port, 16)] = _host(host)
    return ports


def _host(text: str) -> str:
    # Words of 32 bits, each in the machine's order.
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    if isinstance(address, ipaddress.IPv6Address):
        if address.is_unspecified:
            return "127.0.0.1"  # Java's, which takes both
        return str(address.ipv4_mapped) if address.ipv4_mapped else f"[{address}]"
    return "127.0.0.1" if address.is_unspecified else str(address)
