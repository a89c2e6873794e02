"""A second forward in place of a module's own: buffers count once, and nothing is left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sac_policies import recompute_all
from sac_policies.budget._checkpointed import Checkpointed, is_checkpointed, release

from ._blocks import Block

ROWS = torch.linspace(-1, 1, 64 * 24).view(64, 24)


class Averaging(nn.Module):
    """Divides by a running size, which it has changed just before."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24)
        self.register_buffer("size", torch.ones(()))
        self.calls = 0

    def forward(self, x: Any) -> torch.Tensor:
        """Take rows, or a list of them."""
        self.calls += 1
        x = x[0] if isinstance(x, list) else x
        y = self.inner(x).tanh()
        with torch.no_grad():
            self.size.mul_(0.9).add_(y.abs().mean())
        return (y / self.size).exp()


def normed() -> nn.Module:
    """A block with batch norm and dropout."""
    return Block(norm=nn.BatchNorm1d)


def trained(module: nn.Module, *, given: Any = None, twice: bool = False) -> list[torch.Tensor]:
    """Gradients and buffers of three steps."""
    found = []
    for step in range(3):
        torch.manual_seed(step)
        module.zero_grad()
        loss = module(ROWS + step if given is None else given).square().sum()
        for _ in range(1 + twice):
            loss.backward(retain_graph=twice)
        found += [p.grad.clone() for p in module.parameters() if p.grad is not None]
        found += [b.clone() for b in module.buffers()]
    return found


def both(make: Any) -> tuple[nn.Module, nn.Module]:
    """The same module twice."""
    pair = []
    for _ in range(2):
        torch.manual_seed(0)
        pair.append(make())
    return pair[0], pair[1]


@pytest.mark.parametrize("make", [Averaging, normed])
@pytest.mark.parametrize("twice", [False, True])
def test_second_forward_counts_a_batch_once(make: Any, twice: bool) -> None:
    """Gradients and buffers are those of the plain module, bitwise; also in a second backward."""
    plain, module = both(make)
    wrote = tuple(name for name, _ in module.named_buffers())
    module.forward = Checkpointed(module, policy=None, wrote=wrote)  # type: ignore[method-assign]
    expected, found = (trained(each, twice=twice) for each in (plain, module))
    assert all(map(torch.equal, expected, found))


def test_without_the_names_of_its_buffers_a_batch_counts_twice() -> None:
    """What the rule is for; the module does run twice."""
    plain, module = both(Averaging)
    module.forward = Checkpointed(module, policy=None)  # type: ignore[method-assign]
    assert not all(map(torch.equal, trained(plain), trained(module)))
    assert (plain.calls, module.calls) == (3, 6)


def test_containers_are_not_given_to_a_second_forward_that_writes() -> None:
    """Values are replayed instead, and the module runs once."""
    plain, module = both(Averaging)
    module.forward = Checkpointed(module, policy=None, wrote=("size",))  # type: ignore[method-assign]
    assert all(map(torch.equal, trained(plain, given=[ROWS]), trained(module, given=[ROWS])))
    assert module.calls == 3


def test_versions_of_buffers_are_those_from_before_the_second_forward() -> None:
    """What somebody else saved of them is still good."""
    module = Averaging()
    module.forward = Checkpointed(module, policy=None, wrote=("size",))  # type: ignore[method-assign]
    out = module(ROWS).sum()
    factor = torch.ones((), requires_grad=True)
    other = factor * module.size
    out.backward()
    other.backward()
    assert module.calls == 2
    assert factor.grad is not None
    assert torch.equal(factor.grad, module.size)


def test_error_in_the_second_forward_leaves_the_buffers() -> None:
    """As they were."""
    module = Averaging()
    module.forward = Checkpointed(module, policy=None, wrote=("size",))  # type: ignore[method-assign]
    out = module(ROWS).sum()
    now, module.inner = module.size.clone(), nn.Linear(3, 3)
    with pytest.raises(RuntimeError):
        out.backward()
    assert torch.equal(module.size, now)


def test_a_region_is_taken_away_once() -> None:
    """A module that has none is left alone."""
    module = Averaging()
    release(module)
    module.forward = Checkpointed(module, policy=recompute_all())  # type: ignore[method-assign]
    assert is_checkpointed(module)
    release(module)
    assert not is_checkpointed(module)
    assert "forward" not in vars(module)
