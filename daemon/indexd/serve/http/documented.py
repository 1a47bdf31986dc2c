"""How a route's answers are described in OpenAPI."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from indexd.serve.http.problem import MEDIA_TYPE

Responses = dict[int | str, dict[str, Any]]
_PROBLEM = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
_WORDS = {
    401: "A token is needed (http_token_file)",
    404: "There is no such thing",
    409: "The parameters contradict each other",
    413: "Requests have no body here",
    414: "The address is too long",
    421: "The Host header names another host",
    422: "A parameter is wrong, unknown or missing",
    431: "The headers are too long",
    500: "The index is damaged, or a defect",
    503: "Not now: it recovers, or too much is asked at once; Retry-After says when",
}
_ALWAYS = (401, 405, 413, 414, 421, 422, 431, 500, 503)
_WORDS[405] = "Everything here is only read: GET and HEAD"


def documented(model: type[BaseModel], description: str, *problems: int) -> dict[str, Any]:
    """Arguments of a route: what it answers, and which problems beside those of every route."""
    answers: Responses = {200: {"model": model, "description": description}}
    answers |= {status: {"description": _WORDS[status], "content": _PROBLEM} for status in (*_ALWAYS, *problems)}
    return {"response_model": None, "responses": answers}


def documented_text(kind: str, description: str) -> dict[str, Any]:
    """The same for an answer that is no JSON; ``kind`` is its media type."""
    found = documented(BaseModel, description)
    found["responses"][200] = {"description": description, "content": {kind: {"schema": {"type": "string"}}}}
    return found
