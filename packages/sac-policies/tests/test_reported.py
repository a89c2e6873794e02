"""Faults that users of checkpointing reported to other projects; none of them is silent here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sac_policies import MATMULS, checkpoint, recompute_all, save_ops

POLICIES = [recompute_all(), save_ops(MATMULS)]


def gradients(run: Callable[[Tensor], Tensor], x: Tensor, module: nn.Module) -> list[Tensor]:
    """Gradients of the input and of all parameters."""
    return list(torch.autograd.grad(run(x).square().sum(), [x, *module.parameters()]))


def leaf(*shape: int) -> Tensor:
    """Spread values that need a gradient."""
    numel = torch.Size(shape).numel()
    return torch.linspace(-1.3, 1.7, numel).reshape(shape).requires_grad_()


@pytest.mark.parametrize("policy", POLICIES)
def test_noise_that_is_saved_before_it_is_written(policy: Any) -> None:
    """pytorch#193671: `nn.RReLU` saves its noise, and its kernel fills it after that."""
    block, x = nn.Sequential(nn.Linear(64, 64), nn.RReLU(), nn.Linear(64, 64)), leaf(32, 64)
    for seed in range(3):
        torch.manual_seed(seed)
        plain = gradients(block, x, block)
        torch.manual_seed(seed)
        found = gradients(lambda t: checkpoint(block, t, policy=policy), x, block)
        assert all(map(torch.equal, found, plain))


class Retrying(nn.Module):
    """Fails in its second attempt, which a second forward would make, and tries again."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.tries = nn.Parameter(torch.randn(16, 16) / 4), 0

    def attempt(self, x: Tensor) -> Tensor:
        h = (x @ self.w).sin().exp()
        self.tries += 1
        if self.tries == 2:
            raise MemoryError
        return h * (h @ self.w).tanh()

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.attempt(x)
        except MemoryError:
            return self.attempt(x)


@pytest.mark.parametrize("policy", POLICIES)
def test_function_that_tries_again_runs_once(policy: Any) -> None:
    """unsloth-zoo#1047: a second forward that retries saves other tensors than the first."""
    block, x = Retrying(), leaf(16, 16)
    found = gradients(lambda t: checkpoint(block, t, policy=policy), x, block)
    assert block.tries == 1
    assert all(map(torch.equal, found, gradients(Retrying.attempt.__get__(_calm(block)), x, block)))


def _calm(block: Retrying) -> Retrying:
    block.tries = 9
    return block


class Adapted(nn.Module):
    """Two adapters, of which one is active."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16)
        self.adapters = nn.ModuleDict({name: nn.Linear(16, 16) for name in "ab"})
        self.active = "a"

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.adapters[self.active](x.sin()))


@pytest.mark.parametrize("policy", POLICIES)
def test_adapter_of_the_forward_is_that_of_backward(policy: Any) -> None:
    """peft#2832: one forward for each adapter, and then one backward."""
    block, x = Adapted(), leaf(8, 16)

    def both(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        outs = []
        for block.active in "ab":
            outs.append(run(x))
        return list(torch.autograd.grad(sum(outs).sum(), list(block.parameters())))  # type: ignore[union-attr]

    found = both(lambda t: checkpoint(block, t, policy=policy))
    assert all(map(torch.equal, found, both(block)))
