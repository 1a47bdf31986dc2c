"""``indexd inspect`` in this process: its words, or the rows of its JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from indexd.cli.main import main


class Inspect:
    """``code`` and ``err`` are those of the last run."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.code = 0
        self.err = ""

    def words(self, *argv: object) -> str:
        """What it prints for people."""
        with pytest.raises(SystemExit) as stopped:
            main(["inspect", *map(str, argv)])
        self.code = int(stopped.value.code or 0)
        out, self.err = self._capsys.readouterr()
        return out

    def rows(self, *argv: object) -> list[dict[str, Any]]:
        """What it prints for programs."""
        return [json.loads(line) for line in self.words(*argv, "--json").split("\n") if line]

    def of_kind(self, kind: str, *argv: object) -> list[dict[str, Any]]:
        """The rows of one kind."""
        return [row for row in self.rows(*argv) if row["kind"] == kind]
