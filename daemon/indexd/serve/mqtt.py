"""MQTT: status, state and events, published and never listened for."""

from __future__ import annotations

import asyncio
from typing import Any

from indexd.config import Config
from indexd.serve.board import Board


async def publish(config: Config, board: Board, log: Any, stop: asyncio.Event) -> None:
    """Publish until ``stop``."""
    await stop.wait()
