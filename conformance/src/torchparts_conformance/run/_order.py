"""The order cases run in, which no outcome may depend on."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TypeVar

from torchparts_conformance._errors import OptionError

_T = TypeVar("_T")


def known_order(order: str) -> str:
    """Give an order back: `listed`, `reversed`, or shuffled by a seed, such as `seed:7`.

    Raises:
        OptionError: the order is none of these.
    """
    if not re.fullmatch(r"listed|reversed|seed:\d{1,9}", order):
        raise OptionError(
            f"--order {order!r:.60} is unknown, but listed, reversed and seed:N are known."
        )
    return order


def ordered(items: Sequence[_T], order: str) -> list[_T]:
    """Give items in a known order.

    Raises:
        OptionError: the order is none.
    """
    word, _, seed = known_order(order).partition(":")
    arranged = list(reversed(items)) if word == "reversed" else list(items)
    if seed:
        random.Random(int(seed)).shuffle(arranged)
    return arranged
