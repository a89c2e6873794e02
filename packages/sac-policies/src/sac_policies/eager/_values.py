"""Values on a tape: which tensors have one, what autograd saves of them, and their replay.

A value is a held tensor, a call of an operator on other values, or one result of such a call.
Values refer to their inputs and never to a tensor with a graph. So the graph keeps alive exactly
the values that backward may need.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn

from .._errors import MutationError, RecomputeError
from .._tensors import tensors_in
from .._torch_compat import (
    Hooks,
    after_backward,
    announced,
    backward_id,
    hide_from_dynamo,
    in_fake_mode,
    is_freed,
    is_measured,
    next_node_number,
)
from .._torch_compat._dispatch import (
    below_autograd,
    finish,
    hidden_from_modes,
    is_wrapper,
    no_dispatch,
    no_torch_function,
    unseen_alias,
)
from ..policies._unmatched import PolicyUse
from ._fingerprints import Fingerprint, is_comparable
from ._flags import Flags, States
from ._moved import Offloads

PLAIN = frozenset((torch.Tensor, nn.Parameter))
"""Types of tensors that are no subclass with own behavior."""
SMALL_BYTES = 2**14
"""Size up to which a region copies a tensor that code outside of regions may write to."""
UNVERSIONED = -1
"""Version of an inference tensor: it has no counter."""


def version_of(tensor: torch.Tensor) -> int:
    """Return a tensor's version; UNVERSIONED for an inference tensor.

    Example:
        >>> version_of(torch.zeros(2).add_(1))
        1
    """
    try:
        return tensor._version
    except RuntimeError:
        return UNVERSIONED


def storage_of(tensor: torch.Tensor) -> int | None:
    """Return a key of a tensor's storage; None without one."""
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        return None


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with its strides and overlaps."""
    is_plain = tensor.layout is torch.strided and not tensor.is_nested and tensor.numel()
    if not is_plain or tensor.is_contiguous():
        return tensor.clone()
    sizes, strides = tensor.size(), tensor.stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    flat = torch.as_strided(tensor, (span,), (1,)).clone()
    return torch.as_strided(flat, sizes, strides, 0)


class Value:
    """Immutable bits.

    Attributes:
        held: the tensor, None where a call makes it.
        version: of `held`, or of `cached`.
        boxed: reads the result of saved-tensor hooks around the region; None without them.
        cached: a replayed tensor that later reads of this backward need.
        readers: number of times the value is saved, or read by a call that backward may need.
        reads: number of these readers that have read it in this backward.
        is_saved: whether autograd saved it.
        is_alone: whether autograd's save is the only reason to hold it.
        fingerprint: compares a replay with the bits of the forward; None if bits are not compared.
    """

    __slots__ = (
        "__weakref__",
        "boxed",
        "cached",
        "fingerprint",
        "held",
        "is_alone",
        "is_saved",
        "readers",
        "reads",
        "version",
    )

    def __init__(self, held: torch.Tensor | None = None, version: int = 0) -> None:
        self.held = held
        self.version = version
        self.boxed: Callable[[], torch.Tensor] | None = None
        self.cached: torch.Tensor | None = None
        self.fingerprint: Fingerprint | None = None
        self.readers = self.reads = 0
        self.is_saved = self.is_alone = False

    @property
    def made_by(self) -> OpCall | None:
        return None

    def now(self) -> torch.Tensor | None:
        """Return the tensor if it is held or cached, unless it was changed."""
        tensor = self.held
        if tensor is not None:
            if self.version != UNVERSIONED and tensor._version != self.version:
                raise changed(tensor)
            return tensor
        tensor = self.cached
        if tensor is not None and version_of(tensor) != self.version:
            tensor = self.cached = None  # a reader wrote to it
        return tensor

    def hold(self, tensor: torch.Tensor) -> None:
        """Hold a tensor with this value; no call recomputes it."""
        self.held, self.version = tensor, version_of(tensor)


class Part(Value):
    """A held inner tensor of a wrapper subclass: only the wrapper's version shows a later write.

    Attributes:
        whole: the wrapper, or its base; None for a copy.
        written: the wrapper's version.
    """

    __slots__ = ("whole", "written")

    def __init__(
        self, held: torch.Tensor, version: int, whole: ref[torch.Tensor], written: int
    ) -> None:
        super().__init__(held, version)
        self.whole: ref[torch.Tensor] | None = whole
        self.written = written

    def now(self) -> torch.Tensor | None:
        """Return the tensor, unless the wrapper was changed."""
        if self.held is not None and self.whole is not None:
            whole = self.whole()
            if whole is not None and version_of(whole) != self.written:
                raise changed(whole)
        return super().now()

    def hold(self, tensor: torch.Tensor) -> None:
        """Hold a copy; writes to the wrapper do not reach it."""
        super().hold(tensor)
        self.whole = None


class Known(ref[torch.Tensor]):
    """A weak reference to a tensor that has a value while it is at this version."""

    __slots__ = ("key", "value", "version")
    key: int
    value: Value
    version: int


class Operation:
    """An operator that a replay can call.

    Attributes:
        op: the operator, or its name.
        call: calls it.
        positions: of arguments that may be tensors.
        lists: positions of arguments that are lists of tensors.
        shares: whether its results share memory with its first argument.
        flags: process-wide flags that choose its kernel.
    """

    __slots__ = ("call", "flags", "lists", "op", "positions", "shares")

    def __init__(
        self,
        op: Any,
        call: Callable[..., Any],
        positions: tuple[int, ...] = (),
        lists: tuple[int, ...] = (),
        shares: bool = False,
        flags: Flags | None = None,
    ) -> None:
        self.op, self.call, self.positions, self.lists = op, call, positions, lists
        self.shares, self.flags = shares, flags


class OpCall(Value):
    """A call of a functional operator; also the value of its only result.

    Attributes:
        args: positional arguments, with values in place of tensors.
        inputs: all values among the arguments.
        items: the values of several results.
        copies: whether the operator writes to its first argument, of which each run makes a copy.
        states: of the recorder's flags; None without any.
        number: autograd's number of the last node that the forward had created.
        wanted: whether backward may run it.
    """

    __slots__ = (
        "args",
        "copies",
        "inputs",
        "items",
        "kwargs",
        "number",
        "recorder",
        "states",
        "wanted",
    )

    def __init__(
        self,
        recorder: Operation,
        args: list[Any],
        kwargs: dict[str, Any] | None,
        inputs: list[Value],
        copies: bool = False,
    ) -> None:
        self.held = self.boxed = self.cached = self.fingerprint = None
        self.version = self.readers = self.reads = 0
        self.is_saved = self.is_alone = False
        self.recorder, self.args, self.kwargs, self.inputs = recorder, args, kwargs, inputs
        self.items: list[ref[Result] | None] | None = None
        self.copies = copies
        self.states: States | None = None
        self.number = next_node_number() - 1
        self.wanted = False

    @property
    def made_by(self) -> OpCall | None:
        """The call that made the value; None if hooks around the region hold the value."""
        return self if self.boxed is None else None

    def hold(self, tensor: torch.Tensor) -> None:
        """Hold the result and drop the arguments."""
        super().hold(tensor)
        self.args, self.kwargs, self.inputs = [], None, []

    def run(self, made: dict[Value, torch.Tensor]) -> Any:
        """Call the operator again. `made` contains the inputs that are neither held nor cached."""
        recorder, args = self.recorder, self.args.copy()
        count = len(args)
        for at in recorder.positions:
            if at >= count:
                break
            value = args[at]
            if type(value) in _VALUES:
                tensor = made.get(value)
                args[at] = value.now() if tensor is None else tensor
        for at in recorder.lists:
            if at < count:
                args[at] = _read(args[at], made)
        if self.copies:
            args[0] = copy_of(args[0])
        call = recorder.call
        if self.kwargs:
            call = partial(call, **{name: _read(arg, made) for name, arg in self.kwargs.items()})
        if self.states is not None:
            assert recorder.flags is not None, "a call has states of switches"
            call = partial(recorder.flags.set_to, self.states, call)
        return announced(self.number, call, *args) if is_measured() else call(*args)


class Result(Value):
    """One result of a call."""

    __slots__ = ("at", "whole")

    def __init__(self, whole: OpCall, at: int) -> None:
        super().__init__()
        self.whole: OpCall | None = whole
        self.at = at

    @property
    def made_by(self) -> OpCall | None:
        return self.whole

    def hold(self, tensor: torch.Tensor) -> None:
        """Hold the result; it no longer needs the call."""
        super().hold(tensor)
        self.whole = None


_VALUES = frozenset({Value, Part, OpCall, Result})


def _read(arg: Any, made: dict[Value, torch.Tensor]) -> Any:
    if type(arg) is list:
        return [_read(each, made) for each in arg]
    if not isinstance(arg, Value):
        return arg
    tensor = made.get(arg)
    return arg.now() if tensor is None else tensor


def changed(tensor: torch.Tensor) -> MutationError:
    """Make the error for a held tensor that was changed."""
    shape = list(tensor.shape) if not tensor.is_nested else "nested"
    return MutationError(
        f"sac_policies.checkpoint: a tensor of shape {shape} and dtype {tensor.dtype} was changed "
        "in place after the region read it, but backward reads it as it was. Change it after "
        "backward, or give the region a copy."
    )


def want(value: Value) -> None:
    """Count one more reader of a value, and of the inputs of its call."""
    value.readers += 1
    if value.held is not None or value.boxed is not None:
        return
    call = value if type(value) is OpCall else value.made_by
    if call is None or call.wanted:
        return
    stack = [call]
    call.wanted = True
    while stack:
        for each in stack.pop().inputs:
            each.readers += 1
            if each.held is None and each.boxed is None:
                call = each if type(each) is OpCall else each.made_by
                if call is not None and not call.wanted:
                    call.wanted = True
                    stack.append(call)


class Replay:
    """Replays values, and caches those that a backward reads again."""

    __slots__ = ("_backward", "cached", "runs")

    def __init__(self) -> None:
        self.cached: list[ref[Value]] = []
        self._backward = -1
        self.runs = False

    def read(self, value: Value, backward: int, *, caches: bool) -> torch.Tensor:
        """Return the tensor of a saved value that is not held.

        Args:
            value: the value.
            backward: number of the running backward.
            caches: whether values with other readers may be cached.
        """
        if backward != self._backward:
            self.drop()
            self._backward = backward
        tensor = value.now()
        if tensor is None:
            make = self._made
            tensor = announced(-1, make, value, caches) if is_measured() else make(value, caches)
        value.reads += 1
        if value.reads >= value.readers:
            value.cached, value.reads = None, 0
        if not caches:
            self.drop()
        return tensor

    def drop(self) -> None:
        for each in self.cached:
            value = each()
            if value is not None:
                value.cached, value.reads = None, 0
        self.cached.clear()

    def _made(self, root: Value, caches: bool) -> torch.Tensor:
        made: dict[Value, torch.Tensor] = {}
        readers: dict[Value, int] = {root: 1}
        order = _order(root, made, readers)  # hooks around the region may use autograd
        borrowed: set[Value] = set()  # results that share memory with a held tensor
        before, self.runs = self.runs, True
        try:
            with below_autograd(), no_torch_function():
                for call in order:
                    out = call.run(made)
                    if call.recorder.shares:
                        base = call.inputs[0]
                        if base.held is not None or base in borrowed:
                            borrowed.update(_results(call))
                    if call.items is None:
                        made[call] = out
                    else:
                        self._sort(call, out, made, readers, caches and call not in borrowed)
                    out = None
                    for each in call.inputs:
                        if each.held is not None:
                            continue
                        each.reads += 1
                        left = readers[each] = readers[each] - 1
                        if left:
                            continue
                        if each.reads >= each.readers:
                            each.cached, each.reads = None, 0
                        elif caches and each.cached is None and each not in borrowed:
                            self._cache(each, made[each])
                        del made[each]
        finally:
            self.runs = before
        tensor = made[root]
        if caches and root not in borrowed and root.readers - root.reads > 1:
            self._cache(root, tensor)
        return tensor

    def _sort(
        self,
        call: OpCall,
        out: Any,
        made: dict[Value, torch.Tensor],
        readers: dict[Value, int],
        caches: bool,
    ) -> None:
        for item, tensor in zip(call.items or (), out, strict=True):
            value = None if item is None else item()
            if value is None or value.held is not None:
                continue
            if value in readers:
                made[value] = tensor
            elif caches and value.readers > value.reads and value.cached is None:
                self._cache(value, tensor)

    def _cache(self, value: Value, tensor: torch.Tensor) -> None:
        value.cached, value.version = tensor, version_of(tensor)
        self.cached.append(ref(value))


def _results(call: OpCall) -> list[Value]:
    if call.items is None:
        return [call]
    found = [item() for item in call.items if item is not None]
    return [call, *(each for each in found if each is not None)]


def _order(root: Value, made: dict[Value, torch.Tensor], readers: dict[Value, int]) -> list[OpCall]:
    """List the calls that make a value, in order.

    Args:
        root: the value.
        made: gets the inputs that are cached or boxed.
        readers: gets the number of listed calls that read each input that is not held.
    """
    first = root.made_by
    if first is None:
        made[root] = _unboxed(root)
        return []
    order: list[OpCall] = []
    seen: set[OpCall] = set()
    done: set[OpCall] = set()
    stack = [first]
    while stack:
        call = stack[-1]
        if call in seen:
            stack.pop()
            if call not in done:
                done.add(call)
                order.append(call)
            continue
        seen.add(call)
        for each in reversed(call.inputs):  # the first is made first
            if each.held is not None:
                continue
            readers[each] = readers.get(each, 0) + 1
            if each in made:
                continue
            tensor = None if each.cached is None else each.now()
            if tensor is not None:
                made[each] = tensor
                continue
            maker = each if type(each) is OpCall and each.boxed is None else each.made_by
            if maker is None:
                made[each] = _unboxed(each)
            elif maker not in done:
                stack.append(maker)
    return order


def _unboxed(value: Value) -> torch.Tensor:
    assert value.boxed is not None, "a value is held, boxed or made by a call"
    return value.boxed()


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
            raise changed(wrapper)
        inner = {
            name: unpack(part) if isinstance(part, (Value, _Flattened)) else part
            for name, part in self.parts.items()
        }
        made: torch.Tensor = self.kind.__tensor_unflatten__(
            inner, self.context, self.size, self.stride
        )
        return made


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """List the plain tensors of a tensor: itself, or the inner ones of a wrapper."""
    if type(tensor) in PLAIN or not is_wrapper(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    parts = [part for name in names if isinstance(part := getattr(tensor, name), torch.Tensor)]
    return [each for part in parts for each in parts_of(part)]


class _ByStorage:
    """Items by the storage of their tensor, which is read at the first write after they are added.

    Args:
        tensor_of: returns the tensor of an item; None if it is gone.
    """

    def __init__(self, tensor_of: Callable[[Any], torch.Tensor | None]) -> None:
        self._tensor_of = tensor_of
        self._new: list[Any] = []
        self._sorted: dict[int | None, list[Any]] = {}
        self.add = self._new.append

    def take(self, storages: set[int | None]) -> list[Any]:
        """Remove and list the items whose tensor has one of the storages."""
        for item in self._new:
            tensor = self._tensor_of(item)
            if tensor is not None:
                self._sorted.setdefault(storage_of(tensor), []).append(item)
        self._new.clear()
        found = []
        for item in [each for storage in storages for each in self._sorted.pop(storage, ())]:
            tensor = self._tensor_of(item)
            if tensor is not None and storage_of(tensor) in storages:
                found.append(item)
        return found


class TapeValues:
    """The values of one tape: of known tensors, of held tensors, and of what autograd saves.

    Attributes:
        known: the tensors that have a value, by `id`.
        note_gone: called when one of them is freed.
        records_views: whether views of held tensors are recorded. Otherwise such a view is unknown,
            and held when it is read: its memory is held in any case.
        takes_fakes: whether calls with fake tensors are recorded. DTensor propagates shardings on
            fake tensors, which a region of real tensors must ignore.
        checks: whether replays are compared with the bits of the forward.
        wholes: of inner tensors of wrapper subclasses, the wrapper and its version.
        decide: method of the subclass that counts a call, and returns whether the policy keeps its
            result.
        follow_range: method of the subclass that switches recording off while FSDP gathers or frees
            parameters.
    """

    decide: Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], bool]
    follow_range: Callable[[Any, tuple[Any, ...]], None]

    def __init__(self, outer: Hooks | None, offloads: bool, use: PolicyUse) -> None:
        self._outer, self._use = outer, use
        # Hooks around the region store each value once, and a view keeps its base on the device.
        self.records_views = outer is not None or offloads
        self.takes_fakes = in_fake_mode()
        self.checks = False
        self._is_open = True
        self.known: dict[int, Known] = {}
        self._gone: list[Known] = []
        self.note_gone = self._gone.append
        self._known_by_storage = _ByStorage(partial(_tensor_known_as, self.known))
        self._holders: list[ref[Value]] = []
        self._held_by_storage = _ByStorage(_tensor_held_by)
        self._small: list[ref[Value]] = []
        self._unversioned: set[int | None] = set()
        self.replay = Replay()
        self._queued = -1
        self.wholes: dict[int, tuple[ref[torch.Tensor], ref[torch.Tensor], int]] = {}
        self.offloads: Offloads | None = None
        self._lock = threading.RLock()

    # Known tensors

    def value_of(self, tensor: torch.Tensor) -> Value:
        """Return the value of a tensor; hold an unknown tensor."""
        return self.known_value(tensor) or self.hold(tensor)

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
            seen.key = key = id(tensor)
            seen.value, seen.version = value, version
            self.known[key] = seen
            self._known_by_storage.add(key)

    def forget_gone(self) -> None:
        """Forget freed tensors, so that tensors held by their values are freed too."""
        while self._gone:
            seen = self._gone.pop()
            if self.known.get(seen.key) is seen:
                del self.known[seen.key]

    def record(
        self, operation: Operation, args: Any, kwargs: Any, out: torch.Tensor, version: int
    ) -> None:
        """Note that a tensor, at this version, is the result of a call."""
        self.note(out, self.call_of(operation, args, kwargs), version)

    def call_of(
        self, operation: Operation, args: Any, kwargs: dict[str, Any], copies: bool = False
    ) -> OpCall:
        """Make the value of a call; hold arguments that are unknown."""
        inputs: list[Value] = []
        values, count, known = list(args), len(args), self.known
        for at in operation.positions:
            if at >= count:
                break
            arg = args[at]
            seen = known.get(id(arg))
            if seen is not None and seen() is arg and seen.version == args[at]._version:
                value = seen.value
            elif isinstance(arg, torch.Tensor):
                value = self.hold(arg)
            else:
                continue
            values[at] = value
            inputs.append(value)
        for at in operation.lists:
            if at < count:
                values[at] = self._listed(args[at], inputs)
        named = None
        if kwargs:
            named = {name: self._listed(arg, inputs) for name, arg in kwargs.items()}
        call = OpCall(operation, values, named, inputs, copies)
        if operation.flags is not None:
            call.states = operation.flags.read()
        return call

    def _listed(self, arg: Any, inputs: list[Value]) -> Any:
        if isinstance(arg, torch.Tensor):
            value = self.value_of(arg)
            inputs.append(value)
            return value
        if isinstance(arg, (list, tuple)):
            return [self._listed(each, inputs) for each in arg]
        return arg

    # Held tensors

    def hold(self, tensor: torch.Tensor) -> Value:
        """Return a value that holds an unknown tensor."""
        version = version_of(tensor)
        is_itself = (
            self._outer is not None  # hooks get the tensor that autograd would give them
            or version == UNVERSIONED
            or (tensor.requires_grad and tensor.is_leaf)
            or not (tensor.is_floating_point() or tensor.is_complex())  # it has no graph
        )
        value: Value
        if self._unversioned and storage_of(tensor) in self._unversioned:
            with no_dispatch():
                value = self.held(copy_of(tensor.detach()))
        else:
            held = tensor if is_itself else unseen_alias(tensor)
            inner = self.wholes.get(id(tensor)) if self.wholes else None
            whole = inner[1]() if inner is not None and inner[0]() is tensor else None
            if inner is not None and whole is not None:
                value = Part(held, version, inner[1], max(inner[2], version_of(whole)))
                self._note_holder(value)
            else:
                value = self.held(held, version)
                is_constant = not (tensor.requires_grad or self.takes_fakes)
                if is_constant and _size_of(tensor) <= SMALL_BYTES:
                    self._small.append(ref(value))
        self.note(tensor, value, version)
        if self.offloads is not None and self.offloads.is_marked(tensor):
            self.offloads.add(value)
        return value

    def held(self, tensor: torch.Tensor, version: int = 0) -> Value:
        """Return a value that holds this tensor."""
        value = Value(tensor, version)
        self._note_holder(value)
        return value

    def _note_holder(self, value: Value) -> None:
        holder = ref(value)
        self._holders.append(holder)
        self._held_by_storage.add(holder)

    def _live_holders(self) -> list[Value]:
        return [value for each in self._holders if (value := each()) is not None]

    def keep(self, value: Value, tensor: torch.Tensor) -> None:
        """Hold a tensor, so that it need not be recomputed."""
        if value.held is None and value.boxed is None:
            value.hold(tensor if self._outer is not None else unseen_alias(tensor))
            self._note_holder(value)

    def to_offload(self) -> Offloads:
        """Return what offloads tensors of this tape."""
        if self.offloads is None:
            self.offloads = Offloads()
        return self.offloads

    def replaced(self, held: torch.Tensor, original: torch.Tensor) -> None:
        """Called where a tensor is held instead of another one."""

    def _copy(self, value: Value, tensor: torch.Tensor) -> None:
        """Hold a copy instead of a tensor, unless the tensor was freed or modified unnoticed."""
        if value.version in (UNVERSIONED, version_of(tensor)) and not is_freed(tensor):
            copy = copy_of(tensor.detach())
            self.replaced(copy, tensor)
            value.hold(copy)

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
            for key in self._known_by_storage.take(storages):
                self.known.pop(key, None)
            for value, held in self._holding(storages):
                if not (value.is_alone and storage_of(held) in hidden):
                    self._copy(value, held)
            if self.offloads is not None:
                self.offloads.leave(storages)
            for tape in [each() for each in _ended.copy().values()]:  # others may add to it
                if tape is not None:
                    tape._before_later_write(storages, hidden)

    def _holding(self, storages: set[int | None]) -> Iterator[tuple[Value, torch.Tensor]]:
        """Yield the values that hold a tensor of one of the storages, at the first write only.

        Those that are not copied then are never copied: their version shows a later write.
        """
        for holder in self._held_by_storage.take(storages):
            value = holder()
            if value is not None and value.held is not None:
                yield value, value.held

    def _before_later_write(self, storages: set[int | None], hidden: set[int | None]) -> None:
        """After this region has ended, copy its held tensors before another region writes to them.

        This lets running averages be replayed after the next micro-batch. Tensors that autograd
        saved are not copied: autograd refuses them after a write, and so does the tape.
        """
        with self._lock:
            for value, held in self._holding(storages):
                if not (value.is_alone if storage_of(held) in hidden else value.is_saved):
                    self._copy(value, held)

    def note_unversioned(self, written: list[torch.Tensor]) -> None:
        """Record storages written without a version change; values hold copies of them."""
        self._unversioned |= {storage_of(each) for each in written}

    def end(self) -> None:
        """Forget all tensors; pack held tensors with the hooks around the region."""
        self._is_open = False
        self.known.clear()
        self._gone.clear()
        self.wholes.clear()
        if self.offloads is not None:
            self.offloads.end()
        outer, self._outer = self._outer, None
        if outer is None:
            if self._small:
                self._copy_small()
            at = id(self)
            _ended[at] = ref(self, lambda _: _ended.pop(at, None) and None)
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
            saved = {
                storage_of(each.held)
                for each in self._live_holders()
                if each.is_saved and each.held is not None
            }
            for value in read:
                held = value.held
                if type(value) is Value and held is not None and storage_of(held) not in saved:
                    self._copy(value, held)

    # Saved-tensor hooks

    def _pack(self, tensor: torch.Tensor) -> Any:
        if type(tensor) not in PLAIN and is_wrapper(tensor):
            if self.checks or self.records_views:
                finish(tensor)  # before its bits are read
            return _Flattened(tensor, self._pack_part)
        seen = self.known.get(id(tensor))
        if seen is not None and seen() is tensor and seen.version == tensor._version:
            value = seen.value
        elif tensor.requires_grad:
            value = self.hold(tensor)
        else:
            # An alias as in `hold`, so that all readers agree if its `.data` is replaced.
            is_constant = type(tensor) is torch.Tensor and tensor.is_floating_point()
            held = unseen_alias(tensor) if is_constant and self._outer is None else tensor
            value = self.held(held, tensor._version)
            value.is_alone = True
        value.is_saved = True
        want(value)
        if self.offloads is not None and self._outer is None:  # hooks around store the tensors
            self.offloads.start()
        if self.checks and value.fingerprint is None and value.made_by is not None:
            with no_dispatch():
                if value.held is None and is_comparable(tensor):
                    value.fingerprint = Fingerprint(tensor)
        return value

    def _pack_part(self, tensor: torch.Tensor) -> Any:
        """Save an inner tensor; hold integers, because jagged tensors compare them by identity."""
        if not (tensor.is_floating_point() or tensor.is_complex()):
            value = self.value_of(tensor)
            if value.held is None:
                value.hold(tensor)
                self._note_holder(value)
        return self._pack(tensor)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if self._use.missing and not self._use.running:
            raise self._use.error()
        if type(saved) is _Flattened:
            return saved.restored(self._unpack)
        with self._lock:
            backward = backward_id()
            if self.offloads is not None:
                self.offloads.ask_back(backward)
            if saved.held is not None:
                return saved.now()
            tensor = self.replay.read(saved, backward, caches=not self._is_open)
            if self.replay.cached and (backward < 0 or self._queued != backward):
                self._queued = backward
                if not after_backward(self.replay.drop):
                    self.replay.drop()
            if saved.fingerprint is not None:
                with no_dispatch():
                    saved.fingerprint.check(tensor, partial(differs, saved))
        return tensor


hide_from_dynamo(TapeValues._pack, TapeValues._unpack)  # a compiled function in a region calls them

_ended: dict[int, ref[TapeValues]] = {}
"""Values of tapes that have ended, while backward may need them; of all threads."""


def _tensor_known_as(known: dict[int, Known], key: int) -> torch.Tensor | None:
    seen = known.get(key)
    return None if seen is None else seen()


def _tensor_held_by(holder: ref[Value]) -> torch.Tensor | None:
    value = holder()
    return None if value is None else value.held


def _alias_in(packed: Any, tensor: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """Find the tensor itself in the result of a pack hook, and its version."""
    storage = storage_of(tensor)
    for each in tensors_in(packed):
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
