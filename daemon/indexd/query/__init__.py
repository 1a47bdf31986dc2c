"""Queries: by key, by queue, by time, one message. Read only, beside a running daemon or without one, no compiler.

This is the public Python API. ``open_data``, which ``indexd`` has too, opens a data directory; the answers are frozen
dataclasses and sequences of their hits, and say which part of the log they cover and why they are empty:

>>> from indexd import open_data
>>> with open_data(DATA) as data:
...     answer = data.by_key("TopicTest", "order-7", max_num=2)
...     for hit in answer:
...         print(hit.phy_offset, hit.queue_id, hit.queue_offset, hit.keys)
...     print([hit["storeTimestamp"] for hit in answer.to_dict()["hits"]])
...     older = data.by_key("TopicTest", "order-7", before=answer.cursor)
...     print(len(older), data.by_key("TopicTest", "never sent").why)
...     page = data.by_queue("TopicTest", 0, 3, max_num=2)
...     print([hit.queue_offset for hit in page.hits], page.next_offset, page.max_offset)
...     print(data.at_time("TopicTest", 0, 1700000000045).queue_offset)
...     first = data.log_at_time(1700000000045)
...     print(data.message(first.phy_offset).body)
701 0 6 order-7
584 0 5 order-7
[1700000000060, 1700000000050]
5 absent
[3, 4] 5 10
5
b'five'

``questions``  the questions that every surface asks, as models; open_data and Data: the same as methods
``source``    QueryIndex: the index files and the frontier as they stand at one moment; which part of the log an answer
              speaks for, and why it is empty
``broker_message``  whole frames, as a broker sends them
``by_key``    the exact answer, in pages
``by_queue_and_time``  messages by queue offset; queue offsets by store time, as the broker finds them
``message``   one message: Hit, its fields, its body
"""

from indexd.query.by_key import Answer, KeyQuery, query_exact, query_rocketmq
from indexd.query.by_queue_and_time import (
    Boundary,
    LogTimeAnswer,
    OffsetAnswer,
    OffsetQuery,
    QueueHit,
    QueueTimeAnswer,
    query_log_time,
    query_offset,
    query_time,
)
from indexd.query.message import TIME_MAX, TIME_MIN, Hit, NotFound, unpack_body
from indexd.query.questions import (
    ByKey,
    ByMessage,
    ByQueueOffset,
    ByTime,
    ByUniqueKey,
    Data,
    Question,
    open_data,
)
from indexd.query.source import Coverage, QueryIndex, open_index, open_log

#: Every question, in the order in which help shows them. Another one is one more line here.
QUESTIONS: tuple[type[Question], ...] = (
    ByKey,
    ByUniqueKey,
    ByQueueOffset,
    ByTime,
    ByMessage,
)

__all__ = [
    "QUESTIONS",
    "TIME_MAX",
    "TIME_MIN",
    "Answer",
    "Boundary",
    "Coverage",
    "Data",
    "Hit",
    "KeyQuery",
    "LogTimeAnswer",
    "NotFound",
    "OffsetAnswer",
    "OffsetQuery",
    "QueryIndex",
    "QueueHit",
    "QueueTimeAnswer",
    "open_data",
    "open_index",
    "open_log",
    "query_exact",
    "query_log_time",
    "query_offset",
    "query_rocketmq",
    "query_time",
    "unpack_body",
]
