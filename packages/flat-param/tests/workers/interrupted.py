"""A step by hand is stopped at one place after another; the next one is as if none had been."""

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


def gradients(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """Of a normal step, after what is usual after one that was stopped."""
    model.zero_grad()
    flat_param.full_state_dict(model)
    loss_of(model, ids).backward()
    return [
        torch.zeros(0) if param.grad is None else param.grad.clone().flatten()
        for param in model.parameters()
    ]


def build() -> Model:
    """Two units, one in the other, with a frozen layer in each.

    They compute in another dtype, so that one rank gathers and frees, too.
    """
    model = plain(depth=1)
    model.blocks[0].norm.requires_grad_(False)
    precise = MixedPrecisionPolicy(param_dtype=torch.float64)
    flat_param.fully_shard(model.blocks[0], mp_policy=precise)
    return flat_param.fully_shard(model, mp_policy=precise)


def run(rank: int, world: int, stride: int) -> dict[str, Any]:
    """How many places there are, and those after which a gradient is wrong."""
    model, (ids, *_) = build(), batches(world, 1)
    mine = share(ids, rank)
    expected = gradients(model, mine)
    places, wrong = Interrupter(0).run(by_hand(model, mine)), []
    gradients(model, mine)
    for at in range(1, places + 1, stride):
        Interrupter(at).run(by_hand(model, mine))
        if not all(map(torch.equal, gradients(model, mine), expected)):
            wrong.append(at)
            model = build()
    return {"places": places, "wrong": wrong}
