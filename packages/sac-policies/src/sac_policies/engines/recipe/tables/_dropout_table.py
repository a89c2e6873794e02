"""The replay rule for dropout as accelerators have it, whose node saves the mask that was drawn.

Rule 1. The backward of such a node multiplies what it gets by the mask and a scale, as its forward
        did. So a replay gives the operand to the node: it alone knows whether it scales at all.
Rule 2. A kernel may round the scale in one way in its forward, and in another in backward. So each
        share that is dropped is tried once for each dtype and device, on what shows the last bit
        of a scale. Where it fails, and for operands that no kernel takes, the value is kept.
Rule 3. What is tried draws, and leaves the random numbers as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..._capturing import is_capturing
from .._replay import Node, Operand, Rule, alone, output_facts, ramp, same_bits
from ._probes import ROWS, WIDTH, Make

aten = torch.ops.aten

_TRIED = (128, 96)
"""The shape of what a share is tried on."""
_LEAST_KEPT = 64
"""Elements that are left of it, at the least: fewer show nothing of the scale."""
_differs: dict[tuple[float, torch.dtype, torch.device], bool] = {}
"""By share, dtype and device: whether the node gives other bits than its forward."""


def _again(node: Node, x: torch.Tensor) -> torch.Tensor:
    """Run the node on the operand; as the forward does, in the operand's format."""
    made: torch.Tensor = node(x)
    if made.stride() == x.stride():
        return made
    like = torch.empty_like(x)
    return made if made.stride() == like.stride() else like.copy_(made)


def _unfit(node: Node) -> str:
    facts, p = output_facts(node), node._saved_p
    if facts is None:
        return "does not tell what it is of"
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
    for operand in (x, x.t()):
        made, mask = _drawn(partial(aten.native_dropout, operand, p, True), x.device)
        if p < 1 and int(mask.sum()) < _LEAST_KEPT:
            return False
        with torch.no_grad():
            again = _again(made.grad_fn, operand.detach())
        if again.stride() != made.stride() or not same_bits(again, made):
            return False
    return True


def _drawn(run: Callable[[], Any], device: torch.device) -> Any:
    """Run what draws, and draw nothing (Rule 3)."""
    devices = {} if device.type == "cpu" else {"device_type": device.type}
    with torch.random.fork_rng([device] if devices else [], **devices):
        return run()


def _dropped(make: Make) -> torch.Tensor:
    x = make(ROWS, WIDTH)
    made: torch.Tensor = _drawn(lambda: aten.native_dropout(x, 0.5, True)[0], x.device)
    return made


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
