"""The replay rule for dropout as accelerators have it, whose node saves the mask that was drawn.

Rule 1. The backward of such a node multiplies what it gets by the mask and a scale, as its forward
        did. So a replay gives the operand to the node: it alone knows the scale.
Rule 2. A kernel may round the scale in one way in its forward, and in another in backward. So each
        share that is dropped is tried once for each dtype and device, on what shows the last bit
        of a scale. Where it fails, and for operands that no kernel takes, the value is kept.
Rule 3. What is tried draws, and leaves the random numbers as they were.
Rule 4. Without a scale in backward, the forward either dropped nothing (`train=False`), or it
        dropped and did scale: torch leaves the scale of `train=None` out of its gradient. Only a
        mask that has a zero tells which. Where one without any may be a matter of luck, the value
        is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..._capturing import is_capturing
from .._replay import Node, Operand, Rule, alone, output_facts, ramp, same_bits
from ._probes import ROWS, WIDTH, Make

aten = torch.ops.aten

_TRIED = (128, 96)
"""The shape of what a share is tried on."""
_LEAST_KEPT = 64
"""Elements that are left of it, at the least: fewer show nothing of the scale."""
_CERTAIN_BITS = 64
"""A mask that drops nothing in spite of its share, once in two to the power of so many, is none."""
_differs: dict[tuple[float, torch.dtype, torch.device], bool] = {}
"""By share, dtype and device: whether the node gives other bits than its forward."""


class _Asked(TorchDispatchMode):
    """Hears what a node gives to its kernel, which runs unless the node was given nothing.

    Attributes:
        mask: what the kernel was given; None where it was not called.
        scale: the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mask: torch.Tensor | None = None
        self.scale = 1.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not aten.native_dropout_backward.default:
            return func(*args, **(kwargs or {}))
        given, self.mask, self.scale = args
        return func(*args) if given.numel() else given


def _asked(node: Node, x: torch.Tensor) -> tuple[torch.Tensor, _Asked]:
    """Give a tensor to a node; what it returns, and what its kernel was given."""
    with torch.no_grad(), _Asked() as asked:
        made: torch.Tensor = node(x)
    return made, asked


def _again(node: Node, x: torch.Tensor) -> torch.Tensor:
    """Run the forward on the operand again, in the operand's format."""
    made, asked = _asked(node, x)
    if asked.mask is not None and _hides_its_scale(asked.scale, node._saved_p):
        made = _scaled(x, asked.mask, node._saved_p)
    if made.stride() == x.stride():
        return made
    like = torch.empty_like(x)
    return made if made.stride() == like.stride() else like.copy_(made)


def _scaled(x: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """Return what the forward made of its operand, where its backward has no scale."""
    dropped = aten.native_dropout_backward(x, mask, 1 / (1 - p))
    return torch.where(mask.all(), x, dropped)  # without waiting for the mask (Rule 4)


def _hides_its_scale(scale: float, p: float) -> bool:
    return scale == 1 and 0 < p < 1


def _may_be_luck(numel: int, p: float) -> bool:
    """Whether so many elements can all be kept though each is dropped with this chance."""
    return 0 < p < 1 and -numel * math.log2(1 - p) < _CERTAIN_BITS


def _unfit(node: Node) -> str:
    facts, p = output_facts(node), node._saved_p
    if facts is None:
        return "does not tell what it is of"
    if _may_be_luck(math.prod(facts.shape), p) and _hides_its_scale(
        _asked(node, _NOTHING)[1].scale, p
    ):
        return "does not tell whether its forward scaled"
    key = p, facts.dtype, facts.device
    differs = _differs.get(key)
    if differs is None:
        if is_capturing(facts.device):
            return "was not tried before the graph that is captured"
        differs = _differs[key] = not _is_repeated(*key)
    return f"may round otherwise in its backward where it drops {p}" if differs else ""


def _is_repeated(p: float, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether nodes that drop this share give the bits of their forwards (Rule 2)."""
    # In half precision few results would show another scale.
    dtypes = {dtype, torch.float64 if dtype is torch.float64 else torch.float32}
    here = device if alone(lambda: torch.empty(1, device=device)) is not None else "cpu"
    return all(alone(partial(_repeats, p, ramp(each, here))) for each in dtypes)


def _repeats(p: float, make: Make) -> bool:
    x = make(*_TRIED)
    return all(
        _repeats_on(operand, p, train) for operand in (x, x.t()) for train in (True, None, False)
    )


def _repeats_on(operand: torch.Tensor, p: float, train: bool | None) -> bool:
    made, mask = _drawn(partial(aten.native_dropout, operand, p, train), operand.device)
    if p < 1 and int(mask.sum()) < _LEAST_KEPT:
        return False
    if _may_be_luck(operand.numel(), p) and train is None:
        return True  # such a one is kept (Rule 4)
    with torch.no_grad():
        again = _again(made.grad_fn, operand.detach())
    return again.stride() == made.stride() and same_bits(again, made)


def _drawn(run: Callable[[], Any], device: torch.device) -> Any:
    """Run what draws, and draw nothing (Rule 3)."""
    devices = {} if device.type == "cpu" else {"device_type": device.type}
    with torch.random.fork_rng([device] if devices else [], **devices):
        return run()


def _dropped(make: Make) -> torch.Tensor:
    x = make(ROWS, WIDTH)
    made: torch.Tensor = _drawn(lambda: aten.native_dropout(x, 0.5, True)[0], x.device)
    return made


_NOTHING = torch.empty(0, device="cpu")

DROPOUT_RULES = (
    Rule(
        "NativeDropoutBackward0",
        aten.native_dropout.default,
        None,
        through=_again,
        operands=(Operand(0),),
        edge_probes=(_dropped,),
        unfit=_unfit,
    ),
)
