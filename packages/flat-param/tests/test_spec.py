import torch
from torch import nn

from flat_param.layout._spec import dense_stride
from flat_param.plan import collect_params


def test_collect_lists_a_tied_parameter_once_with_its_aliases():
    """Two names of one parameter are one spec, named after the first."""
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    model[1].weight = model[0].weight
    specs, params = collect_params(model)
    assert [spec.names for spec in specs] == [("0.weight", "1.weight")]
    assert params[0] is model[0].weight


def test_collect_leaves_out_ignored_parameters():
    """What another unit owns is not listed."""
    layer = nn.Linear(2, 3)
    specs, _ = collect_params(layer, ignored=[layer.bias])
    assert [spec.name for spec in specs] == ["weight"]


def test_dense_stride_packs_as_clone_does():
    """A packed stride keeps the order of dimensions that `clone` keeps."""
    columns = torch.arange(24.0).view(4, 6).t()[::2]
    assert dense_stride(tuple(columns.shape), columns.stride()) == columns.clone().stride()
