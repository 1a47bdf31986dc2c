"""Parameters: what may be asked, each with its bounds. Texts are read strictly: nothing is guessed or passed over.

Annotations here are read when the module runs: no postponed annotations in this file.
"""

import re
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qsl

from fastapi import Path
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from indexd.query import TIME_MAX
from indexd.serve.http.problem import ProblemError, of_values

M = TypeVar("M", bound=BaseModel)

MESSAGES_MAX = 1000
_INT32_MAX = 2**31 - 1
_PARAMETERS_MAX = 32
# Of any letters, so that all of it goes into an address (guard.TARGET_MAX).
_KEY_MAX = 1024
_WHOLE = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_SHOWN_MAX = 80


def _whole(value: Any) -> Any:
    # What is no text came from a default.
    if isinstance(value, str):
        if not _WHOLE.fullmatch(value):
            raise ValueError("is no whole number")
        return int(value)
    return value


Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[int, Field(ge=0, le=TIME_MAX), BeforeValidator(_whole)]
QueueId = Annotated[int, Field(ge=0, le=_INT32_MAX), BeforeValidator(_whole)]
Topic = Annotated[str, Field(min_length=1, max_length=255, description="The topic, in full", examples=["TopicTest"])]
BodyForm = Literal["none", "text", "json", "hex", "base64"]
_MAX = Field(64, ge=1, le=MESSAGES_MAX, description="Most messages of the answer", examples=[10])
_BEGIN = Field(None, description="First store time, in ms since 1970", examples=[0])
_END = Field(TIME_MAX, description="Last store time, in ms since 1970", examples=[TIME_MAX])
_BODIES = (
    "How bodies are shown: text and json where they are such, else base64; together they are no"
    " longer than http_body_max"
)


class Asked(BaseModel):
    """No parameter but those that are named."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ByKey(Asked):
    """Messages of a topic that have a key."""

    topic: Topic
    key: str = Field(min_length=1, max_length=_KEY_MAX, description="One of the message's keys", examples=["order-7"])
    begin: Count | None = _BEGIN
    end: Count = _END
    max: Whole = _MAX
    mode: Literal["exact", "rocketmq"] = Field(
        "exact", description="exact: every message that matches, once; rocketmq: what the broker itself would answer"
    )
    index_type: Literal["K", "U", "T"] | None = Field(
        None, description="K: a key, U: the unique key, T: the tags; K or U without"
    )
    before: Count | None = Field(None, description="Only messages before this physical offset: the cursor of an answer")
    body: BodyForm = Field("none", description=_BODIES, examples=["text"])


class ByUniqueKey(Asked):
    """The message that a producer gave a unique key."""

    topic: Topic
    id: str = Field(
        min_length=1, max_length=_KEY_MAX, description="The unique key (UNIQ_KEY, the producer's message id)",
        examples=["7F00000100002A1300000100000F4240"],
    )  # fmt: skip
    begin: Count | None = _BEGIN
    end: Count = _END
    max: Whole = _MAX
    body: BodyForm = Field("none", description=_BODIES, examples=["text"])


class ByQueueOffset(Asked):
    """Messages of a queue from an offset on."""

    topic: Topic
    queue: QueueId = Field(description="The queue's id", examples=[0])
    offset: Count = Field(0, description="The first queue offset", examples=[0])
    max: Whole = Field(32, ge=1, le=MESSAGES_MAX, description="Most messages of the answer", examples=[10])
    body: BodyForm = Field("none", description=_BODIES, examples=["text"])


class ByTime(Asked):
    """Where a time is: in a queue, or without topic and queue in the whole log."""

    time: Count = Field(description="A store time, in ms since 1970", examples=[0])
    topic: Topic | None = Field(None, description="The queue's topic; the whole log without", examples=["TopicTest"])
    queue: QueueId | None = Field(None, description="The queue's id; it needs a topic", examples=[0])
    boundary: Literal["lower", "upper"] = Field(
        "lower", description="Of a queue, lower: the first message then or later; upper: the last then or earlier"
    )


class OneMessage(Asked):
    """How one message is shown."""

    body: BodyForm = Field("text", description=_BODIES, examples=["text"])


class TopicsBegin(Asked):
    """Which topics."""

    begin: str = Field("", max_length=255, description="What their names begin with, in letters of any case")
    max: Whole = Field(50, ge=1, le=MESSAGES_MAX, description="Most topics of the answer", examples=[10])


class Since(Asked):
    """Which events."""

    since: Count = Field(0, description="Only events behind this number", examples=[0])


class Thresholds(Asked):
    """How far behind is still ready."""

    lag_ms: Count = Field(60_000, description="Not ready when the oldest message that is not indexed is older, in ms")
    lag_bytes: Count | None = Field(None, description="Not ready when more bytes of log are not indexed yet")


class Nothing(Asked):
    """No parameters at all."""


Where = Annotated[
    str,
    Path(
        pattern=r"^([0-9]{1,19}|[0-9A-Fa-f]{32}|[0-9A-Fa-f]{56})$",
        description="Its physical offset, or its offset message id of 32 or 56 hex digits",
        openapi_examples={"offset": {"value": "0"}},
    ),
]
IndexFileName = Annotated[
    str, Path(pattern=r"^[0-9]{17}$", description="The file's name", openapi_examples={"name": {"value": "2" * 17}})
]


def read_query(model: type[M], query: bytes) -> M:
    """The parameters of a request; ProblemError names those that are wrong, unknown, doubled or no UTF-8."""
    try:
        pairs = parse_qsl(
            query.decode("utf-8"), keep_blank_values=True, errors="strict", max_num_fields=_PARAMETERS_MAX
        )
    except UnicodeDecodeError:
        raise of_values(["a parameter is not UTF-8"]) from None
    except ValueError:
        raise of_values([f"there are more than {_PARAMETERS_MAX} parameters"]) from None
    given = dict(pairs)
    if len(given) < len(pairs):
        names = [name for name, _ in pairs]
        raise of_values(f"{name[:_SHOWN_MAX]!r} is there twice" for name in given if names.count(name) > 1)
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _problem(error) from None


def read_path(adapter: TypeAdapter[Any], name: str, value: str) -> Any:
    """One piece of the path; ProblemError."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise _problem(error, name) from None


def _problem(error: ValidationError, name: str | None = None) -> ProblemError:
    lines = []
    for found in error.errors(include_url=False, include_context=False):
        where = name or str(found["loc"][0])[:_SHOWN_MAX]
        what = found["msg"].removeprefix("Value error, ")
        given = (
            "" if found["type"] in ("missing", "extra_forbidden") else f", given {str(found['input'])[:_SHOWN_MAX]!r}"
        )
        lines.append(f"{where}: {what[:1].lower()}{what[1:]}{given}")
    return of_values(lines)
