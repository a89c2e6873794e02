"""Decisions are read from torch's spelling and written in it, or refused."""

from __future__ import annotations

import pytest
from torch.utils.checkpoint import CheckpointPolicy

from sac_policies import Decision, DecisionError, from_torch, to_torch

_spelt = [
    each
    for each in Decision
    if each is not Decision.OFFLOAD or hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD")
]


@pytest.mark.parametrize("decision", _spelt)
def test_decisions_survive_torchs_spelling(decision):
    """To CheckpointPolicy and back is the same decision."""
    assert from_torch(to_torch(decision)) is decision


def test_offload_is_refused_where_torch_has_no_word_for_it(monkeypatch):
    """A torch without the member cannot be told of it; the error says from when on it can."""
    monkeypatch.setattr("sac_policies.policies._decisions._OFFLOADS", ("NO_SUCH_MEMBER",))
    with pytest.raises(DecisionError, match=r"decision 'offload' has no CheckpointPolicy member"):
        to_torch(Decision.OFFLOAD)
