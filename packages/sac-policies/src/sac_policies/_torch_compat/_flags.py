"""Process-wide flags of torch that choose the kernel of an operator, and so its bits.

Autocast and gradient mode are not among them: they act above the operators that a tape records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from . import find

T = TypeVar("T")
States = tuple[Any, ...]

_get_precision = find("_C._get_fp32_precision_getter")
_set_precision = find("_C._set_fp32_precision_setter")
_get_deterministic = find("_C._get_deterministic_algorithms")
_get_warn_only = find("_C._get_deterministic_algorithms_warn_only")
_set_deterministic = find("_C._set_deterministic_algorithms")
_get_mkldnn = find("_C._get_mkldnn_enabled")
_set_mkldnn = find("_C._set_mkldnn_enabled")
_get_cudnn = find("_C._get_cudnn_enabled")
_set_cudnn = find("_C._set_cudnn_enabled")
_IS_CUDA_BUILT: bool = find("backends.cuda.is_built")()


class Flags:
    """Flags that decide between kernels; this one: deterministic algorithms.

    Reading them is part of each recorded call, so each kind has one function that reads all.
    """

    def read(self) -> States:
        """Return the present states."""
        return (_get_deterministic(),)

    def _set(self, states: States) -> None:
        _set_deterministic(states[0], warn_only=_get_warn_only())

    def set_to(self, states: States, call: Callable[..., T], *args: Any) -> T:
        """Call a function while the flags have given states."""
        before = self.read()
        if before == states:
            return call(*args)
        try:
            self._set(states)
            return call(*args)
        finally:
            self._set(before)


class OfWork(Flags):
    """Also those of the libraries that do one kind of work.

    Args:
        work: "matmul", "conv" or "rnn".
    """

    def __init__(self, work: str) -> None:
        self._work = work

    def read(self) -> States:
        """Return the present states."""
        states = _get_deterministic(), _get_mkldnn(), _get_precision("mkldnn", self._work)
        if _IS_CUDA_BUILT:
            return (*states, _get_cudnn(), _get_precision("cuda", self._work))
        return states

    def _set(self, states: States) -> None:
        super()._set(states)
        _set_mkldnn(states[1])
        _set_precision("mkldnn", self._work, states[2])
        if _IS_CUDA_BUILT:
            _set_cudnn(states[3])
            _set_precision("cuda", self._work, states[4])


_BY_WORK = {
    "matmul": "mm addmm bmm baddbmm addbmm mv addmv dot vdot linear _addmm_activation _scaled_mm",
    "conv": "convolution _convolution conv_tbc mkldnn_convolution cudnn_convolution",
    "rnn": "mkldnn_rnn_layer",
}
_ACCUMULATE = """
    index_add index_put _index_put_impl _unsafe_index_put put index_copy index_reduce scatter
    scatter_add scatter_reduce cumsum bincount median kthvalue
"""
_OF_WORK = {work: OfWork(work) for work in _BY_WORK}
_BY_NAME: dict[str, Flags] = {
    name: _OF_WORK[work] for work, names in _BY_WORK.items() for name in names.split()
}
_BY_NAME |= dict.fromkeys(_ACCUMULATE.split(), Flags())


def flags_of(name: str) -> Flags | None:
    """Return the flags that an operator of aten reads, by its name without overload.

    Example:
        >>> flags_of("scatter_add_").read(), flags_of("sin")
        ((False,), None)
    """
    if name.startswith(("_scaled_dot_product", "_flash_attention", "_efficient_attention")):
        return _OF_WORK["matmul"]
    return _BY_NAME.get(name.rstrip("_"))
