import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flat_param import flatten


@pytest.fixture
def flat(mlp):
    """The flat view of a small model of one segment."""
    return flatten(mlp)


def test_a_grad_assigned_by_hand_is_taken(mlp, flat, own_all):
    """A foreign gradient is copied in at the next look, and the parameter gets its view."""
    for param in mlp.parameters():
        param.grad = torch.ones_like(param)
    assert int(flat.grad_vector().sum()) == 66
    assert own_all([param.grad for param in mlp.parameters()], flat.grad_vector())


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
def test_after_set_to_none_exactly_what_was_reached_has_a_view(wide, own_all, reached):
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


def test_clearing_some_gradients_leaves_the_others_to_accumulate(wide, own_all):
    """Half is None and half is a view: each parameter gets what the plain one would."""
    flat, x = flatten(wide), torch.randn(2, 96)
    wide(x).sum().backward()
    once = {name: param.grad.clone() for name, param in wide.named_parameters()}
    for param in wide[2].parameters():
        param.grad = None
    wide(x).sum().backward()
    for name, param in wide.named_parameters():
        assert torch.equal(param.grad, once[name] * (1 if name.startswith("2") else 2))
    assert own_all([param.grad for param in wide.parameters()], flat.grad_vector())


def test_a_gradient_scaled_by_hand_does_not_count_as_reached(wide):
    """What was written between two backwards is no arrival in the second."""
    flatten(wide)
    wide(torch.randn(2, 96)).sum().backward()
    nn.utils.clip_grad_norm_(wide.parameters(), 1e-3)
    wide.zero_grad()
    wide[2](torch.randn(2, 96)).sum().backward()
    assert wide[1].weight.grad is None


def test_a_failed_backward_leaves_no_gradient_where_none_arrived(wide):
    """What arrived before the error stays, as in a plain module."""
    flatten(wide)
    bomb = wide[1].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        wide(torch.randn(2, 96)).sum().backward()
    bomb.remove()
    assert wide[0].bias.grad is None
    assert wide[2].bias.grad is not None


def _after_a_stop(model, optimizer, inside, anew, clear):
    """A step after a backward that was stopped in the middle, maybe in a hook of another one."""
    hooked = []
    watch = model[1].register_forward_hook(lambda *call: hooked.append(call[-1]))
    losses = [model(torch.ones(2, 96)).pow(2).sum()]
    watch.remove()
    stop = hooked[0].register_hook(lambda grad: 1 / 0)

    def run(grad=None):
        with pytest.raises(ZeroDivisionError):
            losses[0].backward(retain_graph=True)
        stop.remove()
        clear(model, optimizer)
        if anew:
            losses[0] = model(torch.ones(2, 96)).pow(2).sum()
        losses[0].backward()

    if inside:
        around = torch.ones(1, requires_grad=True) * 1
        around.register_hook(torch.enable_grad()(run))
        around.sum().backward()
    else:
        run()
    optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(
    "clear",
    [
        lambda model, optimizer: optimizer.zero_grad(),
        lambda model, optimizer: model.zero_grad(),
        lambda model, optimizer: None,
    ],
    ids=["by optimizer", "by module", "nothing"],
)
@pytest.mark.parametrize("anew", [False, True], ids=["same loss", "forward"])
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside another"])
def test_a_failed_backward_is_not_in_the_step_after_it(wide, inside, anew, clear):
    """What it has left counts as the plain module's does, and is cleared as it is."""
    plain = copy.deepcopy(wide)
    found = _after_a_stop(
        wide, torch.optim.SGD(flatten(wide).chunks(1 << 10), 0.1), inside, anew, clear
    )
    by_param = torch.optim.SGD(plain.parameters(), 0.1)
    for param, expected in zip(
        found, _after_a_stop(plain, by_param, inside, anew, clear), strict=True
    ):
        assert torch.equal(param, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_parts_give_the_same_gradients(wide, own_all, reentrant):
    """A backward inside a backward ends without ending the outer one."""
    x = torch.randn(2, 96, requires_grad=True)
    expected = torch.autograd.grad(wide(x).pow(2).sum(), list(wide.parameters()))
    flat = flatten(wide)
    for _ in range(2):
        wide.zero_grad()
        y = x
        for part in wide:
            y = checkpoint(part, y, use_reentrant=reentrant)
        y.pow(2).sum().backward()
    for param, grad in zip(wide.parameters(), expected, strict=True):
        assert torch.equal(param.grad, grad)
    assert own_all([param.grad for param in wide.parameters()], flat.grad_vector())


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


def test_a_module_that_clears_in_its_own_way_still_does(mlp):
    """An overridden `zero_grad` is called, and a parameter that came since is cleared too."""
    calls = []

    class Own(nn.Linear):
        def zero_grad(self, set_to_none=True):
            calls.append(set_to_none)
            super().zero_grad(set_to_none)

    own = Own(3, 2)
    flatten(own)
    own(torch.ones(1, 3)).sum().backward()
    own.zero_grad()
    assert calls == [True]
    assert own.weight.grad is None
    flatten(mlp)
    late = mlp[2] = nn.Linear(7, 3)
    late.weight.grad = torch.ones(3, 7)
    mlp.zero_grad()
    assert late.weight.grad is None


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_that_a_user_keeps_stay(mlp, own_all, shared):
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
