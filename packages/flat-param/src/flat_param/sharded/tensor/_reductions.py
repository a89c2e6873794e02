"""Reductions of pieces over the ranks that have the other elements.

Each is a collective. Norms are not reduced at once: `clip_grad_norm_` stacks the norms of all
gradients and takes the norm of these, which is one collective. See `PieceNorm`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._errors import CommError, ParameterError, StateError
from ..._torch_compat import norms_of, without_torch_function
from ...comm._comm import Communicator
from ._param_piece import JoinedPieces, ParamPiece

MAX, MIN, SUM = dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.SUM
Part = ParamPiece | JoinedPieces


class Trial:
    """The trial step of an optimizer on empty pieces; see _first_step.py.

    Attributes:
        is_on: whether reductions stay on this rank.
        called: which of "reduction", "numel" and "size" the optimizer has called or read.
    """

    is_on = False
    called: set[str] = set()  # noqa: RUF012  # replaced for each trial


class TrialShape(tuple[int, ...]):
    """The shape of an empty piece in a trial, which notes that one of its sizes is read."""

    def __getitem__(self, at: Any) -> Any:
        Trial.called.add("size")
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[int]:
        Trial.called.add("size")
        return super().__iter__()

    def numel(self) -> int:
        """As of a `torch.Size`, which cannot be a base class."""
        Trial.called.add("numel")
        return math.prod(super().__iter__())


def over_ranks(name: str, piece: Part, value: Tensor, op: Any) -> Tensor:
    """Reduce a value, of any shape, over the ranks that have elements of the tensor. Collective."""
    return _over(name, piece, value, op, comms_of(name, piece))


def any_of_initialised(piece: Part, local: Tensor) -> Tensor:
    """Whether any element is true, while a parameter is initialised: every rank does so."""
    comms = [comm for comm in piece.spread if comm.world_size > 1]
    return _over("any", piece, local.any(), MAX, comms)


def _over(name: str, piece: Part, value: Tensor, op: Any, comms: Sequence[Communicator]) -> Tensor:
    if Trial.is_on:
        Trial.called.add("reduction")
        return value
    if not comms:
        return value
    sent = value.to(piece.device, torch.uint8 if value.dtype == torch.bool else value.dtype)
    sent = sent.clone(memory_format=torch.contiguous_format)
    for comm in comms:
        with _named(name, piece):
            comm.all_reduce(sent, op, of_unit=False).wait()
    return sent.to(value.device, value.dtype)


@contextmanager
def _named(name: str, piece: Part) -> Iterator[None]:
    """Name the reduction in the error of a collective that not all ranks have begun."""
    try:
        yield
    except RuntimeError as error:
        raise CommError(
            f"flat_param.fully_shard: {name} of parameter {piece.label} is computed over all "
            f"ranks that have elements of it. Call it on every rank. ({error})"
        ) from error


def comms_of(name: str, piece: Part) -> list[Communicator]:
    """The communicators of a reduction; raises if a rank may not take part."""
    if piece.may_miss_ranks and not piece.holds_all:
        raise ParameterError(
            f"flat_param.fully_shard: {name} was called with parameter {piece.label} or its "
            "gradient, but optimizers skip it on ranks without elements, so not every rank takes "
            "part. Use the module's clip_grad_norm_ for norms, or call full_tensor() of the "
            "parameter on every rank."
        )
    spread = piece.spread[1:] if piece.holds_all else piece.spread
    return [comm for comm in spread if comm.world_size > 1]


def reduce_piece(
    name: str, piece: Part, local: Tensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """The result of a reduction over all elements, for plain `local` elements. Collective."""
    if name == "mean":
        return _mean(piece, local, kwargs.get("dtype") or local.dtype)
    if Trial.is_on and name in _TRIED:
        Trial.called.add("reduction")
        zero = local.new_zeros(())
        return torch.return_types.aminmax((zero, zero)) if name == "aminmax" else zero
    if name == "aminmax":
        both = _extreme("amin", piece, local), _extreme("amax", piece, local)
        return torch.return_types.aminmax(both)
    if name in _EXTREMES:
        return _extreme(name, piece, local)
    found = getattr(torch, name)(local, *args, **kwargs)
    if isinstance(found, Tensor):
        return over_ranks(name, piece, found, _OPERATORS[name])
    value = torch.tensor(found, device=local.device)
    return bool(over_ranks(name, piece, value, _OPERATORS[name]))


def _extreme(name: str, piece: Part, local: Tensor) -> Tensor:
    """The extreme of those of ranks with elements, which are gathered: backends mistake NaN."""
    take = _EXTREMES[name]
    values = take(local).view(1) if local.numel() else local.new_zeros(1)
    has = torch.tensor([local.numel() > 0], device=local.device)
    for comm in comms_of(name, piece):
        values, has = _gathered(name, piece, values, comm), _gathered(name, piece, has, comm)
    return take(values[has])


def _gathered(name: str, piece: Part, value: Tensor, comm: Communicator) -> Tensor:
    found = value.new_empty(comm.world_size * value.numel(), device=piece.device)
    with _named(name, piece):
        comm.all_gather(found, value.to(piece.device)).wait()
    return found.to(value.device)


def _mean(piece: Part, local: Tensor, dtype: torch.dtype) -> Tensor:
    values = local.to(_wide(dtype))
    count = torch.tensor(local.numel(), dtype=values.dtype, device=values.device)
    total, number = over_ranks("mean", piece, torch.stack([values.sum(), count]), SUM)
    return (total / number.real).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch adds up elements of a dtype."""
    return torch.promote_types(dtype, torch.float32) if dtype.itemsize < 4 else dtype


