"""Decisions are read from what policy functions may return, and written for torch."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from sac_policies import EngineError
from sac_policies.policies import Decision
from sac_policies.policies._decisions import decision_of, to_torch

MM = torch.ops.aten.mm.default


@pytest.mark.parametrize("answer", [*CheckpointPolicy, True, False], ids=str)
def test_torchs_answers_are_read_by_what_they_do(answer):
    """MUST and PREFER are equal; a bool says whether to save."""
    words = {"SAVE": Decision.SAVE, "RECOMPUTE": Decision.RECOMPUTE, "OFFLOAD": Decision.OFFLOAD}
    name = "SAVE" if answer is True else getattr(answer, "name", "RECOMPUTE")
    assert decision_of(answer) is words[name.rpartition("_")[2]]


@pytest.mark.parametrize("answer", [None, 1, 0, "save", torch.tensor(True)], ids=repr)
def test_other_answers_are_none(answer):
    """A number is not a bool, and a text is not a decision."""
    assert decision_of(answer) is None


def test_decisions_survive_torchs_spelling():
    """No answer leaves torch the choice."""
    for decision in (Decision.SAVE, Decision.RECOMPUTE):
        assert decision_of(to_torch(decision, MM, None)) is decision_of(decision) is decision
    assert to_torch(None, MM, None) is CheckpointPolicy.PREFER_RECOMPUTE
    with pytest.raises(EngineError, match=r"policy offloads operator aten\.mm\.default"):
        to_torch(Decision.OFFLOAD, MM, None)


def test_saved_and_offloaded_values_outlive_the_forward():
    """Only recomputed values are freed."""
    assert [each for each in Decision if each.keeps] == [Decision.OFFLOAD, Decision.SAVE]
