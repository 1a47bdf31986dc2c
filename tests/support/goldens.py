"""The stores in tests/golden: made by RocketMQ's own code, with what that code reads in them and answers from them."""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GOLDENS = [
    "rocketmq-5.3-clean",
    "rocketmq-5.4-clean",
    "rocketmq-5.4-propcrc",
    "rocketmq-5.4-killed",
    "rocketmq-5.4-killed-open-index",
]

_ARCHIVES = Path(__file__).resolve().parent.parent / "golden"


@dataclass(frozen=True)
class Golden:
    """One unpacked store. ``root`` is the store root and holds the ``.jsonl`` files too; sizes are as configured."""

    name: str
    root: Path
    version: str
    hash_slot_num: int
    index_num: int
    segment_size: int
    queue_file_size: int
    prop_crc: bool
    killed: bool

    @property
    def flavour(self) -> str:
        """The naive index service's name for this version's rules: tag entries from 5.4 on."""
        return "5.4" if self.version >= "5.4" else "4.7"

    def messages(self) -> list[dict[str, Any]]:
        """Every frame in log order, as the broker's own check decodes it (keys as in messages.jsonl)."""
        return self._rows("messages.jsonl")

    def answers(self) -> list[dict[str, Any]]:
        """400 answers of the broker's own index service; none for a killed store."""
        return self._rows("answers.jsonl")

    def segments(self) -> list[Path]:
        return sorted((self.root / "commitlog").iterdir())

    def index_files(self) -> list[Path]:
        return sorted((self.root / "index").iterdir())

    def _rows(self, name: str) -> list[dict[str, Any]]:
        path = self.root / name
        if not path.exists():
            return []
        # Not splitlines: a key may hold a character that str takes for a line end.
        return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]


def unpack(name: str, tmp: Path) -> Golden:
    """Unpacks golden ``name`` under ``tmp`` (once; a second call finds it there) and describes it."""
    root = tmp / name
    if not root.exists():
        with tarfile.open(_ARCHIVES / f"{name}.tar.gz") as archive:
            # The argument ``filter`` came with Python 3.11.4.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(tmp)
    facts = json.loads((root / "golden.json").read_text("utf-8"))
    return Golden(
        name=name,
        root=root,
        version=facts["rocketmq"],
        hash_slot_num=facts["maxHashSlotNum"],
        index_num=facts["maxIndexNum"],
        segment_size=facts["mappedFileSizeCommitLog"],
        queue_file_size=facts["mappedFileSizeConsumeQueue"],
        prop_crc=facts["enabledAppendPropCRC"],
        killed=facts["exit"] == "killed",
    )
