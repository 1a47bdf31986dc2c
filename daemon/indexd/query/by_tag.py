"""ByTag: the messages of a topic that have a tag.

Annotations here are read when the module runs, to build the validators: no postponed annotations in this file.
"""

from typing import Annotated

from pydantic import Field

from indexd.query.by_key import Answer
from indexd.query.questions import Flags, InTimeRange, Name
from indexd.query.source import QueryIndex


class ByTag(InTimeRange):
    """Find the messages of a topic that have a tag."""

    command = "query-tag"
    path = "by-tag"
    tag: Annotated[Name, Flags(("--tag",))] = Field(description="the message's tag")

    def answer(self, index: QueryIndex) -> Answer:
        """The messages, newest first."""
        return self._find(index, self.tag, self.max, "T")
