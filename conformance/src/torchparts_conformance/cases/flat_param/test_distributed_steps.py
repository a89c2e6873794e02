"""Steps that are stopped, frozen in part, hooked, measured, or out of order, on two ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._sharded import (
    batch,
    distance,
    loss_of,
    mine,
    plain,
    sharded,
    whole_state,
)


class _Stop(Exception):
    pass


def _stop(grad: Any) -> None:
    raise _Stop


def _one_step(model: Any, inputs: Any) -> dict[str, Any]:
    model.zero_grad()
    loss_of(model, inputs).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return whole_state(model)


def _stopped(part: Any, rank: int, world_size: int) -> list[float]:
    """A hook on what goes into a block stops the backward, once in each block."""
    inputs = mine(batch(world_size), rank)
    errors = []
    for index in range(2):
        model, calm = sharded(part), sharded(part)
        handle = model.inner[index].register_forward_pre_hook(
            lambda module, args: args[0].register_hook(_stop) and None
        )
        try:
            loss_of(model, 3 * inputs.requires_grad_(True)).backward()
            return [float("inf")]
        except _Stop:
            handle.remove()
        inputs = inputs.detach()
        errors.append(distance(_one_step(model, inputs), _one_step(calm, inputs)))
    return errors


@requirement(
    "FP-130",
    level="MUST",
    text=(
        "A backward that an exception has stopped MUST leave nothing of its gradients: after "
        "zero_grad() the next step's MUST be those of a model that was never stopped."
    ),
    rationale="Ctrl-C in a notebook, or an error in a user's hook, is an ordinary end of a step",
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_a_stopped_backward_leaves_nothing(part, ranks):
    """The next step is that of a model that was never stopped."""
    for errors in ranks(2, _stopped):
        assert max(errors) == 0, errors


def _frozen_head(part: Any, rank: int, world_size: int) -> float:
    reference, model = (nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in "ab")
    for each in (reference, model):
        each[2].requires_grad_(False)
    for tensor in whole_state(reference).values():
        torch.distributed.broadcast(tensor, 0)
    model.load_state_dict(whole_state(reference))
    part.fully_shard(model[0])
    part.fully_shard(model)
    inputs = batch(world_size)
    loss_of(reference, inputs).backward()
    loss_of(model, mine(inputs, rank)).backward()
    for each in (reference, model):
        torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=1.0).step()
    return distance(whole_state(model), whole_state(reference))


@requirement(
    "FP-131",
    level="MUST",
    text=(
        "Frozen weights MUST stay readable in backward until every gradient that leads through "
        "them is there."
    ),
    rationale=(
        "a frozen head behind a trained unit has no gradient of its own that says when it is done"
    ),
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_a_frozen_head_stays_for_the_unit_before_it(part, ranks):
    """A trained unit, and a frozen layer of the outermost one behind it."""
    errors = ranks(2, _frozen_head)
    assert max(errors) < 1e-5, errors


def _in_backward(part: Any, rank: int, world_size: int) -> list[Any]:
    model, reference = sharded(part), plain()
    told: list[bool] = []

    def step(param: Any) -> None:
        told.append(param.grad is not None)
        torch.optim.SGD([param], lr=0.1).step()
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    used = [p for name, p in reference.named_parameters() if not name.startswith("unused")]
    for number in range(2):
        inputs = batch(world_size, number)
        loss_of(model, mine(inputs, rank)).backward()
        reference.zero_grad()
        loss_of(reference, inputs).backward()
        torch.optim.SGD(used, lr=0.1).step()
    return [told == [True] * (2 * len(used)), distance(whole_state(model), whole_state(reference))]


@requirement(
    "FP-132",
    level="MUST",
    text=(
        "A hook of register_post_accumulate_grad_hook MUST be called once per sum over ranks "
        "with .grad set, so that an optimizer in backward trains as one after it."
    ),
    rationale="a hook that is never called trains nothing, without a word",
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_an_optimizer_in_backward_trains(part, ranks):
    """Each used parameter's hook is called once per step, and trains it."""
    for told, error in ranks(2, _in_backward):
        assert told
        assert error < 1e-5


_SOON_S = 20.0


def _left_out(part: Any, rank: int, world_size: int) -> str:
    model = sharded(part)

    def forward(x: Any) -> Any:
        for block in model.inner[: world_size - rank]:
            x = x + block(x)
        return model.head(x)

    model.forward = forward
    try:
        loss_of(model, mine(batch(world_size), rank)).backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@requirement(
    "FP-193",
    level="SHOULD",
    text=(
        "A unit that only some ranks call SHOULD end in an error on every rank that names the "
        "unit, within 20 seconds, whatever the process group's timeout is."
    ),
    rationale=(
        "reproduced: the ranks waited for the process group's whole timeout, half an hour "
        "unless told otherwise, and no message named the unit; lightseekorg/TorchSpec#126"
    ),
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_unit_left_out_by_one_rank_is_named_soon(part, ranks):
    """Both ranks name the block that only one of them has called."""
    for message in ranks(2, _left_out, timeout_s=_SOON_S):
        assert "inner.1" in message, message
