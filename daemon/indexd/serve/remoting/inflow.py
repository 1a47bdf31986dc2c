"""Inflow: the bytes of frames that have come to a connection and are not taken yet."""

from __future__ import annotations

from indexd.serve.remoting.command import LENGTH_SIZE, frame_size


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
            return
        if isinstance(self._data, bytes):
            self._data = bytearray(self._data)
        self._data += data

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
        elif isinstance(self._data, bytearray):
            del self._data[:at]
        elif at:
            self._data = bytearray(self._data[at:])
        return at > 0

    def clear(self) -> None:
        """None of it is wanted."""
        self._data, self._at = b"", 0
