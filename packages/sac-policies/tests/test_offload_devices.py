"""Offloaded outputs on an accelerator: copies are complete when read, on any stream."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import sac_policies as sp

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
    pytest.mark.usefixtures("no_race"),
]
KIND = torch.accelerator.current_accelerator() or torch.device("cpu")
SIM = getattr(torch, "simdev", None)
POLICY = ("aten.addmm", "aten.gelu")
SLOW_COPIES = {"kernel_us": 100, "copy_us": 5000, "virtual": True}


def simulate(**costs) -> None:
    """Set the durations of the simulated device; a no-op on a real one."""
    if SIM is not None:
        SIM.simulate(**costs)


def network() -> nn.Sequential:
    """Two matmuls with activations between them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(KIND)


def given() -> torch.Tensor:
    """An input that requires grad."""
    return torch.linspace(-1, 1, 128 * 64).view(128, 64).to(KIND).requires_grad_()


def gradients(call, *, costs) -> list[torch.Tensor]:
    """Gradients of the weights and the input, on the host."""
    model, x = network(), given()
    simulate(**costs)
    call(model, x).square().sum().backward()
    torch.accelerator.synchronize()
    return [t.grad.cpu() for t in (x, *model.parameters())]


def checkpointed(model, x):
    """The network as a region whose matmuls and activations are offloaded."""
    return sp.checkpoint(model, x, policy=sp.offload(*POLICY))


def hooked(model, x):
    """The region under user hooks that read the packed tensors."""
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return checkpointed(model, x)


def on_another_stream(model, x):
    """The region on a side stream."""
    main, side = torch.accelerator.current_stream(), torch.Stream(KIND)
    side.wait_stream(main)
    with side:
        y = checkpointed(model, x)
    main.wait_stream(side)
    y.record_stream(main)
    return y


@pytest.mark.parametrize("costs", [{}, {"copy_us": 3000}, SLOW_COPIES], ids=["quick", "late", "v"])
@pytest.mark.parametrize("call", [checkpointed, hooked, on_another_stream])
def test_offloaded_outputs_give_the_plain_gradients(call, costs):
    """Also where a pack hook reads the bytes at once, and with slow copies."""
    plain = gradients(lambda model, x: model(x), costs=costs)
    assert all(map(torch.equal, plain, gradients(call, costs=costs)))


def test_what_is_offloaded_is_pinned_on_any_kind_of_device(monkeypatch):
    """Copies to unpinned memory would block the host."""
    pinned, real = [], torch.empty_like

    def empty_like(tensor, **options):
        if options.get("device") == "cpu":
            pinned.append(options.get("pin_memory"))
        return real(tensor, **options)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    gradients(checkpointed, costs={})
    assert pinned
    assert all(pinned)
