"""A region: one call of a function under a policy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from .._torch_compat._dispatch import LETS_COMPILE
from .._torch_compat._module_calls import compiled_in
from ..policies._modules import ModulePath
from ..policies._names import listening
from ..policies._policies import Policy
from ..policies._unmatched import PolicyUse
from ..policies._views import Operator, OpView, RegionSummary
from ._observed import Observed
from ._recorders import Table


class Region:
    """One call of a function under one policy.

    Attributes:
        use: names and operators of the policy's regions so far.
        calls: number of calls of each operator that the policy is asked about, by `id`, because
            hashing an operator runs Python.
        checks: whether replays are compared with the bits of the forward.
        labels: names given to tensors.
        kept: whether the policy kept a value by an answer to one call.
        inside: operators of nested regions.
        path: the running module, if the policy reads modules.
    """

    def __init__(
        self,
        policy: Policy,
        table: Table,
        use: PolicyUse,
        root: nn.Module | None,
        checks: bool,
        observer: Observed | None = None,
    ) -> None:
        self.policy, self.table, self.use, self.checks = policy, table, use, checks
        self.calls: dict[Any, int] = {}
        self.labels: set[str] = set()
        self.kept = False
        self.inside: set[Operator] = set()
        self.path = ModulePath(root) if table.reads_modules else None
        # Up to torch 2.9 compiled code runs eagerly under a dispatch mode.
        self.compiled = compiled_in(root) if LETS_COMPILE and root is not None else []
        self.observer = observer

    def view(
        self,
        op: Operator,
        index: int,
        out: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        label: str | None = None,
    ) -> OpView:
        module = "" if self.path is None else self.path.now
        return OpView(op, index, out, args, kwargs, module, label)

    def follow(self, until: ExitStack, named: Callable[[torch.Tensor, str], None]) -> None:
        """Follow modules and names, if the policy reads them."""
        if self.path is not None:
            self.path.follow(until)
        if self.table.reads_names:
            until.enter_context(listening(named))

    def seen(self) -> RegionSummary:
        """Summarize the region, to find entries of the policy that match nothing."""
        calls = {op: self.calls.get(id(op), 0) for op in (*self.inside, *self.table.recorders)}
        paths = frozenset() if self.path is None else self.path.known
        return RegionSummary(calls, frozenset(self.labels), paths, self.kept)
