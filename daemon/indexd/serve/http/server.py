"""The application on a socket that listens already, until it is told to stop."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from indexd.config import Config
from indexd.serve.board import Board


async def serve_http(config: Config, board: Board, log: Any, listening: socket.socket, stop: asyncio.Event) -> None:
    """Serve until ``stop``; what is under way then is finished."""
    await stop.wait()
