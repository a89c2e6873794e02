"""Random programs with state, hooks, generators and threads train as plain ones do."""

from __future__ import annotations

from collections import Counter

import pytest

from . import _stateful_programs as programs

PROGRAMS = 25
pytestmark = pytest.mark.filterwarnings("ignore")


def test_programs_with_state_are_bit_identical():
    """Gradients, buffers, attributes, caches, generators, and what hooks noted, in order."""
    verdicts: Counter[str] = Counter()
    for seed in range(PROGRAMS):
        right = programs.expected(seed)
        verdicts.update(programs.verdict(seed, mode, right) for mode in programs.MODES)
    assert [each for each in verdicts if each.startswith("WRONG")] == []
    refused = sum(verdicts[each] for each in verdicts if each.startswith("refused"))
    assert refused < 0.04 * verdicts.total()
    assert verdicts["equal"] > 2 * PROGRAMS


@pytest.mark.parametrize("mode", programs.MODES)
def test_programs_in_threads_are_bit_identical(mode):
    """Each thread trains its own model, with generators of its own."""
    verdicts = [
        each
        for seed in range(0, 12, 4)
        for each in programs.together([*range(seed, seed + 4)], mode)
    ]
    assert [each for each in verdicts if each not in ("equal", "both refused")] == []
