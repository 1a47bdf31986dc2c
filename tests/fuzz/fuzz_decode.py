"""Coverage-guided fuzzing of the frame decoder: the plain one is instrumented, the kernel must come to the same.

``python tests/fuzz/fuzz_decode.py CORPUS -max_total_time=60`` with the daemon installed; other options are
libFuzzer's own. An empty CORPUS is filled with frames of the golden stores first. A difference, or anything raised,
ends the run with a ``crash-`` file that the same command takes instead of CORPUS to show it again.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import indexd.commitlog.kernel  # noqa: F401 - before the rest: numba cannot compile what is instrumented

with atheris.instrument_imports(include=["indexd.commitlog.decoder", "indexd.commitlog.decoder"]):
    from support.commitlog_writer import FrameSpec, encode_frame
    from support.goldens import GOLDENS, unpack
    from support.strategies import DELAY_TOPIC
    from support.twins import Stretch, by_decoder, by_kernel

# So that a frame's own physical offset is most often the one where it stands.
_OFFSETS = (1 << 40) - 1
_SEEDS_PER_GOLDEN = 40
_NOISE = bytes(range(256))


def log_of(data: bytes) -> bytes:
    """The bytes of a log that an input stands for; behind an odd first byte its first total size is set right."""
    log = data[1:]
    return len(log).to_bytes(4, "big") + log[4:] if data[:1] and data[0] % 2 and len(log) > 4 else log


def decode_both(data: bytes) -> None:
    """One input; byte 0 of the log stands at the physical offset that its first frame says."""
    data = log_of(data)
    phy_offset = int.from_bytes(data[28:36], "big") & _OFFSETS
    stretch = Stretch.of(data, phy_offset)
    # The other runs have other bytes around it, which must not matter.
    before = _NOISE[: min(len(_NOISE), phy_offset)]
    surrounded = stretch.within(before, data[:512] + _NOISE)
    for check_crc in (False, True):
        plain = by_decoder(stretch, check_crc=check_crc)
        for given in (stretch, surrounded):
            compiled = by_kernel(given, check_crc=check_crc)
            if compiled != plain:
                raise AssertionError(f"the kernel says {compiled}, the decoder {plain}")


def write_seeds(corpus: Path) -> None:
    """Frames of every golden store and the end of a segment of each; and kinds of frames that they do not hold."""
    for number, prop_crc in enumerate((False, True)):
        odd = FrameSpec(DELAY_TOPIC, b"b", {"DELAY": "+٣", "INNER_NUM": "-5", "INNER_BASE": "77", "TAGS": "é😀"})
        (corpus / f"odd-{number}").write_bytes(b"\1" + encode_frame(odd, 0, prop_crc=prop_crc))
    with tempfile.TemporaryDirectory() as directory:
        for name in GOLDENS:
            golden = unpack(name, Path(directory))
            rows = golden.messages()
            data = golden.segments()[0].read_bytes()
            for row in rows[:: len(rows) // _SEEDS_PER_GOLDEN]:
                at = row["phyOffset"]
                if at + row["size"] <= len(data):
                    (corpus / f"{name}-{at}").write_bytes(bytes([at % 2]) + data[at : at + row["size"]])
            last = max(row["phyOffset"] for row in rows if row["phyOffset"] < len(data))
            (corpus / f"{name}-end").write_bytes(b"\0" + data[last:][:8192])


def main() -> None:
    corpus = Path(sys.argv[1])
    if corpus.is_dir() and not any(corpus.iterdir()):
        write_seeds(corpus)
    decode_both(b"")
    atheris.Setup(sys.argv, decode_both)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
