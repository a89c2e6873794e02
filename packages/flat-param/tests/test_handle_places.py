"""A handle's checks, and the places of its parameters."""

import pytest
import torch
from torch import nn

from flat_param import ParameterError
from flat_param.handle import (
    FlatParameter,
    FlatParamHandle,
    ShardParamInfo,
    refusal,
    set_attribute,
    shard_part,
)


def test_foreign_parameters_are_listed_by_position_and_shape(mlp):
    """The error names each that the module does not own, and leaves the module as it was."""
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


def test_a_part_says_where_it_lies_in_both():
    """Offset in the shard, elements, first and last element in the parameter."""
    for start in range(12):
        for end in range(start, 12):
            held = [at for at in range(3, 8) if start <= at <= end]
            part = shard_part(3, 7, start, end)
            if not held:
                assert part == ShardParamInfo(False, None, None, None, None)
            else:
                assert part == ShardParamInfo(
                    True, held[0] - start, len(held), held[0] - 3, held[-1] - 3
                )


META = torch.ones(1, device="meta")
FROZEN = nn.Parameter(torch.ones(1), requires_grad=False)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (FlatParameter(torch.ones(1)), "Cannot flatten a `FlatParameter`"),
        (torch.ones(1, dtype=torch.int8), "Cannot flatten integer dtype tensors"),
        (torch.ones(1) > 0, "Cannot flatten integer dtype tensors"),
        (
            torch.ones(1, dtype=torch.bfloat16),
            "Must flatten tensors with uniform dtype but got torch.float32 and torch.bfloat16",
        ),
        (
            torch.ones(1, dtype=torch.complex64),
            "Must flatten tensors with uniform dtype but got torch.float32 and torch.complex64",
        ),
        (FROZEN, "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`"),
        (META, "Must flatten tensors on the same device but got both cpu and meta"),
    ],
    ids=["flat", "integer", "bool", "dtype", "complex", "frozen", "device"],
)
def test_why_two_tensors_cannot_share_a_flat_parameter(tensor, reason):
    """In torch's words, with both dtypes or devices in their order."""
    first = nn.Parameter(torch.ones(3), requires_grad=reason.find("device") < 0)
    assert refusal(first, tensor, same_grad=tensor is FROZEN) == reason


def test_trainability_counts_only_where_it_is_asked_for():
    """With original parameters kept, trained and frozen ones share a flat parameter."""
    assert refusal(nn.Parameter(torch.ones(3)), FROZEN, same_grad=False) == ""


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.float8_e4m3fn])
def test_equal_tensors_share_a_flat_parameter(dtype):
    """Complex ones and those of 8 bits too."""
    assert refusal(torch.ones(2, dtype=dtype), torch.ones(1, dtype=dtype), same_grad=True) == ""


@pytest.mark.parametrize("last", [0, 1])
def test_a_refused_list_leaves_the_module_as_it_was(mlp, last):
    """Whichever of the two is the odd one."""
    params = list(mlp.parameters())
    params[-last].data = params[-last].data.double()
    before = [param.data_ptr() for param in params]
    with pytest.raises(ParameterError, match="uniform dtype"):
        FlatParamHandle(params, mlp)
    assert [param.data_ptr() for param in mlp.parameters()] == before


def test_a_parameter_without_elements_has_a_part_without_elements():
    """It lies in the shard that its place is in, from element 0 to -1."""
    assert shard_part(5, 4, 0, 9) == ShardParamInfo(True, 5, 0, 0, -1)
    assert shard_part(5, 4, 6, 9) == ShardParamInfo(False, None, None, None, None)


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


def test_a_tensor_takes_the_place_of_a_parameter_and_back():
    """A parameter is registered, a tensor is a plain attribute; never both."""
    layer = nn.Linear(2, 2)
    tensor, param = torch.ones(2, 2), layer.weight
    set_attribute(layer, "weight", tensor)
    assert "weight" not in layer._parameters
    assert layer.weight is tensor
    set_attribute(layer, "weight", param)
    assert "weight" not in vars(layer)
    assert layer._parameters["weight"] is param
    set_attribute(layer, "new", tensor)
    assert layer.new is tensor
