"""Side effects of forward: hooks, changed arguments, and weights from outside."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement


class Hooked(nn.Module):
    """Registers hooks in forward that scale gradients."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.of = of

    def forward(self, x):
        """Register hooks and call the layer."""
        (x if self.of == "input" else self.linear.weight).register_hook(lambda g: g * 1.5)
        return torch.tanh(self.linear(x)).exp()


class Cache:
    """Rows by layer, like a key and value cache."""

    def __init__(self) -> None:
        self.rows: dict[int, torch.Tensor] = {}

    def append(self, index, rows):
        """Append rows to those of a layer and return all of them."""
        old = self.rows.get(index)
        self.rows[index] = rows if old is None else torch.cat([old, rows])
        return self.rows[index]


class Cached(nn.Module):
    """Reads all rows that were appended so far."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.index = index

    def forward(self, x, cache):
        """Append to the cache and use it."""
        rows = cache.append(self.index, self.linear(x))
        return torch.softmax(x @ rows.mT, -1) @ rows


class Past:
    """A step count and rows from earlier steps."""

    def __init__(self, first) -> None:
        self.steps = 0
        self.past = ([first],)


class CachedPast(nn.Module):
    """Counts its steps in a cache and reads earlier rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, cache):
        """Count and read."""
        cache.steps += 1
        return torch.tanh(self.linear(x) * sum(cache.past[0]) * cache.steps).exp()


