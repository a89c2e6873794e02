"""The tape of a region: its dispatch mode, its saved-tensor hooks, and the known tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .._errors import MutationError, RecomputeError
from .._torch_compat import (
    FAKE_TENSOR,
    Hooks,
    after_backward,
    backward_id,
    base_of,
    end_if_left,
    hide_from_dynamo,
    in_fake_mode,
    install_dispatch,
    is_fake,
    is_freed,
    pop_hooks,
    push_hooks,
    saved_tensor_hooks,
)
from .._torch_compat._dispatch import (
    LETS_COMPILE,
    finish,
    has_own_dispatch,
    hidden_from_modes,
    is_wrapper,
    leave_checkpoints,
    no_dispatch,
    unseen_alias,
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
from ._fingerprints import Fingerprint
from ._fsdp import Ranges
from ._masks import UNPACK, packed, takes
from ._moved import MovedTensor, NoHostMemoryError, is_movable, leaving
from ._recorders import Recorder, Run, Table, tables
from ._values import (
    UNVERSIONED,
    Known,
    OpCall,
    Part,
    Replay,
    Value,
    changed,
    copy_of,
    storage_of,
    tensors_among,
    version_of,
    want,
)

_PLAIN = frozenset((torch.Tensor, nn.Parameter))

SMALL_BYTES = 2**14
"""Size up to which a region copies a tensor that code outside of regions may write to."""


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


class _Flattened:
    """A saved wrapper subclass: values of its inner tensors."""

    __slots__ = ("context", "kind", "parts", "size", "stride", "version", "wrapper")

    def __init__(self, tensor: torch.Tensor, pack: Callable[[torch.Tensor], Any]) -> None:
        names, self.context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        self.kind: Any = type(tensor)
        parts = {name: getattr(tensor, name) for name in names}  # not all of them need be tensors
        self.parts = {
            name: pack(part) if isinstance(part, torch.Tensor) else part
            for name, part in parts.items()
        }
        self.size, self.stride = tensor.size(), tensor.stride()
        self.version, self.wrapper = version_of(tensor), ref(tensor)

    def restored(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        wrapper = self.wrapper()
        if wrapper is not None and version_of(wrapper) != self.version:
            raise MutationError(
                f"sac_policies.checkpoint: a {self.kind.__name__} was changed in place after the "
                "region read it, but backward reads it as it was. Change it after backward, or "
                "give the region a copy."
            )
        inner = {
            name: unpack(part) if isinstance(part, (Value, _Flattened)) else part
            for name, part in self.parts.items()
        }
        made: torch.Tensor = self.kind.__tensor_unflatten__(
            inner, self.context, self.size, self.stride
        )
        return made


class Tape(TorchDispatchMode):
    """Records the operator calls of a region, and replays those that backward reads.

    Attributes:
        region: the running region; nested regions share the tape.
        records_views: whether views of held tensors are recorded. Otherwise such a view is unknown,
            and held when it is read: its memory is held in any case.
        takes_fakes: whether calls with fake tensors are recorded. DTensor propagates shardings on
            fake tensors, which a region of real tensors must ignore.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return LETS_COMPILE

    def __init__(self, region: Region, outer: Hooks | None) -> None:
        super().__init__()
        self.region = region
        self._runs = region.table.runs
        self._outer = outer
        # Hooks around the region store each value once, and a view keeps its base on the device.
        self.records_views = outer is not None or region.table.offloads
        self._is_open = True
        self.known: dict[int, Known] = {}
        self._gone: list[Known] = []
        self.note_gone = self._gone.append
        self._holders: list[ref[Value]] = []
        self._small: list[ref[Value]] = []
        self._storages: set[int | None] | None = None
        self._ranges: Ranges | None = None
        self._is_away = False
        self._unversioned: set[int | None] = set()
        self.takes_fakes = in_fake_mode()
        self._replay = Replay()
        self._queued = -1
        self._wholes: dict[int, tuple[ref[torch.Tensor], ref[torch.Tensor], int]] = {}
        self._marked: dict[int, ref[torch.Tensor]] = {}
        self._pending: list[ref[Value]] = []
        self._moved: list[ref[MovedTensor]] = []
        self._asked = -1
        self._earlier: Callable[[], object] = _nothing
        self._lock = threading.RLock()

    # Running a region

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        before, _current.tape = getattr(_current, "tape", None), self
        push_hooks(self._pack, self._unpack)
        try:
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
            pop_hooks()
            _current.tape = before
            self._end()

    def run_inside(
        self, region: Region, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Call the function of a nested region under its own policy."""
        before = self.region
        self.region, self._runs = region, region.table.runs
        self.records_views |= region.table.offloads
        try:
            with ExitStack() as until:
                self._follow(until)
                return function(*args, **kwargs)
        finally:
            self.region, self._runs = before, before.table.runs
            before.inside |= region.inside | region.table.recorders.keys()

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

    def _end(self) -> None:
        """Forget all tensors; pack held tensors with the hooks around the region."""
        self._is_open = False
        self.known.clear()
        self._gone.clear()
        self._wholes.clear()
        self._marked.clear()
        self._pending.clear()
        if self._moved and leaving.region_ended():
            self._earlier, leaving.region = leaving.region, ref(self)
        outer, self._outer = self._outer, None
        if outer is None:
            if self._small:
                self._copy_small()
            _note_ended(self)
            return
        live = self._live_holders()
        held = [value.held for value in live]
        for value in live:  # if a hook raises, no tensor with a graph may stay here
            value.held = None
        self._holders = []
        pack, unpack = outer
        for value, tensor in zip(live, held, strict=True):
            if value.readers and tensor is not None:
                packed = pack(tensor)
                value.boxed = partial(_unpacked, unpack, packed, _alias_in(packed, tensor))

    def _copy_small(self) -> None:
        """Copy small tensors that autograd does not save, so that they may be written to.

        Plain autograd reads them in forward only: an annealed scale, a running average. Memory that
        autograd saves is not copied: a write to it is an error in plain autograd, too.
        """
        small = [value for each in self._small if (value := each()) is not None]
        self._small.clear()
        read = [each for each in small if each.readers and not each.is_saved]
        if not read:
            return
        with hidden_from_modes(read[0].held):
            live = self._live_holders()
            saved = {
                storage_of(each.held) for each in live if each.is_saved and each.held is not None
            }
            for value in read:
                held = value.held
                if type(value) is Value and held is not None and storage_of(held) not in saved:
                    self._copy(value, held)

    # Interface for recorders

    def value_of(self, tensor: torch.Tensor) -> Value:
        """Return the value of a tensor; hold an unknown tensor."""
        return self.known_value(tensor) or self.hold(tensor, version_of(tensor))

    def known_value(self, tensor: torch.Tensor) -> Value | None:
        """Return the value of a tensor, None if it is unknown."""
        seen = self.known.get(id(tensor))
        if seen is None or seen() is not tensor or seen.version != tensor._version:
            return None
        return seen.value

    def note(self, tensor: torch.Tensor, value: Value, version: int) -> None:
        """Note the value of a tensor at this version; an inference tensor stays unknown."""
        if version != UNVERSIONED:
            seen = Known(tensor, self.note_gone)
            seen.key, seen.value, seen.version = id(tensor), value, version
            self.known[seen.key] = seen

    def forget_gone(self) -> None:
        """Forget freed tensors, so that tensors held by their values are freed too."""
        while self._gone:
            seen = self._gone.pop()
            if self.known.get(seen.key) is seen:
                del self.known[seen.key]

    def note_mask(self, mask: torch.Tensor, version: int) -> None:
        """Hold a mask as bits."""
        if not takes(mask):
            return
        with hidden_from_modes(mask):
            bits = packed(mask)
        held = self._held(bits)
        call = OpCall(UNPACK, [held, tuple(mask.shape), mask.stride(), mask.dtype], None, [held])
        self.note(mask, call, version)

    def before_write(
        self, written: list[torch.Tensor], unseen: Sequence[torch.Tensor] = ()
    ) -> None:
        """Forget tensors of storages that will be written; copy tensors held by values.

        Args:
            written: the tensors that will be written.
            unseen: those of them whose version counters will not show it. Tensors that autograd
                saved itself are not copied then: an operator may save what it is about to write,
                as rrelu does, and batch norm saves its statistics and does not read them.
        """
        if not written:
            return
        with hidden_from_modes(written[0]):
            storages = {storage_of(each) for each in written}
            hidden = {storage_of(each) for each in unseen}
            for key, seen in list(self.known.items()):
                tensor = seen()
                if tensor is not None and storage_of(tensor) in storages:
                    self.known.pop(key, None)
            tensor = None
            live = self._live_holders()
            for value in live:
                if value.held is None:
                    continue
                storage = storage_of(value.held)
                if storage in storages and not (value.is_alone and storage in hidden):
                    self._copy(value, value.held)
            self._holders = [ref(value) for value in live]
            for moved in (each() for each in self._moved):
                if moved is not None:
                    moved.leave(storages)
            for tape in [each() for each in _ended.copy().values()]:  # others may add to it
                if tape is not None:
                    tape._before_later_write(storages, hidden)

    def _before_later_write(self, storages: set[int | None], hidden: set[int | None]) -> None:
        """After this region has ended, copy its held tensors before another region writes to them.

        This lets running averages be replayed after the next micro-batch. Tensors that autograd
        saved are not copied: autograd refuses them after a write, and so does the tape.
        """
        if self._storages is None:
            held = [value.held for value in self._live_holders()]
            self._storages = {storage_of(each) for each in held if each is not None}
        if self._storages.isdisjoint(storages):
            return
        with self._lock:
            for value in self._live_holders():
                storage = None if value.held is None else storage_of(value.held)
                if value.held is None or storage not in storages:
                    continue
                if not (value.is_alone if storage in hidden else value.is_saved):
                    self._copy(value, value.held)

    def _live_holders(self) -> list[Value]:
        return [value for each in self._holders if (value := each()) is not None]

    def note_unversioned(self, written: list[torch.Tensor]) -> None:
        """Record storages written without a version change; values hold copies of them."""
        self._unversioned |= {storage_of(each) for each in written}

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
            self._mark(out)
        return True

    def _mark(self, out: Any) -> None:
        for each in tensors_among((out,)):
            self._marked[id(each)] = ref(each)

    def mark_like(self, base: torch.Tensor, out: Any) -> None:
        """Offload what shares memory with a tensor that is to be offloaded, in its place."""
        marked = self._marked.get(id(base)) if self._marked else None
        if marked is not None and marked() is base:
            self._mark(out)

    def follow_range(self, op: Operator, args: tuple[Any, ...]) -> None:
        """Record nothing while FSDP gathers or frees parameters."""
        if self._ranges is None:
            self._ranges = Ranges()
        self._ranges.follow(op, args)
        was_away, self._is_away = self._is_away, self._ranges.inside
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
                    self._keep(value, tensor)

    def note_wrappers(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the wrapper subclasses whose inner tensors a call will read.

        A wrapper that the call writes to gets its next version when the call returns.
        """
        written = {id(each) for each in facts_of(op).written(args, kwargs)}
        for tensor in tensors_among((*args, *kwargs.values())):
            if type(tensor) in _PLAIN or not is_wrapper(tensor):
                continue
            base = base_of(tensor)
            whole = tensor if base is None else base
            version = version_of(whole) + (id(tensor) in written)
            for each in parts_of(tensor):
                self._wholes[id(each)] = ref(each), ref(whole), version

    # Holding

    def hold(self, tensor: torch.Tensor, version: int) -> Value:
        is_itself = (
            self._outer is not None  # hooks get the tensor that autograd would give them
            or version == UNVERSIONED
            or (tensor.requires_grad and tensor.is_leaf)
            or not (tensor.is_floating_point() or tensor.is_complex())  # it has no graph
        )
        value: Value
        if self._unversioned and storage_of(tensor) in self._unversioned:
            with no_dispatch():
                value = self._held(copy_of(tensor.detach()))
        else:
            held = tensor if is_itself else unseen_alias(tensor)
            inner = self._wholes.get(id(tensor)) if self._wholes else None
            whole = inner[1]() if inner is not None and inner[0]() is tensor else None
            if inner is not None and whole is not None:
                value = Part(held, version, inner[1], max(inner[2], version_of(whole)))
                self._holders.append(ref(value))
            else:
                value = self._held(held, version)
                is_constant = not (tensor.requires_grad or self.takes_fakes)
                if is_constant and _size_of(tensor) <= SMALL_BYTES:
                    self._small.append(ref(value))
        self.note(tensor, value, version)
        if self._marked:
            marked = self._marked.get(id(tensor))
            if marked is not None and marked() is tensor:
                self._pending.append(ref(value))
        return value

    def _held(self, tensor: torch.Tensor, version: int = 0) -> Value:
        value = Value(tensor, version)
        self._holders.append(ref(value))
        return value

    def _keep(self, value: Value, tensor: torch.Tensor) -> None:
        if value.held is None and value.boxed is None:
            value.hold(tensor if self._outer is not None else unseen_alias(tensor))
            self._holders.append(ref(value))

    def _copy(self, value: Value, tensor: torch.Tensor) -> None:
        """Hold a copy instead of a tensor, unless the tensor was freed or modified unnoticed."""
        if value.version in (UNVERSIONED, version_of(tensor)) and not is_freed(tensor):
            value.hold(copy_of(tensor.detach()))

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
            self._keep(value, each)
            if answer is Decision.OFFLOAD:
                self._pending.append(ref(value))

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the base of a view, if the base has a value, since other values may read it."""
        base = base_of(tensor)
        return tensor if base is None or self.known_value(base) is None else base

    # Offloading

    def _start_copies(self) -> None:
        """Start the copies of values to be offloaded that backward reads."""
        if self._outer is not None:
            return  # hooks around the region store the tensors
        waiting = []
        for each in self._pending:
            value = each()
            if value is None or value.held is None:
                continue
            if value.readers:
                self._move(value, value.held)
            else:
                waiting.append(each)
        self._pending = waiting

    def _move(self, value: Value, tensor: torch.Tensor) -> None:
        if is_fake(tensor) or not is_movable(tensor):
            return
        try:
            moved = MovedTensor(tensor)
        except NoHostMemoryError:
            return
        value.held, value.boxed = None, moved.read
        self._moved.append(ref(moved))

    def _ask_back(self, backward: int) -> None:
        """Start the copies back of tensors offloaded by this region and the previous one."""
        self._asked = backward
        earlier = self._earlier()
        for tape in (self, earlier):
            for moved in (each() for each in tape._moved) if isinstance(tape, Tape) else ():
                if moved is not None:
                    moved.start_back()

    # Saved-tensor hooks

    def _pack(self, tensor: torch.Tensor) -> Any:
        if type(tensor) not in _PLAIN and is_wrapper(tensor):
            if self.region.checks or self.records_views:
                finish(tensor)  # before its bits are read
            return _Flattened(tensor, self._pack_part)
        seen = self.known.get(id(tensor))
        if seen is not None and seen() is tensor and seen.version == tensor._version:
            value = seen.value
        elif tensor.requires_grad:
            value = self.hold(tensor, version_of(tensor))
        else:
            value = self._held(tensor, version_of(tensor))
            value.is_alone = True
        value.is_saved = True
        want(value)
        if self._pending:
            self._start_copies()
        if self.region.checks and value.fingerprint is None and value.made_by is not None:
            with no_dispatch():
                if value.held is None and _is_comparable(tensor):
                    value.fingerprint = Fingerprint(_resolved(tensor))
        return value

    def _pack_part(self, tensor: torch.Tensor) -> Any:
        """Save an inner tensor; hold integers, because jagged tensors compare them by identity."""
        if not (tensor.is_floating_point() or tensor.is_complex()):
            value = self.value_of(tensor)
            if value.held is None:
                value.hold(tensor)
                self._holders.append(ref(value))
        return self._pack(tensor)

    def _unpack(self, saved: Any) -> torch.Tensor:
        use = self.region.use
        if use.missing and not use.running:
            raise use.error()
        if type(saved) is _Flattened:
            return saved.restored(self._unpack)
        with self._lock:
            backward = backward_id()
            offloads = self._moved or self._earlier is not _nothing
            if offloads and (backward < 0 or backward != self._asked):
                self._ask_back(backward)
            if saved.held is not None:
                return saved.now()
            tensor = self._replay.read(saved, backward, caches=not self._is_open)
            if self._replay.cached and (backward < 0 or self._queued != backward):
                self._queued = backward
                if not after_backward(self._replay.drop):
                    self._replay.drop()
            if saved.fingerprint is not None:
                with no_dispatch():
                    saved.fingerprint.check(_resolved(tensor), partial(differs, saved))
        return tensor


def _dispatch(
    self: Tape, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    if self._replay.runs:
        return func(*args, **kwargs) if kwargs else func(*args)
    if types:
        for kind in types:
            if kind is FAKE_TENSOR and self.takes_fakes:
                continue
            if kind is FAKE_TENSOR:
                return func(*args, **kwargs) if kwargs else func(*args)
            if kind not in _PLAIN and has_own_dispatch(kind):
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
hide_from_dynamo(Tape._pack, Tape._unpack)  # a compiled function in a region calls them


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


_ended: dict[int, ref[Tape]] = {}
"""Tapes of regions that have ended, while backward may need them; of all threads."""


def _note_ended(tape: Tape) -> None:
    at = id(tape)
    _ended[at] = ref(tape, lambda _: _ended.pop(at, None) and None)


def _nothing() -> None:
    """No earlier region offloads."""


def _alias_in(packed: Any, tensor: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """Find the tensor itself in the result of a pack hook, and its version."""
    storage = storage_of(tensor)
    for each in tensors_among(packed if isinstance(packed, (list, tuple)) else (packed,)):
        if storage_of(each) == storage:
            return each, version_of(each)
    return None


def _unpacked(
    unpack: Callable[[Any], torch.Tensor], packed: Any, alias: tuple[torch.Tensor, int] | None
) -> torch.Tensor:
    """Call an unpack hook.

    With hooks, autograd does not compare versions. A replay may also read tensors that autograd did
    not save. So if a hook returns the packed tensor itself, a write to it is an error.
    """
    if alias is not None and version_of(alias[0]) != alias[1]:
        raise changed(alias[0])
    return unpack(packed)


def differs(value: Value) -> RecomputeError:
    """Make the error for a replay that is not bit-identical to forward."""
    call = value.made_by
    op = "a saved tensor" if call is None else f"the result of {call.recorder.op}"
    return RecomputeError(
        f"sac_policies.checkpoint: {op} has other bits in backward than in forward. A tensor that "
        "it is made of was changed without a version counter (.data, numpy, a custom kernel), or "
        "the operator is not deterministic. Save its result by the policy, or change the tensor "
        'after backward. determinism_check="none" turns the comparison off.'
    )


def _size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor as if it were dense; sparse tensors have no `nbytes`."""
    return tensor.numel() * tensor.element_size()


def _is_comparable(tensor: torch.Tensor) -> bool:
    """Whether the bits of a tensor are there and defined: a workspace of bytes has padding."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and tensor.dtype is not torch.uint8 and not is_fake(tensor)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without lazy conjugation and negation."""
    return tensor.detach().resolve_conj().resolve_neg()


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """List the plain tensors of a tensor: itself, or the inner ones of a wrapper."""
    if type(tensor) in _PLAIN or not is_wrapper(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    parts = [part for name in names if isinstance(part := getattr(tensor, name), torch.Tensor)]
    return [each for part in parts for each in parts_of(part)]


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
