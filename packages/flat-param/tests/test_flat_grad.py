"""Gradients of parameters are views of the flat one, or None."""

import copy

import pytest
import torch
from torch import nn

from flat_param import flatten


def own_all(tensors, buffer):
    """Whether every tensor lies in the memory of one buffer."""
    start, stop = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
    return all(start <= t.data_ptr() and t.data_ptr() + t.nbytes <= stop for t in tensors)


def test_a_sparse_grad_becomes_dense():
    """An embedding with sparse gradients is flattened like any other."""
    layer = nn.Embedding(4, 2, sparse=True)
    flat = flatten(layer)
    layer(torch.tensor([1, 1])).sum().backward()
    assert flat.grad_vector().tolist() == [0, 0, 2, 2, 0, 0, 0, 0]


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a_step_over_chunks_reads_gradients_with_a_graph(mlp):
    """After `create_graph=True` the step is the plain module's, and the graph stays."""
    plain, x = copy.deepcopy(mlp), torch.randn(2, 5)
    optimizers = (
        torch.optim.SGD(flatten(mlp).chunks(), lr=0.1),
        torch.optim.SGD(plain.parameters(), lr=0.1),
    )
    for module, optimizer in zip((mlp, plain), optimizers, strict=True):
        module(x).pow(2).sum().backward(create_graph=True)
        optimizer.step()
        assert all(param.grad.requires_grad for param in module.parameters())
    for ours, theirs in zip(mlp.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.fixture
def wide():
    """Weights of 36 KiB, whose gradients are copied as they arrive, beside small ones."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96), nn.Linear(96, 96))


@pytest.mark.parametrize("reached", [[0, 1, 2], [0], [1], [2], [2, 0]])
def test_after_set_to_none_exactly_what_was_reached_has_a_view(wide, reached):
    """Large and small, first or last to arrive: a view, or None, and the plain module's values."""
    flat, x = flatten(wide), torch.randn(2, 96)
    for _ in range(2):
        wide.zero_grad()
        y = x
        for index in reached:
            y = wide[index](y)
        y.pow(2).sum().backward()
        used = [param for index in reached for param in wide[index].parameters()]
        for param in wide.parameters():
            assert (param.grad is not None) == any(param is other for other in used)
        assert own_all([param.grad for param in used], flat.grad_vector())
    norms = [param.grad.norm() for param in used]
    torch.testing.assert_close(flat.grad_norm(), torch.stack(norms).norm())


@pytest.mark.parametrize("clears", [False, True])
def test_step_after_a_failed_backward_is_the_plain_one(wide, clears):
    """What the failed one has left counts, or is cleared, as the plain module's is."""
    plain = copy.deepcopy(wide)
    optimizers = (
        torch.optim.SGD(flatten(wide).chunks(1 << 10), lr=0.1),
        torch.optim.SGD(plain.parameters(), lr=0.1),
    )
    for model, optimizer in zip((wide, plain), optimizers, strict=True):
        stop = model[1].weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 96)).square().sum().backward()
        stop.remove()
        if clears:
            optimizer.zero_grad()
        model(torch.ones(2, 96)).square().sum().backward()
        optimizer.step()
    for ours, theirs in zip(wide.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_gradient_first_read_in_inference_mode_can_be_trained_on(mlp):
    """The flat gradient is an ordinary tensor, wherever it was made."""
    flat = flatten(mlp)
    with torch.inference_mode():
        assert not flat.grad_norm()
    mlp(torch.ones(1, 5)).sum().backward()
    assert flat.grad_norm()


def test_gradients_cleared_by_the_module_read_as_zero_without_a_backward(mlp):
    """What `module.zero_grad()` leaves for later is done before anybody reads it."""
    flat = flatten(mlp)
    (chunk,) = flat.chunks()
    mlp(torch.ones(1, 5)).sum().backward()
    assert chunk.grad.any()
    mlp.zero_grad()
    assert all(param.grad is None for param in mlp.parameters())
    assert not chunk.grad.any()
    assert not flat.grad_vector().any()


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_that_a_user_keeps_stay(mlp, shared):
    """The objects, and views that alone are kept, over a clipped step and later backwards."""
    if shared:
        mlp.share_memory()
    flat = flatten(mlp)
    x = torch.ones(2, 5)
    mlp(x).sum().backward()
    first, second, *others = [param.grad for param in mlp.parameters()]
    kept = [first, *others] if shared else [first.detach(), second.view(-1)]
    before = [grad.clone() for grad in kept]
    del first, second, others
    mlp.zero_grad()
    mlp[0](x).square().sum().backward()  # leaves the last layer without gradients
    flat.clip_(0.1)
    mlp(-3 * x).sum().backward()
    assert all(map(torch.equal, kept, before))
    assert own_all([param.grad for param in mlp.parameters()], flat.grad_vector())


def test_step_without_kept_gradients_allocates_no_flat_gradient(mlp):
    """Arrivals find that nobody else refers to a gradient."""
    flat = flatten(mlp)
    memory = set()
    for _ in range(3):
        mlp(torch.ones(2, 5)).sum().backward()
        memory.add(flat.grad_vector().data_ptr())
        mlp.zero_grad()
    assert len(memory) == 1
