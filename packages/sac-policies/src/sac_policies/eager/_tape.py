"""The tape of a region: its dispatch mode, and the functions that run a region."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .._tensors import tensors_in
from .._torch_compat import (
    FAKE_TENSOR,
    RANGE_END,
    RANGE_START,
    Hooks,
    base_of,
    end_if_left,
    install_dispatch,
    is_freed,
    pop_hooks,
    push_hooks,
    saved_tensor_hooks,
)
from .._torch_compat._dispatch import (
    LETS_COMPILE,
    has_own_dispatch,
    is_wrapper,
    leave_checkpoints,
    no_dispatch,
)
from .._torch_compat._module_calls import compiled_in
from ..policies._decisions import Decision
from ..policies._modules import ModulePath, root_of
from ..policies._names import NAME_OP, listening
from ..policies._operators import facts_of
from ..policies._policies import DEPENDS, Policy
from ..policies._unmatched import PolicyUse, uses
from ..policies._views import Operator, OpView, RegionSummary
from ._compiled_calls import follow_compiled
from ._recorders import Recorder, Run, Table, tables
from ._values import PLAIN, TapeValues, Value, parts_of, version_of


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
    ) -> None:
        self.policy, self.table, self.use, self.checks = policy, table, use, checks
        self.calls: dict[Any, int] = {}
        self.labels: set[str] = set()
        self.kept = False
        self.inside: set[Operator] = set()
        self.path = ModulePath(root) if table.reads_modules else None
        # Up to torch 2.9 compiled code runs eagerly under a dispatch mode.
        self.compiled = compiled_in(root) if LETS_COMPILE and root is not None else []

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


class Tape(TapeValues, TorchDispatchMode):
    """Records the operator calls of a region, and replays those that backward reads.

    Attributes:
        region: the running region; nested regions share the tape.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return LETS_COMPILE

    def __init__(self, region: Region, outer: Hooks | None) -> None:
        TorchDispatchMode.__init__(self)
        TapeValues.__init__(self, outer, region.table.offloads, region.use)
        self._ranges: list[bool] = []
        self._is_away = False
        self._enter(region)

    # Running a region

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        has_hooks = False
        before, _current.tape = getattr(_current, "tape", None), self
        try:
            push_hooks(self._pack, self._unpack)
            has_hooks = True
            with self, ExitStack() as until:
                self._follow(until)
                try:
                    return function(*args, **kwargs)
                except BaseException as error:
                    leave_checkpoints(error)  # before the tape, whose mode is below theirs
                    raise
        except BaseException as error:
            end_if_left(self, error)
            raise
        finally:
            _current.tape = before
            # Unless an interrupt came around the push, no call comes before the pop.
            hooks = None if has_hooks else saved_tensor_hooks()
            if has_hooks or (hooks is not None and hooks[0] == self._pack):
                pop_hooks()
            self.end()

    def run_inside(
        self, region: Region, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Call the function of a nested region under its own policy."""
        before = self.region
        self._enter(region)
        self.records_views |= region.table.offloads
        try:
            with ExitStack() as until:
                self._follow(until)
                return function(*args, **kwargs)
        finally:
            self._enter(before)
            before.inside |= region.inside | region.table.recorders.keys()

    def _enter(self, region: Region) -> None:
        self.region, self._runs, self.checks = region, region.table.runs, region.checks

    def _follow(self, until: ExitStack) -> None:
        region = self.region
        region.follow(until, self._named)
        if region.compiled:
            follow_compiled(region.compiled, region.policy, region.path, until)

    def takes_hooks(self, hooks: Hooks | None) -> bool:
        """Whether autograd saves to this tape now."""
        return self._is_open and hooks is not None and hooks[0] == self._pack

    def _run_of(self, op: Operator) -> Run:
        return self.region.table.run_of(op, self.region.policy)

    def decide(
        self, recorder: Recorder, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether the policy keeps the result of a call, which is counted."""
        region, op = self.region, recorder.op
        key: Any = id(op)
        if isinstance(op, torch._ops.HigherOrderOperator) and args:
            key = key if isinstance(args[0], torch.Tensor) else (op, args[0])
        index = region.calls.get(key, 0)
        region.calls[key] = index + 1
        answer = recorder.answer
        if answer is DEPENDS:
            answer = region.policy.decide(region.view(op, index, out, args, kwargs))
        if answer is None or not answer.keeps or recorder.facts.is_view:
            return False
        region.kept = True
        if answer is Decision.OFFLOAD and not recorder.shares:
            self.to_offload().mark(tensors_in(out))
        return True

    def follow_range(self, op: Operator, args: tuple[Any, ...]) -> None:
        """Record nothing while FSDP gathers or frees parameters.

        It does so in the forward, but not always in the recomputation (pytorch#185178); it also
        allocates, casts and views. All of that is in profiler ranges.
        """
        if op is RANGE_START:
            self._ranges.append(str(args[0]).startswith("FSDP::"))
        elif op is RANGE_END and self._ranges:
            self._ranges.pop()
        was_away, self._is_away = self._is_away, any(self._ranges)
        if was_away and not self._is_away:
            self._hold_what_reads_freed()

    def _hold_what_reads_freed(self) -> None:
        """Hold tensors computed from parameters that FSDP has freed.

        Backward may read them before FSDP gathers the parameters again.
        """
        with no_dispatch():
            for seen in list(self.known.values()):
                tensor, value = seen(), seen.value
                if tensor is None or seen.version != version_of(tensor) or is_freed(tensor):
                    continue
                if _reads_freed(value):
                    self.keep(value, tensor)

    def note_wrappers(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the wrapper subclasses whose inner tensors a call will read.

        A wrapper that the call writes to gets its next version when the call returns.
        """
        written = {id(each) for each in facts_of(op).written(args, kwargs)}
        for tensor in tensors_in((args, kwargs)):
            if type(tensor) in PLAIN or not is_wrapper(tensor):
                continue
            base = base_of(tensor)
            whole = tensor if base is None else base
            version = version_of(whole) + (id(tensor) in written)
            for each in parts_of(tensor):
                self.wholes[id(each)] = ref(each), ref(whole), version

    def _named(self, tensor: torch.Tensor, label: str) -> None:
        """Hold a named tensor, if the policy keeps it."""
        region = self.region
        region.labels.add(label)
        index = region.calls.get(id(NAME_OP), 0)
        region.calls[id(NAME_OP)] = index + 1
        view = region.view(NAME_OP, index, tensor, (tensor, label), {}, label)
        answer = region.policy.decide(view)
        if answer is None or not answer.keeps:
            return
        for each in map(self._whole, parts_of(tensor)):
            value = self.value_of(each)
            self.keep(value, each)
            if answer is Decision.OFFLOAD:
                self.to_offload().add(value)

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the base of a view, if the base has a value, since other values may read it."""
        base = base_of(tensor)
        return tensor if base is None or self.known_value(base) is None else base


def _dispatch(
    self: Tape, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    if self.replay.runs:
        return func(*args, **kwargs) if kwargs else func(*args)
    if types:
        for kind in types:
            if kind is FAKE_TENSOR and self.takes_fakes:
                continue
            if kind is FAKE_TENSOR:
                return func(*args, **kwargs) if kwargs else func(*args)
            if kind not in PLAIN and has_own_dispatch(kind):
                self.note_wrappers(func, args, kwargs or {})
                return NotImplemented
    if self._gone:
        self.forget_gone()
    if self._is_away:
        out = func(*args, **kwargs) if kwargs else func(*args)
        self.follow_range(func, args)
        return out
    run = self._runs.get(id(func)) or self._run_of(func)
    return run(self, args, kwargs or {})


install_dispatch(Tape, _dispatch)


class _Current(threading.local):
    tape: Tape | None = None


_current = _Current()


def tape_here(hooks: Hooks | None) -> Tape | None:
    """Return this thread's tape, if its hooks are the current ones."""
    tape = _current.tape
    return tape if tape is not None and tape.takes_hooks(hooks) else None


def run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    policy: Policy,
    check: str = "default",
) -> Any:
    """Call `function` so that backward replays what `policy` does not keep.

    Args:
        function: called once; backward calls single operators again.
        args: its positional arguments.
        kwargs: its keyword arguments.
        policy: what to keep.
        check: "default", "bits" or "none". "default" compares
            in the first forward of a function under a policy.

    Raises:
        PolicyError: the policy reads modules, and there is no module to name paths from.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    use = uses.of(policy)
    root = function if isinstance(function, nn.Module) else root_of(function)
    is_new = use.is_new(function) if root is None else id(root) not in use.known
    checks = check == "bits" or (is_new and check == "default")
    # In the first forward, a new table lists only the operators of this region, for warnings.
    table = Table(policy) if is_new else tables.of(policy)
    region = Region(policy, table, use, root, checks)
    hooks = saved_tensor_hooks()
    tape = tape_here(hooks)
    use.running.append(None)
    try:
        if tape is None:
            out = Tape(region, hooks).run(function, args, kwargs)
        else:
            out = tape.run_inside(region, function, args, kwargs)
    finally:
        use.running.pop()
    if is_new or use.open:
        use.forward_ended(policy, region.seen(), function)
    return out


def _reads_freed(value: Value) -> bool:
    """Whether recomputing a value reads a tensor whose memory was freed."""
    waiting, done = [value], {value}
    while waiting:
        call = waiting.pop().made_by
        for each in () if call is None else call.inputs:
            if each.held is not None and is_freed(each.held):
                return True
            if each.held is None and each not in done:
                done.add(each)
                waiting.append(each)
    return False
