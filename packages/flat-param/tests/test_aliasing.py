"""Assigned, replaced and moved parameters are in the flat buffer at its next use."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from flat_param import flat_params_of, flatten, fully_shard


def _lies_in(tensor, buffer):
    start, stop = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
    return start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= stop


def aliased(module):
    """Whether all parameters lie in the buffers of the module's flat view, each once."""
    flat = flat_params_of(module)
    homes = [flat.as_vector(name) for name in flat.layouts]
    found = [[_lies_in(param, home) for home in homes] for param in module.parameters()]
    places = {param.data_ptr() for param in module.parameters()}
    each_home = map(any, zip(*found, strict=True))
    return all(map(any, found)) and all(each_home) and len(places) == len(found)


@pytest.mark.parametrize("change", [nn.Module.double, nn.Module.bfloat16, nn.Module.share_memory])
def test_moving_and_casting_keep_the_aliasing_at_once(mlp, change):
    """Right after the call, so that the old memory is freed."""
    flat = flatten(mlp)
    change(nn.Sequential(mlp))
    pointer = mlp[0].weight.data_ptr()
    assert pointer == flat.as_vector().data_ptr()
    assert flat.as_vector().is_shared() == (change is nn.Module.share_memory)
    assert aliased(mlp)


def test_casting_keeps_gradients(mlp):
    """Accumulated gradients survive the move, as views again."""
    flat = flatten(mlp)
    mlp(torch.ones(1, 5)).sum().backward()
    before = flat.grad_vector()[:35].clone()
    mlp.double()
    assert torch.equal(flat.grad_vector()[:35], before.double())
    home = flat.grad_vector().untyped_storage().data_ptr()
    assert mlp[0].weight.grad.untyped_storage().data_ptr() == home


def test_channels_last_keeps_the_aliasing():
    """A change of strides makes a new plan with the new strides."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    flatten(model)
    model.to(memory_format=torch.channels_last)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert aliased(model)


def test_loading_by_assignment_fills_a_meta_module(mlp):
    """A module flattened on the meta device becomes real when real parameters are assigned."""
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    flatten(empty)
    empty.load_state_dict(mlp.state_dict(), assign=True)
    x = torch.randn(2, 5)
    assert torch.equal(empty(x), mlp(x))
    assert aliased(empty)


def test_flattening_in_inference_mode_leaves_a_module_that_trains(mlp):
    """The buffer is an ordinary tensor, wherever it was made."""
    with torch.inference_mode():
        flat = flatten(mlp)
    mlp(torch.ones(1, 5)).sum().backward()
    assert flat.grad_norm()


class Slicing(nn.Module):
    """Builds a module in its forward, as transformers do with `self.layers[:n]`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers[:2]:
            x = layer(x)
        return x


def test_slicing_a_list_compiles_beside_a_sharded_module(mlp, group_of_one):
    """With `fullgraph=True`, twice, without another compilation."""
    torch._dynamo.reset()
    model, graphs = Slicing(), []
    fully_shard(mlp)

    def count(graph, example):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=count)
    for _ in range(2):
        compiled(torch.ones(1, 4)).sum().backward()
    assert len(graphs) == 1


def _assign(model):
    model[0].weight = nn.Parameter(torch.ones(7, 5))


def _load(model):
    state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _swap_data(model):
    model[2].weight.data = torch.ones(3, 7)


def _new_head(model):
    torch.manual_seed(1)
    model[2] = nn.Linear(7, 3)


CHANGES = [_assign, _load, _swap_data, _new_head]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_step_over_chunks_after_a_change_is_the_plain_one(mlp, change, compiled):
    """Each parameter is replaced between steps; the old optimizer steps the new values."""
    torch._dynamo.reset()
    found = []
    for flat in (False, True):
        model = copy.deepcopy(mlp)
        params = flatten(model).chunks(16) if flat else model.parameters()
        optimizer = torch.optim.SGD(params, lr=0.1)
        forward = torch.compile(model, backend="eager") if compiled else model
        for step in range(3):
            if step == 1:
                change(model)
                optimizer = optimizer if flat else torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.zero_grad()
            forward(torch.ones(2, 5)).pow(2).sum().backward()
            optimizer.step()
        found.append([param.detach().clone() for param in model.parameters()])
    assert all(map(torch.equal, *found))


def test_tying_makes_a_new_plan(mlp):
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


def test_parameters_are_added_and_removed(mlp):
    """In a module with or without parameters; also the last one of a module."""
    flat = flatten(mlp)
    mlp[1].register_parameter("slope", nn.Parameter(torch.ones(2)))
    mlp.prompt = nn.Parameter(torch.ones(1))
    mlp[0].bias = None
    assert flat.numel == 72 + 2 * 4 - 8
    assert aliased(mlp)
    layer = nn.Linear(2, 2, bias=False)
    flat = flatten(layer)
    layer.weight = None
    assert flat.layouts == {}
    layer.weight = nn.Parameter(torch.ones(2, 2))
    layer(torch.ones(1, 2)).sum().backward()
    assert flat.grad_vector().tolist() == [1.0] * 4


@pytest.mark.parametrize("how", ["parametrize", "weight_norm", "prune"])
def test_what_rearranges_a_layer_is_followed(mlp, how):
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


def saved(module):
    """Through torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved])
def test_a_copy_is_flat_and_apart(mlp, copied):
    """Also inside a larger module, with tied weights; it has another buffer and trains."""
    mlp.add_module("tied", nn.Linear(3, 7))
    mlp.tied.bias = mlp[0].bias
    flat = flatten(mlp)
    twin = copied(nn.ModuleDict({"body": mlp}))["body"]
    ours = flat_params_of(twin)
    assert ours.module is twin
    assert twin.tied.bias is twin[0].bias
    assert torch.equal(ours.as_vector(), flat.as_vector())
    assert aliased(twin)
    twin(torch.ones(1, 5)).sum().backward()
    assert ours.grad_vector().any()
    assert mlp[0].weight.grad is None
    twin[2] = nn.Linear(7, 2)
    assert aliased(twin)
    twin.double()
    assert ours.as_vector().dtype == torch.float64


def test_a_submodule_copied_or_saved_alone_needs_nothing_from_here(mlp):
    """It is the plain layer that it would be, and its file names no class of this package."""
    plain = set(vars(nn.Linear(2, 2)))
    flatten(mlp)
    assert set(vars(copy.deepcopy(mlp[0]))) == set(vars(mlp[0])) == plain
    file = io.BytesIO()
    torch.save(mlp[0], file)
    assert b"flat_param" not in file.getvalue()
    assert len(file.getvalue()) < 4096
    assert list(saved(mlp[0]).state_dict()) == ["weight", "bias"]
