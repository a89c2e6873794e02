"""A module whose forward is replaced by a region: state counts once, and undo leaves nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sac_policies import MutationError
from sac_policies.budget._checkpointed import Checkpointed, is_checkpointed, release
from sac_policies.policies._rules import RECOMPUTE_ALL

from ._blocks import Block

ROWS = torch.linspace(-1, 1, 64 * 24).view(64, 24)


class Averaging(nn.Module):
    """Divides by a running size that it has just updated."""

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
def test_region_counts_a_batch_once(make: Any, twice: bool) -> None:
    """Gradients and buffers are bit-identical to the plain module, also in a second backward."""
    plain, module = both(make)
    Checkpointed(module, policy=RECOMPUTE_ALL).put()
    expected, found = (trained(each, twice=twice) for each in (plain, module))
    assert all(map(torch.equal, expected, found))


class Switched(nn.Module):
    """Depends on a mode, a switch, a name, and hooks of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(24, 24), nn.Dropout(0.5)
        self.is_on, self.adapter = True, "first"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).tanh() * (2 if self.is_on else 1)
        return self.drop(y.exp() if self.adapter == "first" else y.sin())


def test_hooks_and_switches_are_those_of_the_forward() -> None:
    """They change before backward, which calls none of them."""
    found = []
    for module in both(Switched):
        if found:
            Checkpointed(module, policy=RECOMPUTE_ALL).put()
        torch.manual_seed(0)
        handle = module.inner.register_forward_hook(lambda _, given, out: out * 3)
        out = module(ROWS).square().sum()
        handle.remove()
        added = module.inner.register_forward_pre_hook(lambda _, given: (given[0] * 5,))
        module.eval()
        module.is_on, module.adapter = False, "second"
        out.backward()
        assert (module.training, module.drop.training) == (False, False)
        assert (module.is_on, module.adapter) == (False, "second")
        assert (len(module.inner._forward_hooks), len(module.inner._forward_pre_hooks)) == (0, 1)
        added.remove()
        assert not module.inner._forward_pre_hooks
        found.append([each.grad for each in module.parameters()])
    assert all(map(torch.equal, *found))


def test_containers_are_given_to_one_forward() -> None:
    """Values are replayed, and the module runs once."""
    plain, module = both(Averaging)
    Checkpointed(module, policy=RECOMPUTE_ALL).put()
    assert all(map(torch.equal, trained(plain, given=[ROWS]), trained(module, given=[ROWS])))
    assert module.calls == 3


def test_a_region_is_taken_away_once() -> None:
    """Removing it from a module without a region is a no-op."""
    module = Averaging()
    release(module)
    Checkpointed(module, policy=RECOMPUTE_ALL).put()
    assert is_checkpointed(module)
    release(module)
    assert not is_checkpointed(module)
    assert "forward" not in vars(module)


class Rotated(nn.Module):
    """Called as transformer blocks are: tensors by keyword, and a tuple of two."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.inner, self.writes = nn.Linear(24, 24), writes
        self.calls = 0

    def forward(self, x: Any, *, mask: Any, positions: tuple[Any, Any], key: Any) -> torch.Tensor:
        """Multiply, turn, and scale by an argument that may be the input itself."""
        self.calls += 1
        assert key is x
        y = self.inner(x) * positions[0] + positions[1]
        if self.writes:
            mask.mul_(2)
        return (y.sin() + mask) * key


def turned(module: nn.Module, change: Any = None) -> list[torch.Tensor]:
    """Gradients of a step, and the mask after it."""
    module.zero_grad()
    x, mask = ROWS.clone().requires_grad_(), torch.ones(24)
    angles = ROWS[0].clone().requires_grad_()
    given = x * 2
    out = module(given, mask=mask, positions=(angles.cos(), angles.sin()), key=given)
    if change is not None:
        change(given, mask)
    out.square().sum().backward()
    return [x.grad, angles.grad, *(p.grad for p in module.parameters()), mask]


def test_tensors_by_name_and_in_tuples_are_passed_through() -> None:
    """A tensor that is passed twice is one tensor."""
    module, plain = Rotated(), Rotated()
    plain.load_state_dict(module.state_dict())
    Checkpointed(module, policy=RECOMPUTE_ALL).put()
    assert all(map(torch.equal, turned(module), turned(plain)))
    assert module.calls == 1


def test_arguments_written_afterwards_have_their_old_bits_or_raise() -> None:
    """Backward reads the input that the region was given."""
    module = Rotated()
    Checkpointed(module, policy=RECOMPUTE_ALL).put()
    with pytest.raises(MutationError, match="was changed in place"):
        turned(module, change=lambda given, mask: given.detach().add_(1))


def test_region_may_write_to_its_arguments() -> None:
    """The write happens once."""
    module, plain = Rotated(writes=True), Rotated(writes=True)
    plain.load_state_dict(module.state_dict())
    Checkpointed(module, policy=RECOMPUTE_ALL).put()
    assert all(map(torch.equal, turned(module), turned(plain)))
