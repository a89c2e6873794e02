"""Values on a tape, and their replay.

A value is a held tensor, a call of an operator on other values, or one result of such a call.
Values refer to their inputs and never to a tensor with a graph. So the graph keeps alive exactly
the values that backward may need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch

from .._errors import MutationError
from .._torch_compat import announced, is_measured, next_node_number
from .._torch_compat._dispatch import below_autograd, no_torch_function
from .._torch_compat._flags import Flags, States
from ._fingerprints import Fingerprint

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


def tensors_among(values: Iterable[Any]) -> list[torch.Tensor]:
    """List the tensors in an operator's arguments, also those in lists."""
    found: list[torch.Tensor] = []
    for value in values:
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor):
                found.append(each)
    return found


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


class Operation(Protocol):
    """The operator of a call."""

    op: Any
    call: Callable[..., Any]
    shares: bool
    flags: Flags | None
    positions: tuple[int, ...]
    lists: tuple[int, ...]


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
            at_once = isinstance(value, OpCall) and _is_ready(value)
            make: Callable[..., torch.Tensor] = self._made_at_once if at_once else self._made
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

    def _made_at_once(self, root: OpCall, caches: bool) -> torch.Tensor:
        """Make a value by one call whose inputs are held or cached."""
        before, self.runs = self.runs, True
        try:
            with below_autograd(), no_torch_function():
                tensor: torch.Tensor = root.run({})
        finally:
            self.runs = before
        is_borrowed = root.recorder.shares and root.inputs[0].held is not None
        if caches and not is_borrowed and root.readers - root.reads > 1:
            self._cache(root, tensor)
        for each in root.inputs:
            if each.held is None:
                each.reads += 1
                if each.reads >= each.readers:
                    each.cached, each.reads = None, 0
        return tensor

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


def _is_ready(call: OpCall) -> bool:
    for each in call.inputs:
        if each.held is None and (each.cached is None or each.now() is None):
            return False
    return call.boxed is None and call.items is None


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
