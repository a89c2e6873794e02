"""Find the values of a block that can be offloaded behind its forward, measured on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._errors import BudgetError
from ..eager._parted import parted
from ..policies._decisions import Decision
from ..policies._plans import Plan
from ._checkpointed import inputs_among
from ._link import beside_on, measure_link
from ._measure import storage_bytes
from ._profile import profile

Hidden = tuple[Plan | None, int]
"""Calls to offload, and their bytes with those of the inputs; None where they are not known."""
_LEAST_COPY = 1 << 20


def hidden_by(call: Callable[..., Any], args: Any, kwargs: Any, device: torch.device) -> Hidden:
    """Profile a block's forward, measure concurrent copies, and choose the values to copy.

    Args:
        call: the forward, which runs a few times; results are dropped.
        args: its positional arguments.
        kwargs: its keyword arguments. With a mutable argument, such as a cache, nothing is run.
        device: an accelerator.
    """
    input_bytes = storage_bytes(inputs_among((args, kwargs)), device=device)
    if parted(call, args, kwargs) is None:
        return None, input_bytes
    try:
        trace = profile(call, *args, unit="ns", **kwargs)
        most = max(_LEAST_COPY, input_bytes + trace.total_bytes())
        with torch.no_grad():
            work = beside_on(device, lambda: call(*args, **kwargs))
            link = measure_link(work, most_bytes=most)
    except BudgetError:
        return None, input_bytes
    away = link.hidden(trace, input_bytes)
    rows = sorted((trace.ops[op].key, Decision.OFFLOAD) for item in away for op in item.ops)
    return Plan(tuple(rows)), input_bytes + sum(item.kept_bytes for item in away)
