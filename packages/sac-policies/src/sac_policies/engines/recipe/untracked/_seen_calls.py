"""Values that no gradient flows to, made again by the calls that made them.

Indices of routing, the embedding of a timestep, the statistics of a norm: no node tells how they
came to be. The mode that sees calls (`_calls`) sees these as well.

Rule 1. A call is made again that gives the same bits for the same operands wherever it runs, draws
        nothing and writes to nothing. Where several answers are right (the order of equal values),
        only on the CPU.
Rule 2. As long as the forward runs, operands are held weakly: nothing lives longer for this.
Rule 3. What was written to since a call gave it, or was given it, is not what another call makes.
Rule 4. What is made again is held to a proof before anyone reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from ...._errors import MutationError
from ...._tensors import tensors_in
from ...._torch_compat import is_fake, sequence_number, storage_key
from .._proof import Proof, check, proof_of
from .._shared_values import SharedValue, Source, replays
from .._spans import mapped
from .._stand_ins import WatchedStandIn
from ._call_table import AGAIN, ON_CPU, SAVED, WRITTEN_LATER, RandomState


class Given:
    """A tensor that a call was given, as long as the forward runs (Rule 2).

    Attributes:
        maker: the call that made it, and which of its results it is; None where none was seen.
    """

    __slots__ = ("_reference", "_version", "maker")

    def __init__(self, tensor: torch.Tensor, maker: Maker | None) -> None:
        self._reference, self._version = TensorWeakRef(tensor), tensor._version
        self.maker = maker

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor; None where it is gone or was written to (Rule 3)."""
        tensor = self._reference()
        return None if tensor is None or tensor._version != self._version else tensor


