"""What the programs of this folder take on their command lines."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

N = TypeVar("N", int, float)


def more_than_zero(kind: Callable[[str], N]) -> Callable[[str], N]:
    """A number for argparse: a run of nothing would end well without having shown anything."""

    def parse(word: str) -> N:
        number = kind(word)
        if not 0 < number < 1e9:
            raise argparse.ArgumentTypeError(f"{word} is not more than 0")
        return number

    parse.__name__ = "number"
    return parse
