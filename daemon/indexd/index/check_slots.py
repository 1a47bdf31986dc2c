"""The slots of an index file against what its entries come to."""

from __future__ import annotations

import time

import numpy as np

from indexd.findings import Findings
from indexd.index.check_ground import Condition, Place, Seen
from indexd.index.check_header import read_header
from indexd.index.format import ENTRY_SIZE, unpack_entry
from indexd.storage.disk import DiskFile

# A slot that a daemon writes while it is read may be seen half old and half new; a moment later it is whole.
_LOOKS = 3
_PAUSE = 0.05
# Wrong slots that are looked at one by one even when there is hardly room for them.
_LOOKED_AT = 20


def check_slots(file: DiskFile, place: Place, seen: Seen, findings: Findings) -> None:
    """One finding for each slot that does not name the newest of its entries."""
    for look in range(_LOOKS):
        slots = np.zeros(place.layout.hash_slot_num, dtype=np.uint32)
        file.pread_into(slots.view(np.uint8).data, place.layout.slot_position(0))
        wrong = np.flatnonzero(slots != seen.slots)
        if place.condition is not Condition.GROWING:
            break
        # The header is written before the slots, so read behind them it counts every entry that they name.
        above = read_header(file, place.mark.header)[5]
        values = slots[wrong].byteswap().view(np.int32)
        wrong = wrong[(values < place.count) | (values >= min(above, place.layout.index_num))]
        if len(wrong) == 0 or look == _LOOKS - 1:
            break
        time.sleep(_PAUSE)
    for done, slot in enumerate(wrong.tolist()):
        if done >= _LOOKED_AT and not findings.has_room:
            findings.count("slot", len(wrong) - done)
            break
        value = int(slots[slot : slot + 1].byteswap().view(np.int32)[0])
        wanted = int(seen.slots[slot : slot + 1].byteswap()[0])
        what, text = _judge(file, place, slot, value, wanted)
        findings.add(place.name, place.layout.slot_position(slot), what, f"slot {slot}: {text}")


def _judge(file: DiskFile, place: Place, slot: int, value: int, wanted: int) -> tuple[str, str]:
    newest = f"its newest entry is {wanted}" if wanted else "it has no entries"
    if value == 0:
        return "slot-wiped", f"empty, but {newest}"
    if not 0 < value < place.layout.index_num:
        return "slot-range", f"{value} is no entry of this file; {newest}"
    if value >= place.count:
        return "slot-behind-last", f"names entry {value}, but the last one is {place.count - 1}; {newest}"
    key_hash = unpack_entry(file.pread(ENTRY_SIZE, place.layout.entry_position(value))).key_hash
    if key_hash < 0 or place.layout.slot_of(key_hash) != slot:
        return "slot-other", f"names entry {value} of another slot; {newest}"
    return "slot-old", f"names entry {value}, but {newest}"
