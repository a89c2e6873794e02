import pytest
import torch

from flat_param.handle import FlatParameter, FlatParamShardMetadata, is_truly_contiguous

FOUR = (["w"], [torch.Size([2, 2])], [4], [(0, 3)])
SIX = (["w"], [torch.Size([2, 2])], [(2, 1)], [True], [4], [(0, 3)])


def test_metadata_is_built_from_four_fields_or_six():
    """Older sources have no strides; both ways fill the same names."""
    old, new = FlatParamShardMetadata(*FOUR), FlatParamShardMetadata(*SIX)
    assert old.param_offsets == new.param_offsets == ((0, 3),)
    assert old.param_strides is None
    assert new.param_contiguities == (True,)


def test_metadata_is_compared_where_both_sides_have_fields():
    """Four equals six; six differs from six with other strides; names always count."""
    old, new = FlatParamShardMetadata(*FOUR), FlatParamShardMetadata(*SIX)
    assert old == new
    assert new == tuple(map(tuple, SIX))
    assert new != FlatParamShardMetadata(["w"], [(2, 2)], [(1, 2)], [True], [4], [(0, 3)])
    assert old != FlatParamShardMetadata(["v"], [(2, 2)], [4], [(0, 3)])
    assert old != "w"
    assert hash(old) == hash(new)


def test_metadata_takes_names_too():
    """By keyword, as the source's tests write it."""
    names = ("param_names", "param_shapes", "param_numels", "param_offsets")
    assert FlatParamShardMetadata(**dict(zip(names, FOUR, strict=True))).param_names == ("w",)


@pytest.mark.parametrize("missing", range(4))
def test_metadata_needs_its_four_fields(missing):
    """A missing field is a TypeError, as for any tuple of fields."""
    names = ("param_names", "param_shapes", "param_numels", "param_offsets")
    fields = dict(zip(names, FOUR, strict=True))
    del fields[names[missing]]
    with pytest.raises(TypeError, match=names[missing]):
        FlatParamShardMetadata(**fields)


def test_flat_parameters_are_told_apart():
    """A flat parameter is a parameter; a parameter is not flat."""
    flat = FlatParameter(torch.ones(3))
    assert isinstance(flat, torch.nn.Parameter)
    assert not isinstance(torch.nn.Parameter(torch.ones(3)), FlatParameter)


def test_truly_contiguous_refuses_a_channels_last_kernel_of_one():
    """torch calls it contiguous both ways; cuDNN does not."""
    kernel = torch.ones(4, 3, 1, 1).to(memory_format=torch.channels_last)
    assert kernel.is_contiguous()
    assert not is_truly_contiguous(kernel)
    assert is_truly_contiguous(torch.tensor(1.0))
