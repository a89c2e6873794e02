"""Parameters and modules that are assigned, added or removed are followed by the flat view."""

import copy

import pytest
import torch
from torch import nn

from flat_param import flatten


def test_an_assigned_parameter_moves_in_and_trains(mlp):
    """The new object is in the buffer at once, and its gradient in the flat gradient."""
    flat = flatten(mlp)
    mlp[0].weight = nn.Parameter(torch.ones(7, 5))
    assert mlp[0].weight.data_ptr() == flat.as_vector().data_ptr()
    mlp(torch.ones(1, 5)).sum().backward()
    home = flat.grad_vector().untyped_storage().data_ptr()
    assert mlp[0].weight.grad.untyped_storage().data_ptr() == home


def test_a_lone_assigned_parameter_announces_its_backward():
    """The new object carries the hook that the old one carried."""
    layer = nn.Linear(3, 5, bias=False)
    flatten(layer)
    layer.weight = nn.Parameter(torch.ones(5, 3))
    layer(torch.ones(1, 3)).sum().backward()
    assert layer.weight.grad.untyped_storage().nbytes() == 16 * 4  # 15 elements and a gap


def test_an_assigned_frozen_parameter_makes_a_new_plan(mlp, aliased):
    """It goes to the frozen segment, which has no gradient."""
    flat = flatten(mlp)
    mlp[0].weight = nn.Parameter(torch.ones(7, 5), requires_grad=False)
    mlp(torch.ones(1, 5))
    assert list(flat.layouts) == ["float32.frozen", "float32"]
    assert aliased(mlp)


def test_untying_makes_a_new_plan(mlp, aliased):
    """A tied name that is given another parameter gets another place in the buffer."""
    mlp.add_module("tied", nn.Linear(5, 7))
    mlp.tied.weight = mlp[0].weight
    flat = flatten(mlp)
    before = flat.numel
    mlp.tied.weight = nn.Parameter(torch.zeros(7, 5))
    assert flat.as_vector().numel() == before + 36
    assert aliased(mlp)


def test_tying_makes_a_new_plan(mlp, aliased):
    """A parameter given a second name has one place, and both names' gradients."""
    mlp.add_module("tied", nn.Linear(5, 7))
    flat = flatten(mlp)
    before = flat.numel
    mlp.tied.weight = mlp[0].weight
    assert flat.as_vector().numel() == before - 36
    (mlp[0](torch.ones(1, 5)) + mlp.tied(torch.ones(1, 5))).sum().backward()
    assert torch.equal(mlp[0].weight.grad, torch.full((7, 5), 2.0))
    assert mlp.tied.weight is mlp[0].weight
    assert aliased(mlp)


