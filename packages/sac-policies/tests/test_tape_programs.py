"""Random programs under the tape engine are bit-identical to plain runs."""

from __future__ import annotations

from collections import Counter

import pytest

from . import _tape_programs as programs

PROGRAMS = 40


@pytest.mark.filterwarnings("ignore")
def test_random_programs_are_bit_identical():
    """Under each policy; the tape refuses only programs that write to an input or a weight."""
    verdicts: Counter[str] = Counter()
    for seed in range(PROGRAMS):
        right = programs.expected(seed)
        verdicts.update(programs.verdict(seed, mode, right) for mode in programs.MODES)
    wrong = [each for each in verdicts if each.startswith("WRONG")]
    refused = [each for each in verdicts if each.startswith("refused")]
    assert wrong == []
    assert [each for each in refused if not each.startswith("refused after write")] == []
    assert verdicts["equal"] >= PROGRAMS
