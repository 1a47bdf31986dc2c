"""Queries: by key, by unique key, one message. Read only, beside a running daemon or without one, without the compiler.

``answer``    KeyQuery, Hit, Answer: what is asked and what comes back
``log``       LogView: the broker's log, listed again when it has grown
``source``    QueryIndex: the index files and the frontier as they stand at one moment
``coverage``  which part of the log an answer speaks for, and why it is empty
``rocketmq``  the broker's own answer
``by_key``    the exact answer
``walk``      the entries of one hash in one file
``message``   one message, whole
"""

from indexd.query.answer import TIME_MAX, Answer, Hit, KeyQuery
from indexd.query.by_key import query_exact
from indexd.query.rocketmq import query_rocketmq
from indexd.query.source import QueryIndex, open_index, open_log

__all__ = [
    "TIME_MAX",
    "Answer",
    "Hit",
    "KeyQuery",
    "QueryIndex",
    "open_index",
    "open_log",
    "query_exact",
    "query_rocketmq",
]