def test_swapping_two_parameters_swaps_their_values(aliased):
    """Each object keeps its values on its way through the other's name."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    first, second = model[0].weight.tolist(), model[1].weight.tolist()
    flatten(model)
    model[0].weight, model[1].weight = model[1].weight, model[0].weight
    model(torch.ones(1, 3))
    assert (model[0].weight.tolist(), model[1].weight.tolist()) == (second, first)
    assert aliased(model)


@pytest.mark.parametrize("name", ["0", "new"])
def test_a_module_put_in_later_is_taken_in_at_the_next_forward(mlp, name, aliased):
    """Replaced or added, its parameters get places, and the replaced ones lose theirs."""
    flat = flatten(mlp)
    mlp.add_module(name, nn.Linear(5, 7) if name == "0" else nn.Linear(3, 2))
    mlp(torch.ones(1, 5)).sum().backward()
    assert aliased(mlp)
    assert flat.numel == (72 if name == "0" else 72 + 8 + 4)
    assert flat.grad_vector().any()


def test_a_module_wrapped_later_keeps_its_buffer(mlp):
    """The same parameters under other names are not moved again."""
    flat = flatten(mlp)
    before = flat.as_vector().data_ptr()
    mlp[0] = nn.Sequential(mlp[0])
    assert flat.as_vector().data_ptr() == before


def test_a_new_parameter_of_a_known_module_is_taken_in(mlp, aliased):
    """Under a name that was not there, in a module with or without parameters."""
    flat = flatten(mlp)
    mlp[0].extra = nn.Parameter(torch.ones(3))
    mlp[1].register_parameter("slope", nn.Parameter(torch.ones(2)))
    mlp.prompt = nn.Parameter(torch.ones(1))
    mlp(torch.ones(1, 5))
    assert aliased(mlp)
    assert flat.numel == 72 + 3 * 4


def test_a_removed_parameter_loses_its_place(mlp, aliased):
    """Set to None, as for a layer that gets no bias."""
    flat = flatten(mlp)
    mlp[0].bias = None
    mlp(torch.ones(1, 5)).sum().backward()
    assert flat.numel == 72 - 8
    assert aliased(mlp)


def test_the_last_parameter_may_be_removed():
    """A module without parameters goes on; a vector is there no more, and says so."""
    layer = nn.Linear(2, 2, bias=False)
    flat = flatten(layer)
    layer.weight = None
    flat.sync()
    assert flat.layouts == {}
    layer.weight = nn.Parameter(torch.ones(2, 2))
    layer(torch.ones(1, 2)).sum().backward()
    assert flat.grad_vector().tolist() == [1.0] * 4


def test_a_functional_call_takes_nothing_in(mlp, aliased):
    """Parameters that are there for one call only are not mistaken for new ones."""
    flat = flatten(mlp)
    mlp(torch.ones(1, 5))
    kept = [(param, param.detach().clone()) for param in mlp.parameters()]
    others = {name: nn.Parameter(torch.zeros_like(p)) for name, p in mlp.named_parameters()}
    out = torch.func.functional_call(mlp, others, torch.ones(1, 5))
    assert not out.any()
    assert aliased(mlp)
    for (param, value), now in zip(kept, mlp.parameters(), strict=True):
        assert param is now
        assert torch.equal(now, value)
    assert not any(other.data_ptr() == flat.as_vector().data_ptr() for other in others.values())


@pytest.mark.parametrize("how", ["parametrize", "weight_norm", "prune"])
def test_what_rearranges_a_layer_is_followed(mlp, how, aliased):
    """torch's utilities that rename and add parameters; the step is the plain module's."""
    from torch.nn.utils import parametrizations, prune

    change = {
        "parametrize": lambda m: parametrizations.orthogonal(m[0]),
        "weight_norm": lambda m: parametrizations.weight_norm(m[0]),
        "prune": lambda m: prune.l1_unstructured(m[0], "weight", amount=0.3),
    }[how]
    plain = copy.deepcopy(mlp)
    flat = flatten(mlp)
    x = torch.randn(2, 5)
    for m in (mlp, plain):
        torch.manual_seed(0)
        change(m)
        m(x).pow(2).sum().backward()
    assert aliased(mlp)
    assert flat.grad_norm()
    ours, theirs = dict(mlp.named_parameters()), dict(plain.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, param in ours.items():
        assert torch.equal(param.grad, theirs[name].grad)


def test_a_module_that_left_carries_nothing(mlp):
    """It may be flattened alone, and assignments to it do not change the first view."""
    plain = set(vars(nn.Linear(2, 2)))
    flat = flatten(mlp)
    left = mlp[0]
    mlp[0] = nn.Linear(5, 7)
    mlp(torch.ones(1, 5))
    assert set(vars(left)) == plain
    left.weight = nn.Parameter(torch.ones(2))
    assert flat.numel == 72
    assert flatten(left).numel == 4 + 8


def test_a_module_without_parameters_may_be_in_two_flattened_trees():
    """An activation shared by two models is no reason to refuse the second."""
    shared = nn.ReLU()
    models = [nn.Sequential(nn.Linear(3, 3), shared) for _ in range(2)]
    flats = [flatten(model) for model in models]
    shared.slope = nn.Parameter(torch.ones(4))
    for model in models[:1]:
        model(torch.ones(1, 3))
    assert flats[0].numel == 12 + 4 + 4


def test_a_refused_assignment_leaves_the_registry(mlp):
    """The old parameter keeps its position."""
    flatten(mlp)
    names, kept = list(mlp.state_dict()), mlp[0].weight
    with pytest.raises(ValueError, match=r"'0.weight' has shape"):
        mlp[0].register_parameter("weight", nn.Parameter(torch.ones(2)))
    with pytest.raises(TypeError):
        mlp[0].register_parameter("weight", torch.ones(7, 5))
    assert mlp[0].weight is kept
    assert list(mlp.state_dict()) == names
