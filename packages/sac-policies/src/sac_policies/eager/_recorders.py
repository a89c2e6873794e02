"""Recorders: how the tape treats an operator, decided once from its schema and the policy.

An operator is recorded only if its schema and tags say that it is functional and deterministic.
Short lists name the operators with a wrong schema.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any
from weakref import ref

import torch
from torch.autograd.graph import increment_version

from .._tensors import tensors_in
from .._torch_compat import RANGE_END, RANGE_START
from .._torch_compat._dispatch import boxed_call, hidden_from_modes, is_called_by_library
from ..policies._decisions import Decision
from ..policies._operators import BATCH_NORMS, RNNS, STATISTICS, Facts, facts_of
from ..policies._per_policy import PerPolicy
from ..policies._policies import DEPENDS, Constant, Policy
from ..policies._views import Operator
from ._flags import flags_of
from ._masks import UNPACK, packed, takes
from ._values import (
    OpCall,
    Operation,
    Result,
    TapeValues,
    version_of,
)

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs one call of an operator under a tape, and records it."""

_UNDEFINED = frozenset(
    (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "as_strided",
        "lift_fresh",
        "_ctc_loss",
        "_cudnn_ctc_loss",
        "linalg_lstsq",
    )
)
"""Not functional: their result is uninitialised or reads past its argument."""
_UNSAFE_VIEWS = frozenset(("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes"))
"""Their results share memory with the argument, which the schema does not say."""
_RESIZES = frozenset(("set_", "resize_", "resize_as_", "_resize_output_"))
_MAY_WRITE = getattr(torch.Tag, "maybe_aliasing_or_mutating", None)
_VARIES = getattr(torch.Tag, "nondeterministic_bitwise", None)
_OUTSIDE = frozenset(("fsdp", "profiler", "prim"))
"""Namespaces of operators that do not belong to the region."""
_MASKS = {"bernoulli_": 0, "bernoulli": 0, "native_dropout": 1}
"""Operators that draw masks, and which of their results is one."""

MUCH_SMALLER = 32
"""Times that the result of a reduction is smaller than its argument to be held."""

_is_grad_enabled = torch.is_grad_enabled


