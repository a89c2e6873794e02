"""`flatten` and `unflatten`, there and back."""

import copy
import io

import pytest
import torch
from torch import nn

import flat_param
from flat_param import ParameterError, StateError, flat_params_of, flatten, unflatten


class Branch(nn.Module):
    """Tied weights, a parameter beside its modules, and one of transposed strides."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.randn(4, 3).t())
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, x):
        return (self.second(torch.tanh(self.first(x))) * self.scale.sum(0) + self.frozen).sum()


def everything_of(module):
    """What the modules of a tree carry, by identity of what Python lets one compare."""
    kept = []
    for owner in module.modules():
        entries = {name: id(value) for name, value in vars(owner).items()}
        hooks = {name: len(value) for name, value in vars(owner).items() if "hooks" in name}
        kept.append((type(owner), list(entries.items()), hooks, list(owner._parameters)))
    return kept


def stepped(module, optimizer, x):
    """One step; the loss, and what the parameters are then."""
    optimizer.zero_grad()
    loss = module(x)
    loss.backward()
    optimizer.step()
    return [loss.item(), *(param.detach().clone() for param in module.parameters())]


@pytest.mark.parametrize("used", [False, True])
def test_unflatten_leaves_the_module_that_was(used):
    """Same objects, values, strides, hooks and attributes; each parameter in its own storage."""
    model = Branch()
    params = [(param, param.detach().clone(), param.stride()) for param in model.parameters()]
    before = everything_of(model)
    flatten(model)
    if used:
        model(torch.ones(2, 4))
    unflatten(model)
    assert everything_of(model) == before
    for (param, value, stride), now in zip(params, model.parameters(), strict=True):
        assert now is param
        assert torch.equal(now, value)
        assert now.stride() == stride
        assert now.untyped_storage().nbytes() == now.numel() * 4
        assert not now._post_accumulate_grad_hooks
    assert flat_params_of(model) is None


def test_unflatten_keeps_gradients_optimizers_and_hooks():
    """Training goes on, bit for bit as in a module that was never flattened."""
    model = Branch()
    plain = copy.deepcopy(model)
    called = []
    model.first.weight.register_post_accumulate_grad_hook(called.append)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    x = torch.randn(3, 4)
    flatten(model)
    for m, optimizer in zip((model, plain), optimizers, strict=True):
        stepped(m, optimizer, x)
        m(x).backward()
    grads = [param.grad for param in model.parameters()]
    unflatten(model)
    for param, grad, other in zip(model.parameters(), grads, plain.parameters(), strict=True):
        assert param.grad is grad
        if grad is not None:
            assert torch.equal(grad, other.grad)
            assert grad.untyped_storage().nbytes() == grad.numel() * 4
    ours, theirs = (stepped(m, o, x) for m, o in zip((model, plain), optimizers, strict=True))
    assert ours[0] == theirs[0]
    assert all(torch.equal(a, b) for a, b in zip(ours[1:], theirs[1:], strict=True))
    assert len(called) == 3


@pytest.mark.parametrize("copied", ["deepcopy", "torch.save"])
def test_a_copy_is_unflattened_alone(mlp, copied):
    """Nothing of the package stays on it, and the original stays flat."""
    before = [sorted(vars(module)) for module in mlp.modules()]
    flat = flatten(mlp)
    if copied == "deepcopy":
        twin = copy.deepcopy(mlp)
    else:
        file = io.BytesIO()
        torch.save(mlp, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    unflatten(twin)
    assert [sorted(vars(module)) for module in twin.modules()] == before
    homes = {param.untyped_storage().data_ptr() for param in twin.parameters()}
    assert len(homes) == 4
    mlp(torch.ones(1, 5)).sum().backward()
    assert flat.grad_norm()


def test_the_view_of_an_unflattened_module_says_so(mlp):
    """Its calls name the reason, and so do the chunks of an optimizer, also without the view."""
    flat = flatten(mlp)
    optimizer = torch.optim.SGD(flat.chunks(), lr=0.1)
    unflatten(mlp)
    assert flat.module is mlp
    assert repr(flat) == "FlatParams(Sequential, unflattened)"
    steps = (optimizer.step, optimizer.zero_grad)
    for use in (flat.as_vector, flat.zero_grad, flat.norm, *steps):
        with pytest.raises(
            StateError, match=r"flat_param.FlatParams: Sequential was unflattened, but"
        ):
            use()
    del flat
    for use in steps:
        with pytest.raises(StateError, match="the module was unflattened, but"):
            use()


def test_unflatten_refuses_what_is_not_a_flattened_root(mlp):
    """A plain module, and a part of a flattened one."""
    with pytest.raises(StateError, match="Sequential is not flattened, but only what"):
        unflatten(mlp)
    flat = flatten(mlp)
    with pytest.raises(StateError, match="Linear is not the root of a flattened module, but only"):
        unflatten(mlp[0])
    assert flat.numel == 72


def test_unflatten_within_a_backward_leaves_the_plain_gradients(mlp):
    """Gradients that arrive later are those of the plain module, too."""
    plain = copy.deepcopy(mlp)
    flatten(mlp)
    for model in (mlp, plain):
        model(torch.ones(1, 5)).sum().backward()
        hidden = model[:2](torch.ones(1, 5))
        hidden.register_hook(lambda grad: None if flat_params_of(mlp) is None else unflatten(mlp))
        model[2](hidden).sum().backward()
    assert flat_params_of(mlp) is None
    for ours, theirs in zip(mlp.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
        assert ours.grad.untyped_storage().nbytes() == ours.grad.nbytes


def test_data_of_another_shape_makes_a_new_plan(mlp):
    """As `resize_token_embeddings` does it: the same object, with more rows; gradients bitwise."""
    plain = copy.deepcopy(mlp)
    flat = flatten(mlp)
    mlp(torch.ones(1, 5))
    x = torch.randn(2, 5)
    for m in (mlp, plain):
        rows = torch.arange(28.0).view(4, 7)
        m[2].weight.data, m[2].bias.data = rows, torch.zeros(4)
        m(x).pow(2).sum().backward()
    assert flat.numel == 36 + 8 + 28 + 4
    home = flat.as_vector()[44:].data_ptr()
    assert mlp[2].weight.data_ptr() == home
    for ours, theirs in zip(mlp.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_data_of_another_shape_keeps_ties():
    """The one object has one place, of the new size."""
    model = Branch()
    flat = flatten(model)
    wide = torch.randn(6, 4)
    model.first.weight.data, model.first.bias.data = wide, torch.zeros(6)
    assert model.second.weight is model.first.weight
    assert sorted(flat.layouts["float32"].specs[1].names) == ["first.weight", "second.weight"]


def test_a_gradient_of_the_old_shape_is_refused_by_name(mlp):
    """A plain module fails in the backward; here the flat view says what to do, too."""
    flat = flatten(mlp)
    mlp(torch.ones(1, 5)).sum().backward()
    mlp[2].weight.data, mlp[2].bias.data = torch.ones(4, 7), torch.zeros(4)
    words = r"parameter '2.weight' has shape \(4, 7\) and a gradient of shape \(3, 7\), but"
    with pytest.raises(ParameterError, match=words):
        flat.as_vector()
    mlp.zero_grad()
    mlp(torch.ones(1, 5)).sum().backward()
    assert torch.equal(mlp[2].bias.grad, torch.ones(4))


def test_chunks_in_use_name_a_way_out_that_works(mlp):
    """Another shape is refused while an optimizer has chunks; what is advised goes on training."""
    flat = flatten(mlp)
    optimizer = torch.optim.SGD(flat.chunks(16), lr=0.1)
    mlp[2].weight.data, mlp[2].bias.data = torch.ones(4, 7), torch.zeros(4)
    with pytest.raises(StateError, match=r"Call flat_param.unflatten\(module\), flatten it again"):
        optimizer.step()
    unflatten(mlp)
    optimizer = torch.optim.SGD(flatten(mlp).chunks(16), lr=0.1)
    mlp(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    assert torch.equal(mlp[2].bias, torch.full((4,), -0.1))


@pytest.mark.parametrize("features", [8, 128])  # gradients that are added in place, and copied
@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupt_as_a_hook_is_placed_leaves_no_hook_that_acts(monkeypatch, features, at):
    """Ctrl-C just after the effect: the module works as it is, and can be flattened."""
    model = nn.Sequential(*(nn.Linear(features, features) for _ in range(3)))
    real, calls = torch.Tensor.register_post_accumulate_grad_hook, []

    def interrupted(self, hook):
        handle = real(self, hook)
        calls.append(handle)
        if len(calls) == at:
            raise KeyboardInterrupt
        return handle

    x = torch.ones(2, features)
    model(x).sum().backward()
    expected = [param.grad.clone() for param in model.parameters()]
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "register_post_accumulate_grad_hook", interrupted)
        with pytest.raises(KeyboardInterrupt):
            flat_param.flatten(model)
    for again in range(2):
        model.zero_grad()
        model(x).sum().backward()
        found = [param.grad for param in model.parameters()]
        assert all(map(torch.equal, found, expected))
        if not again:
            flat_param.flatten(model)
