"""Values that a policy offloads: they have arrived whenever they are read."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from torchparts_conformance import requirement
from torchparts_conformance.cases._devices import (
    lag,
    races_are_read,  # noqa: F401
    synchronize,
)

ROWS, WIDTH = 128, 64
POLICY = ("aten.addmm", "aten.gelu")


def _network(device):
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    return nn.Sequential(*layers).to(device)


def _checkpointed(part, model, x):
    policy = part.offload(*POLICY)
    return part.checkpoint(model, x, policy=policy)


def _under_hooks(part, model, x):
    """Hooks of somebody else read what they are given at once."""
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return _checkpointed(part, model, x)


def _on_another_stream(part, model, x):
    if x.device.type == "cpu":
        return _checkpointed(part, model, x)
    main, side = torch.accelerator.current_stream(), torch.Stream(x.device)
    side.wait_stream(main)
    with side:
        out = _checkpointed(part, model, x)
    main.wait_stream(side)
    out.record_stream(main)
    return out


@requirement(
    "SP-178",
    level="MUST",
    text=(
        "Offloaded values MUST have arrived whenever they are read: under saved-tensor hooks "
        "around the region, on another stream than the current one, and with copies that take "
        "long, gradients MUST be those of no checkpointing, bitwise."
    ),
    rationale=(
        "reproduced on a simulated accelerator: hooks around the region were handed bytes that "
        "had not arrived, and gradients were NaN"
    ),
    since="0.1.0",
    profile="budget",
)
@pytest.mark.parametrize(
    "call",
    [_checkpointed, _under_hooks, _on_another_stream],
    ids=["alone", "hooks", "stream"],
)
def test_offloaded_values_have_arrived(part, device, call):
    """However slow their copies are; the gradients are those of no checkpointing, bitwise."""
    results = []
    for run in (lambda part, model, x: model(x), call):
        model = _network(device)
        x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).to(device).requires_grad_()
        lag(device, virtual=False, copy_us=3000)
        run(part, model, x).square().sum().backward()
        synchronize(device)
        results.append([t.grad.cpu() for t in (x, *model.parameters())])
    assert all(map(torch.equal, *results))


def _chain(part, device, policy):
    """A step of four networks, each a region of its own; None: no region."""
    models = [_network(device) for _ in range(4)]
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).to(device).requires_grad_()
    h = x
    for model in models:
        if policy is None:
            h = model(h)
        else:
            h = part.checkpoint(model, h, policy=policy)
    return h.square().sum(), [x, *(p for model in models for p in model.parameters())]


@requirement(
    "SP-200",
    level="MUST",
    text=(
        "In a step of a chain of regions, values that a policy offloads MUST be asked for "
        "before they are read, in every region but that which backward reads first, "
        "`offload_stats` MUST count those that were not, and gradients MUST be those of no "
        "checkpointing, bitwise."
    ),
    rationale=(
        "a copy that begins where backward reads its value is time in which the device stands still"
    ),
    since="0.1.0",
    profile="budget",
)
def test_offloaded_values_are_asked_for_before_they_are_read(part, device):
    """The first step of a policy shows what its regions read; the second is asked."""
    policy = part.offload(*POLICY)
    found = []
    for each in (None, policy, policy):
        before = part.offload_stats()
        lag(device, virtual=False, copy_us=3000)
        loss, leaves = _chain(part, device, each)
        loss.backward()
        synchronize(device)
        found.append([t.grad.cpu() for t in leaves])
    after = part.offload_stats()
    assert all(map(torch.equal, found[0], found[2]))
    assert after.late == before.late
    if device != "cpu":
        assert after.copies_in > before.copies_in


@requirement(
    "SP-201",
    level="MUST",
    text=(
        "Under `limit_offload` offloaded values MUST NOT take more host memory than the limit "
        "at any time; those beyond it MUST stay on the device, be counted, and give the "
        "gradients of no checkpointing, bitwise."
    ),
    rationale="pinned memory that runs out ends the process, or the machine",
    since="0.1.0",
    profile="budget",
)
def test_offloaded_values_keep_to_the_limit(part, device):
    """Room for a third of the values."""
    plain, leaves = _chain(part, device, None)
    plain.backward()
    expected = [t.grad.cpu() for t in leaves]
    policy = part.offload(*POLICY)
    before = part.offload_stats()
    loss, _ = _chain(part, device, policy)
    room = (part.offload_stats().bytes_away - before.bytes_away) // 3
    del loss
    part.limit_offload(before.bytes_away + room)
    lag(device)
    try:
        loss, leaves = _chain(part, device, policy)
        inside = part.offload_stats()
        loss.backward()
    finally:
        part.limit_offload(None)
    synchronize(device)
    assert inside.bytes_away - before.bytes_away <= room
    assert all(map(torch.equal, expected, [t.grad.cpu() for t in leaves]))
    if device != "cpu":
        assert inside.kept > before.kept
