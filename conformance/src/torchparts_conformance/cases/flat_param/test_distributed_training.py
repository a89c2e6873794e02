"""Sharded training equals plain training, on two and four ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._sharded import (
    batch,
    distance,
    loss_of,
    mine,
    plain,
    sharded,
    train,
    whole_state,
)


def _error(part: Any, rank: int, world_size: int, options: dict[str, Any]) -> float:
    inputs = [batch(world_size, step) for step in range(3)]
    reference, model = plain(), sharded(part, **options)
    train(reference, inputs)
    train(model, [mine(one, rank) for one in inputs])
    return distance(whole_state(model), whole_state(reference))


def _every_way(part: Any, rank: int, world_size: int) -> list[float]:
    mesh = init_device_mesh("cpu", (world_size, 1))
    ways: list[dict[str, Any]] = [{}, {"reshard_after_forward": False}, {"mesh": mesh}]
    return [_error(part, rank, world_size, options) for options in ways]


@requirement(
    "FP-100",
    "Training MUST give the losses and parameters of one process, also for sizes not divisible by"
    " the number of ranks, with parameters resharded after forward, kept until backward, or "
    "replicated.",
    rationale=(
        "ZeRO (arXiv 1910.02054) divides memory and leaves the mathematics unchanged; "
        "FlatParamHandle pads with 42, which leaks into norms"
    ),
    profile="distributed",
)
def test_training_equals_one_process(part, ranks):
    """Parameters after three steps equal those of one process."""
    for errors in ranks(2, _every_way):
        assert max(errors) < 1e-6, errors


def _hybrid(part: Any, rank: int, world_size: int) -> float:
    mesh = init_device_mesh("cpu", (2, 2))
    return _error(part, rank, world_size, {"mesh": mesh})


@requirement(
    "FP-101",
    "Training over a 2 x 2 mesh MUST give the losses and parameters of one process.",
    rationale=(
        "FSDP1 and FSDP2 both offer it; the loss of one step does not show a reduction over one "
        "axis only"
    ),
    profile="distributed",
)
def test_hybrid_training_equals_one_process(part, ranks):
    """Two replicas of two shards train like one process."""
    errors = ranks(4, _hybrid)
    assert max(errors) < 1e-6, errors


def _used_by_first_only(part: Any, rank: int, world_size: int) -> list[Any]:
    model, reference = sharded(part, reshard_after_forward=False), plain()
    inputs = batch(world_size)

    def forward(net: Any, x: Any, *, extra: bool) -> Any:
        y = net.head(x)
        return y + net.unused(x[:, :2]).sum() if extra else y

    def everyone(net: Any) -> Any:
        return forward(net, mine(inputs, 0), extra=True), forward(net, mine(inputs, 1), extra=False)

    model.forward = lambda x: forward(model, x, extra=rank == 0)
    model(mine(inputs, rank)).sum().backward()
    (sum(y.sum() for y in everyone(reference)) / 2).backward()
    expected = torch.cat([p.grad.flatten() for p in reference.unused.parameters()])
    pieces = [p.grad for p in model.unused.parameters() if p.numel()]  # parts that this rank holds
    has = [piece is not None for piece in pieces]
    local = [p.to_local() if hasattr(p, "to_local") else p for p in pieces if p is not None]
    held = [value for piece in local for value in piece.flatten().tolist()]
    idle = [p.grad is None for p in model.inner.parameters()]
    return [all(idle), all(has), held, expected.tolist()]


@requirement(
    "FP-102",
    "A parameter that no rank used MUST have no gradient on any rank, and a parameter that some "
    "rank used MUST have the mean gradient on all ranks that hold a part of it.",
    rationale=(
        "pytorch#87308; FSDP1 gives zeros, and weight decay then moves the parameter: reproduced "
        "on 2.13"
    ),
    profile="distributed",
)
def test_gradients_are_unset_only_where_no_rank_used_the_parameter(part, ranks):
    """The ranks' pieces form the mean gradient; unused parameters have None."""
    results = ranks(2, _used_by_first_only)
    held = [value for _, _, piece, _ in results for value in piece]
    for idle, has, _, expected in results:
        assert idle
        assert has
        assert sorted(round(value, 4) for value in held) == sorted(round(v, 4) for v in expected)


def _clipped(part: Any, rank: int, world_size: int) -> list[float]:
    model, reference = sharded(part), plain()
    inputs = batch(world_size)
    loss_of(model, mine(inputs, rank)).backward()
    loss_of(reference, inputs).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    try:
        got = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    except (RuntimeError, ValueError):
        return [0.0]
    return [abs(float(got) - float(expected))]


@requirement(
    "FP-103",
    "torch.nn.utils.clip_grad_norm_ on sharded parameters MUST use the norm over all ranks or "
    "raise an error.",
    rationale="FSDP1 silently clips each rank by its own norm: reproduced on 2.13",
    profile="distributed",
)
def test_clipping_uses_the_norm_over_all_ranks(part, ranks):
    """The norm is that of one process, or an error is raised."""
    assert all(error < 1e-5 for (error,) in ranks(2, _clipped))


def _accumulated(part: Any, rank: int, world_size: int) -> float:
    model, reference = sharded(part), plain()
    with model.no_sync():
        loss_of(model, mine(batch(world_size, 0), rank)).backward()
    loss_of(model, mine(batch(world_size, 1), rank)).backward()
    for step in range(2):
        loss_of(reference, batch(world_size, step)).backward()
    for module in (model, reference):
        torch.optim.SGD(module.parameters(), lr=1.0).step()
    return distance(whole_state(model), whole_state(reference))


@requirement(
    "FP-104",
    "The backward after those inside no_sync MUST give the mean over ranks of the sum of all of "
    "them.",
    rationale="gradient accumulation; otherwise each backward costs a reduction over ranks",
    profile="distributed",
)
def test_no_sync_accumulates(part, ranks):
    """A step after the next backward is that of one process."""
    for error in ranks(2, _accumulated):
        assert error < 1e-5


def _tied(part: Any, rank: int, world_size: int) -> str:
    model = plain()
    model.inner[0][2].bias = model.inner[1][2].bias
    try:
        part.fully_shard(model.inner[0])
        part.fully_shard(model)
    except ValueError as error:
        return str(error)
    return ""


@requirement(
    "FP-105",
    "A weight tied across units MUST be refused with an error that names both places.",
    rationale=(
        "pytorch#77724; FSDP1 fails with 'size mismatch' in the forward pass: reproduced on 2.13"
    ),
    profile="distributed",
)
def test_weights_tied_across_units_are_refused_by_name(part, ranks):
    """The message has both names."""
    for message in ranks(2, _tied):
        assert "inner.0.2.bias" in message
        assert "inner.1.2.bias" in message
