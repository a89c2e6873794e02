"""Process-wide flags of torch that choose the kernel of an operator, and so its bits.

Autocast and gradient mode are not among them: they act above the operators that a tape records.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from .. import _torch_compat as compat

T = TypeVar("T")
States = tuple[Any, ...]
Flag = tuple[Callable[[], Any], Callable[[Any], Any]]
"""Functions that read and set a flag."""


class Flags:
    """Flags that an operator reads."""

    def __init__(self, *flags: Flag) -> None:
        self._reads = [read for read, _ in flags]
        self._flags = flags

    def read(self) -> States:
        """Return the present states."""
        return tuple([read() for read in self._reads])

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

    def _set(self, states: States) -> None:
        for (_, set_flag), state in zip(self._flags, states, strict=True):
            set_flag(state)


def _set_deterministic(is_on: bool) -> None:
    compat.set_deterministic(is_on, warn_only=compat.get_warn_only())


_DETERMINISTIC: Flag = (compat.get_deterministic, _set_deterministic)


def _of_work(work: str) -> Flags:
    """Return the flags of "matmul", "conv" or "rnn", also those of the libraries that do it."""

    def precision(library: str) -> Flag:
        read, write = compat.get_precision, compat.set_precision
        return partial(read, library, work), partial(write, library, work)

    flags = [_DETERMINISTIC, (compat.get_mkldnn, compat.set_mkldnn), precision("mkldnn")]
    if compat.IS_CUDA_BUILT:
        flags += [(compat.get_cudnn, compat.set_cudnn), precision("cuda")]
    return Flags(*flags)


_BY_WORK = {
    "matmul": "mm addmm bmm baddbmm addbmm mv addmv dot vdot linear _addmm_activation _scaled_mm",
    "conv": "convolution _convolution conv_tbc mkldnn_convolution cudnn_convolution",
    "rnn": "mkldnn_rnn_layer",
}
_ACCUMULATE = """
    index_add index_put _index_put_impl _unsafe_index_put put index_copy index_reduce scatter
    scatter_add scatter_reduce cumsum bincount median kthvalue
"""
_OF_WORK = {work: _of_work(work) for work in _BY_WORK}
_BY_NAME: dict[str, Flags] = {
    name: _OF_WORK[work] for work, names in _BY_WORK.items() for name in names.split()
}
_BY_NAME |= dict.fromkeys(_ACCUMULATE.split(), Flags(_DETERMINISTIC))


def flags_of(name: str) -> Flags | None:
    """Return the flags that an operator of aten reads, by its name without overload.

    Example:
        >>> flags_of("scatter_add_").read(), flags_of("sin")
        ((False,), None)
    """
    if name.startswith(("_scaled_dot_product", "_flash_attention", "_efficient_attention")):
        return _OF_WORK["matmul"]
    return _BY_NAME.get(name.rstrip("_"))
