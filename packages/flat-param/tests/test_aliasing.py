"""A flattened module stays flat when it is moved, cast or loaded, and nothing stays behind."""

import pytest
import torch
from torch import nn

from flat_param import flatten, fully_shard


@pytest.mark.parametrize("change", [nn.Module.double, nn.Module.bfloat16, nn.Module.share_memory])
def test_moving_and_casting_keep_the_aliasing_at_once(mlp, change, aliased):
    """Right after the call, before any forward, parameters lie in the buffer."""
    flat = flatten(mlp)
    change(nn.Sequential(mlp))
    pointer = mlp[0].weight.data_ptr()
    assert pointer == flat.as_vector().data_ptr()
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


def test_channels_last_keeps_the_aliasing(aliased):
    """A change of strides makes a new plan with the new strides."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    flatten(model)
    model.to(memory_format=torch.channels_last)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert aliased(model)


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_keeps_the_aliasing(mlp, assign, aliased):
    """Loading copies in, and with `assign=True` the assigned parameters move in."""
    flat = flatten(mlp)
    state = {name: torch.full_like(value, 2.0) for name, value in mlp.state_dict().items()}
    mlp.load_state_dict(state, assign=assign)
    pointer = mlp[0].weight.data_ptr()
    assert pointer == flat.as_vector().data_ptr()
    assert aliased(mlp)
    assert int(flat.as_vector().sum()) == 2 * sum(p.numel() for p in mlp.parameters())


def test_loading_by_assignment_fills_a_meta_module(mlp, aliased):
    """A module flattened on the meta device becomes real when real parameters are assigned."""
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    flatten(empty)
    empty.load_state_dict(mlp.state_dict(), assign=True)
    x = torch.randn(2, 5)
    assert torch.equal(empty(x), mlp(x))
    assert aliased(empty)


def test_nothing_stays_in_the_process(mlp):
    """No hook of torch's for all modules is set, and other modules carry nothing."""
    everywhere = vars(torch.nn.modules.module)
    before = {k: dict(v) for k, v in everywhere.items() if k.startswith("_global_") and v}
    other = nn.Linear(2, 2)
    carried = set(vars(other))
    flatten(mlp)
    mlp(torch.ones(1, 5)).sum().backward()
    mlp.add_module("new", other)
    assert set(vars(other)) == carried
    assert before == {k: dict(v) for k, v in everywhere.items() if k.startswith("_global_") and v}


class Slicing(nn.Module):
    """Builds a module in its forward, as transformers do with `self.layers[:n]`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers[:2]:
            x = layer(x)
        return x


@pytest.mark.parametrize("which", ["beside a flat module", "beside a sharded one", "flat"])
def test_a_forward_that_slices_a_list_of_modules_compiles_whole(mlp, which, group_of_one):
    """With `fullgraph=True`, twice, without another compilation."""
    torch._dynamo.reset()
    model = Slicing()
    if which == "beside a sharded one":
        fully_shard(mlp)
    else:
        flatten(mlp if which == "beside a flat module" else model)
    graphs = []

    def count(graph, example):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=count)
    for _ in range(2):
        compiled(torch.ones(1, 4)).sum().backward()
    assert len(graphs) == 1


def test_parameters_made_anew_by_a_move_are_taken_in(aliased):
    """`to_empty` of a module on the meta device replaces the objects."""
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    flat = flatten(empty)
    empty.to_empty(device="cpu")
    assert aliased(empty)
    nn.init.ones_(empty[0].weight)
    assert flat.as_vector()[:35].tolist() == [1.0] * 35


def test_flattening_in_inference_mode_leaves_a_module_that_trains(mlp):
    """The buffer is an ordinary tensor, wherever it was made."""
    with torch.inference_mode():
        flat = flatten(mlp)
    mlp(torch.ones(1, 5)).sum().backward()
    assert flat.grad_norm()


def test_sharing_memory_shares_the_buffer(mlp, aliased):
    """`share_memory` moves the one storage, and later forwards leave it there."""
    flat = flatten(mlp)
    mlp.share_memory()
    mlp(torch.ones(1, 5))
    assert flat.as_vector().is_shared()
    assert aliased(mlp)


@pytest.mark.parametrize("use", [lambda f: f.module(torch.ones(1, 5)), lambda f: f.as_vector()])
def test_swapped_data_is_taken_back_at_the_next_use(mlp, use, aliased):
    """`vector_to_parameters` and its like do not tear the module off its buffer."""
    flat = flatten(mlp)
    nn.utils.vector_to_parameters(torch.ones(66), mlp.parameters())
    use(flat)
    assert mlp[0].weight.data_ptr() == flat.as_vector().data_ptr()
    assert torch.equal(mlp[0].weight, torch.ones(7, 5))
    assert aliased(mlp)
