"""Which ranks would save an earlier step than the others, from what they tell each other."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flat_param import fully_shard
from flat_param.checkpoint import _one_step
from flat_param.checkpoint._one_step import behind, written
from flat_param.sharded._param_sites import ParamSite


def _pieces(*counts):
    return {"writes": {}, "pieces": _one_step._runs(list(counts))}


def test_ranks_that_say_their_step_are_compared_by_it():
    """Whatever was written to."""
    notes = [{"step": 3, "writes": {"w": 9}}, {"step": 2, "writes": {"w": 9}}, {"step": 3}]
    assert behind(notes) == {1}
    assert behind([{"step": 0}, {"step": 0}]) == set()


def test_a_step_that_group_of_one_does_not_say_is_not_compared():
    """What was written to tells, then."""
    notes = [{"step": 7, "writes": {"w": 1}}, {"step": None, "writes": {"w": 2}}]
    assert behind(notes) == {0}


def test_half_that_was_written_to_less_often_is_behind():
    """One parameter cut between two ranks is enough, whatever else they have."""
    notes = [{"writes": {"a": 4, "w": 2}}, {"writes": {"w": 3, "b": 1}}, {"writes": {"b": 1}}]
    assert behind(notes) == {0}
    assert behind([{"writes": {"w": 2}}, {"writes": {"w": 2}}]) == set()


def test_halves_that_contradict_each_other_are_both_behind():
    """Each has a parameter of an earlier step than the other's: there is no step to save."""
    notes = [{"writes": {"v": 1, "w": 2}}, {"writes": {"v": 2, "w": 1}}]
    assert behind(notes) == {0, 1}


def test_whole_pieces_are_compared_all_together():
    """A parameter that this batch did not use is not written to, which is no step behind."""
    assert behind([_pieces(2, 2, 2), _pieces(1, 1, 1)]) == {1}
    assert behind([_pieces(2, 1, 2), _pieces(2, 2, 2)]) == {0}
    assert behind([_pieces(2, 1), _pieces(1, 2)]) == set()
    assert behind([_pieces(2, 2), _pieces(2, 2)]) == set()


def test_ranks_that_tell_nothing_are_not_behind():
    """A torch without versions, or a module without parameters."""
    assert behind([{}, {}]) == set()
    assert behind([{}, _pieces(1)]) == set()
    assert behind([{"step": None}]) == set()


@given(st.lists(st.integers(0, 3), max_size=30))
def test_runs_are_the_counts_in_short(counts):
    """What is the same is told once."""
    runs = _one_step._runs(counts)
    assert list(_one_step._counts(runs)) == counts
    assert all(a[0] != b[0] for a, b in itertools.pairwise(runs))


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=4))
def test_somebody_is_not_behind(ranks):
    """Of any ranks there are some whose step is saved."""
    assert behind([_pieces(*counts) for counts in ranks]) != set(range(len(ranks)))


def test_optimizers_writes_since_sharding_are_told(group_of_one, monkeypatch):
    """Each of its steps counts once; what is read or shown counts nothing."""
    # One rank has no halves, and need not tell of pieces: as if another had the others.
    monkeypatch.setattr(_one_step, "keeps_dims", lambda plan: False)
    model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = []
    for step in range(3):
        told.append(written(model))
        assert list(_one_step._counts(told[-1]["pieces"])) == [step] * 4
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        model.state_dict()
        optimizer.step()
    assert behind(told) == {0, 1}


def test_a_torch_without_versions_tells_of_no_step(group_of_one, monkeypatch):
    """Nothing is refused then."""
    monkeypatch.setattr(_one_step, "keeps_dims", lambda plan: False)
    monkeypatch.setattr(_one_step, "versions", lambda tensors: None)
    model = fully_shard(nn.Linear(2, 2))
    assert written(model) == {"writes": {}, "pieces": [[0, 2]]}


def test_parameters_that_are_cut_here_are_told_by_name(parts_of_ranks, monkeypatch):
    """With the writes to this rank's piece; whole and absent ones are no halves."""
    parts = parts_of_ranks(3, torch.zeros(4), torch.zeros(11), torch.zeros(4))
    lengths = [[piece.numel for piece in part.pieces] for part in parts]
    assert lengths == [[4, 4, 0], [0, 7, 0], [0, 0, 4]]
    told = []
    for part in parts:
        part.versions_at_start = [0, 0, 0]
        with torch.no_grad():
            part.params[1].add_(1)
        sites = [(f"p{index}", ParamSite({}, "", part, index)) for index in range(3)]
        monkeypatch.setattr(_one_step, "named_sites", lambda module, sites=sites: sites)
        told.append(_one_step._writes(nn.ReLU()))
    assert [list(each) for each in told] == [["p1"], ["p1"], []]
    assert told[0]["p1"] == told[1]["p1"] > 0
