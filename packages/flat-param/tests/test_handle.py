"""torch's handle: values, padding, trainability, saved flat parameters."""

import copy
import io

import pytest
import torch
from torch import nn

from flat_param import ParameterError
from flat_param.handle import (
    FlatParameter,
    FlatParamHandle,
    FlatParamShardMetadata,
    is_truly_contiguous,
)


@pytest.mark.parametrize(
    "tensors",
    [
        (torch.arange(24.0).view(4, 6)[:, :3], torch.full((20,), -1.0)),
        (torch.tensor(1.0),),
        (torch.ones(3, dtype=torch.complex64),),
        (torch.ones(3).to(torch.float8_e4m3fn), torch.ones(5).to(torch.float8_e4m3fn)),
        (torch.ones(1).expand(4), torch.ones(0, 2)),
    ],
    ids=["column slice", "scalar", "complex", "float8", "expanded and empty"],
)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_every_kind_of_tensor_keeps_its_values(holder, tensors, use_orig_params, handle_of):
    """torch corrupts the first, and refuses the others or computes nonsense."""
    expected = [tensor.tolist() for tensor in tensors]
    module = holder(*tensors)
    handle_of(module, use_orig_params=use_orig_params)
    assert [getattr(module, f"p{i}").tolist() for i in range(len(tensors))] == expected


def test_padding_is_zero_and_out_of_the_norm(mlp, handle_of):
    """The norm of the flat parameter is that of the parameters."""
    true = torch.cat([param.detach().flatten() for param in mlp.parameters()]).norm()
    handle = handle_of(mlp, use_orig_params=True, rank=0, world=2)
    assert handle.flat_param.numel() == 72
    torch.testing.assert_close(handle.flat_param.norm(), true)


@pytest.mark.parametrize("trained", [False, True])
def test_a_flat_parameter_is_trained_where_any_of_its_parameters_is(mlp, trained, handle_of):
    """Frozen alone, it is frozen; with original parameters kept, one is enough."""
    mlp.requires_grad_(False)
    mlp[2].bias.requires_grad_(trained)
    assert handle_of(mlp, use_orig_params=True).flat_param.requires_grad is trained


def test_flatten_tensors_lays_out_like_the_parameter(mlp, handle_of):
    """A state of the parameters' shapes is flattened to the flat parameter's layout."""
    tensors = [param.detach().clone() for param in mlp.parameters()]
    handle = handle_of(mlp, use_orig_params=True)
    assert torch.equal(handle.flatten_tensors(tensors, 4)[:71], handle.flat_param[:71])
    made = handle.flatten_tensors_into_flat_param(tensors, 0, requires_grad=False)
    assert isinstance(made, FlatParameter)
    assert made.shape == (66,)


def test_a_saved_flat_parameter_knows_its_parts(mlp, handle_of):
    """Names, shapes and layout survive saving and copying."""
    flat = handle_of(mlp).flat_param
    file = io.BytesIO()
    torch.save(flat, file)
    file.seek(0)
    for copied in (torch.load(file, weights_only=False), copy.deepcopy(flat)):
        assert isinstance(copied, FlatParameter)
        assert copied._fqns == flat._fqns
        assert copied._layout == flat._layout
        assert torch.equal(copied, flat)


def test_foreign_parameters_are_listed_by_position_and_shape(mlp):
    """The error names each foreign parameter, and the module is unchanged."""
    before = list(mlp.parameters())
    foreign = nn.Parameter(torch.ones(2, 3))
    with pytest.raises(ParameterError) as caught:
        FlatParamHandle([*before, foreign, nn.Parameter(torch.ones(()))], mlp)
    assert str(caught.value) == (
        "flat_param.FlatParamHandle: `params` were not found in `module`'s tree: "
        "params[4] (2, 3), params[5] (), but Sequential must own all of them. "
        "Leave foreign parameters out."
    )
    assert all(a is b for a, b in zip(mlp.parameters(), before, strict=True))
    with pytest.raises(ParameterError, match=r"tree: params\[0\] \(2, 3\), but"):
        FlatParamHandle([foreign], mlp)


@pytest.mark.parametrize("last", [0, 1])
def test_a_refused_list_leaves_the_module_as_it_was(mlp, last):
    """Whichever of the two is the odd one."""
    params = list(mlp.parameters())
    params[-last].data = params[-last].data.double()
    before = [param.data_ptr() for param in params]
    with pytest.raises(ParameterError, match="uniform dtype"):
        FlatParamHandle(params, mlp)
    assert [param.data_ptr() for param in mlp.parameters()] == before


def test_places_name_module_path_and_attribute(handle_of):
    """Of the first place and the further ones, the root's own parameters with an empty path."""
    root = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Sequential(nn.Linear(2, 2, bias=False)))
    root.register_parameter("own", nn.Parameter(torch.ones(2)))
    root[1][0].weight = root[0].weight
    flat = handle_of(root).flat_param
    assert [tuple(info) for info in flat._param_infos] == [
        ("own", root, ""),
        ("weight", root[0], "0"),
    ]
    assert [tuple(info) for info in flat._shared_param_infos] == [
        ("weight", root[1][0], "1.0", "weight", root[0], "0")
    ]


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
