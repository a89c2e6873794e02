"""Random programs under the tape engine are bit-identical to plain runs."""

from __future__ import annotations

from collections import Counter

import pytest
from _tape_programs import MODES, expected, verdict

PROGRAMS = 30


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, 8 * PROGRAMS, PROGRAMS))
def test_random_programs_are_bit_identical(first):
    """Under each policy; the tape refuses few that autograd runs, and only after writes."""
    verdicts: Counter[str] = Counter()
    for seed in range(first, first + PROGRAMS):
        right = expected(seed)
        verdicts.update(verdict(seed, mode, right) for mode in MODES)
    wrong = [each for each in verdicts if each.startswith("WRONG")]
    refused = {each: n for each, n in verdicts.items() if each.startswith("refused")}
    assert not wrong
    assert all(each.startswith("refused after write") for each in refused), refused
    assert verdicts["equal"] >= PROGRAMS
