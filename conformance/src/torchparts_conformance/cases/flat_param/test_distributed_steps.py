"""Interrupted, hooked and out-of-order steps, on two ranks."""

from __future__ import annotations

from typing import Any

import torch

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._sharded import (
    batch,
    distance,
    loss_of,
    mine,
    plain,
    sharded,
    stepped,
    whole_state,
)


class _Stop(Exception):
    pass


def _stop(grad: Any) -> None:
    raise _Stop


def _one_step(model: Any, inputs: Any) -> dict[str, Any]:
    model.zero_grad()
    loss_of(model, inputs).backward()
    return stepped(model)


def _stopped(part: Any, rank: int, world_size: int) -> list[float]:
    """A hook on the input of a block stops the backward, once in each block."""
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
    "After a backward that an exception stopped, and zero_grad(), the next step's gradients MUST "
    "be those of a model without the stopped backward.",
    rationale="steps often end by Ctrl-C in a notebook or by an error in a user's hook",
    profile="distributed",
)
def test_a_stopped_backward_leaves_nothing(part, ranks):
    """The next step equals that of a model without the stopped backward."""
    for errors in ranks(2, _stopped):
        assert max(errors) == 0, errors


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
    "A hook of register_post_accumulate_grad_hook MUST be called once per reduction over ranks "
    "with .grad set, and an optimizer step in that hook MUST train like a step after backward.",
    rationale="if the hook is never called, nothing trains and nothing raises",
    profile="distributed",
)
def test_an_optimizer_in_backward_trains(part, ranks):
    """The hook of each used parameter is called once per step and steps the optimizer."""
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
    "A unit that only some ranks call SHOULD raise an error on every rank that names the unit, "
    "within 20 seconds, whatever the process group's timeout.",
    rationale=(
        "reproduced: ranks waited for the process group's timeout, half an hour by default, and "
        "no message named the unit; lightseekorg/TorchSpec#126"
    ),
    profile="distributed",
)
def test_unit_called_by_some_ranks_only_is_named(part, ranks):
    """Both ranks name the block that only one of them called."""
    for message in ranks(2, _left_out, timeout_s=_SOON_S):
        assert "inner.1" in message, message
