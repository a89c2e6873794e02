"""Facts about single operators, from their schemas."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ._views import Operator

# These move memory of FSDP, not of the region: FSDP gathers and frees parameters inside a region,
# in the forward but not always in the recomputation (pytorch#185178).
_NOT_OURS = frozenset({"c10d", "fsdp", "prim"})
# Checkpointing runs other numbers of the first two in forward and recomputation; a nested tensor
# is asked for its geometry by the others.
_BOOKKEEPING = frozenset(
    f"aten.{name}.default"
    for name in (
        "detach",
        "lift_fresh",
        "_nested_tensor_size",
        "_nested_tensor_strides",
        "_nested_tensor_storage_offsets",
    )
)
BATCH_NORMS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
    if hasattr(torch.ops.aten, name)
)
"""Given running statistics, and after them whether they are written to: no schema says so."""
STATISTICS = slice(3, 5)
_UNDECLARED = frozenset(
    ("batch_norm_update_stats", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts")
)
"""Operators that write running statistics, which their schemas do not say."""
_RUNNING = frozenset(("running_mean", "running_var"))
RNNS = frozenset({torch.ops.aten.mkldnn_rnn_layer.default})
"""Fused RNNs without random numbers; with gradients off they return no workspace."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about one operator that the engines need.

    Attributes:
        bookkeeping: not part of the region's work: returns no tensor, or runs for torch itself.
        writes: (position or None, name) of every argument it writes to.
        unseen: those of them that it does not return, while it returns others: their version
            counters do not show the write.
        random: whether it may advance a random number generator.
        dropout: position of an argument `dropout_p`, None without one.
        is_view: whether its result is a view of an input, or it turns an input into a view with
            other sizes or strides.
    """

    bookkeeping: bool = False
    writes: tuple[tuple[int | None, str], ...] = ()
    unseen: tuple[tuple[int | None, str], ...] = ()
    random: bool = False
    dropout: int | None = None
    is_view: bool = False

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors this call writes to."""
        return _tensors_at(self.writes, args, kwargs)

    def written_unseen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors this call writes to without changing their version counters."""
        return _tensors_at(self.unseen, args, kwargs) if self.unseen else []

    def draws(self, args: tuple[Any, ...]) -> bool:
        """Return whether this call advances a generator: attention without dropout does not."""
        if not self.random or self.dropout is None:
            return self.random
        return len(args) > self.dropout and bool(args[self.dropout])


@cache
def facts_of(op: Operator) -> Facts:
    """Read the facts of `op`; a higher-order operator has none.

    Example:
        >>> facts_of(torch.ops.aten.relu_.default).writes
        ((0, 'self'),)
    """
    schema = getattr(op, "_schema", None)
    if schema is None:
        return Facts()
    names = [argument.name for argument in schema.arguments]
    writes, unseen = [], []
    returned = [each.alias_info for each in schema.returns if each.alias_info is not None]
    shown = {label for each in returned if each.is_write for label in each.before_set}
    is_undeclared = schema.name.rpartition("::")[2] in _UNDECLARED
    for at, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        is_declared = alias is not None and alias.is_write
        if not (is_declared or (is_undeclared and argument.name in _RUNNING)):
            continue
        writes.append((None if argument.kwarg_only else at, argument.name))
        if schema.returns and (alias is None or shown.isdisjoint(alias.before_set)):
            unseen.append(writes[-1])
    return Facts(
        bookkeeping=_is_bookkeeping(op, schema),
        writes=tuple(writes),
        unseen=tuple(unseen),
        random=torch.Tag.nondeterministic_seeded in op.tags,
        dropout=names.index("dropout_p") if "dropout_p" in names else None,
        is_view=torch.Tag.inplace_view in op.tags or any(not each.is_write for each in returned),
    )


def _tensors_at(
    places: tuple[tuple[int | None, str], ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    found = (kwargs.get(name) if at is None or at >= len(args) else args[at] for at, name in places)
    return [
        each
        for value in found
        for each in (value if isinstance(value, (list, tuple)) else (value,))
        if isinstance(each, torch.Tensor)
    ]


def _is_bookkeeping(op: Operator, schema: Any) -> bool:
    returns_tensor = any("Tensor" in str(result.type) for result in schema.returns)
    return not returns_tensor or op.namespace in _NOT_OURS or str(op) in _BOOKKEEPING