class SeenCall:
    """A call as it was seen.

    Attributes:
        name: of the function.
        function: what was called; None where that is not to be called again (Rule 1).
        first: a number that the next node would have had.
        given: its arguments, positional ones and those by name, with `Given` for tensors.
        results: which results autograd saves while it runs, in order.
        share: what part of a result's bytes would else be kept, as a divisor.
        viewed: what its result is a view of; None where it is none.
        code: what makes the results again, once there is a use for it.
    """

    __slots__ = (
        *("code", "first", "function", "given", "name", "results", "saved", "share"),
        *("storages", "viewed"),
    )

    def __init__(
        self, name: str, function: Callable[..., Any] | None, given: Any, storages: set[int]
    ) -> None:
        self.function, self.given, self.storages = function, given, storages
        self.results: tuple[int, ...] = ()
        self.share = 1
        self.viewed: Given | None = None
        self.code: Code | None = None
        self.first, self.saved, self.name = sequence_number(), 0, name

    def reads(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in memory of what the call was given."""
        return storage_key(tensor) in self.storages


Maker = tuple[SeenCall, int]
"""A call, and which of its results a value is; -1 for a call that returns one tensor."""


class Code:
    """A call that is made again, once for all its readers.

    Attributes:
        cell: what they share.
        is_bound: whether it reads what is rebuilt, which only one node may.
    """

    __slots__ = ("_function", "_given", "cell", "is_bound")

    def __init__(self, function: Callable[..., Any], given: Any, is_bound: bool) -> None:
        self._function, self._given, self.is_bound = function, given, is_bound
        self.cell = SharedValue()

    def results(self) -> Any:
        """Return what the call returns."""
        return self.cell.get(self._made)

    def sources(self) -> Iterator[Source]:
        """What is held for the call, and for the calls that make what it is given."""
        operands: list[Operand] = []
        mapped(self._given, operands.append, Operand)
        for each in operands:
            if isinstance(each.of, Code):
                yield from each.of.sources()
            else:
                yield each.of

    @property
    def state_bytes(self) -> int:
        """Of the random state that it draws from, 0 for most."""
        given = getattr(self._function, "args", ())
        return sum(each.nbytes for each in given if isinstance(each, RandomState))

    def _made(self) -> Any:
        args, kwargs = mapped(self._given, lambda operand: operand.value(), Operand)
        return self._function(*args, **kwargs)


class Operand:
    """An operand that is read when the call is made again.

    Attributes:
        of: what it is read from: what is held, or another call, of which it is one result.
    """

    __slots__ = ("_at", "of")

    def __init__(self, of: Source | Code, at: int = -1) -> None:
        self.of, self._at = of, at

    def value(self) -> torch.Tensor:
        """Return it, made again where a call makes it."""
        of = self.of
        return _part(of.results(), self._at) if isinstance(of, Code) else of.value()


def names_behind(call: SeenCall) -> frozenset[str]:
    """The functions that are called to make a call again, and those that it is a view of."""
    given: list[Given] = [] if call.viewed is None else [call.viewed]
    mapped(call.given, given.append, Given)
    before = [each.maker[0] for each in given if each.maker is not None]
    return frozenset({call.name}).union(*map(names_behind, before))


def part_of(code: Code, at: int) -> Operand:
    """Make an operand of one result of another call."""
    code.cell.readers += 1
    return Operand(code, at)


def _part(results: Any, at: int) -> torch.Tensor:
    found: torch.Tensor = results if at < 0 else results[at]
    return found


class Remade(WatchedStandIn):
    """What is held of a value that its call makes again.

    Attributes:
        saves_bytes: what would else be kept.
    """

    __slots__ = ("__weakref__", "_at", "_code", "_geometry", "_proof", "saves_bytes")

    def __init__(
        self, tensor: torch.Tensor, code: Code, maker: Maker, changed: Callable[[], Exception]
    ) -> None:
        super().__init__(tensor, changed)
        self._code, self._at = code, maker[1]
        self.saves_bytes = tensor.untyped_storage().nbytes() // maker[0].share
        code.cell.readers += 1
        self._geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())
        self._proof: Proof = proof_of(tensor)

    @property
    def code(self) -> Code:
        """What makes it again."""
        return self._code

    def protect(self) -> None:
        """Do nothing: no replay reads it but through what it is made of."""

    def _made(self) -> torch.Tensor:
        replays.depth += 1
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                value = _part(self._code.results(), self._at)
        finally:
            replays.depth -= 1
        check(self._proof, value, self._other)
        return value.as_strided(*self._geometry)

    def _other(self) -> MutationError:
        return MutationError(
            "sac_policies.checkpoint: the call that made the saved tensor of shape "
            f"{tuple(self._geometry[0])} gives other values than in the forward, but it must give "
            "the same: something wrote past autograd to what it reads. Change it after backward."
        )


class Untracked:
    """The calls that were seen in one forward, by what they returned.

    Attributes:
        used: what is made again, in the order in which it was saved.
        read: values of the graph that it is made of, by node and which of its outputs.
    """

    def __init__(self) -> None:
        self.used: list[Maker] = []
        self.read: set[tuple[Any, int]] = set()
        self._makers: dict[int, tuple[TensorWeakRef, int, Maker]] = {}
        self._running: list[SeenCall] = []

    def call(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run a call, and take note of it where it can be made again."""
        saved = SAVED.get(name)
        if saved is not None and not is_autocast():
            results, again, share = saved
            found = again(function, args, kwargs)
            # What is called in its place is given nothing else.
            call = None if found is None else self._seen(name, *found, (args, kwargs))
            if call is not None:
                call.results, call.share = results, share
                out = self._run(call, function, args, kwargs)
                self._returned(call, out)
                return out
        out = function(*args, **kwargs)
        if type(out) is torch.Tensor and out.requires_grad:  # most come by here
            return out
        if name in AGAIN and _is_untracked(out) and not is_autocast():
            if name == "arange":
                kwargs = {**kwargs, "dtype": out.dtype, "device": out.device}
            function = function if _repeats(name, out) else None
            call = self._seen(name, function, args, kwargs, (args, kwargs))
            if call is not None:
                self._returned(call, out)
        return out

    def _run(self, call: SeenCall, function: Any, args: Any, kwargs: Any) -> Any:
        self._running.append(call)
        try:
            return function(*args, **kwargs)
        finally:
            self._running.pop()

    def _seen(
        self, name: str, function: Any, args: Any, kwargs: Any, whole: Any
    ) -> SeenCall | None:
        """Describe a call, of whole arguments; None for arguments that cannot be held."""
        try:
            given = mapped((args, kwargs), self._given, torch.Tensor)
        except TypeError:
            return None
        return SeenCall(name, function, given, set(map(storage_key, tensors_in(whole))))

    def _given(self, tensor: torch.Tensor) -> Given:
        if not _is_plain(tensor):
            raise TypeError
        return Given(tensor, None if tensor.requires_grad else self._maker(tensor))

    def _returned(self, call: SeenCall, out: Any) -> None:
        for at, part in enumerate(out if isinstance(out, tuple) else (out,)):
            if not isinstance(part, torch.Tensor) or part.requires_grad or not _is_plain(part):
                continue
            if call.reads(part):
                call.viewed = _base(call, part)
                if call.viewed is None or call.viewed.tensor is part:
                    continue
            maker = call, (at if part is not out else -1)
            self._makers[id(part)] = TensorWeakRef(part), part._version, maker

    def _maker(self, tensor: torch.Tensor) -> Maker | None:
        """Return the call that made a tensor as it is (Rule 3)."""
        reference, version, maker = self._makers.get(id(tensor), _NONE)
        same = reference is not None and reference() is tensor and tensor._version == version
        return maker if same else None

    def makes(self, tensor: torch.Tensor) -> bool:
        """Whether a call in this forward made it, whatever was written to it since."""
        reference, _, maker = self._makers.get(id(tensor), _NONE)
        return maker is not None and reference() is tensor and maker[0].viewed is None

    def saved(self, tensor: torch.Tensor, number: int) -> Maker | None:
        """Return the call that made a tensor which is saved now, by the node before a number."""
        call = self._running[-1] if self._running else None
        if call is None or number <= call.first or call.reads(tensor):
            return self._maker(tensor)
        at, call.saved = call.saved, call.saved + 1
        return (call, call.results[at]) if at < len(call.results) else None

    def clear(self) -> None:
        """Let go of all."""
        self.used.clear()
        self.read.clear()
        self._makers.clear()
        self._running.clear()


_NONE: Any = (None, 0, None)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of no kind that has operators of its own, or stands for such a one."""
    return type(tensor) in _PLAIN or is_fake(tensor)


def _base(call: SeenCall, view: torch.Tensor) -> Given | None:
    """What of a call's arguments a result shares its storage with."""
    found: list[Given] = []
    mapped(call.given, found.append, Given)
    for each in found:
        tensor = each.tensor
        if tensor is not None and storage_key(tensor) == storage_key(view):
            return each
    return None


def is_autocast() -> bool:
    """Whether operators may read something else than they are given."""
    return torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu")


def _is_untracked(out: Any) -> bool:
    first = out[0] if type(out) is not torch.Tensor and isinstance(out, tuple) and out else out
    return isinstance(first, torch.Tensor) and not first.requires_grad and _is_plain(first)


def _repeats(name: str, out: Any) -> bool:
    """Whether a call may be made again (Rule 1)."""
    if name in WRITTEN_LATER:
        return False
    first = out if isinstance(out, torch.Tensor) else out[0]
    return first.is_cpu or name not in ON_CPU
