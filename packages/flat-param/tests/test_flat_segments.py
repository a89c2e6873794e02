"""All segments of one module, kept flat for as long as the module lives."""

import pytest
import torch
from torch import nn

from flat_param import ParameterError, VectorError, flat_params_of, flatten, unflatten


def test_a_new_parameter_of_another_shape_is_refused_as_it_is_assigned(mlp):
    """By name; the module keeps the one it had."""
    flatten(mlp)
    kept = mlp[0].weight
    with pytest.raises(ParameterError, match=r"0\.weight"):
        mlp[0].weight = nn.Parameter(torch.ones(2))
    assert mlp[0].weight is kept
    assert flat_params_of(mlp).as_vector().numel()


def test_a_segment_is_found_by_one_name_only(mlp):
    """Where several match, or none, the error names them all."""
    mlp[2].double()
    flat = flatten(mlp)
    with pytest.raises(VectorError) as caught:
        flat.as_vector()
    assert "segment None matches 2 of" in str(caught.value)
    assert all(repr(name) in str(caught.value) for name in flat.layouts)
    with pytest.raises(VectorError, match="segment 'x' matches 0 of"):
        flat.as_vector("x")


def test_clearing_gradients_through_the_class_of_the_module(mlp):
    """A class with its own `zero_grad` has it called; a plain one has all gradients cleared."""
    flatten(mlp)
    mlp(torch.ones(1, 5)).sum().backward()
    mlp.zero_grad()
    assert [param.grad for param in mlp.parameters()] == [None] * 4


def test_two_parameters_of_the_module_may_not_share_a_place(mlp):
    """A value that lies in another parameter's memory is refused with both names."""
    mlp.add_module("twin", nn.Linear(5, 7))
    flatten(mlp)
    before = mlp[0].weight.tolist()
    with pytest.raises(ParameterError, match=r"parameter '0\.weight' and parameter 'twin\.weight'"):
        mlp.twin.weight = nn.Parameter(mlp[0].weight.detach())
    assert mlp[0].weight.tolist() == before


def test_closing_takes_everything_off_the_root(mlp):
    """Attributes and hooks are gone, and each parameter has memory of its own."""
    before = set(vars(mlp))
    flatten(mlp)
    assert set(vars(mlp)) > before
    unflatten(mlp)
    assert set(vars(mlp)) == before
    assert not mlp._forward_pre_hooks
    assert len({param.untyped_storage().data_ptr() for param in mlp.parameters()}) == 4


def _pair():
    """Two layers beside each other, each flattened."""
    root = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("left", "right")})
    for module in root.values():
        flatten(module)
    return root


def test_weight_of_a_flattened_module_beside_is_refused():
    """Each would train values of its own: one's optimizer would train nothing, without a word."""
    root = nn.ModuleDict({"left": nn.Linear(2, 2), "right": nn.Linear(2, 2)})
    root["right"].weight = root["left"].weight
    flatten(root["left"])
    before = root["right"].bias.data_ptr()
    with pytest.raises(ParameterError, match=r"'weight' is tied to 'weight' in a flattened module"):
        flatten(root["right"])
    assert flat_params_of(root["right"]) is None
    assert root["right"].bias.data_ptr() == before
    unflatten(root["left"])
    flatten(root)


@pytest.mark.parametrize("name", ["weight", "extra"])
def test_weight_that_is_tied_to_one_beside_later_is_refused(name):
    """As it is assigned, or at the next use where the name is new."""
    root = _pair()
    with pytest.raises(ParameterError, match=r"FlatParams: parameter '\w+' is tied to"):
        root["right"].register_parameter(name, root["left"].weight)
        root["right"](torch.ones(1, 2))
    if name == "weight":
        before = root["left"].weight.detach().clone()
        optimizer = torch.optim.SGD(flat_params_of(root["left"]).chunks(1 << 10), lr=0.1)
        root["right"](root["left"](torch.ones(1, 2))).sum().backward()
        optimizer.step()
        assert not torch.equal(root["left"].weight, before)


def test_values_of_a_module_beside_are_taken():
    """A new parameter with its values, or what it loads from the other's state."""
    root = _pair()
    root["right"].weight = nn.Parameter(root["left"].weight.detach())
    assert torch.equal(root["right"].weight, root["left"].weight)
    with torch.no_grad():
        root["left"].weight.add_(1)
    assert not torch.equal(root["right"].weight, root["left"].weight)
    root["right"].load_state_dict(root["left"].state_dict(), assign=True)
    assert torch.equal(root["right"].weight, root["left"].weight)
