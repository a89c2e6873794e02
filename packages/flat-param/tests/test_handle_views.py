"""What a handle puts in the place of a module's parameters, and takes in from there."""

import pytest
import torch
from torch import nn

from flat_param import ParameterError, StateError
from flat_param.handle import HandleShardingStrategy as Strategy


def test_unflatten_as_params_is_a_parenthesis(mlp, handle_of):
    """Inside there are parameters, outside there are tensors."""
    handle = handle_of(mlp)
    with handle.unflatten_as_params():
        assert [name for name, _ in mlp.named_parameters()] == list(handle.flat_param._fqns)
    assert list(mlp.named_parameters()) == []


def test_tied_places_are_listed(handle_of):
    """Names of first and further places."""
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    model[1].weight = model[0].weight
    handle = handle_of(model)
    assert list(handle.param_module_names()) == [("weight", "0"), ("weight", "1")]
    assert list(handle.shared_param_module_names()) == [("weight", "1")]
    assert model[1].weight is model[0].weight
    assert repr(handle) == "FlatParamHandle(flat_param.fqns=('0.weight',))"


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("by", ["data", "object"])
def test_replaced_original_parameters_are_taken_in(mlp, world_size, by, handle_of):
    """A value put in a parameter's place between steps is there when the module is whole again."""
    strategy = Strategy.NO_SHARD if world_size == 1 else Strategy.FULL_SHARD
    handle = handle_of(
        mlp, sharding_strategy=strategy, use_orig_params=True, rank=0, world=world_size
    )
    handle.shard()
    handle.init_flat_param_attributes()
    held = mlp[0].weight
    value = torch.full_like(held, 2.0)
    if by == "data":
        held.data = value
    else:
        mlp[0].weight = nn.Parameter(value)
    assert handle._writeback_orig_params()
    assert not handle._writeback_orig_params()
    assert torch.equal(handle.flat_param[: value.numel()], value.flatten())
    handle.flat_param.data.mul_(2)
    assert torch.equal(mlp[0].weight, 2 * value)


def test_a_replaced_parameter_of_another_shape_is_refused(mlp, handle_of):
    """In the source's words, and with its name; the flat parameter keeps its values."""
    handle = handle_of(mlp, sharding_strategy=Strategy.NO_SHARD, use_orig_params=True)
    handle.shard()
    before = handle.flat_param.detach().clone()
    mlp[0].weight = nn.Parameter(torch.ones(2))
    with pytest.raises(
        ParameterError, match=r"Cannot writeback when the parameter shape changes\n.*0\.weight"
    ):
        handle.unshard()
    assert torch.equal(handle.flat_param, before)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_sharded_module_is_not_unflattened(handle_of, mlp, use_orig_params):
    """A part cannot be whole parameters; the refusal comes before anything changes."""
    handle = handle_of(mlp, rank=0, world=2, use_orig_params=use_orig_params)
    handle.shard()
    before = [mlp[0].weight, mlp[2].bias]
    with pytest.raises(StateError, match=r"is sharded, .* Call unshard\(\) first"):
        handle.unflatten_as_params().__enter__()
    assert all(a is b for a, b in zip(before, [mlp[0].weight, mlp[2].bias], strict=True))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_parenthesis_closes_whatever_is_raised_in_it(handle_of, mlp, error):
    """After an error or Ctrl-C there are tensors again, and what was written is kept."""
    handle = handle_of(mlp)
    with pytest.raises(error), handle.unflatten_as_params():
        mlp[2].bias.data.fill_(7.0)
        raise error
    assert list(mlp.named_parameters()) == []
    assert mlp[2].bias.tolist() == [7.0] * 3
    assert handle.flat_param[-3:].tolist() == [7.0] * 3


@pytest.mark.parametrize("trained", [False, True])
def test_parameters_made_anew_train_as_the_flat_one_does(handle_of, mlp, trained):
    """Frozen ones stay frozen inside the parenthesis."""
    handle = handle_of(mlp.requires_grad_(trained))
    with handle.unflatten_as_params():
        assert {param.requires_grad for param in mlp.parameters()} == {trained}


def test_original_objects_come_back_inside_the_parenthesis(handle_of, mlp):
    """With `use_orig_params` they are the very objects, tied places too."""
    mlp.add_module("tied", nn.Linear(5, 7, bias=False))
    mlp.tied.weight = mlp[0].weight
    params = list(mlp.parameters())
    handle = handle_of(mlp, use_orig_params=True)
    with handle.unflatten_as_params():
        assert all(a is b for a, b in zip(mlp.parameters(), params, strict=True))
        assert mlp.tied.weight is params[0]
    assert mlp.tied.weight is mlp[0].weight


def test_views_reach_the_flat_parameter_under_no_grad(handle_of, mlp):
    """They are made with gradients, wherever the handle is called from."""
    with torch.no_grad():
        handle = handle_of(mlp)
    mlp(torch.ones(1, 5)).sum().backward()
    assert handle.flat_param.grad is not None


def test_replaced_parameters_are_all_taken_in_or_none(handle_of, mlp):
    """A wrong shape is refused before any other replacement is copied."""
    handle = handle_of(mlp, sharding_strategy=Strategy.NO_SHARD, use_orig_params=True)
    handle.shard()
    before = handle.flat_param.detach().clone()
    mlp[0].weight = good = nn.Parameter(torch.full((7, 5), 9.0))
    mlp[2].bias = nn.Parameter(torch.ones(3, 1))
    with pytest.raises(ParameterError) as caught:
        handle._writeback_orig_params()
    assert str(caught.value) == (
        "Cannot writeback when the parameter shape changes\n"
        "Expects torch.Size([3]) but got torch.Size([3, 1]) for 2.bias"
    )
    assert torch.equal(handle.flat_param, before)
    assert handle.flat_param._params[0] is not good


def test_a_replacement_of_another_dtype_is_cast_into_its_place(handle_of, mlp):
    """The new object stays in the module, with the memory and dtype of the flat parameter."""
    handle = handle_of(mlp, sharding_strategy=Strategy.NO_SHARD, use_orig_params=True)
    handle.shard()
    mlp[0].weight = new = nn.Parameter(torch.full((7, 5), 2.0))
    handle._writeback_orig_params()
    assert mlp[0].weight is new is handle.flat_param._params[0]
    assert new.data_ptr() == handle.flat_param.data_ptr()
    mlp[0].weight = nn.Parameter(torch.full((7, 5), 3.0, dtype=torch.bfloat16))
    handle._writeback_orig_params()
    assert handle.flat_param.dtype == mlp[0].weight.dtype == torch.float32
    assert handle.flat_param[0].item() == 3.0


def test_a_place_without_a_parameter_takes_nothing_in(handle_of, mlp):
    """None in the place of a parameter leaves its values; the next whole module has them."""
    handle = handle_of(mlp, sharding_strategy=Strategy.NO_SHARD, use_orig_params=True)
    handle.shard()
    before = mlp[0].weight.tolist()
    mlp[0].weight = None
    handle.unshard()
    assert mlp[0].weight.tolist() == before
    assert handle._writeback_orig_params() is False
