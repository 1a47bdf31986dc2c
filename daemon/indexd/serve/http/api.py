"""Api: routes, each registered once with what it takes and answers, from which OpenAPI's description is made too.

The parameters of a question are its own model within HTTP's bounds, read strictly: nothing is guessed.

Annotations here are read when the module runs: no postponed annotations in this file.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from indexd import __version__
from indexd.errors import UsageError
from indexd.query.questions import Count, Question, Whole
from indexd.serve.http.problem import MEDIA_TYPE, ProblemError, wrong_values

M = TypeVar("M", bound=BaseModel)
Handler = Callable[[Request, Any], Awaitable[Response]]
_JSON = "application/json"
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
_PARAMETERS_MAX = 32
_SHOWN_MAX = 80

_MAX = Field(ge=1, le=1000)
# Of any letters, so that all of it goes into an address (guard.TARGET_MAX).
_BOUNDS = {"topic": Field(max_length=255), "key": Field(max_length=1024), "id": Field(max_length=1024), "max": _MAX}
BodyForm = Annotated[
    Literal["none", "text", "json", "hex", "base64"],
    Field(
        description="How bodies are shown: text and json where they are such, else base64; together they are no"
        " longer than http_body_max",
        examples=["text"],
    ),
]


def over_http(question: type[Question], *, has_bodies: bool) -> type[Question]:
    """The question as it may be asked over HTTP."""
    fields: dict[str, Any] = {
        name: (Annotated[info.annotation, _BOUNDS[name]], info)
        for name, info in question.model_fields.items()
        if name in _BOUNDS
    }
    if has_bodies:
        fields["body"] = (BodyForm, "none")
    return create_model(question.__name__, __base__=question, **fields)


class NoParameters(BaseModel):
    """No parameters at all, and the base of those that are no question's."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class OneMessage(NoParameters):
    """How one message is shown."""

    body: BodyForm = "text"


class TopicsBegin(NoParameters):
    """Which topics."""

    begin: str = Field("", max_length=255, description="What their names begin with, in letters of any case")
    max: Annotated[Whole, _MAX] = Field(50, description="Most topics of the answer")


class Since(NoParameters):
    """Which events."""

    since: Count = Field(0, description="Only events behind this number")


class Thresholds(NoParameters):
    """How far behind is still ready."""

    lag_ms: Count = Field(60_000, description="Not ready when the oldest message that is not indexed is older, in ms")
    lag_bytes: Count | None = Field(None, description="Not ready when more bytes of log are not indexed yet")


def read_query(model: type[M], query: bytes) -> M:
    """The parameters of a request; ProblemError names those that are wrong, unknown, doubled or no UTF-8, and those
    that contradict each other (409).
    """
    try:
        text = query.decode("utf-8")
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=_PARAMETERS_MAX)
    except ValueError:
        raise wrong_values([f"parameters are UTF-8, and {_PARAMETERS_MAX} at most"]) from None
    given = dict(pairs)
    if len(given) < len(pairs):
        raise wrong_values(["a parameter is there twice"])
    try:
        return model.model_validate(given)
    except UsageError as error:
        raise ProblemError(409, "parameters", str(error.args[0])) from None
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
    if not problems[0]["loc"]:  # of several parameters together
        raise ProblemError(409, "parameters", problems[0]["msg"].removeprefix("Value error, "))
    raise wrong_values(
        [f"{str(found['loc'][0])[:_SHOWN_MAX]}: {found['msg']}, given {str(found['input'])[:_SHOWN_MAX]!r}"
        for found in problems]
    )  # fmt: skip


class Api:
    """A handler takes the request and the model of its parameters; its docstring describes it."""

    def __init__(self) -> None:
        self.routes: list[Route] = []
        self._operations: dict[str, dict[str, Any]] = {}

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

            self.routes.append(Route(path, endpoint))
            answer = {media: {"schema": {"type": "object" if media == _JSON else "string"}}}
            problem = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
            responses = {str(one): {"description": _WORDS[one], "content": problem} for one in (*_ALWAYS, *problems)}
            self._operations[path] = {
                "summary": summary,
                "description": " ".join((handler.__doc__ or summary).split()),
                "operationId": handler.__name__,
                "parameters": ([{"in": "path", "required": True, **piece}] if piece else []) + _parameters(query),
                "responses": {"200": {"description": "The answer", "content": answer}, **responses},
            }
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
            "paths": {path: {"get": operation} for path, operation in self._operations.items()},
            "components": parts,
        }
        if with_token:
            parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"token": []}]
            schema["paths"]["/livez"]["get"] |= {"security": []}
        return schema


def _parameters(model: type[BaseModel]) -> list[dict[str, Any]]:
    schema = model.model_json_schema()
    found = []
    for name, kind in schema.get("properties", {}).items():
        # A parameter that is not given is null; none is ever given as such.
        shown = next((one for one in kind.pop("anyOf", ()) if one.get("type") != "null"), {}) | kind
        # Bounds behind a validator of our own are left as pydantic calls them.
        shown = {{"ge": "minimum", "le": "maximum"}.get(key, key): value for key, value in shown.items()}
        if shown.get("default", "") is None:
            del shown["default"]
        is_needed, words = name in schema.get("required", ()), shown.pop("description")
        found.append({"name": name, "in": "query", "required": is_needed, "description": words, "schema": shown})
    return found
