import copy
import io

import pytest
import torch
from torch import nn

from flat_param import StateError, flat_params_of, flatten


class _PerParameter(torch.optim.Optimizer):
    """Plain descent, with a factor for each parameter."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def factor(self, param):
        return 1.0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param -= group["lr"] * self.factor(param) * param.grad


class _NormPerParameter(_PerParameter):
    """As in LARS."""

    def factor(self, param):
        return param.norm() / param.grad.norm()


class _Noisy(_PerParameter):
    """Draws other numbers for a longer parameter."""

    def factor(self, param):
        return torch.randn_like(param)


class _WithAnObject(_NormPerParameter):
    """A copy would share the object."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.seen = object()


class _Counting(_PerParameter):
    """Counts its steps in a list."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.steps = []

    def factor(self, param):
        self.steps.append(param.numel())
        return 1.0


class _SumOverAll(_PerParameter):
    """As Prodigy does."""

    def factor(self, param):
        return sum(p.grad.square().sum() for g in self.param_groups for p in g["params"])


def test_a_cleared_chunk_has_no_gradient_until_a_backward(mlp):
    """A step after `zero_grad` moves nothing, as it would for parameters."""
    flat = flatten(mlp)
    optimizer = torch.optim.AdamW(flat.chunks(16), lr=0.1, weight_decay=0.5)
    leaves = optimizer.param_groups[0]["params"]
    assert all(leaf.grad is None for leaf in leaves)
    mlp(torch.ones(1, 5)).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves)
    optimizer.zero_grad()
    before = flat.as_vector().clone()
    optimizer.step()
    assert torch.equal(flat.as_vector(), before)


def test_chunk_grads_can_be_assigned(mlp):
    """A gradient given to a chunk is the parameters' gradient."""
    flat = flatten(mlp)
    (leaf,) = flat.chunks()
    leaf.grad = torch.ones_like(leaf)
    assert mlp[0].weight.grad is None
    assert torch.equal(leaf.grad, torch.ones_like(leaf))


