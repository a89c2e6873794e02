"""What the contexts engine does at one operator, worked out once per policy.

Most operators of a region are recomputed whatever their arguments: their entry in the table is
None and costs one dictionary look-up. A `OpHandler` is made only for operators that may be kept,
are counted, draw random numbers or write to a tensor.

Rule 1. A view is not kept, whatever the policy says: it is made again from its base, at no cost. A
        kept one would part from its base where either is written to, and saves no memory. So
        is an operator that makes its input a view (unsqueeze_): it is run again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from ..._errors import EngineError, RecomputeError
from ...policies._decisions import Decision
from ...policies._operators import BATCH_NORMS, facts_of, written_statistics
from ...policies._policies import DEPENDS, Policy
from ...policies._unmatched import watch_of
from ...policies._views import Operator, OpView, RegionState
from .._engine_disabled import RangeHandler
from .._error_context import error_context
from .._fsdp import RANGE_OPS
from ._kept import Kept, KeptTensor, Offloaded, keep
from ._regions import Key, Region


class Mode(Protocol):
    """What is asked here of either mode of a region."""

    region: Region


class ForwardMode(Mode, Protocol):
    """What is asked here of the mode that runs a region for the first time."""

    def view(
        self, op: Operator, index: int, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> OpView:
        """Show one call to the policy."""

    def from_origin(self, handler: OpHandler, key: Key) -> Any:
        """Return what this region kept in the forward being recomputed, or None."""

    def note(self, key: Key, out: Any, drawn: int, handler: OpHandler) -> None:
        """Remember a call."""


class RecomputeMode(Mode, Protocol):
    """What is asked here of the mode that runs a region again."""

    state: RegionState
    hands_over: bool

    def check(self, handler: OpHandler) -> None:
        """Compare the order of operators with the forward."""


class OpHandler:
    """One operator under one policy."""

    __slots__ = ("answer", "dropout", "facts", "op", "special")

    def __init__(self, op: Operator, policy: Policy) -> None:
        self.op = op
        self.facts = facts_of(op)
        is_higher_order = isinstance(op, torch._ops.HigherOrderOperator)
        draws_always = self.facts.random and self.facts.dropout is None
        writes = bool(self.facts.writes) or op in BATCH_NORMS
        self.special = is_higher_order or draws_always or writes
        self.dropout = self.facts.dropout if self.facts.random else None
        self.answer = None if self.facts.bookkeeping else policy.constant(op)
        if self.facts.is_view and self.answer is not DEPENDS:
            self.answer = None  # Rule 1

    @property
    def needed(self) -> bool:
        """Whether this operator needs more than to be called."""
        may_keep = self.answer is DEPENDS or self.answer in (Decision.SAVE, Decision.OFFLOAD)
        return may_keep or self.facts.random or bool(self.facts.writes)

    @property
    def takes_view(self) -> bool:
        """Whether this operator returns a view and reads nothing."""
        return self.facts.is_view and not self.facts.bookkeeping

    def key(self, args: tuple[Any, ...]) -> Any:
        """Return what calls are counted by: compiled callables count each for itself.

        One operator runs every compiled callable of a region (pytorch#175258).
        """
        if isinstance(self.op, torch._ops.HigherOrderOperator) and args:
            return (self.op, args[0]) if not isinstance(args[0], torch.Tensor) else self.op
        return self.op

    def forward(self, mode: ForwardMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator and keep its output if the policy says so."""
        region = mode.region
        if self.special or region.special or (self.dropout and self.facts.draws(args)):
            return self._forward_special(mode, args, kwargs)
        op = self.op
        out = op(*args, **kwargs)
        index = region.state.enter(op)
        decision = self.answer
        if decision is DEPENDS:
            decision = region.policy.decide(mode.view(op, index, out, args, kwargs))
            if self.facts.is_view:
                return out
        if decision is Decision.SAVE:
            region.kept[op, index] = keep(out, region.hooks, False, 0)
        elif decision is Decision.OFFLOAD:
            region.kept[op, index] = keep(out, region.hooks, True, 0)
        return out

    def _forward_special(
        self, mode: ForwardMode, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Do the same where the operator draws or writes, or the region needs more care."""
        region, facts = mode.region, self.facts
        if facts.writes:
            region.protect(facts.written(args, kwargs))
        if facts.bookkeeping:
            return self.op(*args, **kwargs)
        if facts.writes:
            region.external.before_write(self.op, facts.written(args, kwargs), region.made)
        key = self.key(args)
        index = region.state.enter(key)
        statistics = written_statistics(self.op, args)
        out = None if statistics else mode.from_origin(self, (key, index))
        if out is None:
            out = self.op(*args, **kwargs)
        decision = self.answer
        if decision is DEPENDS:
            decision = region.policy.decide(mode.view(self.op, index, out, args, kwargs))
        keeps = decision is not None and decision.keeps and not facts.is_view
        drawn = region.draw(keeps) if facts.random and facts.draws(args) else 0
        if keeps:
            self._check_writes(out, region.policy)
            own = region.external.own_copy(out) if facts.writes else out
            kept = keep(own, region.hooks, decision is Decision.OFFLOAD, drawn)
            if facts.writes and own is out and isinstance(kept, (KeptTensor, Offloaded)):
                kept.expect_write()
            region.kept[key, index] = kept
            if statistics:
                region.external.note_left((key, index), statistics)
        mode.note((key, index), out, drawn, self)
        return out

    def replay(self, mode: RecomputeMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the kept output, or run the operator again."""
        region, facts = mode.region, self.facts
        if region.log is not None:
            mode.check(self)
        written = facts.written(args, kwargs) if facts.writes else []
        if written:
            region.protect(written)
        taken = None if facts.bookkeeping else self.take(mode, args)
        if taken is None:
            return self.op(*args, **kwargs)
        call, kept = taken
        if kept.drawn and kept.drawn < region.last_recomputed_draw:
            self.op(*args, **kwargs)
        value = kept.read(self.op, region.policy, last=mode.hands_over)
        statistics = written_statistics(self.op, args)
        if statistics and not region.external.leave_again(call, statistics):
            self.op(*args, **kwargs)  # kept for its name, when it had run
        return written[0].copy_(value) if written else value

    def take(self, mode: RecomputeMode, args: tuple[Any, ...]) -> tuple[Key, Kept] | None:
        """Count one call in a recomputation and return it with its kept output, if any.

        Raises:
            RecomputeError: the forward called the operator fewer times.
        """
        key, region = self.key(args), mode.region
        index = mode.state.enter(key)
        if region.finished and index >= region.state.calls().get(key, 0):
            raise RecomputeError(
                f"sac_policies.checkpoint: operator {self.op} runs for the {index + 1}. time in "
                f"the recomputation ({error_context(region.policy, self.op)}), but the forward "
                f"ran it {index} times. "
                "Make the function do the same work each time it is called."
            )
        take = region.kept.pop if mode.hands_over else region.kept.get
        kept = take((key, index), None)
        return None if kept is None else ((key, index), kept)

    def _check_writes(self, out: Any, policy: Policy) -> None:
        writes, is_tensor = len(self.facts.writes), isinstance(out, torch.Tensor)
        if writes > 1 or (writes and not (is_tensor and self.facts.returns_written)):
            other = ", not what it writes to" if writes == 1 and is_tensor else ""
            raise EngineError(
                f"sac_policies.checkpoint: operator {self.op} writes to {writes} arguments and "
                f"returns {type(out).__name__}{other}, but only one tensor that is written and "
                f"returned can be kept ({error_context(policy, self.op)}). Recompute it, or keep "
                "what reads its result."
            )


class Traits(NamedTuple):
    """What the table knows of one operator that is asked at every call, to be asked once.

    Attributes:
        rereads: whether it reads data when it is recomputed: not one that takes a view, nor one
            of which what it returns is kept.
        views: whether it takes a view.
        makes: whether it returns no tensor it was given, nor a view of one.
        reads: whether what it is given may be looked at: not by one that tells of geometry.
    """

    rereads: bool
    views: bool
    makes: bool
    reads: bool = True


Calls = frozenset[tuple[Any, int]]


class OpTable(dict[Operator, "OpHandler | RangeHandler | None"]):
    """Operator to visit, filled as operators appear; None: call it and do nothing else.

    Attributes:
        reads_names: as the policy's.
        reads_modules: as the policy's.
        watch: what the policy's regions have had of what it names.
        traits: what is asked of every operator, for each that appeared.
    """

    def __init__(self, policy: Policy, *, every: bool, beside: OpTable | None = None) -> None:
        super().__init__()
        self._policy = policy
        self._every = every or policy.reads_names
        self.reads_names = policy.reads_names
        self.reads_modules = policy.reads_modules
        self.watch = watch_of(policy)
        self.traits: dict[Operator, Traits] = {}
        self._unread: list[Calls] = [frozenset()] if beside is None else beside._unread

    @property
    def unread(self) -> Calls:
        """Calls whose value the last region to be run again had no use for.

        What is learned of it is of all tables of a policy.
        """
        return self._unread[0]

    @unread.setter
    def unread(self, calls: Calls) -> None:
        self._unread[0] = calls

    def __missing__(self, op: Operator) -> OpHandler | RangeHandler | None:
        if op in RANGE_OPS:
            self.traits[op] = Traits(rereads=True, views=False, makes=False)
            self[op] = started = RangeHandler(op)
            return started
        handler = OpHandler(op, self._policy)
        facts, is_kept = handler.facts, handler.answer in (Decision.SAVE, Decision.OFFLOAD)
        self.traits[op] = Traits(
            rereads=not (handler.takes_view or is_kept),
            views=handler.takes_view,
            makes=not (facts.is_view or facts.writes or facts.bookkeeping),
            reads=not facts.geometry,
        )
        wanted = handler.needed or (
            not handler.facts.bookkeeping and (self._every or self._policy.counts(op))
        )
        self[op] = found = handler if wanted else None
        return found


class WriteHandler:
    """An operator that is not the region's, but may overwrite what it keeps."""

    __slots__ = ("facts", "op")

    def __init__(self, op: Operator) -> None:
        self.op = op
        self.facts = facts_of(op)

    def forward(self, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator; copy first what it would overwrite."""
        mode.region.protect(self.facts.written(args, kwargs))
        return self.op(*args, **kwargs)

    replay = forward


class Waiting(dict[Operator, "WriteHandler | None"]):
    """The table of a mode while a recomputation runs inside its region."""

    def __missing__(self, op: Operator) -> WriteHandler | None:
        self[op] = found = WriteHandler(op) if facts_of(op).writes else None
        return found


waiting = Waiting()


@lru_cache(maxsize=256)
def op_table_of(policy: Policy) -> OpTable:
    """Return the table of a policy; equal policies share one, as do all their regions.

    Bounded, because a table holds its policy: a weak table would never let one go.
    """
    return OpTable(policy, every=False)
