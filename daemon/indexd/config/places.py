"""Where indexd may keep its own files: anywhere but in the store."""

from __future__ import annotations

from pathlib import Path

from ..errors import UnsafeStoreError
from .model import Config


def check_outside(config: Config, path: Path, flag: str) -> None:
    """Refuse a directory of ours that lies in the store or in one of its commitlog directories."""
    roots = (*((config.store.store,) if config.store.store else ()), *config.store.commit_log_directories)
    for root in roots:
        if path.resolve().is_relative_to(root.resolve()):
            raise UnsafeStoreError(
                f"{path} (from {flag}) lies inside the store, in {root}",
                f"nothing is written into a broker's store: give another {flag}",
            )
