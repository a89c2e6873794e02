"""Pushes dispatch modes; the eager engine that works for any function.

Two modes around one region: `Forward` keeps what the policy says, `Recompute` puts it in
place of running the operator again. torch's own checkpoint calls the function under them, so
nesting, early stop, random state and autocast are torch's.

Rule 1. A region run inside another one keeps its values for both: when the outer region is
        recomputed, the inner one is found again by its place and hands out what it kept.
Rule 2. A recomputation that runs inside other regions (a backward in the middle of a function)
        is no work of theirs, be it one of them that is recomputed: they wait until it ends.
Rule 3. What FSDP does inside a region is not the region's: it runs, uncounted and unkept.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from ..._errors import MutationError, RecomputeError
from ..._torch_compat import (
    Hooks,
    backward_keeps_graph,
    install_dispatch,
    saved_tensor_hooks,
)
from ...policies._decisions import Decision
from ...policies._modules import path_for
from ...policies._names import NAME_OP, listening
from ...policies._policies import Policy
from ...policies._views import Operator, OpView, RegionState, RegionSummary
from .._engine_disabled import EngineDisabled, active, own_work
from .._error_context import error_context
from .._fsdp import Ranges
from ._arguments import Arguments
from ._kept import keep
from ._op_table import OpHandler, OpTable, Waiting, op_table_of, waiting
from ._passing import watch_hooks
from ._producers import Producers
from ._regions import Key, Region


class Mode(TorchDispatchMode):
    """What both modes share: the region, its table, their place among the active modes."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Count a compiled callable as one operator; do not look inside."""
        return True

    supports_higher_order_operators = True

    def __init__(self, region: Region, op_table: OpTable) -> None:
        # torch sets a mode's own fields on entering it; the recompute mode may never be.
        self.region = region
        self.op_table: OpTable | EngineDisabled | Waiting = op_table
        self.own = op_table
        self.ranges = Ranges()
        # Hooks that a recomputation registered; None in a forward.
        self.handles: list[RemovableHandle] | None = None
        # Those around the mode when it was entered: its checkpoint's.
        self.hooks: Hooks | None = None

    @property
    def waits(self) -> bool:
        """Whether what runs now is not the region's."""
        return self.op_table is not self.own

    def follow(self, op: Operator, args: tuple[Any, ...]) -> None:
        """Look away while FSDP is at work (Rule 3)."""
        self.ranges.follow(op, args)
        self.op_table = EngineDisabled() if self.ranges.inside else self.own


class Forward(Mode):
    """Runs a region for the first time and keeps what its policy says."""

    def __init__(
        self, region: Region, op_table: OpTable, root: nn.Module | None, function: object
    ) -> None:
        super().__init__(region, op_table)
        self._function = function
        self._path = path_for(root) if op_table.reads_modules else None
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
            active.enter(self)
            return super().__enter__()
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self.region.finished = True
            self._leave()
        if error[0] is None:
            self._protect_leaves()
        watch = self.own.watch
        if error[0] is None and (watch.open or watch.is_new(self._function)):
            watch.forward_ended(self._seen(), self._function)

    def _protect_leaves(self) -> None:
        leaves = self.region.leaves
        leaves.protect(leaves if self._before is None else self._before.leaves)
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
            extras.enter_context(self._path)
        if self._producers is not None:
            extras.enter_context(listening(self.named))

    def _join_outer(self) -> None:
        if not active.modes:
            return
        outer, region = active.modes[-1], self.region
        if isinstance(outer, Recompute):
            before = outer.next_child()
            region.special = True
            # Other policies keep other values.
            if before is not None and before.policy == region.policy:
                region.origin = before
        else:
            before = outer.region.add(region)
            self._outer = outer.region
        self._before = before
        known = None if before is None else before.arguments
        if region.arguments is not None and known is not None:
            region.arguments.start_from(known)

    def _seen(self) -> RegionSummary:
        calls = {**dict.fromkeys(self.own, 0), **self.region.state.calls()}
        paths = frozenset() if self._path is None else self._path.known
        kept = frozenset(op for op, _ in self.region.kept)
        return RegionSummary(calls, frozenset(self._labels), paths, kept)


