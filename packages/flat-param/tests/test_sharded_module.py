"""What a sharded module can do beyond its own class, in a group of one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from flat_param import fully_shard

pytestmark = pytest.mark.usefixtures("group_of_one")
PRECISE = MixedPrecisionPolicy(param_dtype=torch.float64)


def _x() -> Tensor:
    return torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_no_sync_ends_with_its_block(error: type[BaseException], pair: nn.Module) -> None:
    """Also by an exception, and inside of another one."""
    with pair.no_sync():
        with pytest.raises(error), pair.no_sync():
            raise error
        pair(_x()).sum().backward()
        assert all(param.grad is None for param in pair.parameters())
    pair(_x()).sum().backward()
    assert all(param.grad is not None for param in pair.parameters())


class Coder(nn.Module):
    """With a method beside forward, and things that are none of it."""

    rate = 2

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 4)

    def encode(self, x: Tensor, *, times: int = 1) -> Tensor:
        """Of the layer; refuses no times."""
        return self.into(x) * (12 // times)

    @staticmethod
    def halved(x: Tensor) -> Tensor:
        """Of no module."""
        return x / 2


def test_registered_method_is_a_forward_of_this_module_alone() -> None:
    """Its arguments and its documentation pass; twice is once; an error leaves it usable."""
    model, other = fully_shard(Coder(), mp_policy=PRECISE), fully_shard(Coder())
    model.register_forward_method("encode")
    once = type(model).encode
    model.register_forward_method("encode")
    assert type(model).encode is once
    assert model.encode.__doc__ == Coder.encode.__doc__
    assert type(other).encode is Coder.encode
    weight, bias = (param.detach().double() for param in model.parameters())
    expected = 6 * nn.functional.linear(_x(), weight, bias)
    assert torch.allclose(model.encode(_x(), times=2), expected)
    with pytest.raises(ZeroDivisionError):
        model.encode(_x(), times=0)
    assert model.into.weight.dtype == torch.float32
    model.encode(_x(), times=2).sum().backward()
    assert torch.equal(model.into.bias.grad, torch.full((4,), 12.0))


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_stopped_forward_shows_the_optimizers_parameters(
    error: type[BaseException], pair: nn.Module
) -> None:
    """Of all units of the tree; the next forward is right."""
    params = list(pair.parameters())

    def stops(*_: object) -> None:
        raise error

    handle = pair[1].register_forward_pre_hook(stops)
    with pytest.raises(error):
        pair(_x())
    assert all(a is b for a, b in zip(pair.parameters(), params, strict=True))
    handle.remove()
    pair(_x()).sum().backward()


def test_cleared_gradients_are_those_accumulated_too(pair: nn.Module) -> None:
    """The next backward sums nothing that came before; zeros stay where asked for."""
    with pair.no_sync():
        pair(_x()).sum().backward()
    assert all(param.grad is None for param in pair.parameters())
    pair.zero_grad()
    pair(_x()).sum().backward()
    first = [param.grad.clone() for param in pair.parameters()]
    pair.unshard()
    pair.zero_grad(set_to_none=False)
    assert pair[2].weight.dtype == torch.float64
    pair.reshard()
    assert not any(param.grad.any() for param in pair.parameters())
    pair(_x()).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(pair.parameters(), first, strict=True))
