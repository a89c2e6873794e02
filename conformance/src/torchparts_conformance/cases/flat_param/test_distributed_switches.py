"""Methods of a sharded module: forward methods, gradient sync, and unshard by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._sharded import (
    batch,
    distance,
    loss_of,
    mine,
    plain,
    sharded,
    stepped,
)


class _Coder(nn.Module):
    """An autoencoder that is called by two methods."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.back = nn.Linear(5, 3), nn.Linear(3, 5)

    def encode(self, x: Tensor) -> Tensor:
        """Map (B, 5) to (B, 3)."""
        return torch.tanh(self.into(x))

    def decode(self, code: Tensor) -> Tensor:
        """Map (B, 3) to (B, 5)."""
        return self.back(code)


def _coded(part: Any, rank: int, world_size: int) -> float:
    reference, model = _Coder(), part.fully_shard(_Coder())
    for name in ("encode", "decode"):
        model.register_forward_method(name)
    inputs = batch(world_size)
    for module, share in ((reference, inputs), (model, mine(inputs, rank))):
        module.decode(module.encode(share)).square().mean().backward()
    return distance(stepped(model), stepped(reference))


@requirement(
    "FP-188",
    "A method registered as a forward method MUST compute with full parameters and give the "
    "gradients of one process, also if the module itself is never called.",
    rationale=(
        "autoencoders are called by `encode` and `decode`; FSDP2 has "
        "`register_fsdp_forward_method`; pytorch#109385"
    ),
    profile="distributed",
)
def test_methods_compute_with_whole_parameters(part, ranks):
    """`decode(encode(x))` of a module that is one unit and is never called itself."""
    assert all(error < 1e-5 for error in ranks(2, _coded))


def _switched(part: Any, rank: int, world_size: int) -> list[Any]:
    model, reference = sharded(part), plain()
    silent = []
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        loss_of(model, mine(batch(world_size, step), rank)).backward()
        loss_of(reference, batch(world_size, step)).backward()
        silent.append(all(param.grad is None for param in model.parameters()))
    return [silent, distance(stepped(model), stepped(reference))]


@requirement(
    "FP-189",
    "After `set_requires_gradient_sync(False)` backward passes MUST leave gradients unset, and "
    "the first backward after `set_requires_gradient_sync(True)` MUST give the mean over ranks of"
    " the sum of all of them.",
    rationale=(
        "accumulation loops for FSDP2 switch this on and off in each step instead of using a "
        "context"
    ),
    profile="distributed",
)
def test_gradient_sync_is_switched_off_and_on(part, ranks):
    """Two backward passes without reduction, and one that reduces all three."""
    for silent, error in ranks(2, _switched):
        assert silent == [True, True, False]
        assert error < 1e-5


class _Gathers(TorchDispatchMode):
    """Counts the collectives that gather parameters; some libraries also reduce by these."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        self.count += "c10d" in namespace and ("gather" in name or "alltoall" in name)
        return func(*args, **(kwargs or {}))


def _gathered_by_hand(part: Any, rank: int, world_size: int) -> list[Any]:
    inputs, reference, found = batch(world_size), plain(), []
    whole = reference.inner[0][0].weight.detach().clone()
    loss_of(reference, inputs).backward()
    expected = stepped(reference)
    for way in ("never", "now", "waited for", "freed"):
        model = sharded(part)
        if way != "never":
            handle = model.inner[0].unshard(async_op=way == "waited for")
            if handle is not None:
                handle.wait()
            found.append(torch.equal(model.inner[0][0].weight, whole))
        if way == "freed":
            model.inner[0].reshard()
        with _Gathers() as gathers:
            loss_of(model, mine(inputs, rank)).backward()
        found += [gathers.count, distance(stepped(model), expected)]
    return found


@requirement(
    "FP-191",
    "`unshard()` MUST gather a unit's full parameters, a following forward MUST NOT gather them "
    "again, a forward after `reshard()` MUST, and gradients MUST be those of one process.",
    rationale="FSDP2's users prefetch units by hand, and read or use weights outside of forward",
    profile="distributed",
)
def test_units_are_unsharded_by_hand(part, ranks):
    """A step does not gather again a unit that was unsharded by hand."""
    for usual, error, *others in ranks(2, _gathered_by_hand):
        shown, gathers, errors = others[::3], others[1::3], others[2::3]
        assert shown == [True] * 3
        assert gathers == [usual - 1, usual - 1, usual]
        assert max(error, *errors) < 1e-5
