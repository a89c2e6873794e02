"""Decisions are converted from and to torch's CheckpointPolicy, or refused."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from sac_policies import DecisionError
from sac_policies.policies import Decision, from_torch, to_torch

_spelt = [
    each
    for each in Decision
    if each is not Decision.OFFLOAD or hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD")
]


@pytest.mark.parametrize("decision", _spelt)
def test_decisions_survive_torchs_spelling(decision):
    """Conversion to CheckpointPolicy and back gives the same decision."""
    assert from_torch(to_torch(decision)) is decision


def test_offload_is_refused_where_torch_has_no_word_for_it(monkeypatch):
    """An older torch lacks the member; the error says which version has it."""
    monkeypatch.setattr("sac_policies.policies._decisions._OFFLOADS", ("NO_SUCH_MEMBER",))
    with pytest.raises(DecisionError, match=r"decision 'offload' has no CheckpointPolicy member"):
        to_torch(Decision.OFFLOAD)


@pytest.mark.parametrize("answer", [*CheckpointPolicy, True, False], ids=str)
def test_torchs_answers_are_read_by_what_they_do(answer):
    """MUST and PREFER are equal; a bool says whether to save."""
    words = {"SAVE": Decision.SAVE, "RECOMPUTE": Decision.RECOMPUTE, "OFFLOAD": Decision.OFFLOAD}
    name = "SAVE" if answer is True else getattr(answer, "name", "RECOMPUTE")
    assert from_torch(answer) is words[name.rpartition("_")[2]]


@pytest.mark.parametrize("answer", [None, 1, 0, "save", torch.tensor(True)], ids=repr)
def test_answer_that_is_none_is_refused_with_its_type(answer):
    """A number is not a bool, and a text is not a decision."""
    with pytest.raises(DecisionError, match=rf"is a {type(answer).__name__}, but a policy"):
        from_torch(answer)


def test_decision_is_read_as_itself():
    """Policy functions may return a decision."""
    assert [from_torch(each) for each in Decision] == list(Decision)


def test_no_answer_leaves_torch_the_choice():
    """Without a matching rule, torch's preference applies."""
    assert to_torch(None) is CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("given", [True, False, "save", CheckpointPolicy.MUST_SAVE], ids=str)
def test_what_is_no_decision_is_not_written(given):
    """Bools, texts and torch's policies are refused; the error recommends `from_torch`."""
    with pytest.raises(DecisionError, match=r"but a Decision or None is needed.*from_torch"):
        to_torch(given)


def test_saved_and_offloaded_values_outlive_the_forward():
    """Only recomputed values are freed."""
    assert [each for each in Decision if each.keeps] == [Decision.OFFLOAD, Decision.SAVE]
