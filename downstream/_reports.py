"""What mod-tracker says of a model, and what the same is known from otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from _models import Case
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mod_tracker import ModTracker, profile_flops, profile_memory, profile_time, trace

REPORTS: dict[str, Callable[[], Any]] = {
    "tracker": ModTracker,
    "flops": profile_flops,
    "time": profile_time,
    "memory": profile_memory,
    "trace": trace,
}


def products_of_groups(*shapes: Any, out_shape: Any = None, **_: Any) -> int:
    """What torch's counter has no formula for: rows of tokens, or what is summed, in groups."""
    return 2 * math.prod(shapes[0]) * shapes[1][-1]


def torchs_counter() -> FlopCounterMode:
    """torch's counter, which is told of experts."""
    experts = {torch.ops.aten._grouped_mm: products_of_groups}
    return FlopCounterMode(display=False, custom_mapping=experts)


def names_of_calls(case: Case, model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the modules in the order of their calls: the tracker's, and forward hooks'.

    The tracker's are without the class of the model, with which they all begin.
    """
    expected: list[str] = []
    names = {module: name for name, module in model.named_modules()}
    handles = [
        module.register_forward_pre_hook(lambda m, _: expected.append(names[m])) for module in names
    ]
    case.loss(model)
    for handle in handles:
        handle.remove()
    seen: list[str] = []
    kind = type(model).__name__
    with ModTracker() as tracker:
        # Some models call modules that they made on the way, which no hook above is on.
        tracker.register_user_hooks(
            pre_fw_hook=lambda m, _: seen.append(names[m]) if m in names else None
        )
        case.loss(model)
        assert tracker.phase == "outside"
    assert all(tracker.get_known_fqn(m).startswith(kind) for m in names if names[m] in set(seen))
    return seen, expected
