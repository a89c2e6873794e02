"""The order cases run in, which no outcome may depend on."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TypeVar

from torchparts_conformance._errors import OptionError

_T = TypeVar("_T")


def ordered(items: Sequence[_T], order: str) -> list[_T]:
    """Give items as they are (`listed`), `reversed`, or shuffled by a seed (`seed:7`).

    Raises:
        OptionError: the order is none of these.
    """
    if order == "listed":
        return list(items)
    if order == "reversed":
        return list(reversed(items))
    if not (seed := re.fullmatch(r"seed:(\d{1,9})", order)):
        raise OptionError(
            f"--order {order!r:.60} is unknown, but listed, reversed and seed:N are known."
        )
    shuffled = list(items)
    random.Random(int(seed[1])).shuffle(shuffled)
    return shuffled
