"""Calls of sharded modules outside of a step, on streams: they wait for other ranks' data.

The host is as far ahead as possible, as in `test_sharded.py`.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from simdev.ranks import on_ranks
from torch.distributed.fsdp import MixedPrecisionPolicy

import flat_param
from flat_param.sharded.tensor._reductions import found_inf_anywhere

WIDTH, SIZE = 64, 2
DEVICE = "simdev:0"


def layer(seed=1, **options):
    """One unit; gradients are ones on the first rank, twos on the second."""
    torch.manual_seed(seed)
    return flat_param.fully_shard(torch.nn.Linear(WIDTH, WIDTH).to(DEVICE), **options)


def plain(seed=1):
    """Return the values without sharding."""
    torch.manual_seed(seed)
    return torch.cat(
        [param.detach().flatten() for param in torch.nn.Linear(WIDTH, WIDTH).parameters()]
    )


def norm(rank, order):
    """The norm of all ranks' gradients, whose mean is 1.5."""
    trained = layer()
    out = trained(torch.ones(1, WIDTH, device=DEVICE))
    (out.sum() * (rank + 1)).backward()
    return trained.clip_grad_norm_(1.0, order).item()


def norm_of_own(rank):
    """The largest norm of two ranks' own gradients of an ignored parameter."""
    module = torch.nn.Linear(4, 4).to(DEVICE)
    trained = flat_param.fully_shard(module, ignored_params={module.bias})
    trained.bias.grad = torch.full((4,), 1.0 + rank, device=DEVICE)
    return trained.clip_grad_norm_(1.0).item()


def overflow(rank):
    """The result of the search for an overflow that only one rank has."""
    trained = layer()
    found = torch.full((1,), float(rank), device=DEVICE)
    pieces = [piece for part in trained._flat_param.parts for piece in part.pieces]
    found_inf_anywhere(pieces, found)
    return found.item()


def reduced(rank):
    """A sum and a norm of all ranks' gradients, whose mean is 1.5."""
    trained = layer()
    out = trained(torch.ones(1, WIDTH, device=DEVICE))
    (out.sum() * (rank + 1)).backward()
    grad = trained.bias.grad
    return grad.sum().item(), grad.norm().item()


def whole(trained):
    """Full values, from the shards of all ranks."""
    with trained.whole_params():
        return torch.cat([each.detach().flatten() for each in trained.parameters()]).cpu()


def by_hand(rank, *, later):
    """A result that uses a unit unsharded by hand."""
    trained = layer()
    handle = trained.unshard(async_op=later)
    if later:
        handle.wait()
    found = torch.cat([each.detach().flatten() for each in trained.parameters()]) * 1
    trained.reshard()
    return found.cpu()


def drop_in(rank):
    """A flat parameter with one shard per rank."""
    torch.manual_seed(1)
    module = torch.nn.Linear(WIDTH, WIDTH).to(DEVICE)
    handle = flat_param.handle.FlatParamHandle(
        list(module.parameters()), module, process_group=dist.group.WORLD
    )
    handle.shard()
    handle.init_flat_param_attributes()
    handle.unshard()
    return torch.cat([module.weight.flatten(), module.bias]).detach().cpu()


class Skips(torch.nn.Module):
    """Two units, of which the inner one can be left out."""

    def __init__(self, **options):
        super().__init__()
        inner = torch.nn.Linear(WIDTH, WIDTH)
        self.inner = flat_param.fully_shard(inner.to(DEVICE), **options)
        self.outer = torch.nn.Linear(WIDTH, WIDTH).to(DEVICE)

    def forward(self, x, skips):
        return self.outer(x) if skips else self.inner(x)


def beside(rank):
    """A mean gradient that is reduced on another stream than the compute stream.

    An earlier backward left it unreduced; it is reduced in another dtype, so in a separate buffer,
    and added to an existing gradient.
    """
    options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}
    trained = flat_param.fully_shard(Skips(**options), **options)
    given = torch.ones(1, WIDTH, device=DEVICE)
    main, other = torch.accelerator.current_stream(), torch.Stream(DEVICE)
    other.wait_stream(main)
    with other:
        for skips in (False, True, False, True):
            trained.set_requires_gradient_sync(skips)
            (trained(given, skips).sum() * (rank + 1)).backward()
    main.wait_stream(other)
    params = [each for each in trained.inner.parameters() if each.grad is not None]
    grads = [each.grad.to_local().flatten() for each in params]
    return torch.cat(grads).unique().cpu()


def left_out(rank):
    """Blocks held back if a prefetched unit is not used, and is freed again."""
    trained, given = flat_param.fully_shard(Skips()), torch.ones(1, WIDTH, device=DEVICE)
    with torch.no_grad():
        for skips in (False, True):
            held = torch.simdev.memory()["held"]
            trained(given, skips)
    return float(torch.simdev.memory()["held"] - held)


CALLS = {
    "norm": (norm, (2.0,), 1.5 * math.sqrt(WIDTH * (WIDTH + 1))),
    "largest gradient": (norm, (math.inf,), 1.5),
    "norm of each rank's own": (norm_of_own, (), 4.0),
    "overflow": (overflow, (), 1.0),
    "reductions": (reduced, (), (1.5 * WIDTH, 1.5 * math.sqrt(WIDTH))),
    "whole values": (lambda rank: whole(layer()), (), plain()),
    "by hand": (lambda rank: by_hand(rank, later=False), (), plain()),
    "by hand, later": (lambda rank: by_hand(rank, later=True), (), plain()),
    "beside": (beside, (), [3.0]),
    "left out": (left_out, (), 0.0),
    "drop-in": (drop_in, (), plain()),
}


def all_calls(rank):
    """Return results and races of each call."""
    told = {}
    for name, (call, given, _) in CALLS.items():
        torch.simdev.reset()
        torch.simdev.simulate(virtual=True, kernel_us=1, comm_us=20)
        found = call(rank, *given)
        torch.simdev.synchronize_all()
        told[name] = torch.as_tensor(found).tolist(), torch.simdev.races()
    return told


@pytest.fixture(scope="module")
def two():
    """Results of two ranks."""
    return on_ranks(all_calls, size=SIZE)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_waits_for_what_ranks_tell(two, name):
    """No race, and both ranks have the results of one process."""
    wanted = torch.as_tensor(CALLS[name][2])
    for told in two:
        found, races = told[name]
        assert races == []
        assert torch.allclose(torch.tensor(found), wanted, rtol=1e-6, atol=0)
