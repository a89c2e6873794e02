"""Compares random programs in regions with plain ones."""

from __future__ import annotations

import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

MODES = ("nothing", "matmuls", "subset", "others")
Outcome = list[Any]


@dataclass(frozen=True)
class Expected:
    """The expected result of a program; None if no plain run computes it.

    Attributes:
        outcome: the correct outcome.
        is_plain: whether plain autograd computes it; otherwise a run that saves copies does,
            because the program writes to tensors that autograd saved.
    """

    outcome: Outcome | None
    is_plain: bool = False


def expected(run: Callable[[], Outcome], copies: bool = True) -> Expected:
    """Run a program plainly, or with saved copies where autograd refuses a write."""
    try:
        return Expected(run(), is_plain=True)
    except Exception as error:
        if "modified by an inplace" not in str(error) or not copies:
            return Expected(None)
    try:
        with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return Expected(run())
    except Exception:
        return Expected(None)


def verdict(run: Callable[[], Outcome], right: Expected, after: str = "") -> str:
    """Compare a program under the tape with its expected outcome."""
    try:
        found = run()
    except Exception as error:
        if not right.is_plain:
            return "both refused"
        return f"refused{after}: {type(error).__name__}: {str(error)[:160]}"
    if right.outcome is None:
        return "plain refused"
    return "equal" if are_equal(found, right.outcome) else f"WRONG{after}"


def are_equal(left: Outcome, right: Outcome) -> bool:
    """Whether two outcomes are bit-identical."""
    return len(left) == len(right) and all(map(_is_equal, left, right))


def _is_equal(a: Any, b: Any) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return bool(type(a) is type(b) and a == b)
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and torch.equal(*(each.detach().reshape(-1).view(torch.uint8) for each in (a, b)))


def compare(verdicts: Callable[[int, str], Iterator[str]]) -> None:
    """Count the verdicts of the command line's seeds: FIRST COUNT [MODE ...]."""
    torch.set_num_threads(1)
    first, count = map(int, sys.argv[1:3])
    seeds = defaultdict[str, list[tuple[int, str]]](list)
    with warnings.catch_warnings(action="ignore"):
        for seed in range(first, first + count):
            for mode in sys.argv[3:] or MODES:
                for found in verdicts(seed, mode):
                    seeds[found].append((seed, mode))
    times = Counter({found: len(each) for found, each in seeds.items()})
    for found, number in times.most_common():
        print(number, found, [] if found.startswith(("equal", "both")) else seeds[found][:6])
