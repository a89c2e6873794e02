"""Process-wide switches of torch that choose the kernel of an operator, and so its bits.

Autocast and gradient mode are not among them: they act above the operators that a tape records.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from . import find

T = TypeVar("T")
Switch = tuple[Callable[[], Any], Callable[[Any], None]]
"""Reads and sets a switch."""

_get_precision = find("_C._get_fp32_precision_getter")
_set_precision = find("_C._set_fp32_precision_setter")
_get_deterministic = find("_C._get_deterministic_algorithms")
_get_warn_only = find("_C._get_deterministic_algorithms_warn_only")
_set_deterministic = find("_C._set_deterministic_algorithms")


def _deterministic() -> tuple[bool, bool]:
    return _get_deterministic(), _get_warn_only()


_DETERMINISTIC: Switch = _deterministic, lambda now: _set_deterministic(now[0], warn_only=now[1])
_IS_CUDA_BUILT: bool = find("backends.cuda.is_built")()


def _flag(name: str) -> Switch:
    return find(f"_C._get_{name}"), find(f"_C._set_{name}")


def _precision(backend: str, work: str) -> Switch:
    return partial(_get_precision, backend, work), partial(_set_precision, backend, work)


def _switches(work: str) -> tuple[Switch, ...]:
    found = [_DETERMINISTIC, _flag("mkldnn_enabled"), _precision("mkldnn", work)]
    if _IS_CUDA_BUILT:
        found += [_precision("cuda", work), _flag("cudnn_enabled"), _flag("cudnn_deterministic")]
    return tuple(found)


_BY_WORK = {
    "matmul": "mm addmm bmm baddbmm addbmm mv addmv dot vdot linear _addmm_activation _scaled_mm",
    "conv": "convolution _convolution conv_tbc mkldnn_convolution cudnn_convolution",
    "rnn": "mkldnn_rnn_layer",
}
_ACCUMULATE = """
    index_add index_put _index_put_impl _unsafe_index_put put index_copy index_reduce scatter
    scatter_add scatter_reduce cumsum bincount median kthvalue
"""
_BY_NAME = {name: _switches(work) for work, names in _BY_WORK.items() for name in names.split()}
_BY_NAME |= dict.fromkeys(_ACCUMULATE.split(), (_DETERMINISTIC,))
_ATTENTION = _switches("matmul")


def switches_of(name: str) -> tuple[Switch, ...]:
    """Return the switches that an operator of aten reads, by its name without overload.

    Example:
        >>> len(switches_of("scatter_add_")), switches_of("sin")
        (1, ())
    """
    if name.startswith(("_scaled_dot_product", "_flash_attention", "_efficient_attention")):
        return _ATTENTION
    return _BY_NAME.get(name.rstrip("_"), ())


def set_to(
    switches: tuple[Switch, ...], states: tuple[Any, ...], call: Callable[..., T], *args: Any
) -> T:
    """Call a function while switches have given states."""
    before = [read() for read, _ in switches]
    changed = [at for at, state in enumerate(states) if before[at] != state]
    try:
        for at in changed:
            switches[at][1](states[at])
        return call(*args)
    finally:
        for at in changed:
            switches[at][1](before[at])