class Recorder(Operation):
    """One operator under one policy.

    Attributes:
        run: runs one call under a tape.
        answer: the policy's constant answer.
        asks: whether each call is counted, and the policy is called after it.
        why: reason why its results are held although the policy does not keep them.
    """

    __slots__ = (
        "_is_view",
        "_short",
        "answer",
        "asks",
        "facts",
        "is_aten",
        "run",
        "why",
    )

    def __init__(self, op: Operator, policy: Policy) -> None:
        self.facts: Facts = facts_of(op)
        self.answer: Constant = None if self.facts.bookkeeping else policy.constant(op)
        if self.facts.is_view and self.answer is not DEPENDS:
            self.answer = None  # a view costs nothing to recompute
        is_told = self.answer in (DEPENDS, Decision.OFFLOAD)
        self.asks = not self.facts.bookkeeping and is_told
        schema = getattr(op, "_schema", None)
        self.is_aten = schema is not None and op.namespace in ("aten", "prims")
        self._short = "" if schema is None else schema.name.partition("::")[2]
        self._is_view = self.facts.is_view
        shares = self._is_view or (self.is_aten and self._short in _UNSAFE_VIEWS)
        flags = flags_of(self._short) if self.is_aten else None
        super().__init__(op, boxed_call(op), *_tensor_positions(schema), shares, flags)
        self.run, self.why = self._kind(schema)

    @property
    def reduces(self) -> bool:
        """Whether its result may be held because it is small."""
        return self.run == self._reduction

    @property
    def keeps(self) -> bool:
        return self.answer is Decision.SAVE

    def _kind(self, schema: Any) -> tuple[Run, str]:
        """Choose the function that runs a call, and the reason if its results are held."""
        if schema is None:
            return self._held, "a higher-order operator is not replayed"
        if self.op in (RANGE_START, RANGE_END):
            return self._range, ""
        if self.op.namespace in _OUTSIDE:
            return (
                self._written if self.facts.writes else self._held,
                "it does not belong to the region",
            )
        if not schema.returns:
            return self._written_unseen if self.facts.writes else self._held, ""
        if self.op.namespace == "c10d":
            return self._collective, "a collective is not run again"
        if self.op in BATCH_NORMS:
            return self._batch_norm, "the statistics of a batch are held"
        if self.facts.writes:
            return self._kind_of_write(schema)
        if self.op in RNNS:
            return self._rnn, ""
        if self.facts.random:
            if self.facts.dropout is not None:
                return self._attention, "random numbers are not drawn again"
            run = self._mask if self.is_aten and self._short in _MASKS else self._held
            return run, "random numbers are not drawn again"
        if self.op.namespace.startswith("_c10d"):
            return self._held, "a collective is not run again"
        if _MAY_WRITE in self.op.tags:
            return self._collective, "it may write to its arguments"
        if _VARIES in self.op.tags:
            return self._held, "it does not return the same bits each time"
        if self.is_aten and self._short in _UNDEFINED:
            return self._held, "its result is not determined by its arguments"
        if self.keeps or not _returns_tensors(schema):
            return self._held, ""
        if not _returns_one(schema):
            return self._several, "integer results are held"
        if any(each.name == "keepdim" for each in schema.arguments):
            return self._reduction, "integer results are held"
        return self._single, "integer results are held"

    def _kind_of_write(self, schema: Any) -> tuple[Run, str]:
        first = schema.arguments[0].alias_info if schema.arguments else None
        writes_first = len(self.facts.writes) == 1 and first is not None and first.is_write
        changes_view = torch.Tag.inplace_view in self.op.tags
        if self.facts.random:
            run = self._drawn_mask if self.is_aten and self._short in _MASKS else self._written
            return run, "random numbers are not drawn again"
        if not (self.is_aten and writes_first and len(schema.returns) == 1) or changes_view:
            return self._written, "it writes to its arguments"
        if self._short in _RESIZES or self.keeps:
            return self._written, "" if self.keeps else "it resizes its argument"
        return self._in_place, "it writes to a tensor that is held"

    # Functions that run a call

    def _held(self, tape: TapeValues, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self.call(*args, **kwargs) if kwargs else self.call(*args)
        if self.asks:
            tape.decide(self, out, args, kwargs)
        return out

    def _range(self, tape: TapeValues, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self.call(*args, **kwargs)
        tape.follow_range(self.op, args)
        return out

    def _single(self, tape: TapeValues, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self.call(*args, **kwargs) if kwargs else self.call(*args)
        if self.asks and tape.decide(self, out, args, kwargs):
            return out
        version = 0
        if self.shares:
            seen = tape.known.get(id(args[0]))
            if (seen is None or seen.value.held is not None) and self._stays_held(tape, args, out):
                return out
            version = version_of(args[0]) if self._is_view else 0
        # DTensor makes views in autograd functions.
        if not (_is_grad_enabled() or self._is_view or self._is_called_by_library()):
            return out
        dtype = out.dtype
        if (
            dtype.is_floating_point
            or dtype.is_complex
            or self._is_view
            or not self._cuts(args, dtype)
        ):
            tape.record(self, args, kwargs, out, version)
        return out

    def _reduction(self, tape: TapeValues, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hold a result that is much smaller than its argument: it costs less than a replay."""
        out = self._single(tape, args, kwargs)
        if out.numel() * MUCH_SMALLER <= args[0].numel():
            tape.known.pop(id(out), None)
        return out

    def _several(self, tape: TapeValues, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self.call(*args, **kwargs) if kwargs else self.call(*args)
        if self.asks and tape.decide(self, out, args, kwargs):
            return out
        if self.shares:
            seen = tape.known.get(id(args[0]))
            if (seen is None or seen.value.held is not None) and self._stays_held(tape, args, out):
                return out
        is_recorded = _is_grad_enabled() or self._is_view or self._is_called_by_library()
        if is_recorded and type(out) in (tuple, list):
            self._note_items(tape, args, kwargs, out)
        return out

    def _stays_held(self, tape: TapeValues, args: tuple[Any, ...], out: Any) -> bool:
        """Whether a result that shares memory of a held tensor is held itself, if it is read.

        An unsafe view has a version counter of its own, which its base does not show.
        """
        if self._is_view:
            return not tape.records_views
        offloads = tape.offloads
        if offloads is not None and offloads.is_marked(args[0]):  # offload it in place of its base
            offloads.mark(tensors_in(out))
        return True

    def _note_items(
        self, tape: TapeValues, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        if any(type(each) in (tuple, list) for each in out):
            return
        call = tape.call_of(self, args, kwargs)
        version = version_of(args[0]) if self._is_view else 0
        chosen = () if self._is_view else self._chosen(args, out)
        call.items = []
        for at, each in enumerate(out):
            item = None
            if isinstance(each, torch.Tensor) and each.shape not in chosen:
                dtype = each.dtype
                exact = not (dtype.is_floating_point or dtype.is_complex)
                if self._is_view or not (exact and self._cuts(args, dtype)):
                    item = Result(call, at)
                    tape.note(each, item, version)
            call.items.append(None if item is None else ref(item))

    def _chosen(self, args: tuple[Any, ...], out: Any) -> list[torch.Size]:
        """Return the shapes of integer results that depend on values.

        Floating-point results of these shapes are held too, so topk and sort run once. Pooling is
        excluded: only its indices are held.
        """
        if "pool" in self._short:
            return []
        tensors = [each for each in out if isinstance(each, torch.Tensor)]
        exact = [t for t in tensors if not (t.is_floating_point() or t.is_complex())]
        return [t.shape for t in exact if t.dim() and self._cuts(args, t.dtype)]

    def _attention(self, tape: TapeValues, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        at, given = self.facts.dropout, kwargs.get("dropout_p", 0.0)
        assert at is not None
        if self.keeps or (args[at] if at < len(args) else given):
            return self._held(tape, args, kwargs)
        return self._several(tape, args, kwargs)

    def _batch_norm(self, tape: TapeValues, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record batch norm without its running statistics, which forward updates once.

        A batch's own statistics are held: they are small, and backward reads them.
        """
        if not args[STATISTICS.stop]:
            return (self._held if self.keeps else self._several)(tape, args, kwargs)
        statistics = [each for each in args[STATISTICS] if isinstance(each, torch.Tensor)]
        tape.before_write(statistics, statistics)
        tape.note_unversioned(statistics)
        out = self.call(*args, **kwargs)
        if self.asks and tape.decide(self, out, args, kwargs):
            return out
        if _is_grad_enabled() and not self.keeps:
            before, after = args[: STATISTICS.start], args[STATISTICS.stop :]
            call = tape.call_of(self, (*before, None, None, *after), kwargs)
            normalized = Result(call, 0)
            call.items = [ref(normalized), *[None] * (len(out) - 1)]
            tape.note(out[0], normalized, 0)
        return out

    def _rnn(self, tape: TapeValues, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a fused RNN, also its workspace of integers, which backward reads."""
        out = self.call(*args, **kwargs)
        if self.asks and tape.decide(self, out, args, kwargs):
            return out
        if _is_grad_enabled() and not self.keeps:
            call = tape.call_of(self, args, kwargs)
            again = partial(_called_with_gradients, self.call)
            call.recorder = Operation(
                self.op, again, self.positions, self.lists, self.shares, self.flags
            )
            items = [Result(call, at) for at in range(len(out))]
            call.items = [ref(item) for item in items]
            for item, each in zip(items, out, strict=True):
                tape.note(each, item, 0)
        return out

    def _mask(self, tape: TapeValues, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self._held(tape, args, kwargs)
        if _is_grad_enabled():
            mask = out if isinstance(out, torch.Tensor) else out[_MASKS[self._short]]
            _note_mask(tape, mask, 0)
        return out

    def _drawn_mask(self, tape: TapeValues, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self._written(tape, args, kwargs)
        if _is_grad_enabled():
            _note_mask(tape, args[0], version_of(args[0]) + 1)
        return out

    def _collective(self, tape: TapeValues, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that may write to any of its arguments."""
        tape.before_write(tensors_in((args, kwargs)))
        return self._held(tape, args, kwargs)

    def _written(self, tape: TapeValues, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unseen = self.facts.written_unseen(args, kwargs)
        tape.before_write(self.facts.written(args, kwargs), unseen)
        if unseen:  # such as the noise of rrelu, which its node saves first
            tape.note_unversioned(unseen)
        return self._held(tape, args, kwargs)

    def _written_unseen(
        self, tape: TapeValues, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a write without a result, and advance the version counters.

        Under a dispatch mode `_foreach_mul_` and similar operators do not advance them.
        """
        written = self.facts.written(args, kwargs)
        tape.before_write(written)
        out = self._held(tape, args, kwargs)
        increment_version(written)
        return out

    def _in_place(self, tape: TapeValues, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a write to a tensor that a call made, as a functional call on a copy of it."""
        target = args[0]
        known = tape.known_value(target) if _is_grad_enabled() else None
        if known is None or known.held is not None or not target.is_floating_point():
            return self._written(tape, args, kwargs)
        call = tape.call_of(self, args, kwargs, copies=True)
        tape.before_write([target])
        out = self.call(*args, **kwargs) if kwargs else self.call(*args)
        if not (self.asks and tape.decide(self, out, args, kwargs)):
            tape.note(target, call, version_of(target) + 1)
        return out

    # Helpers

    def _is_called_by_library(self) -> bool:
        return not self.is_aten and is_called_by_library(4)

    def _cuts(self, args: tuple[Any, ...], dtype: torch.dtype) -> bool:
        """Whether an integer result depends on floating-point values and so must be held."""
        if dtype is torch.bool:
            return False
        return any(each.is_floating_point() for each in tensors_in(args))


def _note_mask(tape: TapeValues, mask: torch.Tensor, version: int) -> None:
    """Hold a mask as bits."""
    if not takes(mask):
        return
    with hidden_from_modes(mask):
        bits = packed(mask)
    tape.replaced(bits, mask)
    held = tape.held(bits)
    call = OpCall(UNPACK, [held, tuple(mask.shape), mask.stride(), mask.dtype], None, [held])
    tape.note(mask, call, version)


def _called_with_gradients(call: Callable[..., Any], *args: Any) -> Any:
    with torch.enable_grad():
        return call(*args)


@lru_cache(maxsize=4096)
def _positions_of(types: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    tensors = [at for at, each in enumerate(types) if "Tensor" in each]
    lists = [at for at in tensors if "[" in types[at]]
    return tuple(at for at in tensors if at not in lists), tuple(lists)


def _tensor_positions(schema: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions of arguments that may be tensors, and of those that are lists of them."""
    if schema is None:
        return (), ()
    return _positions_of(tuple(str(each.type) for each in schema.arguments))


def _returns_tensors(schema: Any) -> bool:
    return any("Tensor" in str(each.type) for each in schema.returns)


def _returns_one(schema: Any) -> bool:
    return len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"


class Table:
    """The recorders of one policy, made as operators appear.

    Attributes:
        offloads: whether the policy offloads.
        reads_modules: whether it reads modules.
        reads_names: whether it reads names of tensors.
        runs: what runs the calls of an operator, by `id`: hashing an operator runs Python.
    """

    def __init__(self, policy: Policy) -> None:
        self.offloads = policy.offloads
        self.reads_modules, self.reads_names = policy.reads_modules, policy.reads_names
        self.runs: dict[int, Run] = {}
        self.recorders: dict[Operator, Recorder] = {}

    def run_of(self, op: Operator, policy: Policy) -> Run:
        recorder = self.recorders.get(op) or Recorder(op, policy)
        self.recorders[op], self.runs[id(op)] = recorder, recorder.run
        return recorder.run


tables = PerPolicy(Table)