class Buffered(nn.Module):
    """Writes its rows into an existing tensor and reads the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, cache):
        """Write and read."""
        y = torch.tanh(self.linear(x))
        scale = cache.rows[0].clone()
        cache.rows[0].add_(1)
        return y * scale


def _step(model, *args):
    model.zero_grad()
    model(*args).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@requirement(
    "CW-094",
    "A hook that forward registers on an input or a parameter MUST act once per step, as in the "
    "plain module.",
    rationale=(
        "reproduced on torch 2.13: recomputation registers the hook again, so a gradient is "
        "scaled twice"
    ),
)
def test_hooks_of_a_forward_act_once(part, device):
    """On an input that is not a leaf, and on a parameter."""
    for of in ("input", "weight"):
        plain = Hooked(of).to(device)
        wrapped = part.checkpoint_wrapper(copy.deepcopy(plain))
        inputs = []
        grads = []
        for model in (plain, wrapped):
            leaf = torch.linspace(-1, 1, 8, device=device).view(2, 4).requires_grad_()
            grads.append(_step(model, leaf * 2))
            inputs.append(leaf.grad)
        assert torch.equal(*inputs)
        assert all(map(torch.equal, *grads))


@requirement(
    "CW-095",
    "If forward changes an argument, such as a cache that it appends to, gradients and the "
    "argument's final state MUST be those of the plain module.",
    rationale=(
        "reproduced on torch 2.13: recomputation appends to the cache again and reads the entries"
        " of both runs; shihao1895/MemoryVLA#18"
    ),
)
def test_a_cache_grows_once_a_step(part, device):
    """Three layers share the cache; the second step continues from the first."""
    plain = nn.ModuleList(Cached(i) for i in range(3)).to(device)
    wrapped = nn.ModuleList(part.checkpoint_wrapper(copy.deepcopy(layer)) for layer in plain)
    caches = Cache(), Cache()
    for _ in range(2):
        grads = []
        for layers, cache in zip((plain, wrapped), caches, strict=True):
            x = torch.linspace(-1, 1, 8, device=device).view(2, 4)
            for layer in layers:
                x = layer(x, cache)
            layers.zero_grad()
            x.sum().backward()
            grads.append([p.grad.clone() for p in layers.parameters()])
            cache.rows = {i: rows.detach() for i, rows in cache.rows.items()}
        assert all(map(torch.equal, *grads))
    assert all(torch.equal(caches[0].rows[i], caches[1].rows[i]) for i in range(3))


@requirement("CW-095")
def test_cache_entries_from_after_forward_are_not_read(part, device):
    """Other code appends to a list that forward reads."""
    plain = CachedPast().to(device)
    wrapped = part.checkpoint_wrapper(copy.deepcopy(plain))
    x, grads = torch.linspace(-1, 1, 8, device=device).view(2, 4), []
    for model in (plain, wrapped):
        cache = Past(torch.ones(2, 4, device=device))
        loss = model(x, cache).sum()
        cache.past[0].append(torch.ones(2, 4, device=device))
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
        assert (cache.steps, len(cache.past[0])) == (1, 2)
    assert all(map(torch.equal, *grads))


@requirement(
    "CW-096",
    "If forward changes a tensor inside an argument in place, either gradients MUST be those of "
    "the plain module, or an error MUST be raised before any gradient is returned.",
    rationale=(
        "pytorch#197039 for compiled code; reproduced on torch 2.13: recomputation reads the "
        "changed tensor, and gradients are silently wrong"
    ),
)
def test_a_tensor_changed_in_place_is_never_silently_wrong(part, device):
    """Either right, or an error before any gradient is returned."""
    plain = Buffered().to(device)
    wrapped = part.checkpoint_wrapper(copy.deepcopy(plain))
    x = torch.linspace(-1, 1, 8, device=device).view(2, 4)
    grads = []
    for model in (plain, wrapped):
        cache = Cache()
        cache.rows[0] = torch.ones(2, 4, device=device)
        try:
            grads.append(_step(model, x, cache))
        except RuntimeError:
            assert model is wrapped
            assert all(p.grad is None for p in wrapped.parameters())
            return
    assert all(map(torch.equal, *grads))


@requirement(
    "CW-100",
    "If `torch.func.functional_call` passes weights to a module, their gradients MUST be the "
    "plain module's, also if backward runs after the call has returned.",
    rationale=(
        "reproduced on torch 2.13: recomputation uses the module's own weights, and gradients are"
        " silently wrong"
    ),
)
def test_weights_of_a_functional_call_are_used_in_recompute(part, device):
    """Backward runs after the module has its own weights again."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(device)
    wrapped = part.checkpoint_wrapper(copy.deepcopy(plain))
    x = torch.linspace(-1, 1, 8, device=device).view(2, 4)
    grads = []
    for model in (plain, wrapped):
        given = {n: (p.detach() * 3).requires_grad_() for n, p in model.named_parameters()}
        loss = torch.func.functional_call(model, given, (x,)).exp().sum()
        loss.backward()
        grads.append([tensor.grad for tensor in given.values()])
        assert all(p.grad is None for p in model.parameters())
    assert all(map(torch.equal, *grads))


class Centred(nn.Module):
    """Subtracts an average that each forward advances, in place or by assignment."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.in_place = in_place
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x):
        """Advance the average and subtract it."""
        y = self.linear(x)
        centred = y - self.centre
        with torch.no_grad():
            if self.in_place:
                self.centre.lerp_(y.mean(0), 0.5)
            else:
                self.centre = self.centre.lerp(y.mean(0), 0.5)
        return torch.tanh(centred) * centred


@requirement(
    "CW-110",
    "Recomputation MUST read the value that a buffer had in forward, also if forward writes it, "
    "under both implementations.",
    rationale=(
        "pytorch#197039 for compiled code; reproduced on torch 2.13: recomputation reads the "
        "buffer that forward left, so gradients are silently wrong"
    ),
)
def test_a_buffer_that_forward_writes_has_its_value_in_recompute(part, device):
    """Gradients equal the plain module's in each of three steps."""
    for impl in part.CheckpointImpl:
        for in_place in (True, False):
            plain = Centred(in_place=in_place).to(device)
            inner = copy.deepcopy(plain)
            wrapped = part.checkpoint_wrapper(inner, impl)
            for _ in range(3):
                x = torch.randn(5, 4, device=device, requires_grad=True)
                inner.load_state_dict(plain.state_dict())
                for module in (plain, wrapped):
                    module(x).sum().backward()
                assert torch.equal(inner.linear.weight.grad, plain.linear.weight.grad), impl


