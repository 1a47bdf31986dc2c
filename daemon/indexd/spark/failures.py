"""What ended a job, as one of indexd's own errors.

An IndexdError that a worker raises comes back as it was: sealed into the text of the task's failure, which is all that
Spark carries; of one that was not sealed, class and message are found in that text. Of everything else the last line of
the worker's traceback, or the reason that Spark gives, is what an operator can use; the rest hangs on ``__cause__``.
When the JVM itself has ended, that is what is said, whatever py4j makes of it.
"""

from __future__ import annotations

import base64
import pickle
import re
import signal
import subprocess
import sys

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException

from indexd import errors
from indexd.errors import IndexdError, SparkError

_CONNECTION_ERRORS = (ConnectionRefusedError, ConnectionResetError, EOFError)  # py4j lets them through as they are
ENGINE_ERRORS: tuple[type[Exception], ...] = (PySparkException, Py4JError, *_CONNECTION_ERRORS)
"""What pyspark raises when a job, the session or the connection to it fails."""

_SEALED = re.compile(r"\[sealed:([A-Za-z0-9+/=]+)\]")
_RAISED = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?([A-Z]\w*(?:Error|Exception|Interrupt)): (.*)$", re.MULTILINE)
_OURS = re.compile(r"^indexd\.errors\.(\w+): (.*)$", re.MULTILINE)
_REASON = re.compile(r"most recent failure: [^\n]*?\(([^\s)]+) executor [^)]*\): ([^\n]*)")
_JAVA_CLASS = re.compile(r"^(?:[a-z]\w*\.)+[A-Z][\w$]*: ")
_END_SECONDS = 2.0  # a process that was killed may be seen to be gone a little after its sockets are
_LINE_MAX = 400  # characters: a reason is a line, not a plan


class TaskError(Exception):
    """What a worker raises in an IndexdError's place: its line, and the whole of it in a form that survives as text."""


def sealed(error: IndexdError) -> TaskError:
    """To be raised by a worker ``from None``; `job_error` opens it in the driver."""
    return TaskError(f"[sealed:{base64.b64encode(pickle.dumps(error)).decode()}] {error.line()}")


def job_error(error: BaseException) -> IndexdError:
    """`error`, one of ENGINE_ERRORS, as what it means; to be raised ``from`` it."""
    if ended := jvm_error(error):
        return ended
    text = str(error)
    if seal := _SEALED.search(text):
        opened = pickle.loads(base64.b64decode(seal[1]))
        assert isinstance(opened, IndexdError)
        return opened
    ours = _OURS.search(text)
    kind = getattr(errors, ours[1], None) if ours else None
    if ours and isinstance(kind, type) and issubclass(kind, IndexdError):
        # Not by its constructor, which may ask for more than the text tells.
        found = kind.__new__(kind, ours[2])
        found.hint = kind.default_hint
        return found
    if "No module named 'indexd'" in text or "No module named 'pyspark_rocketmq" in text:
        return SparkError(
            "the workers of Spark cannot import indexd",
            "install the same rocketmq-indexd in the Python of every executor, or ship it with spark.archives",
        )
    if "PYTHON_VERSION_MISMATCH" in text:
        return SparkError(
            f"the workers of Spark run another Python than this one: {_one_line(text)}",
            "give the executors the same minor version, with --conf spark.pyspark.python=...",
        )
    return SparkError(f"a job on Spark failed: {_reason(text)}")


def jvm_error(error: BaseException) -> SparkError | None:
    """What `error` means when the JVM that this process started has ended; None when it has not, or there is none."""
    if not isinstance(error, (Py4JError, *_CONNECTION_ERRORS)) or isinstance(error, Py4JJavaError):
        return None
    # Not imported: a Connect client need not have it.
    context = getattr(sys.modules.get("pyspark.core.context"), "SparkContext", None)
    process = getattr(getattr(context, "_gateway", None), "proc", None)
    if process is None:
        return None
    try:
        code = process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    how = signal.Signals(-code).name if -code in set(signal.Signals) else f"exit code {code}"
    return SparkError(
        f"Spark's JVM has ended ({how})", "start again; if the kernel killed it for want of memory, dmesg says so"
    )


def _reason(text: str) -> str:
    raised = [match for match in _RAISED.finditer(text.partition("\n\tat ")[0]) if "SparkException" not in match[1]]
    if "Traceback (most recent call last)" in text and raised:
        return _one_line(f"{raised[-1][1]}: {raised[-1][2]}")
    if lost := _REASON.search(text):
        return _one_line(f"{_JAVA_CLASS.sub('', lost[2])} (on {lost[1]})")
    return _one_line(next((line for line in text.splitlines() if line.strip()), "without a word"))


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LINE_MAX else f"{text[:_LINE_MAX]}..."
