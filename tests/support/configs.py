"""What the tests of the configuration share: a file, a load that must fail, a home without a system file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from indexd.config import load
from indexd.errors import IndexdError, UsageError

SHIPPED = Path(__file__).parents[2] / "config" / "indexd.toml"
HOME = {"HOME": "/home/op"}
LOAD = sys.modules["indexd.config.load"]  # the module: in its package, the function has that name


@pytest.fixture(autouse=True)
def no_system_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in /etc on this machine must not matter."""
    monkeypatch.setattr(LOAD, "DEFAULT_CONFIG_FILE", tmp_path / "etc" / "indexd.toml")


def write(path: Path, text: str | bytes) -> Path:
    """Write a file and return its path."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refused(
    flags: dict[str, str | None] | None = None,
    file: Path | None = None,
    environ: dict[str, str] | None = None,
    error: type[IndexdError] = UsageError,
) -> IndexdError:
    """The error of a load that must fail, after a look that it is one printable line."""
    with pytest.raises(error) as caught:
        load(flags or {}, file, HOME | (environ or {}))
    assert str(caught.value).isprintable()
    assert caught.value.line().isprintable()
    return caught.value
