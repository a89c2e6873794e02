"""Tensors that are one rank's piece of a parameter or gradient, and refuse whole-tensor functions.

Elementwise functions work as on any tensor, and their results are pieces too. A function that reads
the whole tensor (a norm, a sum, a matmul) would silently give this rank's value, so it raises.
Optimizers that need full tensors are detected by the functions they call. If any other function
fails, for instance in a layer that is called without its unit, the error names the piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import FlatParamError, ParameterError, StateError
from .._torch_compat import allow_foreach, without_torch_function
from ._param_piece import PIECE, ParamPiece, piece_of

_REDUCTIONS = {
    *("argmax", "argmin", "count_nonzero", "cumsum", "kthvalue", "logsumexp"),
    *("amax", "amin", "aminmax", "max", "mean", "median", "min", "mode", "nansum", "nanmean"),
    *("norm", "prod", "quantile", "softmax", "std", "sum", "topk", "var"),
    *("matrix_norm", "vector_norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm"),
}
"""By name; along rows or blocks they are allowed where these are whole."""

_WHOLE = {
    *("_foreach_norm", "_foreach_max", "addmm", "baddbmm", "bmm", "chain_matmul", "dot", "einsum"),
    *("inner", "matmul", "__matmul__", "__rmatmul__", "mm", "mv", "outer", "tensordot", "vdot"),
    *("eigh", "inverse", "linalg_eigh", "linalg_inv", "linalg_qr", "linalg_svd", "pinverse"),
    *("qr", "svd", "svd_lowrank", "linalg_cholesky", "cholesky", "linalg_svdvals"),
}
"""Functions that need whole tensors in any case, by name."""

_OPTIMIZERS = ("_foreach_", "_fused_")
_OTHER_ERRORS = (FlatParamError, torch.OutOfMemoryError, torch.AcceleratorError)
_JOINS = {"cat", "stack", "concat", "concatenate", "hstack", "vstack"}
_TENSOR: Any = Tensor
_VIEWS = {getattr(_TENSOR, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real")}


def _call(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Refuse functions that read the whole tensor."""
    kwargs, name = kwargs or {}, getattr(func, "__name__", "")
    if name in _REDUCTIONS or name in _WHOLE:
        for tensor, piece in _pieces_in((*args, *kwargs.values())):
            if name in _WHOLE or not _keeps_rows(name, tensor, piece, args, kwargs):
                raise _refused(name, piece)
    try:
        with without_torch_function():
            found = func(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError) as error:
        if not isinstance(error, _OTHER_ERRORS) and not name.startswith(_OPTIMIZERS):
            # A write to a piece, as by an optimizer, is no computation of a module.
            read = args[1:] if name.endswith("_") or name.startswith("__i") else args
            for _, piece in _pieces_in((*read, *kwargs.values())):
                raise outside_unit(piece, f"{name} computes with it") from error
        raise
    if type(found) is not Tensor or (name == "__get__" and func not in _VIEWS):
        return found
    first = next(_pieces_in(args), None)
    if first is None:
        return found
    with without_torch_function():
        same = name in _JOINS or (found.numel() == first[0].numel() and name[-5:] != "_like")
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place or name == "as_subclass" or not same or not found.is_floating_point():
            return found
    found.__class__ = Piece  # `as_subclass` would add a node to the graph
    setattr(found, PIECE, first[1])
    return found


class Piece(Tensor):
    """A piece of a gradient, or an elementwise result of pieces."""

    __torch_function__: Any = classmethod(_call)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        found = memo[id(self)] = plain(self).clone()
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)


class PieceParameter(nn.Parameter):
    """A parameter of an optimizer that is a piece."""

    __torch_function__: Any = classmethod(_call)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        found = memo[id(self)] = nn.Parameter(plain(self).clone(), self.requires_grad)
        return found


allow_foreach(PieceParameter)


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor without restrictions, with the same memory and version counter."""
    with without_torch_function():
        return tensor.detach().as_subclass(Tensor)


def as_piece(tensor: Tensor, piece: ParamPiece) -> Tensor:
    """Return a gradient as a piece; a plain tensor if this rank has all of the parameter."""
    with without_torch_function():
        found = tensor if piece.is_whole else tensor.as_subclass(Piece)
    setattr(found, PIECE, piece)
    return found


def be_piece(param: nn.Parameter, piece: ParamPiece) -> None:
    """Turn a parameter into a piece; the object stays the same."""
    setattr(param, PIECE, piece)
    if type(param) is nn.Parameter and not piece.is_whole:
        param.__class__ = PieceParameter


def _pieces_in(args: Iterable[Any]) -> Iterator[tuple[Tensor, ParamPiece]]:
    """Tensors of which this rank has not all elements."""
    for each in args:
        if isinstance(each, (Piece, PieceParameter)):
            piece = piece_of(each)
            if piece is not None and not piece.is_whole:
                yield each, piece
        elif isinstance(each, (list, tuple)):
            yield from _pieces_in(each)


def _keeps_rows(
    name: str, tensor: Tensor, piece: ParamPiece, args: Sequence[Any], kwargs: dict[str, Any]
) -> bool:
    """Whether a reduction only goes along rows or blocks that are whole on this rank."""
    if len(args) > 1 and isinstance(args[1], Tensor):
        return True  # elementwise max and min of two tensors
    position = 2 if "norm" in name else 1
    dims = kwargs.get("dim", kwargs.get("axis", args[position] if len(args) > position else None))
    with without_torch_function():
        shape = tuple(tensor.shape)
    cut = piece.plan.cuts[piece.index]
    if dims is None or len(shape) < 2 or cut.inner is None:
        return False
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    first = min((dim % len(shape) for dim in dims), default=0)
    # In a piece's shape, dimensions of size one precede the dimensions that are not cut.
    if not first or (shape == piece.piece_shape and first < len(shape) - len(cut.inner)):
        return False
    together = prod(shape[first:])  # rows of a piece, or blocks that an optimizer has viewed it as
    return cut.atom_numel % max(together, 1) == 0


def outside_unit(piece: ParamPiece, where: str) -> StateError:
    """The error for a piece that was used as a full parameter, outside of its unit's forward."""
    return StateError(
        f"flat_param.fully_shard: parameter '{piece.name}' is a piece of shape {piece.piece_shape} "
        f"where {where}, but only a call of {piece.comm.unit} makes it whole, "
        f"{tuple(piece.spec.shape)}. Call that module, make the module that computes with it "
        "a unit of its own, do not shard it by itself, or read the parameter between unshard() and "
        "reshard()."
    )


def _refused(name: str, piece: ParamPiece) -> ParameterError:
    return ParameterError(
        f"flat_param.fully_shard: {name} was called with parameter {piece.label} or its gradient, "
        f"but this rank has {piece.numel} of {piece.spec.numel} elements. Use the module's "
        "clip_grad_norm_ for norms, whole_params() or full_state_dict for values, unshard() to "
        "compute a loss, as_subclass(torch.Tensor) for the elements of this rank, and for "
        "optimizers of whole tensors shard with boundary='tensor'. In an optimizer's step, "
        "parameters before this one may have been stepped: load a checkpoint."
    )
