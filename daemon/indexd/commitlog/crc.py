"""CRC-32 as a kernel: eight bytes a step by eight tables; any reflected polynomial, zlib's among them.

A compiled loop cannot call zlib; a call per message from Python would cost more than the sum itself.
"""

from __future__ import annotations

import zlib

import numba
import numpy as np
from numpy.typing import NDArray

_1 = np.uint64(1)
_8 = np.uint64(8)
_BYTE = np.uint32(0xFF)
_ONES = np.uint32(0xFFFFFFFF)


def crc_tables(first: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The eight tables, shape (8, 256), from the one of the polynomial, shape (256,)."""
    rows = np.zeros((8, 256), dtype=np.uint32)
    rows[0] = first
    for step in range(1, 8):
        previous = rows[step - 1]
        rows[step] = rows[0][previous & 0xFF] ^ (previous >> 8)
    return rows


# zlib.crc32 of one byte, taken without its initial and final inversion, is the first table.
_ZERO = zlib.crc32(b"\x00", 0xFFFFFFFF)
CRC_TABLES = crc_tables(
    np.array([zlib.crc32(bytes([byte]), 0xFFFFFFFF) ^ _ZERO for byte in range(256)], dtype=np.uint32)
)


@numba.njit(nogil=True, cache=True)
def crc_go_on(buffer, start, end, register, tables):  # type: ignore[no-untyped-def]  # numba infers the types
    """The register of a CRC after ``buffer[start:end]``, from ``register`` before; uint32.

    A sum begins with 2^32-1, and its value is the last register xor that: so one sum can go over several buffers.
    """
    crc = np.uint32(register)  # what Python calls with is an int64
    i = np.uint64(start)
    stop = np.uint64(end)
    while i + _8 <= stop:
        low = crc ^ (
            np.uint32(buffer[i])
            | np.uint32(buffer[i + _1]) << np.uint32(8)
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
        i += _8
    while i < stop:
        crc = tables[0, (crc ^ np.uint32(buffer[i])) & _BYTE] ^ (crc >> np.uint32(8))
        i += _1
    return crc


@numba.njit(nogil=True, cache=True)
def crc32(buffer, start, end, tables):  # type: ignore[no-untyped-def]  # numba infers the types
    """CRC-32 of ``buffer[start:end]`` (uint8 array, uint64 positions, ``tables`` = CRC_TABLES) as uint32."""
    return crc_go_on(buffer, start, end, _ONES, tables) ^ _ONES
