"""CRC-32 (the zlib polynomial) as a kernel: eight bytes a step by eight tables.

A compiled loop cannot call zlib; a call per message from Python would cost more than the sum itself.
"""

from __future__ import annotations

import zlib

import numba
import numpy as np
from numpy.typing import NDArray

_U8 = np.uint64(8)
_BYTE = np.uint32(0xFF)
_ONES = np.uint32(0xFFFFFFFF)


def _tables() -> NDArray[np.uint32]:
    # zlib.crc32 of one byte, taken without its initial and final inversion, is the first table.
    rows = np.zeros((8, 256), dtype=np.uint32)
    zero = zlib.crc32(b"\x00", 0xFFFFFFFF)
    for byte in range(256):
        rows[0, byte] = zlib.crc32(bytes([byte]), 0xFFFFFFFF) ^ zero
    for step in range(1, 8):
        previous = rows[step - 1]
        rows[step] = rows[0][previous & 0xFF] ^ (previous >> 8)
    return rows


CRC_TABLES = _tables()


@numba.njit(nogil=True, cache=True)
def crc32(buffer, start, end, tables):  # type: ignore[no-untyped-def]  # numba infers the types
    """CRC-32 of ``buffer[start:end]`` (uint8 array, uint64 positions, ``tables`` = CRC_TABLES) as uint32."""
    crc = _ONES
    i = start
    while i + _U8 <= end:
        low = crc ^ (
            np.uint32(buffer[i])
            | np.uint32(buffer[i + np.uint64(1)]) << np.uint32(8)
            | np.uint32(buffer[i + np.uint64(2)]) << np.uint32(16)
            | np.uint32(buffer[i + np.uint64(3)]) << np.uint32(24)
        )
        crc = (
            tables[7, low & _BYTE]
            ^ tables[6, (low >> np.uint32(8)) & _BYTE]
            ^ tables[5, (low >> np.uint32(16)) & _BYTE]
            ^ tables[4, low >> np.uint32(24)]
            ^ tables[3, buffer[i + np.uint64(4)]]
            ^ tables[2, buffer[i + np.uint64(5)]]
            ^ tables[1, buffer[i + np.uint64(6)]]
            ^ tables[0, buffer[i + np.uint64(7)]]
        )
        i += _U8
    while i < end:
        crc = tables[0, (crc ^ np.uint32(buffer[i])) & _BYTE] ^ (crc >> np.uint32(8))
        i += np.uint64(1)
    return crc ^ _ONES
