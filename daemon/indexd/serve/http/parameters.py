"""Parameters of requests: the questions' own models within HTTP's bounds, read strictly: nothing is guessed.

Annotations here are read when the module runs: no postponed annotations in this file.
"""

import re
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from indexd.query import TIME_MAX, questions
from indexd.serve.http.problem import ProblemError, wrong_values

M = TypeVar("M", bound=BaseModel)

MESSAGES_MAX = 1000
_PARAMETERS_MAX = 32
_WHOLE = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_SHOWN_MAX = 80

Topic = Annotated[str, Field(min_length=1, max_length=255, description="The topic, in full", examples=["TopicTest"])]
# Of any letters, so that all of it goes into an address (guard.TARGET_MAX).
Key = Annotated[str, Field(min_length=1, max_length=1024, examples=["order-7"])]
Max = Annotated[int, Field(ge=1, le=MESSAGES_MAX, description="Most messages of the answer", examples=[10])]
Count = Annotated[int, Field(ge=0, le=TIME_MAX)]
BodyForm = Annotated[
    Literal["none", "text", "json", "hex", "base64"],
    Field(
        description="How bodies are shown: text and json where they are such, else base64; together they are no"
        " longer than http_body_max",
        examples=["text"],
    ),
]


class InTimeRange(questions.InTimeRange):
    """What both questions by key share."""

    #: Which output beside the key index they need.
    output: ClassVar[str | None] = None
    topic: Topic
    max: Max = 64
    body: BodyForm = "none"

    @model_validator(mode="after")
    def _together(self) -> Self:  # instead of the question's own, in HTTP's words
        if self.begin is not None and self.begin > self.end:
            raise ProblemError(
                409, "parameters", f"begin, {self.begin}, is later than end, {self.end}: turn them round"
            )
        if self.mode == "rocketmq" and self.before is not None:
            raise ProblemError(409, "parameters", "the broker's own answer has no pages: leave before or mode out")
        return self


class ByKey(InTimeRange, questions.ByKey):
    """Messages of a topic that have a key

    Exact by default: every message that matches, once, and none that does not. In mode rocketmq it is what the broker
    itself would answer, collisions, repeats and misses included.
    """

    key: Key = Field(description="One of the message's keys")


class ByUniqueKey(InTimeRange, questions.ByUniqueKey):
    """The message that a producer gave a unique key

    The unique key is the id that a producer's send returns (UNIQ_KEY).
    """

    id: Key = Field(description="The unique key (UNIQ_KEY, the producer's message id)")


class ByQueueOffset(questions.ByQueueOffset):
    """Messages of a queue from an offset on

    As a consumer's pull sees it; ``nextOffset`` is the offset of the next page.
    """

    output: ClassVar[str | None] = "consume_queue"
    topic: Topic
    offset: Count = Field(0, description="The first queue offset", examples=[0])
    max: Max = 32
    body: BodyForm = "none"


class ByTime(questions.ByTime):
    """Where a time is in a queue, or in the whole log

    With topic and queue, the queue offset that the broker's search finds; without, the log's first message that was
    stored then or later.
    """

    topic: Topic | None = Field(None, description="The queue's topic; the whole log without")

    @property
    def output(self) -> str:
        """Which output beside the key index it needs."""
        return "sparse" if self.topic is None else "consume_queue"

    @model_validator(mode="after")
    def _together(self) -> Self:  # a boundary without a queue is passed over
        if (self.topic is None) != (self.queue is None):
            raise ProblemError(409, "parameters", "topic and queue belong together: give both or none")
        return self


class NoParameters(BaseModel):
    """No parameters at all, and the base of those that are no question's."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class OneMessage(NoParameters):
    """How one message is shown."""

    body: BodyForm = "text"


class TopicsBegin(NoParameters):
    """Which topics."""

    begin: str = Field("", max_length=255, description="What their names begin with, in letters of any case")
    max: Max = Field(50, description="Most topics of the answer")


class Since(NoParameters):
    """Which events."""

    since: Count = Field(0, description="Only events behind this number", examples=[0])


class Thresholds(NoParameters):
    """How far behind is still ready."""

    lag_ms: Count = Field(60_000, description="Not ready when the oldest message that is not indexed is older, in ms")
    lag_bytes: Count | None = Field(None, description="Not ready when more bytes of log are not indexed yet")


def read_query(model: type[M], query: bytes) -> M:
    """The parameters of a request; ProblemError names those that are wrong, unknown, doubled or no UTF-8, and those
    that contradict each other (409).
    """
    try:
        pairs = parse_qsl(
            query.decode("utf-8"), keep_blank_values=True, errors="strict", max_num_fields=_PARAMETERS_MAX
        )
    except UnicodeDecodeError:
        raise wrong_values(["a parameter is not UTF-8"]) from None
    except ValueError:
        raise wrong_values([f"there are more than {_PARAMETERS_MAX} parameters"]) from None
    given: dict[str, Any] = dict(pairs)
    if len(given) < len(pairs):
        names = [name for name, _ in pairs]
        raise wrong_values([f"{name[:_SHOWN_MAX]!r} is there twice" for name in given if names.count(name) > 1])
    for name in _whole_numbers(model) & given.keys():
        if _WHOLE.fullmatch(given[name]):
            given[name] = int(given[name])
    try:
        return model.model_validate(given, strict=True)  # what is still a text is no whole number
    except ValidationError as error:
        raise _problem(error) from None


@cache
def _whole_numbers(model: type[BaseModel]) -> frozenset[str]:
    def is_int(kind: Any) -> bool:
        return kind is int or any(is_int(part) for part in get_args(kind))

    return frozenset(name for name, field in model.model_fields.items() if is_int(field.annotation))


def _problem(error: ValidationError) -> ProblemError:
    lines = []
    for found in error.errors(include_url=False, include_context=False):
        where, what = str(found["loc"][0])[:_SHOWN_MAX], found["msg"]
        is_named = found["type"] in ("missing", "extra_forbidden")
        given = "" if is_named else f", given {str(found['input'])[:_SHOWN_MAX]!r}"
        lines.append(f"{where}: {what[:1].lower()}{what[1:]}{given}")
    return wrong_values(lines)
