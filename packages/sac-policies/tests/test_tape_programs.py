"""Random programs under the tape engine are bit-identical to plain runs."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

PROGRAMS = 100
_spec = importlib.util.spec_from_file_location(
    "_tape_programs", Path(__file__).with_name("_tape_programs.py")
)
assert _spec is not None
assert _spec.loader is not None
programs = sys.modules["_tape_programs"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(programs)


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