_OPERATORS = {
    **dict.fromkeys(("sum", "nansum", "count_nonzero", "dot", "vdot"), SUM),
    **dict.fromkeys(("all", "equal", "allclose"), MIN),
    "any": MAX,
}
_EXTREMES = {"max": torch.amax, "amax": torch.amax, "min": torch.amin, "amin": torch.amin}
OF_WHOLE = frozenset({"prod", "nanmean", "std", "var", "histc"})
"""Reductions of the gathered tensor, which are rare: results of ranks do not give theirs."""

_TRIED = frozenset({"aminmax", *_EXTREMES, *OF_WHOLE})
"""Reductions that torch refuses for no elements, or warns of; a trial goes on with zero."""

REDUCTIONS = frozenset({"mean", *_OPERATORS, *_TRIED})


def check_all_ranks_search(pieces: Iterable[Part]) -> None:
    """Refuse a search for infinities in which ranks without gradients take no part.

    Raises:
        StateError: torch's `GradScaler` looks at nothing on such a rank.
    """
    for piece in pieces:
        if isinstance(piece, ParamPiece) and piece.leaves_ranks_out:
            raise StateError(
                "flat_param.fully_shard: a GradScaler looks for infinite gradients on all ranks, "
                f"but boundary= may leave ranks without parameter {piece.label}. Shard with "
                "boundary='element', or train in bfloat16, which needs no scaler."
            )


def found_inf_anywhere(pieces: Sequence[Part], found_inf: Tensor) -> None:
    """Set `found_inf` on all ranks if it is set on one. Collective."""
    comms: dict[Any, Communicator] = {}
    for piece in pieces:
        for comm in piece.all_comms:
            comms.setdefault(comm.group, comm)
    for comm in comms.values():
        if comm.world_size > 1:
            comm.all_reduce(found_inf, MAX, of_unit=False).wait()


