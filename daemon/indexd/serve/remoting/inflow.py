"""Inflow: the bytes of frames that have come to a connection and are not taken yet."""

from __future__ import annotations

from indexd.serve.remoting.command import LENGTH_SIZE, frame_size

# What is copied rather than kept where it can grow.
_SMALL_SIZE = 1 << 14


class Inflow:
    """Most of the time what comes is whole frames, and nothing is left of it."""

    def __init__(self) -> None:
        self._data: bytes | bytearray = b""
        self._at = 0

    def __len__(self) -> int:
        """Bytes that are not taken."""
        return len(self._data) - self._at

    def add(self, data: bytes) -> None:
        """More of them."""
        if not self._data:
            self._data = data
        elif len(self._data) <= _SMALL_SIZE:
            self._data = bytes(self._data) + data
        else:
            self._data = self._data if isinstance(self._data, bytearray) else bytearray(self._data)
            self._data += data

    @property
    def fresh(self) -> bytes:
        """All that has come, from the begin of a frame on; nothing where a large frame grows."""
        return self._data if self._at == 0 and isinstance(self._data, bytes) else b""

    def skip(self, size: int) -> None:
        """So many bytes of it are taken."""
        self._at += size

    def take(self, size_max: int) -> bytes | bytearray | None:
        """The next frame without its length field; None until it is whole. FrameError if there can be none."""
        data, at = self._data, self._at
        if len(data) - at < LENGTH_SIZE:
            return None
        begin = at + LENGTH_SIZE
        behind = begin + frame_size(data, at, size_max)
        if behind > len(data):
            return None
        self._at = behind
        return data[begin:behind]

    def drop_taken(self) -> bool:
        """Give back the memory of what was taken, all at once; whether anything was."""
        at, self._at = self._at, 0
        if at == len(self._data):
            self._data = b""
        elif len(self._data) - at <= _SMALL_SIZE:
            self._data = bytes(self._data[at:])
        elif isinstance(self._data, bytearray):
            del self._data[:at]
        elif at:
            self._data = bytearray(self._data[at:])
        return at > 0

    def clear(self) -> None:
        """None of it is wanted."""
        self._data, self._at = b"", 0
