"""create_app: what is answered under which path."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from indexd import __version__
from indexd.config import Config
from indexd.serve.board import Board
from indexd.serve.http.access import Access, read_access
from indexd.serve.http.figures import figure_router
from indexd.serve.http.files import file_router
from indexd.serve.http.guard import Guard
from indexd.serve.http.health import health_router
from indexd.serve.http.messages import message_router
from indexd.serve.http.page import page_router
from indexd.serve.http.problem import ProblemError, of_status, of_values
from indexd.serve.http.queries import Queries
from indexd.serve.http.route import StrictRoute
from indexd.serve.http.schemas import Problem

_DESCRIPTION = """\
Finds messages of an Apache RocketMQ broker by key, unique key, queue offset, time and physical offset, and says how the
index stands. Everything is read only. Whole numbers of 64 bits are texts. Whatever is no answer is an
`application/problem+json` object. A parameter that is not known here is an error, never passed over.
"""


def create_app(
    config: Config, board: Board, log: Any = None, stop: asyncio.Event | None = None, access: Access | None = None
) -> FastAPI:
    """The application; streams end when ``stop`` is set. ``app.state.queries`` has to be closed. UsageError."""
    app = FastAPI(
        title="indexd", version=__version__, description=_DESCRIPTION, docs_url=None, redoc_url=None,
        redirect_slashes=False, license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
    )  # fmt: skip
    queries = app.state.queries = Queries(config, board)
    access = access or read_access(config)
    direct: dict[str, ASGIApp] = {}
    app.add_middleware(Guard, access=access, direct=direct, log=log)

    @app.exception_handler(ProblemError)
    async def on_problem(request: Request, problem: ProblemError) -> Response:
        return problem.response(request.scope["path"])

    @app.exception_handler(HTTPException)
    async def on_status(request: Request, error: HTTPException) -> Response:
        detail = "there is nothing under this path" if error.status_code == 404 else str(error.detail)
        return of_status(error.status_code, detail).response(request.scope["path"])

    @app.exception_handler(RequestValidationError)
    async def on_values(request: Request, error: RequestValidationError) -> Response:
        problem = of_values(f"{found['loc'][-1]}: {found['msg']}" for found in error.errors())
        return problem.response(request.scope["path"])

    for router in (
        message_router(config, queries),
        file_router(board, queries),
        health_router(board),
        figure_router(board, stop or asyncio.Event()),
    ):
        app.include_router(router)
        direct |= {
            route.path: route.app for route in router.routes if isinstance(route, StrictRoute) and "{" not in route.path
        }
    app.include_router(page_router(config, board, queries))
    _describe_problems(app, with_token=access.token is not None)
    return app


def _describe_problems(app: FastAPI, *, with_token: bool) -> None:
    # FastAPI knows of no answers that are no JSON; this adds their schema, and the token where there is one.
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = make()
            parts = schema.setdefault("components", {})
            parts.setdefault("schemas", {})["Problem"] = Problem.model_json_schema(by_alias=True)
            if with_token:
                parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
                schema["security"] = [{"token": []}]
                schema["paths"]["/livez"]["get"]["security"] = []
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation has it
