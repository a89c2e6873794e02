import pytest
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


@pytest.mark.parametrize(
    ("shape", "stride", "kept"),
    [
        ((4, 3), (3, 1), (3, 1)),
        ((4, 3), (1, 4), (1, 4)),
        ((4, 3), (6, 1), (3, 1)),
        ((4, 3), (0, 1), (3, 1)),
        ((2, 3, 4, 4), (48, 1, 12, 3), (48, 1, 12, 3)),
        ((20, 10, 1, 1), (10, 1, 10, 10), (10, 1, 10, 10)),
        ((), (), ()),
        ((0, 3), (3, 1), (3, 1)),
    ],
)
def test_dense_stride_keeps_dense_ones_and_packs_the_rest(shape, stride, kept):
    """Holes and overlaps go; every dense stride stays as it is."""
    assert dense_stride(shape, stride) == kept


def test_dense_stride_packs_as_clone_does():
    """A packed stride keeps the order of dimensions that `clone` keeps."""
    columns = torch.arange(24.0).view(4, 6).t()[::2]
    assert dense_stride(tuple(columns.shape), columns.stride()) == columns.clone().stride()
