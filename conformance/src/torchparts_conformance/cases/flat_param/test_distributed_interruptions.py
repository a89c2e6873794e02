"""A sharded module after a step or a sharding that was interrupted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._sharded import (
    batch,
    distance,
    loss_of,
    mine,
    pair_distance,
    plain,
    stepped,
    whole_state,
)

LIMIT = 1e-6


class _Stop(Exception):
    """Raised by a case in the middle of a pass."""


def _stop(*_: Any) -> None:
    raise _Stop


def _interrupted(part: Any, rank: int, world_size: int, place: str) -> float:
    def backward(module: nn.Module, share: Callable[[Tensor], Tensor]) -> None:
        layer = module.inner[1][0]
        if place == "forward":
            handle = layer.register_forward_hook(_stop)
        else:
            handle = layer.register_full_backward_hook(_stop)
        try:
            loss_of(module, share(batch(world_size))).backward()
        except _Stop:
            pass
        else:
            raise AssertionError("the pass was not interrupted")
        handle.remove()
        module.zero_grad()
        loss_of(module, share(batch(world_size, 1))).backward()

    return pair_distance(part, rank, world_size, backward)


@requirement(
    "FP-178",
    level="MUST",
    text=(
        "After an exception in the forward pass on every rank, the next training step MUST be "
        "right."
    ),
    rationale="an out-of-memory error that is caught and answered with a smaller batch",
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_step_after_an_exception_in_forward_is_right(part, ranks):
    """On every rank a layer raises; the next step is that of a module to which nothing happened."""
    errors = ranks(2, _interrupted, "forward")
    assert max(errors) < LIMIT, errors


@requirement(
    "FP-179",
    level="MUST",
    text=(
        "After an exception in the backward pass on every rank and zero_grad, the next training"
        " step MUST be right."
    ),
    rationale=(
        "Ctrl-C in a notebook; gradients of the pass that was interrupted are in the next step "
        "without a word"
    ),
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_step_after_an_exception_in_backward_is_right(part, ranks):
    """What the interrupted pass left, whole gradients or pending sums, is in no later gradient."""
    errors = ranks(2, _interrupted, "backward")
    assert max(errors) < LIMIT, errors


class _StopAt(TorchDispatchMode):
    """Ctrl-C at the n-th operator."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.seen = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        if self.seen == self.at:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def _stopped(part: Any, at: int) -> tuple[nn.Module, int]:
    model = plain()
    counts = _StopAt(at)
    with contextlib.suppress(KeyboardInterrupt), counts:
        part.fully_shard(model)
    return model, counts.seen


def _or_refused(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception:
        return None


def _sharding_is_stopped(part: Any, rank: int, world_size: int) -> list[Any]:
    found = []
    _, places = _stopped(part, 0)
    reference, inputs = plain(), mine(batch(world_size), rank)
    before, loss = whole_state(plain()), loss_of(reference, inputs)
    loss.backward()
    loss = float(loss)
    after = stepped(reference)
    for at in range(1, places + 1, 4):
        model, _ = _stopped(part, at)
        if _or_refused(lambda model=model: part.fully_shard(model)) is not None:
            loss_of(model, inputs).backward()
            found.append(distance(stepped(model), after))
            continue
        found += [
            _or_refused(lambda model=model: distance(whole_state(model), before)) or 0.0,
            _or_refused(lambda model=model: abs(float(loss_of(model, inputs)) - loss)) or 0.0,
        ]
    return found


@requirement(
    "FP-183",
    level="MUST",
    text=(
        "After `fully_shard` was interrupted, another call MUST shard the module right or MUST "
        "be refused, and then its forward and its state MUST be right or MUST be refused."
    ),
    rationale=(
        "in a notebook the cell is run again; pieces in the place of weights would be trained"
    ),
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_a_sharding_that_was_stopped_is_made_again_or_refuses(part, ranks):
    """Ctrl-C at every fourth operator, on one rank: others are at other places then."""
    for results in ranks(1, _sharding_is_stopped):
        assert results
        assert max(results) < LIMIT