def test_grad_scaler_unscales_and_steps_chunks(mlp):
    """AMP's scaler sees chunks as parameters."""
    plain = copy.deepcopy(mlp)
    flat = flatten(mlp)
    for model, params in ((mlp, flat.chunks(16)), (plain, list(plain.parameters()))):
        optimizer = torch.optim.SGD(params, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 5)).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    for ours, theirs in zip(mlp.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_chunk_is_copied_and_saved_as_a_plain_parameter(mlp):
    """A copy or a loaded file is an independent tensor."""
    (leaf,) = flatten(mlp).chunks()
    file = io.BytesIO()
    torch.save(leaf, file)
    file.seek(0)
    for copied in (copy.deepcopy(leaf), torch.load(file, weights_only=True)):
        assert torch.equal(copied, leaf)
        assert copied.data_ptr() != leaf.data_ptr()
        assert copied.grad is None


def test_gaps_stay_zero_under_training(mlp):
    """An optimizer with weight decay and momentum does not move the padding."""
    flat = flatten(mlp)
    optimizer = torch.optim.AdamW(flat.chunks(16), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        mlp(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
    (layout,) = flat.layouts.values()
    assert layout.gaps
    assert all(not flat.as_vector()[a:b].any() for a, b in layout.gaps)


def test_gradient_of_a_chunk_is_one_object(mlp):
    """As a parameter's is: looked at twice it is the same, and what is written to it stays."""
    flat = flatten(mlp)
    first, second = flat.chunks(16)[:2]
    mlp(torch.ones(2, 5)).sum().backward()
    assert first.grad is first.grad
    assert first.grad is not second.grad
    first.grad.fill_(3.0)
    assert flat.grad_vector()[:16].tolist() == [3.0] * 16


@pytest.mark.parametrize(
    ("device", "sizes"), [("cpu", [1 << 18, 1024]), ("meta", [(1 << 18) + 1024])]
)
def test_chunks_have_their_devices_default_size(device, sizes):
    """Of one segment that is larger than a cache, and one that is not."""
    model = torch.nn.ParameterList([torch.ones((1 << 18) + 1024, device=device)])
    assert [chunk.numel() for chunk in flatten(model).chunks()] == sizes
    model = torch.nn.ParameterList([torch.ones(8, device=device)])
    assert [chunk.numel() for chunk in flatten(model).chunks()] == [8]


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_chunks_on_an_accelerator_are_whole_segments():
    """One leaf for each trainable segment, which trains as the parameters do."""
    device = torch.accelerator.current_accelerator()
    model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(600, 4)).to(device)
    plain = copy.deepcopy(model)
    flat = flatten(model)
    chunks = flat.chunks()
    assert [chunk.numel() for chunk in chunks] == [flat.numel]
    for module, params in ((model, chunks), (plain, list(plain.parameters()))):
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            module(torch.ones(2, 600, device=device)).sum().backward()
            optimizer.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("make", [torch.optim.Adafactor, _NormPerParameter])
def test_optimizer_of_whole_parameters_is_refused(mlp, make):
    """By what it does to one flat parameter and to two; nothing has changed."""
    flat = flatten(mlp)
    before = flat.as_vector().clone()
    optimizer = make(flat.chunks(), lr=0.1)
    mlp(torch.ones(2, 5)).sum().backward()
    with pytest.raises(
        StateError, match=f"{make.__name__} computes with each parameter as a whole"
    ):
        optimizer.step()
    assert torch.equal(flat.as_vector(), before)
    assert not optimizer.state


@pytest.mark.parametrize("make", [_Noisy, _WithAnObject, _SumOverAll, _Counting])
def test_optimizer_that_may_step_chunks_does(mlp, make):
    """Random ones, those that cannot be copied, and those that add up over all parameters."""
    flat = flatten(mlp)
    before, generator = flat.as_vector().clone(), torch.get_rng_state()
    optimizer = make(flat.chunks(), lr=0.1)
    mlp(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), generator) == (make is not _Noisy)
    assert not torch.equal(flat.as_vector(), before)
    assert getattr(optimizer, "steps", [flat.numel]) == [flat.numel]


@pytest.mark.parametrize("write", ["step", "load", "average"])
def test_backward_notices_that_parameters_were_written(mlp, write):
    """As in plain training, autograd refuses a backward through a forward before a step."""
    flat, x = flatten(mlp), torch.ones(2, 5)
    optimizer = torch.optim.SGD(flat.chunks(8), lr=0.1)
    out = mlp(x)
    out.square().sum().backward(retain_graph=True)
    if write == "step":
        optimizer.step()
    elif write == "load":
        flat.load_vector(flat.as_vector().clone())
    else:
        flat.lerp_(flat_params_of(copy.deepcopy(mlp)), 0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_step_over_some_chunks_is_no_write_to_the_other_parameters(mlp):
    """Two optimizers, one for each half, as of two players."""
    flat, x = flatten(mlp), torch.ones(2, 5)
    (start, _), *_ = flat.layouts[next(iter(flat.layouts))].ranges[2:]
    first, second = flat.chunks(start)[:2]
    out = mlp[0](x)
    mlp(x).sum().backward()
    first.grad = None
    torch.optim.SGD([first, second], lr=0.1).step()
    out.sum().backward()


@pytest.mark.parametrize("how", ["none", "other"])
def test_middle_gradient_cleared_before_a_step_is_not_applied(how):
    """As for separate parameters, which are compared before each step."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    plain = copy.deepcopy(layers)
    flat = flatten(layers)
    flat_optimizer = torch.optim.SGD(flat.chunks(), lr=0.1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for model in (layers, plain):
        model(torch.ones(2, 4)).square().sum().backward()
    flat.clip_(1.0)
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    for model in (layers, plain):
        for param in model[1].parameters():
            param.grad = None if how == "none" else torch.ones_like(param)
    flat_optimizer.step()
    optimizer.step()
    for param, same in zip(layers.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param, same)
