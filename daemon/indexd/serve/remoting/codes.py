"""The numbers of the protocol, as RocketMQ 5.4.0 names them: those that something here asks for, and no others."""

from __future__ import annotations

from enum import IntEnum


class RequestCode(IntEnum):
    """What is asked. Other numbers are no error: they are passed on, or answered as not supported."""

    SEND_MESSAGE = 10
    PULL_MESSAGE = 11
    QUERY_MESSAGE = 12
    GET_BROKER_RUNTIME_INFO = 28
    SEARCH_OFFSET_BY_TIMESTAMP = 29
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    GET_EARLIEST_MSG_STORETIME = 32
    VIEW_MESSAGE_BY_ID = 33
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    CONSUMER_SEND_MSG_BACK = 36
    END_TRANSACTION = 37
    GET_CONSUMER_LIST_BY_GROUP = 38
    CHECK_TRANSACTION_STATE = 39
    NOTIFY_CONSUMER_IDS_CHANGED = 40
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    QUERY_TOPIC_CONSUME_BY_WHO = 300
    SEND_MESSAGE_V2 = 310
    SEND_BATCH_MESSAGE = 320
    LITE_PULL_MESSAGE = 361
    POP_MESSAGE = 200050
    NOTIFICATION = 200054


class ResponseCode(IntEnum):
    """What is answered: what RocketMQ's clients act upon."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    SERVICE_NOT_AVAILABLE = 14
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22


#: Bits of ``flag``: an answer; a request that gets none.
RESPONSE_FLAG = 1
ONEWAY_FLAG = 2

#: Languages by their number in a binary header; in a JSON header they stand by name.
LANGUAGES = (
    "JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY",
    "OTHER", "HTTP", "GO", "PHP", "OMS", "RUST", "NODE_JS",
)  # fmt: skip
OUR_LANGUAGE = "PYTHON"
UNKNOWN_LANGUAGE = "OTHER"

#: Versions are positions in RocketMQ's own list of its releases.
V4_9_3 = 399
V4_9_4 = 401
V5_4_0 = 493
#: What our answers say: the release whose answers they are.
VERSION = V5_4_0

#: What a name server serves (5.4.0): key-value settings, registration of brokers, routes, lists of topics, settings.
NAME_SERVER_CODES = frozenset(
    (100, 101, 102, 103, 104, 105, 106, 205, 206, 216, 217, 219, 224, 304, 311, 312, 313, 318, 319, 322, 327, 901, 904)
)
