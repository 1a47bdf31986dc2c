"""The keys of the pipeline on Spark: where a job runs, with which Java, and how the log is cut.

Annotations here are read when the module runs, to build the validators: no postponed annotations in this file.
"""

import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from .facts import ConflictError, Stage
from .units import Kind, OptionalPath, Size, parse_choice, shown

Engine = Literal["process", "spark"]

_COUNT = "[1-9][0-9]{0,4}"  # of threads; Spark itself falls over 0, and over what is no int
LOCAL = re.compile(rf"local(?:\[(\*|{_COUNT})(?: *, *{_COUNT})?\])?")
"""The masters in this process; group 1 is how many tasks run at once, ``*`` or none."""
_MASTER = re.compile(rf"{LOCAL.pattern}|local-cluster\[ *{_COUNT} *, *{_COUNT} *, *[0-9]+ *\]|spark://.+|yarn|k8s://.+")
_REMOTE = re.compile(r"sc://[^/].*")
_CONF = re.compile(r"\s*(spark\.[\w.*-]+)\s*=(.*)")


def parse_master(value: object) -> str:
    """A master as spark-submit takes it."""
    if not isinstance(value, str) or not _MASTER.fullmatch(value) or not value.isprintable():
        raise ValueError("is not a master of Spark: write local[*], spark://host:7077, yarn or k8s://https://host:443")
    return value


def parse_remote(value: object) -> str | None:
    """The address of a Connect server; None, which only Python code can write, is none."""
    if value is None:
        return None
    if not isinstance(value, str) or not _REMOTE.fullmatch(value) or not value.isprintable():
        raise ValueError("is not the address of a Spark Connect server: write sc://host, or sc://host:15002/;token=...")
    return value


def parse_conf(value: object) -> tuple[tuple[str, str], ...]:
    """Spark's own keys: ``k=v`` texts in a list, or lines of one text; of a key that is there twice the last holds."""
    if isinstance(value, str):
        value = [line for line in value.splitlines() if line.strip()]
    if not isinstance(value, list | tuple):
        raise ValueError("is not a list of key=value: write a list of such texts")
    found: dict[str, str] = {}
    for part in value:
        text = "=".join(map(str, part)) if isinstance(part, tuple) else part
        match = _CONF.fullmatch(text) if isinstance(text, str) and text.isprintable() else None
        if match is None:
            raise ValueError(f"holds {shown(part)}: write key=value with a key of Spark, as spark.executor.memory=2g")
        found[match[1]] = match[2]
    return tuple(found.items())


Conf = Annotated[
    tuple[tuple[str, str], ...], BeforeValidator(parse_conf), Kind("key=value", lambda _: "none", repeats=True)
]


class SparkConfig(Stage):
    """Where the pipeline on Spark runs; nothing of the daemon looks at it."""

    engine: Annotated[Engine, BeforeValidator(parse_choice)] = Field(
        default="process", description="What rebuild and audit run on: this process, or Spark; a word"
    )
    master: Annotated[str, BeforeValidator(parse_master), Kind("master", str)] = Field(
        default="local[*]", description="Where a job of Spark runs: local[*], spark://host:7077, yarn, k8s://...; a URL"
    )
    remote: Annotated[str | None, BeforeValidator(parse_remote), Kind("remote", lambda _: "not set")] = Field(
        default=None, description="The Spark Connect server to use in place of a master: sc://host; a URL"
    )
    conf: Conf = Field(default=(), description="Spark's own keys, over all defaults of indexd; key=value, repeated")
    java_home: OptionalPath = Field(
        default=None, description="The Java 17 or newer of Spark's driver, else it is looked for; a directory"
    )
    split_size: Size = Field(
        default=0, ge=0, le=2**40, description="The log that one task reads, 0: a segment, less if those are few; bytes"
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.remote is not None and self.master != type(self).model_fields["master"].default:
            raise ConflictError(("master", "remote"), "a job runs on a master or through a Connect server, not on both")
        return self
