"""Results of mod-tracker for a model, and the same figures from other sources."""

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
    """A formula for grouped products, which torch's counter lacks."""
    return 2 * math.prod(shapes[0]) * shapes[1][-1]


def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """torch's formula of other attention kernels, for the CPU's kernel."""
    return sdpa_flop_count(query, key, value)


def attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """The same in backward."""
    return sdpa_backward_flop_count(grad, query, key, value)


def convolution_backward(grad: Any, given: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """As many FLOPs as the forward per gradient; torch's formula ignores groups."""
    forward = conv_flop_count(list(given), list(weight), list(grad), transposed=rest[4])
    return int(forward) * sum(rest[7][:2])


def torchs_counter() -> FlopCounterMode:
    """torch's counter with formulas for experts, groups, and attention on the CPU."""
    aten = torch.ops.aten
    told = {
        aten._grouped_mm: products_of_groups,
        aten.convolution_backward: convolution_backward,
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    }
    return FlopCounterMode(display=False, custom_mapping=told)


def names_of_calls(case: Case, model: nn.Module) -> tuple[list[str], list[str]]:
    """Return module names in order of calls, from the tracker and from forward hooks.

    The tracker's names are without the model's class, with which all of them begin.
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
        # Some models call modules that they create in forward, so the hooks above miss them.
        tracker.register_user_hooks(
            pre_fw_hook=lambda m, _: seen.append(names[m]) if m in names else None
        )
        case.loss(model)
        assert tracker.phase == "outside"
    assert all(tracker.get_known_fqn(m).startswith(kind) for m in names if names[m] in set(seen))
    return seen, expected
