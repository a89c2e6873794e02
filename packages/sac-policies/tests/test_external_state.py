"""Contexts engine: what a region writes to and did not make is read again as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from sac_policies import (
    EngineError,
    MutationError,
    checkpoint,
    name,
    offload,
    recompute_all,
    save_all,
    save_named,
    save_ops,
)
from sac_policies.engines.contexts import _external_state

POLICIES = {
    "recompute": recompute_all(),
    "products": save_ops("aten.addmm", "aten.mm"),
    "writes": save_ops("aten.add_.Tensor", "aten.lerp_.Scalar"),
    "norms": save_ops("aten.native_batch_norm"),
    "names": save_named("normed", missing_ok=True),
    "all": save_all(),
    "offload": offload(save_all()),
}


class _Reads(nn.Module):
    """Reads state and writes to it; x is (4, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("state", torch.linspace(-1, 1, 8))


class _Average(_Reads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.state.lerp_(y.mean(0), 0.1)
        return torch.tanh(y - self.state) * y


class _ReadThenWrite(_Reads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) + self.state
        self.state.add_(1)
        return torch.tanh(y) * y


class _PastTheCounter(_Reads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) + self.state
        self.state.data[2:5].mul_(0.5)
        self.state.data[3:].add_(1)
        return torch.tanh(y) * y


class _OwnBias(_Reads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.linear.bias.mul_(0.5)
        return torch.tanh(y) * y


class _Overwritten(_Reads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.state.copy_(y.detach().mean(0))
        self.state.mul_(2)
        return torch.tanh(y - self.state) * y


class _OverwrittenThenFollowed(nn.Module):
    """What one region overwrites, the next one follows."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([_Overwritten(), _Average()])
        self.parts[1].state = self.parts[0].state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = checkpoint(part, x, policy=recompute_all(), engine="contexts")
        return x


class _Codebook(_Reads):
    """The nearest of a table's rows, which then move, as in a VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        nearest = torch.cdist(y.detach(), self.table).argmin(1)
        found = self.table[nearest]
        with torch.no_grad():
            self.table.index_add_(0, nearest, y, alpha=0.3)
        return torch.tanh(y * found) + (found - y).detach() + y


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))


class _NormThenRead(nn.Module):
    """Reads the statistics that batch norm has just written to, and names what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = name(self.norm(self.linear(x)), "normed")
        return y.tanh() * (self.norm.running_mean * 3 + self.norm.running_var)


def _spectral() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8))


MODULES = [
    _Average,
    _ReadThenWrite,
    _PastTheCounter,
    _OwnBias,
    _Overwritten,
    _Codebook,
    _normed,
    _NormThenRead,
    _spectral,
]


def _train(make, run, *, backward=torch.autograd.grad) -> list[torch.Tensor]:
    """Gradients of three steps, and what is then in parameters and buffers."""
    torch.manual_seed(0)
    module, x = make(), torch.randn(4, 8, requires_grad=True)
    found: list[torch.Tensor] = []
    for _ in range(3):
        found += backward(run(module, x).sum(), [*module.parameters(), x])
    return found + [each.detach().clone() for each in (*module.parameters(), *module.buffers())]


def _region(policy, **kwargs):
    return lambda module, x: checkpoint(module, x, policy=policy, engine="contexts", **kwargs)


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", MODULES)
def test_gradients_and_state_are_plains(make, policy, equal):
    """Whatever is kept: three steps give the gradients and the buffers of no checkpointing."""
    expected = _train(make, lambda module, x: module(x))
    for early_stop in (True, False):
        assert equal(_train(make, _region(POLICIES[policy], early_stop=early_stop)), expected)


@pytest.mark.parametrize("make", MODULES)
def test_nested_regions_and_second_backwards_find_it_too(make, equal):
    """A region in a region is run again from within, and a graph that stays is read twice."""
    inner = _region(recompute_all())

    def nested(module, x):
        return checkpoint(
            lambda t: inner(module, t.sin()).cos(), x, policy=recompute_all(), engine="contexts"
        )

    def twice(out, tensors):
        first = torch.autograd.grad(out, tensors, retain_graph=True)
        assert equal(list(first), list(torch.autograd.grad(out, tensors)))
        return first

    expected = _train(make, lambda module, x: module(x.sin()).cos())
    assert equal(_train(make, nested), expected)
    assert equal(_train(make, nested, backward=twice), expected)


@pytest.mark.parametrize("make", MODULES)
def test_two_forwards_before_their_backwards(make, equal):
    """Each backward reads what its own forward read; the last forward's writing stays."""

    def train(run):
        torch.manual_seed(0)
        module, x = make(), torch.randn(4, 8, requires_grad=True)
        outs = [run(module, x).sum(), run(module, x * 2).sum()]
        found = []
        for out in outs:
            try:
                found += torch.autograd.grad(out, [*module.parameters(), x])
            except RuntimeError:  # autograd saved what the second forward wrote to
                return None
        return found + [each.clone() for each in module.buffers()]

    expected = train(lambda module, x: module(x))
    if expected is not None:
        assert equal(train(_region(recompute_all())), expected)


def test_gradient_inside_the_forward(equal):
    """A recomputation of a region that still runs writes what the forward wrote, no more."""

    def run(wrap):
        torch.manual_seed(0)
        module, x = _ReadThenWrite(), torch.randn(4, 8, requires_grad=True)

        def function(t):
            y = module(t)
            (inner,) = torch.autograd.grad(y.sum(), t, retain_graph=True)
            return y * inner

        out = wrap(function, x)
        return [*torch.autograd.grad(out.sum(), [*module.parameters(), x]), module.state.clone()]

    plain = run(lambda function, x: function(x))
    assert equal(run(_region(recompute_all())), plain)


def test_operator_that_writes_to_something_else_than_it_returns_is_not_kept():
    """What it returned would be taken for what it wrote."""

    @torch.library.custom_op("sac_policies_tests::counted", mutates_args={"total"})
    def counted(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total += x
        return x.sin()

    x, total = torch.randn(4, 8, requires_grad=True), torch.zeros(4, 8)

    def function(t):
        return counted(t.detach(), total).tanh() * total * t

    with pytest.raises(EngineError, match="returns Tensor, not what it writes to, but only one"):
        checkpoint(function, x, policy=save_all(), engine="contexts")


class _Stop(BaseException):
    pass


def test_what_another_region_wrote_after_that_stays(equal):
    """A recomputation overwrites what has moved on since; it is there again afterwards."""

    def plain(module, x):
        for part in module.parts:
            x = part(x)
        return x

    expected = _train(_OverwrittenThenFollowed, plain)
    assert equal(_train(_OverwrittenThenFollowed, lambda module, x: module(x)), expected)


@pytest.mark.parametrize("error", [_Stop, ValueError])
def test_recomputation_that_fails_leaves_the_state_as_it_was(error):
    """An interrupt in the middle of the second run changes nothing."""
    module, x, runs = _ReadThenWrite(), torch.randn(4, 8, requires_grad=True), []

    def function(t):
        out = module(t)
        runs.append(1)
        if len(runs) == 2:
            raise error
        return out.sin()

    out = checkpoint(function, x, policy=recompute_all(), engine="contexts")
    state = module.state.clone()
    with pytest.raises(error):
        out.sum().backward()
    assert torch.equal(module.state, state)


def test_interrupt_between_two_that_are_put_back_changes_nothing(monkeypatch):
    """The first is there again."""
    module, x = _normed(), torch.randn(4, 8, requires_grad=True)
    out = checkpoint(module, x, policy=recompute_all(), engine="contexts")
    buffers = [each.clone() for each in module.buffers()]

    def interrupted(there):
        yield list(there)[-1]
        raise _Stop

    monkeypatch.setattr(_external_state, "reversed", interrupted, raising=False)
    with pytest.raises(_Stop):
        out.sum().backward()
    assert all(map(torch.equal, module.buffers(), buffers))


def test_interrupt_of_the_putting_back_is_made_good(monkeypatch):
    """One Ctrl-C between two copies: both are made."""
    module, x, copies = _normed(), torch.randn(4, 8, requires_grad=True), []
    out = checkpoint(module, x, policy=recompute_all(), engine="contexts")
    buffers = [each.clone() for each in module.buffers()]
    real = _external_state.Found._leave

    def interrupted(found):
        copies.append(len(found.values))
        if len(copies) == 1:
            tensor, value, _ = found.values[0]
            tensor.copy_(value)
            raise _Stop
        real(found)

    monkeypatch.setattr(_external_state.Found, "_leave", interrupted)
    with pytest.raises(_Stop):
        out.sum().backward()
    assert copies[0] > 1
    assert all(map(torch.equal, module.buffers(), buffers))


def test_statistics_that_were_given_other_data_are_refused():
    """They would advance twice."""
    module, x = _normed(), torch.randn(4, 8, requires_grad=True)
    out = checkpoint(module, x, policy=recompute_all(), engine="contexts")
    module[1].running_mean.data = module[1].running_mean.data * 0.5
    with pytest.raises(MutationError, match="was given other data after the region read it"):
        out.sum().backward()


def test_what_others_saved_of_the_state_is_not_refused(equal):
    """The recomputation's writes are undone: nobody's version has changed."""

    def run(wrap):
        torch.manual_seed(0)
        module, x = _ReadThenWrite(), torch.randn(4, 8, requires_grad=True)
        first = wrap(module, x)
        other = x * module.state  # autograd saves it
        # The region's backward runs before that of the product, by its hand.
        grads = torch.autograd.grad(first.sum(), [*module.parameters(), x])
        return [*grads, *torch.autograd.grad(other.sum(), x)]

    plain = run(lambda function, x: function(x))
    assert equal(run(_region(recompute_all())), plain)


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize("policy", ["recompute", "products"])
def test_state_that_was_given_other_data_is_refused(policy):
    """There is nothing to put back where it lies now."""
    module, x = _ReadThenWrite(), torch.randn(4, 8, requires_grad=True)
    out = checkpoint(module, x, policy=POLICIES[policy], engine="contexts")
    module.state.data = module.state.data * 0.5
    with pytest.raises(
        MutationError,
        match=r"sac_policies\.checkpoint: tensor of shape \(8,\) was given other data after the "
        r"region read it, but aten\.add\.Tensor of the recomputation reads it as it was "
        r"\(read .*\)\. Change it after backward\.",
    ):
        out.sum().backward()


def test_what_the_region_makes_is_not_copied(monkeypatch):
    """Masks and sums that are filled in place are made again; caches that are overwritten too."""
    copies = []
    monkeypatch.setattr(_external_state, "copied", lambda tensor: copies.append(tensor))
    cache = torch.zeros(4, 8)

    def function(t):
        mask = torch.ones(8, 8).tril_().mul_(2)
        total = torch.zeros_like(t).index_add_(0, torch.tensor([0, 1, 2, 3]), t.sin())
        cache.copy_(total.detach())
        return (total @ mask).tanh()

    x = torch.randn(4, 8, requires_grad=True)
    checkpoint(function, x, policy=recompute_all(), engine="contexts").sum().backward()
    assert copies == []
