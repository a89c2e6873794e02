"""What offload moved, for a module or a whole model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple

from torch import nn

from ckpt_wrap.checkpointing._options import require_module
from ckpt_wrap.modules._in_place import callers_of
from ckpt_wrap.offload._offload import Offload
from ckpt_wrap.offload._offload_stats import OffloadStats


def offload_stats(module: nn.Module) -> OffloadStats:
    """Counts of all offloaded modules at and below a module, added up.

    So `peak_bytes_away` of several modules is an upper bound: their peaks need not coincide.

    Raises:
        ModuleError: not an `nn.Module`.

    Example:
        >>> offload_stats(nn.Linear(2, 2)).copies_out
        0
    """
    require_module(module, "offload_stats")
    columns = [astuple(OffloadStats()), *(astuple(offload.stats) for offload in _offloads(module))]
    return OffloadStats(*map(sum, zip(*columns, strict=True)))


def _offloads(module: nn.Module) -> Iterator[Offload]:
    for candidate in module.modules():
        yield from (c for c in callers_of(candidate) if isinstance(c, Offload))
