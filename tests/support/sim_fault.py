"""Which call of a simulated disk fails, and how: a fault map, given as a string.

::

    map       rule { ";" rule }                  blanks around a rule do not count, an empty map has no rule
    rule      operation [":" glob] ["#" n | "@all"] "=" fault
    operation one of OPERATIONS, or "*"
    glob      matched from the right, as pathlib does: "frontier.*.tmp", "index/*"; "*" if it is left out
    n         the n-th call that fits, from 1; 1 if it is left out; "@all" is every one
    fault     an errno by name    the call fails with it
              short               of a pwrite: a part is written, then the disk is full
              crash, crash-after  the machine loses its power before the call, or right after it

    pwrite:index/*#3=ENOSPC; fsync:frontier.*.tmp=EIO; rename:*#2=crash; pwrite:*#7=short; open_write:*@all=EMFILE
"""

from __future__ import annotations

import errno
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import PurePath

#: The calls of Disk and DiskFile. ``create`` is open_write(create=True) and the temporary file of write_atomically.
OPERATIONS = (
    *("open_read", "open_write", "create", "exists", "list_dir", "stamps"),
    *("size", "stamp", "pread", "pwrite", "allocate", "truncate", "fsync"),
    *("rename", "link", "exchange", "unlink", "remove_dir", "make_dir", "sync_dir"),
)
# What the real disk calls its operations where an error names them.
WORDS = {
    "open_read": "open", "open_write": "open", "exists": "stat", "size": "stat", "stamp": "stat",
    "list_dir": "list", "stamps": "list", "pread": "read", "pwrite": "write", "allocate": "allocate space for",
    "unlink": "remove", "remove_dir": "remove", "make_dir": "make directory", "sync_dir": "fsync directory",
}  # fmt: skip
#: Those that leave another disk behind; a crash between two others is a crash before the later one.
CHANGES = frozenset(
    {
        *("create", "pwrite", "allocate", "truncate", "fsync", "rename", "link", "exchange"),
        *("unlink", "remove_dir", "make_dir", "sync_dir"),
    }
)
_RULE = re.compile(
    r"(?P<operation>[a-z_]+|\*)(?::(?P<glob>[^#@=;]+))?(?:#(?P<nth>\d+)|(?P<all>@all))?=(?P<fault>[\w-]+)"
)
_WORDS = ("short", "crash", "crash-after")


class SimCrash(BaseException):
    """The machine lost its power. No Exception, so that nothing in between takes it for an error to be handled."""


@dataclass(slots=True)
class Rule:
    """One rule of a map; ``nth`` is 0 for every call; ``seen`` counts the calls that fitted."""

    operation: str
    glob: str
    nth: int
    fault: str
    seen: int = 0

    def meets(self, operation: str, path: PurePath) -> bool:
        """Count a call that fits; True when it is the one that fails."""
        if self.operation not in ("*", operation) or not (self.glob == "*" or path.match(self.glob)):
            return False
        self.seen += 1
        return self.nth in (0, self.seen)


class FaultMap:
    """The rules, and in ``injected`` how often each kind of fault was met."""

    def __init__(self, rules: tuple[Rule, ...] = ()) -> None:
        self.rules = rules
        self.injected: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"FaultMap({self.rules}, {dict(self.injected)})"

    @classmethod
    def parse(cls, text: str) -> FaultMap:
        """The map that ``text`` says; ValueError with the rule that is none and the reason."""
        return cls(tuple(_rule(part.strip()) for part in text.split(";") if part.strip()))

    def meet(self, operation: str, path: PurePath) -> str | None:
        """The fault of this call, or None. Every rule counts the call, the first one that fails it wins."""
        faults = [rule.fault for rule in self.rules if rule.meets(operation, path)]
        if not faults:
            return None
        self.injected[f"{operation}={faults[0]}"] += 1
        return faults[0]


def errno_of(fault: str) -> int:
    """The number of an errno's name."""
    return int(getattr(errno, fault))


def _rule(text: str) -> Rule:
    found = _RULE.fullmatch(text)
    if found is None:
        raise ValueError(f"fault map: {text!r} is not operation[:glob][#n | @all]=fault")
    operation, fault = found["operation"], found["fault"]
    if operation not in ("*", *OPERATIONS) or fault not in (*_WORDS, *errno.errorcode.values()):
        raise ValueError(f"fault map: {operation!r} of {text!r} is no call, or {fault!r} is no errno")
    return Rule(operation, (found["glob"] or "*").strip(), 0 if found["all"] else int(found["nth"] or 1), fault)
