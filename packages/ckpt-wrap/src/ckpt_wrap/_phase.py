"""Whether this thread is recomputing, and what must not happen twice while it is."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torch import nn

_COUNTING = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class _Phase(threading.local):
    recomputing = 0
    in_region = 0


_phase = _Phase()


def is_recomputing() -> bool:
    """Whether the current thread runs a checkpointed module again, for its backward.

    Example:
        >>> is_recomputing()
        False
    """
    return _phase.recomputing > 0


def is_checkpointing() -> bool:
    """Whether the current thread runs a checkpointed module, for the first time or again.

    What autograd saves there is not kept for backward. Outside of a checkpointed module, and in
    one that is called without gradients, this is False.

    Example:
        >>> is_checkpointing()
        False
    """
    return _phase.in_region > 0 or _phase.recomputing > 0


class InsideRegion:
    """Context of a checkpointed forward."""

    __slots__ = ()

    def __enter__(self) -> None:
        _phase.in_region += 1

    def __exit__(self, *error: object) -> None:
        _phase.in_region -= 1


marked_region = InsideRegion()


@contextlib.contextmanager
def recomputing(module: nn.Module | None) -> Iterator[None]:
    """Mark this thread as recomputing; running statistics inside `module` do not advance."""
    with _still_statistics(module):
        _phase.recomputing += 1
        try:
            yield
        finally:
            _phase.recomputing -= 1


@contextlib.contextmanager
def _still_statistics(module: nn.Module | None) -> Iterator[None]:
    """Let layers that count batches advance copies, and drop the copies after."""
    norms = [] if module is None else [m for m in module.modules() if _counts(m)]
    kept = [(norm, name, getattr(norm, name)) for norm in norms for name in _STATISTICS]
    try:
        for norm, name, statistic in kept:
            setattr(norm, name, None if statistic is None else statistic.clone())
        yield
    finally:
        for norm, name, statistic in kept:
            setattr(norm, name, statistic)


def _counts(module: nn.Module) -> bool:
    return isinstance(module, _COUNTING) and module.training and module.track_running_stats