class NoGradient(torch.autograd.Function):
    """A value of all ranks, whose gradient is refused."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor, piece: ParamPiece) -> Tensor:
        ctx.piece = piece
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ctx.piece.outside_unit("the loss was computed with it")


class PieceNorm(Tensor):
    """Norms of this rank's elements of some pieces, which are reduced over ranks when read.

    A stack of them remains unreduced, and the norm of that stack is one collective: it is the norm
    of all elements. Ranks that have no gradient of some parameters can take part in it.
    """

    _parts: tuple[tuple[Any, int], ...]
    _order: float

    @classmethod
    def of(cls, local: Tensor, parts: Sequence[tuple[Any, int]], order: float) -> PieceNorm:
        """Norms, `()` or `(n,)`, of the pieces in `parts`; each has the number of its norms."""
        found = local.as_subclass(cls)
        found._parts, found._order = tuple(parts), order
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Stack norms, or reduce the norms among the arguments first."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "size", "dim", "numel", "stride", "is_floating_point"):
            with without_torch_function():
                return func(*args, **kwargs)
        if name in ("to", "float", "double", "detach", "cpu", "cuda") and isinstance(args[0], cls):
            with without_torch_function():
                found = func(args[0], *args[1:], **kwargs)
                return cls.of(found, args[0]._parts, args[0]._order)
        if name == "stack" and len(args) == 1 and not kwargs:
            return _stacked(args[0])
        first = args[0] if args else None
        if name in NORM_ORDERS and isinstance(first, cls) and first._combines(name, args, kwargs):
            return first.combined()
        args, kwargs = _reduced((args, kwargs))
        return func(*args, **kwargs)

    def _combines(self, name: str, args: Any, kwargs: Any) -> bool:
        order = order_of(name, args, kwargs)
        return order == self._order and dims_of(name, args, kwargs) is None

    def combined(self) -> Tensor:
        """The norm of all elements of all pieces. Collective."""
        with without_torch_function():
            powers = _powers(self.detach().as_subclass(Tensor).view(-1), self._order)
            lists: dict[Any, tuple[list[Communicator], list[Tensor]]] = {}
            for (piece, _), power in zip(self._parts, powers, strict=True):
                comms = [comm for comm in getattr(piece, "spread", ()) if comm.world_size > 1]
                key = tuple([comm.group for comm in comms])
                lists.setdefault(key, (comms, []))[1].append(power)
            op = MAX if self._order == math.inf else SUM
            totals = []
            for comms, each in lists.values():
                total = _joined(torch.stack(each), self._order)
                for comm in comms if not Trial.is_on else ():
                    comm.all_reduce(total, op, of_unit=False).wait()
                totals.append(total)
            Trial.called.add("reduction")
            every = torch.stack([each.to(totals[0].device) for each in totals])
            return self._linked(_root(_joined(every, self._order), self._order).to(self.dtype))

    def _linked(self, value: Tensor) -> Tensor:
        """Have a backward through `value` raise, as one through these norms does."""
        piece = next((each for each, _ in self._parts if isinstance(each, ParamPiece)), None)
        if piece is None or not self.requires_grad:
            return value
        return NoGradient.apply(self.as_subclass(Tensor), value, piece)

    def reduced(self) -> Tensor:
        """The norm of each piece. Collective."""
        with without_torch_function():
            local = self.detach().as_subclass(Tensor)
            powers = _powers(local.view(-1), self._order)
            op = MAX if self._order == math.inf else SUM
            lists: dict[Any, list[int]] = {}
            for index, (piece, _) in enumerate(self._parts):
                comms = [] if piece is None else comms_of("norm", piece)
                lists.setdefault(tuple([comm.group for comm in comms]), []).append(index)
            for indices in lists.values():
                piece = self._parts[indices[0]][0]
                if piece is not None:
                    powers[indices] = over_ranks("norm", piece, powers[indices], op)
            return self._linked(_root(powers, self._order).view(local.shape).to(local.dtype))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.reduced().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.reduced()


def _stacked(norms: Sequence[Tensor]) -> Any:
    orders = {norm._order for norm in norms if isinstance(norm, PieceNorm)}
    if len(orders) > 1 or any(norm.dim() for norm in norms):
        return torch.stack([_reduced(norm) for norm in norms])
    parts = [norm._parts[0] if isinstance(norm, PieceNorm) else (None, 1) for norm in norms]
    with without_torch_function():
        return PieceNorm.of(
            torch.stack([norm.as_subclass(Tensor) for norm in norms]), parts, orders.pop()
        )


def _reduced(value: Any) -> Any:
    if isinstance(value, PieceNorm):
        return value.reduced()
    if isinstance(value, (list, tuple)):
        return type(value)([_reduced(each) for each in value])
    if isinstance(value, dict):
        return {key: _reduced(each) for key, each in value.items()}
    return value


def _powers(norms: Tensor, order: float) -> Tensor:
    wide = norms.to(_wide(norms.dtype))
    return wide.clone() if math.isinf(order) else wide.pow(order)


def _joined(powers: Tensor, order: float) -> Tensor:
    return powers.amax() if math.isinf(order) else powers.sum()


def _root(powers: Tensor, order: float) -> Tensor:
    return powers if math.isinf(order) else powers.pow(1 / order)


NORM_ORDERS = {
    "norm": "p",
    "linalg_norm": "ord",
    "linalg_vector_norm": "ord",
    "vector_norm": "ord",
    "_foreach_norm": "ord",
}
"""The argument with the order, by function."""


def order_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> float | None:
    """The order of a vector norm over all elements, above 0; None if it is another norm."""
    order = kwargs.get(NORM_ORDERS[name], args[1] if len(args) > 1 else None)
    if order is None or order == "fro":
        return 2.0
    return float(order) if isinstance(order, (int, float)) and order > 0 else None


def dims_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The dimensions of a reduction; None: all."""
    position = 2 if name in NORM_ORDERS else 1
    return kwargs.get("dim", kwargs.get("axis", args[position] if len(args) > position else None))


def norms_of_pieces(
    tensors: Sequence[Tensor], pieces: Sequence[Part | None], order: float
) -> list[Tensor]:
    """The norm of each tensor, which are plain, over ranks where it is a piece."""
    at = [index for index, tensor in enumerate(tensors) if tensor.numel()]
    found: list[Any] = [
        tensor.new_zeros((), dtype=tensor.real.dtype if tensor.is_complex() else tensor.dtype)
        for tensor in tensors
    ]
    if at:
        filled = norms_of([tensors[index] for index in at], order)
        for index, norm in zip(at, filled, strict=True):
            found[index] = norm
    for index, piece in enumerate(pieces):
        if piece is not None:
            found[index] = PieceNorm.of(found[index], [(piece, 1)], order)
    return found
