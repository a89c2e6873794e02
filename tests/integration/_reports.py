"""What mod-tracker says of a model, and what the same is known from otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from _models import Case
from torch import nn
from torch.utils.flop_counter import (
    FlopCounterMode,
    conv_flop_count,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

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


def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """torch's formula of other kernels, told of the CPU's."""
    return sdpa_flop_count(query, key, value)


def attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """The same in backward."""
    return sdpa_backward_flop_count(grad, query, key, value)


def convolution_backward(grad: Any, given: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """The forward's operations for each gradient; torch's formula leaves groups out."""
    forward = conv_flop_count(list(given), list(weight), list(grad), transposed=rest[4])
    return int(forward) * sum(rest[7][:2])


def torchs_counter() -> FlopCounterMode:
    """torch's counter, told of experts, of groups, and that the CPU's attention is attention."""
    aten = torch.ops.aten
    told = {
        aten._grouped_mm: products_of_groups,
        aten.convolution_backward: convolution_backward,
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    }
    return FlopCounterMode(display=False, custom_mapping=told)


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
