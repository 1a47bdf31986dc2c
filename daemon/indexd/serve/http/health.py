"""Health: is it alive, and is it near enough to the end of the log?

Annotations here are read when the module runs: no postponed annotations in this file.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from indexd.serve.board import Board
from indexd.serve.http.answers import json_response, text64
from indexd.serve.http.documented import documented
from indexd.serve.http.parameters import Thresholds
from indexd.serve.http.problem import ProblemError
from indexd.serve.http.route import StrictRoute
from indexd.serve.http.schemas import Health

_RETRY = 5
_LAG = ("dispatchBehindBytes", "dispatchBehindMilliseconds")


def health_router(board: Board) -> APIRouter:
    """The routes."""
    router = APIRouter(route_class=StrictRoute, tags=["health"])

    @router.get("/livez", summary="Is it alive?", **documented(Health, "It is"))
    async def livez() -> Response:
        """200 unless a stage of the indexing (read, build, flush) stands still, which a restart may help.

        A full disk or an unreadable log is no reason: it is waited for, and a restart helps nothing.
        """
        row = board.row()
        stalled = row["stalled"]
        if stalled and row["phase"] == "running":
            words = ", ".join(f"{stage} for {seconds:.0f} s" for stage, seconds in stalled.items())
            members = {"phase": row["phase"], "stalled": stalled}
            raise ProblemError(503, "stalled", f"the indexing does not move: {words}", members, retry=_RETRY)
        return json_response({"status": "ok", "phase": row["phase"]})

    @router.get("/readyz", summary="Is the index near enough to the end of the log?", **documented(Health, "It is"))
    async def readyz(asked: Annotated[Thresholds, Query()]) -> Response:
        """200 while it runs, within the thresholds, and can read on; else 503 with the numbers and why.

        Where the log goes on behind bytes that are no frame, no threshold is waited for.
        """
        row = board.row()
        lag = {name: row.get(name) for name in _LAG}
        facts: dict[str, Any] = text64({"phase": row["phase"], **lag, "caughtUp": row.get("caughtUp")})
        is_running = row["phase"] == "running"
        reasons = [] if is_running else [f"it is {row['phase']}"]
        for name, most, unit in ((_LAG[0], asked.lag_bytes, "bytes"), (_LAG[1], asked.lag_ms, "ms")):
            found = lag[name]
            if most is not None and is_running and (found is None or found > most):
                reasons.append(f"it is {'an unknown number of' if found is None else found} {unit} behind")
        corrupt = row.get("corrupt") if is_running else None
        if corrupt and (reasons or lag[_LAG[0]]):
            reasons.insert(0, f"it stands at bytes that are no frame, at {corrupt['offset']}: {corrupt['reason']}")
        if reasons:
            raise ProblemError(503, "not-ready", "; ".join(reasons), facts, retry=_RETRY)
        return json_response({"status": "ok", **facts})

    return router
