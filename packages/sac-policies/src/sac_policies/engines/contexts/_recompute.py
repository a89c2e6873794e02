"""The mode of a region that runs again in backward: it hands out what the forward kept."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..._errors import MutationError, RecomputeError
from ..._torch_compat import backward_keeps_graph, install_dispatch, saved_tensor_hooks
from ...policies._names import NAME_OP
from ...policies._views import Operator, RegionState
from .._engine_disabled import active, seeing
from .._error_context import error_context
from .._fsdp import Ranges
from ._external_state import Found
from ._leaves import Leaves
from ._mode import Mode
from ._op_table import OpHandler, OpTable, waiting
from ._passing import unwatch_hooks, watch_hooks
from ._regions import Region


class Recompute(Mode):
    """Runs a region again for backward and hands out what was kept."""

    recomputes = True

    def __init__(self, region: Region, op_table: OpTable) -> None:
        super().__init__(region, op_table)
        self.state = region.state
        self.hands_over = False
        self._child = 0
        self._step = 0
        self._around: list[tuple[Mode, Any]] = []
        self.doubtful = Leaves()
        self._stopped: Any = None
        self._found = Found()
        self._saves: saved_tensors_hooks | None = None

    def __enter__(self) -> Any:
        if self.own.watch.is_due and all(mode.recomputes for mode in active.modes):
            raise self.own.watch.error()
        self.op_table, self.ranges = self.own, Ranges()
        self.state = RegionState()
        self.hands_over = self.region.finished and not backward_keeps_graph()
        self._child = self._step = 0
        self.handles = []
        self.hooks = saved_tensor_hooks()
        self.doubtful = self.region.leaves.doubtful()
        active.enter(self)
        self._stop_where_forward_is()
        self._around = [(mode, mode.op_table) for mode in seeing() if mode is not self]
        try:
            self._found = self.region.external.put_back()
            watch_hooks(self)
            self._watch_saves()
            self.region.ask_for_values(self.own.unread)
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
        if not any(error) and self.region.finished:
            self._check_counts()
        if self.hands_over:
            self.region.clear()
            self.own.unread = frozenset(self.region.unread)

    def _watch_saves(self) -> None:
        """See what is saved again of leaves that were written to: no operator may read them."""
        if self.hooks is None or not self.doubtful.have_new_versions():
            return
        pack, unpack = self.hooks

        def pack_checked(tensor: torch.Tensor) -> Any:
            self.doubtful.check_saved(tensor, self.region.mutated)
            return pack(tensor)

        self._saves = saved_tensors_hooks(pack_checked, unpack)
        self._saves.__enter__()

    def _stop_where_forward_is(self) -> None:
        """Stop early, whatever was asked for, if a gradient is taken inside the region (Rule 4)."""
        frame = None if self.region.frame is None else self.region.frame()
        if frame is not None and not (self.region.finished or frame.early_stop):
            frame.early_stop, self._stopped = True, frame

    def _leave(self) -> None:
        saves, self._saves = self._saves, None
        hooks = None if saves is None else saved_tensor_hooks()
        if saves is not None and hooks is not None and hooks[0] is saves.pack_hook:
            saves.__exit__(None, None, None)
        unwatch_hooks(self)
        active.leave(self)
        found, self._found = self._found, Found()
        found.leave()
        if self._stopped is not None:
            self._stopped.early_stop, self._stopped = False, None
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

        def error(tensor: torch.Tensor, how: str) -> MutationError:
            return self.region.mutated(tensor, op, how)

        traits = self.own.traits[op]
        if traits.reads:
            self.doubtful.check(op, args, error, reads=traits.rereads, views=traits.views)

    def inside(self, region: Region) -> Region | None:
        """Return what stood in the forward where a region begins now."""
        del region
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


def _dispatch_recompute(
    self: Recompute, op: Operator, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    handler = self.op_table[op]
    if self.doubtful and self.op_table is self.own:
        self.check_leaves(op, args)
    if handler is not None:
        return handler.replay(self, args, kwargs or {})
    return op(*args, **kwargs) if kwargs else op(*args)


install_dispatch(Recompute, _dispatch_recompute)
