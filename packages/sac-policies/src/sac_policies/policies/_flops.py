"""Floating point operations of one operator call."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from ._views import Operator


def flops_of(op: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> int:
    """Count multiplications and additions; 0 for operators without a known formula.

    torch's registry decides, completed by the CPU attention kernel it lacks.

    Example:
        >>> a = torch.ones(2, 3)
        >>> flops_of(torch.ops.aten.mm.default, (a, a.t()), {}, a @ a.t())
        24
    """
    from torch.utils.flop_counter import flop_registry  # brings Triton, where that is installed

    packet = getattr(op, "overloadpacket", op)
    if formula := _MORE.get(str(packet)):
        return formula(*args[:3])
    if packet not in flop_registry:
        return 0
    return int(flop_registry[packet](*args, **kwargs, out_val=output))


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Two products per head: (s, e) x (e, t) and (s, t) x (t, v)."""
    *batch, s, e = query.shape
    t, v = value.shape[-2:]
    del key
    return 2 * prod(batch) * s * t * (e + v)


_MORE = {"aten._scaled_dot_product_flash_attention_for_cpu": _attention}
