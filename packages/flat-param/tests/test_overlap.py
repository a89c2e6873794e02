"""Parameters that share memory without being one object."""

import pytest
import torch
from torch import nn

from flat_param import ParameterError, flatten, fully_shard
from flat_param.handle import FlatParamHandle


def same(base):
    """The same elements twice."""
    return base, base


def crossing(base):
    """Two stretches with four elements in common."""
    return base[:16], base[12:]


def beside(base):
    """Two stretches, one after the other."""
    return base[:12], base[12:]


def columns(base):
    """The left and the right half of a matrix."""
    matrix = base.view(4, 6)
    return matrix[:, :3], matrix[:, 3:]


def read_as_integers(base):
    """A float and the same bytes as an integer."""
    return base[:4], base.view(torch.int32)[3:5]


@pytest.mark.parametrize("split", [same, crossing, columns])
@pytest.mark.parametrize(
    "flat",
    [flatten, fully_shard, lambda module: FlatParamHandle(list(module.parameters()), module)],
)
def test_parameters_that_share_memory_are_refused_by_name(holder, split, flat, group_of_one):
    """They would be parted silently; the module keeps what it had."""
    module = holder(*split(torch.arange(24.0)))
    pointers = [param.data_ptr() for param in module.parameters()]
    with pytest.raises(ParameterError, match="parameter 'p0' and parameter 'p1' share memory"):
        flat(module)
    assert [param.data_ptr() for param in module.parameters()] == pointers
    assert type(module) is nn.Module


def test_parameters_of_another_dtype_that_share_memory_are_refused(holder):
    """In either order."""
    tensors = read_as_integers(torch.arange(24.0))
    for pair in (tensors, tensors[::-1]):
        with pytest.raises(
            ParameterError, match=r"parameter 'p\d' and parameter 'p\d' share memory"
        ):
            flatten(holder(*pair))


def test_a_parameter_that_shares_memory_with_a_buffer_is_refused(holder):
    """The buffer would go stale."""
    module = holder(torch.ones(4))
    module.register_buffer("seen", module.p0.data[1:])
    with pytest.raises(ParameterError, match="parameter 'p0' and buffer 'seen' share memory"):
        flatten(module)


def test_parameters_of_one_storage_are_flattened(holder):
    """Parts that lie one after the other keep their values."""
    module = holder(*beside(torch.arange(24.0)))
    expected = [param.tolist() for param in module.parameters()]
    flatten(module)
    assert [param.tolist() for param in module.parameters()] == expected


def test_parameters_without_elements_share_nothing(holder):
    """Whatever the system says about where nothing lies."""
    module = holder(torch.empty(3, 0), torch.empty(3, 0, dtype=torch.float64))
    flatten(module)
    assert [tuple(param.shape) for param in module.parameters()] == [(3, 0), (3, 0)]


@pytest.mark.parametrize("later", ["assigned", "data"])
def test_sharing_after_flattening_is_refused_by_name(later):
    """Neither a new parameter nor new data may lie in another one's place."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    flat = flatten(model)
    with pytest.raises(ParameterError, match=r"'0\.weight' and parameter '1\.weight' share"):
        if later == "assigned":
            model[1].weight = nn.Parameter(model[0].weight.data)
        else:
            model[1].weight.data = model[0].weight.data
        flat.as_vector()
