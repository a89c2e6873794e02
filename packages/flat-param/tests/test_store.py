import pytest
import torch
from torch import nn

from flat_param import ParameterError, collect_params, plan_segments
from flat_param._store import SegmentStore


@pytest.fixture
def store(mlp):
    """The one segment of a small model."""
    specs, params = collect_params(mlp)
    (plan,) = plan_segments(specs)
    return SegmentStore(plan, params)


def test_a_replaced_storage_is_noticed_and_taken_back(mlp, store):
    """Its position is named; after adoption the values are in the buffer and nothing is moved."""
    mlp[2].weight.data = torch.ones(3, 7)
    assert store.moved() == [2]
    store.adopt(2, mlp[2].weight)
    assert store.moved() == []
    assert int(store.buffer[44:65].sum()) == 21


def test_a_parameter_of_another_shape_is_not_adopted(store):
    """The buffer keeps what it had."""
    before = store.buffer.clone()
    with pytest.raises(ParameterError, match=r"'2\.weight' has shape \(2,\)"):
        store.adopt(2, nn.Parameter(torch.ones(2)))
    assert torch.equal(store.buffer, before)


def test_what_a_segment_accepts(store):
    """Its own dtype and trainability, nothing else."""
    assert store.accepts(nn.Parameter(torch.ones(1)))
    assert not store.accepts(nn.Parameter(torch.ones(1, dtype=torch.float64)))
    assert not store.accepts(nn.Parameter(torch.ones(1), requires_grad=False))
