"""The mode of a region that runs for the first time: it keeps what the policy says."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..._errors import MutationError
from ..._torch_compat import (
    checkpoint_frame,
    install_dispatch,
    read_inputs_within,
    saved_tensor_hooks,
)
from ...policies._decisions import Decision
from ...policies._modules import ModulePath, named_root
from ...policies._names import NAME_OP, listening
from ...policies._operators import written_statistics
from ...policies._policies import Policy
from ...policies._views import Operator, OpView, RegionSummary
from .._engine_disabled import active, own_work
from .._error_context import error_context
from ._kept import keep
from ._mode import Mode
from ._op_table import OpHandler, OpTable
from ._producers import Producers
from ._recompute import Recompute
from ._regions import Key, Region


class Forward(Mode):
    """Runs a region for the first time and keeps what its policy says."""

    def __init__(
        self, region: Region, op_table: OpTable, root: nn.Module | None, function: object
    ) -> None:
        super().__init__(region, op_table)
        self._function = function
        self._path = ModulePath(named_root(root)) if op_table.reads_modules else None
        self._producers = Producers() if op_table.reads_names else None
        self._labels: set[str] = set()
        self._extras = ExitStack() if self._path or self._producers else None
        region.special = self._producers is not None or region.log is not None
        # The same region in the forward that is being recomputed, if any, and the one around.
        self._before: Region | None = None
        self._outer: Region | None = None

    def __enter__(self) -> Any:
        try:
            self._join_outer()
            if self._extras is not None:
                self._enter_extras(self._extras)
            self.hooks = saved_tensor_hooks()
            frame = checkpoint_frame(self.hooks)
            if frame is not None:
                self.region.frame = weakref.ref(frame)
                # Rule 5
                read_inputs_within(frame, partial(_reading_inputs, self.region.policy))
            active.enter(self)
            return super().__enter__()
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self.region.end()
            self._leave()
        if not any(error):
            self._protect_leaves()
        watch = self.own.watch
        if not any(error) and (watch.open or watch.is_new(self._function)):
            watch.forward_ended(self._seen(), self._function)

    def _protect_leaves(self) -> None:
        leaves = self.region.leaves
        if not self.region.compares:
            return
        leaves.protect(None if self._before is None else self._before.leaves, self.region.mutated)
        if self._outer is not None:
            leaves.hand_to(self._outer.leaves)

    def _leave(self) -> None:
        active.leave(self)
        if self._extras is not None:
            self._extras.close()

    def view(
        self,
        op: Operator,
        index: int,
        out: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        label: str | None = None,
    ) -> OpView:
        """Show one call to the policy."""
        module = "" if self._path is None else self._path.now
        return OpView(op, index, out, args, kwargs, module, label, self.region.state)

    def named(self, tensor: torch.Tensor, label: str) -> None:
        """Keep a tensor that was just named, under the call that made its storage."""
        region, producers = self.region, self._producers
        if self.waits or producers is None:
            return
        self._labels.add(label)
        index = region.state.enter(NAME_OP)
        view = self.view(NAME_OP, index, tensor, (tensor, label), {}, label)
        decision = region.policy.decide(view)
        if decision is not None and decision.keeps:
            self._keep_named(producers, tensor, offload=decision is Decision.OFFLOAD)

    def _keep_named(self, producers: Producers, tensor: torch.Tensor, *, offload: bool) -> None:
        region = self.region
        with own_work():
            made = producers.find(tensor)
        if made is not None and made[0] not in region.kept:
            key, value, drawn = made
            region.kept[key] = keep(value, region.hooks, offload, drawn)

    def inside(self, region: Region) -> Region | None:
        """Add a region that begins now; return it as it was where this one is run again."""
        return self.region.add(region)

    def note(self, key: Key, out: Any, drawn: int, handler: OpHandler) -> None:
        """Remember who made `out` for a later naming, and what ran for debugging."""
        if self._producers is not None and not handler.facts.is_view:
            self._producers.note(key, out, drawn)
        if self.region.log is not None and not handler.facts.bookkeeping:
            self.region.log.append(handler.op)

    def from_origin(self, handler: OpHandler, key: Key) -> Any:
        """Return what this region kept in the forward being recomputed (Rule 1), or None."""
        origin = self.region.origin
        if origin is None or handler.facts.writes or handler.facts.random:
            return None
        kept = origin.kept.get(key)
        if kept is None:
            return None
        outer = active.modes[active.modes.index(self) - 1]
        if isinstance(outer, Recompute) and outer.op_table[handler.op] is not None:
            outer.skip(key[0])
        return kept.read(handler.op, self.region.policy, last=False)

    def _enter_extras(self, extras: ExitStack) -> None:
        if self._path is not None:
            self._path.follow(extras)
        if self._producers is not None:
            extras.enter_context(listening(self.named))

    def _join_outer(self) -> None:
        if not active.modes:
            return
        outer, region = active.modes[-1], self.region
        if outer.waits:
            return
        before = outer.inside(region)
        if outer.recomputes:
            region.special = True
            # Other policies keep other values.
            if before is not None and before.policy == region.policy:
                region.origin = before
        else:
            self._outer = outer.region
        self._before = before
        region.start_from(before)

    def _seen(self) -> RegionSummary:
        calls = {**dict.fromkeys(self.own, 0), **self.region.state.calls()}
        paths = frozenset() if self._path is None else self._path.known
        kept = frozenset(op for op, _ in self.region.kept)
        return RegionSummary(calls, frozenset(self._labels), paths, kept)


@contextmanager
def _reading_inputs(policy: Policy) -> Iterator[None]:
    """Bring back what a region was given; torch's checkpoint has noted its versions."""
    try:
        with own_work():
            yield
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise MutationError(
            "sac_policies.checkpoint: an input of the region was changed in place after the "
            "region ran, but the recomputation reads it as it was "
            f"({error_context(policy, None)}). Change it after backward, or pass the region a "
            "copy."
        ) from error


def _dispatch_forward(
    self: Forward, op: Operator, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    handler = self.op_table[op]
    region, makes = self.region, False
    if self.op_table is self.own:
        rereads, views, makes, reads = self.own.traits[op]
        if reads:
            region.leaves.note(op, args, region.made, rereads=rereads, views=views)
        if statistics := written_statistics(op, args):
            region.external.before_write(op, statistics, region.made)
    if handler is not None:
        out = handler.forward(self, args, kwargs or {})
    else:
        out = op(*args, **kwargs) if kwargs else op(*args)
    if makes:
        region.made.add(out)
    return out


install_dispatch(Forward, _dispatch_forward)
