"""Process-wide flags, own generators, and modes that code sets inside a region."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sac_policies import CONVOLUTIONS, checkpoint, recompute_all, save_ops
from sac_policies._torch_compat._flags import flags_of

numpy = pytest.importorskip("numpy")
pytestmark = pytest.mark.filterwarnings(
    "ignore::sac_policies.UnmatchedEntryWarning",
    "ignore:TF32 acceleration on top of oneDNN:UserWarning",
)

POLICIES = {"nothing": recompute_all(), "convolutions": save_ops(CONVOLUTIONS)}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


class Block(nn.Module):
    """Two convolutions with a function between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 16, 3), nn.Conv2d(16, 8, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        """Apply them."""
        return self.two(self.between(self.one(x).sin())).cos()


def outcome(block: nn.Module, run: Any) -> list[Tensor]:
    """Gradients, and what generators give after the step."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    x = torch.linspace(-1, 1, 2 * 8 * 144).view(2, 8, 12, 12).requires_grad_()
    out = run(block, x)
    found = list(torch.autograd.grad(out.square().sum(), [x, *block.parameters()]))
    return [*found, torch.rand(2), torch.tensor([random.random(), numpy.random.rand()])]


def compare(block: nn.Module, policy: Any) -> None:
    """Compare a block in a region with the plain one, with and without comparison of bits."""
    expected = outcome(block, lambda block, x: block(x))
    for check in ("bits", "none"):
        options = {"policy": policy, "determinism_check": check}
        found = outcome(block, lambda block, x, options=options: checkpoint(block, x, **options))
        assert all(map(torch.equal, found, expected))


class Without(nn.Module):
    """Runs a module without oneDNN."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Switch oneDNN off for the call."""
        with torch.backends.mkldnn.flags(enabled=False):
            return self.inner(x).sin()


@every_policy
def test_library_switched_off_inside_a_region_is_off_in_its_replay(policy):
    """Another library gives other bits."""
    torch.manual_seed(0)
    block = Without(nn.Conv2d(8, 16, 3))
    compare(nn.Sequential(block, nn.Conv2d(16, 4, 3)), policy)


@every_policy
def test_library_switched_off_around_forward_is_off_in_its_replay(policy):
    """Backward runs outside of the block; the switch is as before after it."""
    torch.manual_seed(0)
    block = Block(torch.tanh)

    def run(call: Any) -> Any:
        def switched(block: nn.Module, x: Tensor) -> Tensor:
            with torch.backends.mkldnn.flags(enabled=False):
                return call(block, x)

        return switched

    expected = outcome(block, run(lambda block, x: block(x)))
    found = outcome(block, run(lambda block, x: checkpoint(block, x, policy=policy)))
    assert all(map(torch.equal, found, expected))
    assert torch.backends.mkldnn.enabled


@pytest.mark.parametrize("name", ["convolution", "mm", "mkldnn_rnn_layer", "scatter_add_"])
def test_flags_are_set_during_a_call_only(name):
    """Also if it raises; each is put back to what it was."""
    flags = flags_of(name)
    before = flags.read()
    other = (not before[0], *[not each if isinstance(each, bool) else each for each in before[1:]])
    assert flags.set_to(other, flags.read) == other
    with pytest.raises(ZeroDivisionError):
        flags.set_to(other, lambda: 1 // 0)
    assert flags.read() == before


def without_gradients(x: Tensor) -> Tensor:
    """Switches gradients off and on in the middle."""
    torch.set_grad_enabled(False)
    scale = x.abs().mean()
    torch.set_grad_enabled(True)
    with torch.no_grad():
        shift = x.mean()
        with torch.enable_grad():
            x = x * scale
    return (x + shift).exp()


def in_half(x: Tensor) -> Tensor:
    """Enters autocast, and leaves it for a part."""
    weight = torch.eye(x.shape[-1])
    with torch.autocast("cpu", torch.bfloat16):
        x = (x @ weight).sin()
        with torch.autocast("cpu", enabled=False):
            x = (x.float() @ weight).cos()
        return (x @ weight).float()


def in_inference(x: Tensor) -> Tensor:
    """Computes a constant in inference mode."""
    with torch.inference_mode():
        scale = torch.arange(x.shape[-1]).div(7.0)
    return (x + scale.clone()).sin()


def deterministic(x: Tensor) -> Tensor:
    """Adds up with deterministic algorithms only."""
    index = torch.arange(x.shape[-1]) // 2
    torch.use_deterministic_algorithms(True)
    try:
        return torch.zeros_like(x).index_add(3, index, x.sin()).cos()
    finally:
        torch.use_deterministic_algorithms(False)


def draws(x: Tensor) -> Tensor:
    """Draws from generators of its own, of torch, of Python and of NumPy."""
    own = torch.Generator().manual_seed(3)
    noise = torch.randn(x.shape, generator=own) * random.random() + numpy.random.rand()
    kept = torch.empty_like(x).bernoulli_(0.7, generator=own)
    return (x * noise * kept).sin() + nn.functional.dropout(x.cos(), 0.3)


BETWEEN = (without_gradients, in_half, in_inference, deterministic, draws)


@every_policy
@pytest.mark.parametrize("between", BETWEEN, ids=lambda each: each.__name__)
def test_modes_and_generators_inside_a_region_are_bit_identical(between, policy):
    """They act when forward runs; backward neither sets a mode nor draws a number."""
    torch.manual_seed(0)
    compare(Block(between), policy)
