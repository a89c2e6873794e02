"""A step is stopped at one place after another; the next is compared with one never stopped."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _harness import Model, batches, loss_of, plain, share
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import flat_param

SOURCE = str(Path(flat_param.__file__).parent)


def in_package(frame: Any) -> bool:
    """Whether a frame runs code of flat_param."""
    return bool(frame.f_code.co_filename.startswith(SOURCE))


class Interrupter:
    """Raises at the n-th entry or return of a function of flat_param; counts them all."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def __call__(self, frame: Any, event: str, _: object) -> None:
        """Be told by the interpreter."""
        # A generator that is told of an exception as it yields would not clean up, but no signal
        # arrives there: the interpreter looks for them in calls and after them.
        yields = event == "return" and frame.f_code.co_flags & inspect.CO_GENERATOR
        if event in ("call", "return") and not yields and in_package(frame):
            self.seen += 1
            if self.seen == self.at:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def run(self, step: Callable[[], object]) -> int:
        """Run a step under it, and return how many places there were."""
        sys.setprofile(self)
        try:
            step()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        return self.seen


def forward(model: nn.Module, ids: Tensor) -> Callable[[], object]:
    """Stop inside forward."""
    return lambda: loss_of(model, ids)


def backward(model: nn.Module, ids: Tensor) -> Callable[[], object]:
    """Stop inside backward."""
    return loss_of(model, ids.flip(0)).backward


def accumulation(model: nn.Module, ids: Tensor) -> Callable[[], object]:
    """Stop inside a backward that does not sum, after another one."""
    with model.no_sync():
        loss_of(model, ids).backward()
        loss = loss_of(model, ids.flip(0))

    def step() -> None:
        with model.no_sync():
            loss.backward()

    return step


def by_hand(model: nn.Module, ids: Tensor) -> Callable[[], object]:
    """Stop where units are gathered, written to, used and freed by hand."""
    block = model.blocks[0]

    def step() -> None:
        handle = model.unshard(async_op=True)
        block.unshard()
        handle.wait()
        model.head.weight.data.mul_(1)
        with torch.no_grad():
            block.up.bias.mul_(1)
        loss = block.up.weight.square()
        model.reshard()
        (loss.sum() + loss_of(model, ids)).backward()

    return step


PHASES = {
    "forward": forward,
    "backward": backward,
    "accumulation": accumulation,
    "by_hand": by_hand,
}


def gradients(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """Of a normal step, after what is usual after one that was stopped."""
    model.zero_grad()
    flat_param.full_state_dict(model)
    loss_of(model, ids).backward()
    return [
        torch.zeros(0) if param.grad is None else param.grad.clone().flatten()
        for param in model.parameters()
    ]


def build(phase: str) -> Model:
    """Two units, one in the other, with a frozen layer in each.

    One rank gathers and frees only where it computes in another dtype.
    """
    model = plain(depth=1)
    model.blocks[0].norm.requires_grad_(False)
    precise = MixedPrecisionPolicy(param_dtype=torch.float64)
    options = {"mp_policy": precise} if phase == "by_hand" else {}
    flat_param.fully_shard(model.blocks[0], **options)
    return flat_param.fully_shard(model, **options)


def run(rank: int, world: int, phase: str, stride: int) -> dict[str, Any]:
    """How many places there are, and those after which a gradient is wrong."""
    if phase == "sharding":
        return run_sharding(rank, world, stride)
    model, (ids, *_) = build(phase), batches(world, 1)
    mine = share(ids, rank)
    expected = gradients(model, mine)
    places, wrong = Interrupter(0).run(PHASES[phase](model, mine)), []
    gradients(model, mine)
    for at in range(1, places + 1, stride):
        Interrupter(at).run(PHASES[phase](model, mine))
        if not all(map(torch.equal, gradients(model, mine), expected)):
            wrong.append(at)
            model = build(phase)
    return {"places": places, "wrong": wrong}


def on_meta(world: int) -> nn.Module:
    """One unit, whose parameters have no memory yet; two ranks have equal parts of the only one.

    They then pass the same places, and are stopped at the same.
    """
    with torch.device("meta"):
        if world > 1:
            return nn.Sequential(nn.Linear(8, 8, bias=False))
        return nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))


def weights(model: nn.Module) -> list[Tensor]:
    """Whole, after sharding what is not sharded."""
    if not isinstance(model, flat_param.ShardedModule):
        torch.manual_seed(0)
        flat_param.fully_shard(model)
    return [*flat_param.full_state_dict(model)["model"].values()]


def run_sharding(rank: int, world: int, stride: int) -> dict[str, Any]:
    """`fully_shard` is stopped, and called again: right, or refused in words that help."""

    def step(model: nn.Module) -> Callable[[], object]:
        torch.manual_seed(0)
        return lambda: flat_param.fully_shard(model)

    def refuses(model: nn.Module) -> bool:
        uses = (
            lambda: flat_param.fully_shard(model),
            lambda: flat_param.fully_shard(nn.Sequential(model)),
            lambda: flat_param.full_state_dict(nn.Sequential(model)),
            lambda: flat_param.save_sharded(model, "never"),
        )
        return all(HALF_SHARDED in error_of(use) for use in uses)

    expected, wrong, refused = weights(on_meta(world)), [], 0
    places = Interrupter(0).run(step(on_meta(world)))
    for at in range(1, places + 1, stride):
        model = on_meta(world)
        Interrupter(at).run(step(model))
        if type(vars(model).get("_flat_param")) is object:  # the placeholder of a unit
            refused += 1
            right = refuses(model)
        else:
            right = all(map(torch.equal, weights(model), expected))
        if not right:
            wrong.append(at)
    return {"places": places, "wrong": wrong, "refused": refused}


HALF_SHARDED = (
    "flat_param.fully_shard: Sequential was only partly sharded when it was interrupted, but a "
    "rank cannot put its pieces back together. Build the module again on every rank, and shard "
    "that."
)


def error_of(call: Callable[[], object]) -> str:
    """What a call says that fails."""
    try:
        call()
    except flat_param.FlatParamError as error:
        return str(error)
    return ""
