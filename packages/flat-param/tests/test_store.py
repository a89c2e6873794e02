import pytest
import torch
from torch import nn

from flat_param import collect_params, plan_segments
from flat_param._store import SegmentStore


@pytest.fixture
def store(mlp):
    """The one segment of a small model."""
    specs, params = collect_params(mlp)
    (plan,) = plan_segments(specs)
    return SegmentStore(plan, params)


def test_grads_land_in_views_after_every_way_to_clear(mlp, store, own_all):
    """Whether grads were None, zero or there already, they end as views, equal to autograd's."""
    x = torch.randn(4, 5)
    expected = torch.autograd.grad(mlp(x).sum(), list(mlp.parameters()))
    for clear in (lambda: None, mlp.zero_grad, lambda: mlp.zero_grad(set_to_none=False)):
        mlp.zero_grad()
        clear()
        mlp(x).sum().backward()
        assert own_all([param.grad for param in mlp.parameters()], store.grad)
        for param, grad in zip(mlp.parameters(), expected, strict=True):
            assert torch.equal(param.grad, grad)


def test_accumulation_adds_into_the_views(mlp, store, own_all):
    """Two backwards leave twice the gradient, in the same memory."""
    x = torch.randn(4, 5)
    mlp(x).sum().backward()
    once = store.grad.clone()
    mlp(x).sum().backward()
    assert torch.equal(store.grad, 2 * once)
    assert own_all([param.grad for param in mlp.parameters()], store.grad)


def test_an_unused_parameter_keeps_none_and_reads_as_zero(mlp, store):
    """What no backward reached has no gradient, and an old one does not shine through."""
    mlp(torch.ones(1, 5)).sum().backward()
    mlp.zero_grad()
    mlp[2](torch.ones(1, 7)).sum().backward()
    assert mlp[0].weight.grad is None
    assert not store.grad[:35].any()
    assert store.grad.any()


def test_a_grad_assigned_by_hand_is_taken(mlp, store, own_all):
    """A foreign gradient is copied in at the next look, and the parameter gets its view."""
    for param in mlp.parameters():
        param.grad = torch.ones_like(param)
    assert int(store.grad.sum()) == store.plan.layout.used_numel
    assert own_all([param.grad for param in mlp.parameters()], store.grad)


def test_a_sparse_grad_becomes_dense():
    """An embedding with sparse gradients is flattened like any other."""
    layer = nn.Embedding(4, 2, sparse=True)
    specs, params = collect_params(layer)
    store = SegmentStore(plan_segments(specs)[0], params)
    layer(torch.tensor([1, 1])).sum().backward()
    assert store.grad.tolist() == [0, 0, 2, 2, 0, 0, 0, 0]


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a_grad_with_a_graph_is_left_to_its_owner(mlp, store):
    """`create_graph=True` keeps gradients that can be differentiated again."""
    mlp(torch.randn(2, 5)).pow(2).sum().backward(create_graph=True)
    assert all(param.grad.requires_grad for param in mlp.parameters())


def test_no_gradient_memory_before_the_first_backward(mlp, store):
    """A model that only runs forward pays for no gradient; clearing makes none."""
    with torch.no_grad():
        mlp(torch.ones(1, 5))
    store.zero_grad()
    assert store._grad is None


def test_closing_takes_the_hooks_off(mlp, store):
    """After `close`, a gradient stays where autograd made it."""
    store.close()
    mlp(torch.ones(1, 5)).sum().backward()
    assert mlp[0].weight.grad.untyped_storage().nbytes() == 35 * 4