class Doubled(nn.Module):
    """A linear layer whose weight other code doubles."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        """Call the layer."""
        return torch.tanh(self.linear(x))


@requirement(
    "CW-111",
    "If a parameter is changed in place between forward and backward, backward MUST raise an "
    "error that names the parameter, under both implementations, but optimizers that step after "
    "backward, or in backward once a parameter has its gradient, MUST work.",
    rationale=(
        "without checkpointing autograd raises; reproduced on torch 2.13: recomputation uses the "
        "new weights and gradients are silently wrong"
    ),
)
def test_a_parameter_changed_in_place_since_forward_is_an_error(part, device):
    """The error names the parameter."""
    for impl in part.CheckpointImpl:
        wrapped = part.checkpoint_wrapper(Doubled().to(device), impl)
        x = torch.randn(5, 4, device=device, requires_grad=True)
        loss = wrapped(x).sum()
        with torch.no_grad():
            next(wrapped.parameters()).mul_(2)
        with pytest.raises(RuntimeError, match=r"linear\.weight"):
            loss.backward()


def step(parameter: nn.Parameter) -> None:
    """Subtract a parameter's gradient from it."""
    with torch.no_grad():
        parameter.sub_(parameter.grad)
    parameter.grad = None


@requirement("CW-111")
def test_an_optimizer_step_in_or_after_backward_is_allowed(part, device):
    """Weights after three steps equal those of the plain model."""
    for impl in part.CheckpointImpl:
        for in_backward in (True, False):
            plain = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]).to(device)
            blocks = [part.checkpoint_wrapper(copy.deepcopy(one), impl) for one in plain]
            wrapped = nn.Sequential(*blocks)
            for module in (plain, wrapped):
                for parameter in module.parameters() if in_backward else ():
                    parameter.register_post_accumulate_grad_hook(step)
                for _ in range(3):
                    x = torch.ones(5, 4, device=device, requires_grad=True)
                    module(x).sum().backward()
                    for parameter in () if in_backward else module.parameters():
                        step(parameter)
            assert all(map(torch.equal, plain.parameters(), wrapped.parameters())), impl


class Mode:
    """A sentinel: users compare it with `is`."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


HALF, FULL = Mode(0.5), Mode(2.0)


class Moded(nn.Module):
    """Scales by a mode, which may be nested in a container, and reports which one it got."""

    def __init__(self, report) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.report = report

    def forward(self, x, mode=None, nested=None):
        """Scale and call the layer."""
        mode = nested["mode"][0] if mode is None else mode
        self.report("HALF" if mode is HALF else "FULL" if mode is FULL else "a copy")
        return torch.tanh(self.linear(x) * (0.5 if mode is HALF else 2.0))


@requirement(
    "CW-120",
    "An argument that nothing changes MUST be the same object in recomputation as in forward, "
    "whether it is positional, by keyword or in a container.",
    rationale=(
        "sentinels and modes are compared with `is`; with a copy recomputation takes the other "
        "branch, and gradients are silently wrong"
    ),
)
def test_an_argument_compared_by_identity_stays_the_same_object(part, device):
    """Forward and recomputation see the sentinel that was passed."""
    given = ((HALF,), {}), ((), {"mode": HALF}), ((), {"nested": {"mode": [HALF]}})
    for args, kwargs in given:
        seen = []
        plain = Moded(str).to(device)
        wrapped = part.checkpoint_wrapper(Moded(seen.append).to(device))
        wrapped.load_state_dict(plain.state_dict())
        x = torch.linspace(-1, 1, 8, device=device).view(2, 4)
        grads = []
        for model in (plain, wrapped):
            model(x, *args, **kwargs).sum().backward()
            grads.append([p.grad for p in model.parameters()])
        assert seen == ["HALF", "HALF"]
        assert all(map(torch.equal, *grads))