class Recompute(Mode):
    """Runs a region again for backward and hands out what was kept."""

    def __init__(self, region: Region, op_table: OpTable) -> None:
        super().__init__(region, op_table)
        self.state = region.state
        self.hands_over = False
        self._child = 0
        self._step = 0
        self._around: list[tuple[Mode, Any]] = []
        self._checked: set[int] = set()

    def __enter__(self) -> Any:
        if self.own.watch.missing and not any(isinstance(m, Forward) for m in active.modes):
            raise self.own.watch.error()
        self.op_table, self.ranges = self.own, Ranges()
        self.state = RegionState()
        self.hands_over = not backward_keeps_graph()
        self._child = self._step = 0
        self._checked.clear()
        self.handles = []
        self.hooks = saved_tensor_hooks()
        watch_hooks()
        active.enter(self)
        self._around = [(mode, mode.op_table) for mode in active.modes if mode is not self]
        try:
            for mode, _ in self._around:
                mode.op_table = waiting
            return super().__enter__()
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._leave()
        if error[0] is None and self.region.finished:
            self._check_counts()
        if self.hands_over:
            self.region.clear()

    def _leave(self) -> None:
        active.leave(self)
        around, self._around = self._around, []
        for mode, table in around:
            mode.op_table = table
        handles, self.handles = self.handles, None
        for handle in handles or ():
            handle.remove()

    def _check_counts(self) -> None:
        """Compare a recomputation that ran to its end with the forward."""
        calls = self.state.calls()
        for key, count in self.region.state.calls().items():
            if calls.get(key, 0) < count and key is not NAME_OP:
                op = key[0] if isinstance(key, tuple) else key
                raise RecomputeError(
                    f"sac_policies.checkpoint: operator {op} ran {calls.get(key, 0)} times in the "
                    f"recomputation (backward {error_context(self.region.policy, op)}), but "
                    f"{count} times in the forward. Make the function do the same work each time "
                    "it is called."
                )

    def check_leaves(self, op: Operator, args: tuple[Any, ...]) -> None:
        """Refuse leaves that others changed since the forward read them.

        Raises:
            MutationError: they did.
        """
        leaves = self.region.leaves
        tensor = leaves.changed_version(args)
        if tensor is not None:
            raise self._mutated(tensor, op, "changed in place")
        if op not in self.own.unread:
            leaves.check_data(
                op, args, self._checked, lambda leaf: self._mutated(leaf, op, "changed")
            )

    def _mutated(self, tensor: torch.Tensor, op: Operator, how: str) -> MutationError:
        return MutationError(
            f"sac_policies.checkpoint: tensor of shape {tuple(tensor.shape)} was {how} after the "
            f"region read it, but {op} of the recomputation reads it as it was "
            f"(read {error_context(self.region.policy, op)}). Change it after backward."
        )

    def next_child(self) -> Region | None:
        """Return the region that stood at this place in the forward."""
        self._child += 1
        return self.region.child(self._child - 1)

    def skip(self, key: Any) -> None:
        """Count a call that an inner region answered for."""
        index = self.state.enter(key)
        self.region.kept.pop((key, index), None)

    def check(self, handler: OpHandler) -> None:
        """Compare the order of operators with the forward, where debugging logged it."""
        log = self.region.log
        if log is None or handler.facts.bookkeeping or not self.region.finished:
            return
        before = log[self._step] if self._step < len(log) else None
        if before is not handler.op:
            raise RecomputeError(
                f"sac_policies.checkpoint: operator {self._step} of the recomputation is "
                f"{handler.op} ({error_context(self.region.policy, handler.op)}), but the forward "
                f"ran {before} there. Make the function do the same work each time it is called."
            )
        self._step += 1


def _dispatch_forward(
    self: Forward, op: Operator, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    handler = self.op_table[op]
    if not self.waits:
        self.region.leaves.note(op, args, rereads=op not in self.own.unread)
    if handler is not None:
        return handler.forward(self, args, kwargs or {})
    return op(*args, **kwargs) if kwargs else op(*args)


def _dispatch_recompute(
    self: Recompute, op: Operator, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    handler = self.op_table[op]
    if not self.waits:
        self.check_leaves(op, args)
    if handler is not None:
        return handler.replay(self, args, kwargs or {})
    return op(*args, **kwargs) if kwargs else op(*args)


install_dispatch(Forward, _dispatch_forward)
install_dispatch(Recompute, _dispatch_recompute)


def contexts(
    policy: Policy,
    *,
    root: nn.Module | None = None,
    debug: bool = False,
    arguments: Arguments | None = None,
    function: object = None,
) -> tuple[Forward, Recompute]:
    """Return the two modes of one region; `function` is what runs in it, None where unknown."""
    about = root if function is None else function
    op_table = op_table_of(policy)
    if debug or op_table.watch.is_new(about):
        # A table of its own: it lists the operators of this region and no others.
        op_table = OpTable(policy, every=debug)
    region = Region(policy, _user_hooks(), debug, arguments)
    return Forward(region, op_table, root, about), Recompute(region, op_table)


def _user_hooks() -> Hooks | None:
    """Return the saved-tensor hooks around the region, unless a checkpoint put them there.

    The hooks of an outer region expect exactly what autograd saves, nothing else. A checkpoint
    pushes them just before it enters the region's mode, whoever's it is.
    """
    hooks = saved_tensor_hooks()
    own = ("torch.utils.checkpoint", __package__.rpartition(".")[0])
    if hooks is None or getattr(hooks[0], "__module__", "").startswith(own):
        return None
    return None if any(mode.hooks == hooks for mode in active.modes) else hooks
