"""Floating-point operations of one operator call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch

from ._views import Operator


def flops_of(op: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> int:
    """Count multiplications and additions; 0 for operators without a known formula.

    Uses torch's registry, except for attention: it lacks kernels, and before 2.13 refuses shared
    key heads. A formula that raises counts as missing.

    Example:
        >>> a = torch.ones(2, 3)
        >>> flops_of(torch.ops.aten.mm.default, (a, a.t()), {}, a @ a.t())
        24
    """
    from torch.utils.flop_counter import flop_registry  # imports Triton if it is installed

    packet = getattr(op, "overloadpacket", op)
    own = _ATTENTION.get(str(packet))
    if own is None and packet not in flop_registry:
        return 0
    try:
        if own is not None:
            return own(*args[:4])
        return int(flop_registry[packet](*args, **kwargs, out_val=output))
    except Exception:  # a user's formula may raise anything
        return 0


def _forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> int:
    """Two products per head: (s, e) x (e, t) and (s, t) x (t, v)."""
    del rest
    *batch, s, e = query.shape
    return 2 * prod(batch) * s * key.shape[-2] * (e + value.shape[-1])


def _backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> int:
    """The first product again, and two for each."""
    del grad
    *batch, s, e = query.shape
    return 2 * prod(batch) * s * key.shape[-2] * (3 * e + 2 * value.shape[-1])


_KERNELS = (
    *("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"),
    "fused_attention_overrideable",
)
_ATTENTION: dict[str, Callable[..., int]] = {
    f"aten._scaled_dot_product_{kernel}{name}": formula
    for kernel in _KERNELS
    for name, formula in (("", _forward), ("_backward", _backward))
}
