"""Random programs under the tape are bit-identical to plain runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from . import _stateful_programs, _tape_programs
from ._programs import MODES

pytestmark = pytest.mark.filterwarnings("ignore")
BY_DAY, AT_NIGHT = 10, 200
PROGRAMS = [BY_DAY, pytest.param(AT_NIGHT, marks=pytest.mark.nightly)]


def verdicts(programs: Any, count: int) -> Counter[str]:
    """How often programs have each verdict, under each policy."""
    found: Counter[str] = Counter()
    for seed in range(count):
        right = programs.expected(seed)
        found.update(programs.verdict(seed, mode, right) for mode in MODES)
    assert [each for each in found if each.startswith("WRONG")] == []
    assert found["equal"] > 2 * count
    return found


@pytest.mark.parametrize("count", PROGRAMS)
def test_random_programs_are_bit_identical(count):
    """The tape refuses only programs that write to an input or a weight."""
    refused = [each for each in verdicts(_tape_programs, 2 * count) if each.startswith("refused")]
    assert [each for each in refused if not each.startswith("refused after write")] == []


@pytest.mark.parametrize("count", PROGRAMS)
def test_programs_with_state_are_bit_identical(count):
    """Gradients, buffers, attributes, caches, generators, and events of hooks, in order."""
    found = verdicts(_stateful_programs, count)
    refused = sum(found[each] for each in found if each.startswith("refused"))
    assert refused < 0.04 * found.total()


@pytest.mark.parametrize("mode", MODES)
def test_programs_in_threads_are_bit_identical(mode):
    """Each thread trains its own model, with its own generators."""
    found = _stateful_programs.together([*range(4)], mode)
    assert [each for each in found if each not in ("equal", "both refused")] == []
