"""What a sharded module can do beyond its own class, in a group of one."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from flat_param import StateError, fully_shard

pytestmark = pytest.mark.usefixtures("group_of_one")


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


def test_training_in_another_thread_is_plain(mlp: nn.Sequential) -> None:
    """A new thread for each step; losses and parameters are those of the plain module, bitwise."""
    plain, sharded = copy.deepcopy(mlp), fully_shard(mlp)
    found = []
    for model in (plain, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> float:
            optimizer.zero_grad()
            loss = model(torch.linspace(-1, 1, 10).view(2, 5)).square().sum()
            loss.backward()
            optimizer.step()
            return loss.item()

        losses = []
        for _ in range(3):
            with ThreadPoolExecutor(1) as thread:
                losses.append(thread.submit(step).result())
        found.append((losses, [value.clone() for value in model.state_dict().values()]))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


@pytest.mark.parametrize("listed", [list, tuple, iter, nn.ModuleList])
@pytest.mark.parametrize("function", ["forward", "backward"])
def test_units_may_be_listed_in_any_way(
    listed: Callable[[list[nn.Module]], object], function: str, pair: nn.Module
) -> None:
    """As the model has them; a list may be emptied."""
    say = getattr(pair[0], f"set_modules_to_{function}_prefetch")
    say(listed([pair[1]]))
    say([])
    pair(torch.ones(2, 4, dtype=torch.float64)).sum().backward()


CHOICES = (
    "finalize_backward",
    "set_is_last_backward",
    "set_manual_backward_finalization",
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_reshard_after_backward",
    "set_reshard_after_forward",
    "set_unshard_in_backward",
    "unshard",
)


@pytest.mark.parametrize("function", CHOICES)
@pytest.mark.parametrize("value", ["no", 2, 0.5, [], torch.tensor([True, False])])
def test_what_is_neither_yes_nor_no_is_refused(
    function: str, value: object, pair: nn.Module
) -> None:
    """Python takes most words for yes."""
    takes_ranks = function == "set_reshard_after_forward" and isinstance(value, int)
    rest = ", or shard over fewer ranks" if takes_ranks else "."  # names what does that
    text = f"flat_param.{function}: got {value!r}. Pass True or False{rest}"
    with pytest.raises(StateError, match=re.escape(text)):
        getattr(pair, function)(value)


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("pins", [True, False])
def test_what_is_offloaded_is_page_locked_unless_it_is_said(pins: bool) -> None:
    """Shards and gradients, after a change of dtype too; training is the plain module's."""
    device = torch.accelerator.current_accelerator()
    mesh = init_device_mesh(device.type, (1,))
    plain = nn.Linear(4, 3)
    policy = CPUOffloadPolicy(pin_memory=pins)
    model = fully_shard(copy.deepcopy(plain), offload_policy=policy, mesh=mesh)
    for dtype in (torch.float32, torch.float64):
        for module, home in ((plain, torch.device("cpu")), (model, device)):
            module.to(dtype)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                module(torch.ones(2, 4, dtype=dtype, device=home)).square().sum().backward()
                optimizer.step()
        for param, same in zip(model.parameters(), plain.parameters(), strict=True):
            assert param.grad is not None
            assert param.is_pinned() is param.grad.is_pinned() is pins
            torch.testing.assert_close(param, same)
