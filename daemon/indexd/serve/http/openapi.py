"""Api: routes, each registered once with what it takes and answers, from which OpenAPI's description is made too."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from indexd import __version__
from indexd.serve.http.parameters import NoParameters, read_query
from indexd.serve.http.problem import MEDIA_TYPE

Handler = Callable[[Request, Any], Awaitable[Response]]
_JSON = "application/json"
_PROBLEM = "#/components/schemas/Problem"
_ALWAYS = (401, 405, 413, 414, 421, 422, 431, 500, 503)
_WORDS = {
    401: "A token is needed (http_token_file)",
    404: "There is no such thing",
    405: "Everything here is only read: GET and HEAD",
    409: "The parameters contradict each other",
    413: "Requests have no body here",
    414: "The address is too long",
    421: "The Host header names another host",
    422: "A parameter is wrong, unknown or missing",
    431: "The headers are too long",
    500: "The index is damaged, or a defect",
    503: "Not now: it recovers, or too much is asked at once; Retry-After says when",
}
_DESCRIPTION = """\
Finds messages of an Apache RocketMQ broker by key, unique key, queue offset, time and physical offset, and says how the
index stands. Everything is read only. Whole numbers of 64 bits are texts. Whatever is no answer is an
`application/problem+json` object. A parameter that is not known here is an error, never passed over.
"""


class Api:
    """A handler takes the request and the model of its parameters; its docstring describes it."""

    def __init__(self) -> None:
        self.routes: list[Route] = []
        self._operations: dict[str, Callable[[], dict[str, Any]]] = {}

    def get(
        self,
        path: str,
        summary: str,
        *problems: int,
        query: type[BaseModel] = NoParameters,
        piece: dict[str, Any] | None = None,
        media: str = _JSON,
    ) -> Callable[[Handler], Handler]:
        """Register what answers GET and HEAD, with ``media``; ``piece`` is a piece of the path."""

        def register(handler: Handler) -> Handler:
            async def endpoint(request: Request) -> Response:
                return await handler(request, read_query(query, request.scope["query_string"]))

            def operation() -> dict[str, Any]:
                parameters = [] if piece is None else [{"in": "path", "required": True, **piece}]
                return {
                    "summary": summary,
                    "description": " ".join((handler.__doc__ or "").split()),
                    "operationId": handler.__name__,
                    "parameters": [*parameters, *_parameters(query)],
                    "responses": {"200": _answer(media)}
                    | {str(status): _problem(status) for status in (*_ALWAYS, *problems)},
                }

            self.routes.append(Route(path, endpoint))
            self._operations[path] = operation
            return handler

        return register

    def schema(self, *, with_token: bool) -> dict[str, Any]:
        """OpenAPI's description of all that was registered."""
        members: dict[str, Any] = {name: {"type": "string"} for name in ("type", "title", "detail", "instance", "hint")}
        members |= {"status": {"type": "integer"}, "problems": {"type": "array", "items": {"type": "string"}}}
        problem = {"type": "object", "description": "Every answer that is none (RFC 9457)", "properties": members}
        parts: dict[str, Any] = {"schemas": {"Problem": problem | {"required": list(members)[:4]}}}
        schema: dict[str, Any] = {
            "openapi": "3.1.0",
            "info": {
                "title": "indexd",
                "version": __version__,
                "description": _DESCRIPTION,
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            "paths": {path: {"get": operation()} for path, operation in self._operations.items()},
            "components": parts,
        }
        if with_token:
            parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"token": []}]
            schema["paths"]["/livez"]["get"]["security"] = []
        return schema


def _parameters(model: type[BaseModel]) -> list[dict[str, Any]]:
    schema = model.model_json_schema()
    found = []
    for name, kind in schema.get("properties", {}).items():
        # A parameter that is not given is null; none is ever given as such.
        shown = {key: value for key, value in kind.items() if key not in ("title", "anyOf", "description")}
        shown |= next((one for one in kind.get("anyOf", ()) if one.get("type") != "null"), {})
        if shown.get("default", "") is None:
            del shown["default"]
        words = kind.get("description") or shown.get("description")
        is_needed = name in schema.get("required", ())
        found.append({"name": name, "in": "query", "required": is_needed, "description": words, "schema": shown})
    return found


def _answer(media: str) -> dict[str, Any]:
    kind = "object" if media == _JSON else "string"
    return {"description": "The answer", "content": {media: {"schema": {"type": kind}}}}


def _problem(status: int) -> dict[str, Any]:
    return {"description": _WORDS[status], "content": {MEDIA_TYPE: {"schema": {"$ref": _PROBLEM}}}}
