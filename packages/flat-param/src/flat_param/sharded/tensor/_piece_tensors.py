"""This rank's elements of a parameter, as a tensor that behaves like the whole one, or refuses.

Parameters between steps, their gradients, optimizer state and results of elementwise functions are
of these classes. The memory and the shape are those of the local elements.

- Elementwise functions, views and copies run on the elements; results are pieces of every dtype.
- Reductions of all elements are computed over the ranks that have the other elements.
- Random functions draw the whole tensor, and keep this rank's elements.
- `torch.nn.init`, `reset_parameters` and the planner of `torch.distributed.checkpoint`, which saves
  and loads pieces as shards, see the shape of the whole tensor.
- An optimizer that takes pieces has its state dicts followed, see _optim_state.py.
- Reductions along rows or blocks that this rank has whole run on the elements.
- Functions of other libraries, and fused and foreach kernels, run on the elements.
- Anything else raises: it would compute with some of the elements.

If this rank has all elements, everything runs on them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..._errors import FlatParamError, ParameterError, StateError
from ..._torch_compat import allow_foreach, without_torch_function
from ...buffers._views import memory_order
from ._callers import COLLECTIVES, FILES, INITIALISERS, LOOKING_FOR_DTENSORS, OPTIMIZERS
from ._param_piece import PIECE, JoinedPieces, ParamPiece, piece_of
from ._piece_functions import ALONG_ROWS, ELEMENTWISE_FUNCTIONS, FILLS, JOINS, NORMS, QUESTIONS
from ._reductions import (
    OF_WHOLE,
    REDUCTIONS,
    NoGradient,
    Part,
    Trial,
    TrialShape,
    any_of_initialised,
    check_all_ranks_search,
    comms_of,
    dims_of,
    found_inf_anywhere,
    norms_of_pieces,
    order_of,
    reduce_piece,
)

_OTHER_ERRORS = (FlatParamError, torch.OutOfMemoryError, torch.AcceleratorError)
_TENSOR: Any = Tensor
_VIEWS = {getattr(_TENSOR, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag")}
_SHAPES = {getattr(_TENSOR, name).__get__ for name in ("shape", "ndim")}
_IS_LEAF = _TENSOR.is_leaf.__get__
_SET_GRAD = _TENSOR.grad.__set__
_WHOLE_SHAPE = ("size", "dim", "ndimension", "numel", "nelement")


def _call(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Answer a function of torch; see the module."""
    kwargs, name = kwargs or {}, getattr(func, "__name__", "")
    if name == "__get__":
        return _get(func, args)
    if name in QUESTIONS or name in ("detach", "__repr__", "__format__"):
        return _question(name, func, args, kwargs)
    if name in ELEMENTWISE_FUNCTIONS:
        return _elementwise(name, func, args, kwargs)
    if name in NORMS:
        return _norm(name, func, args, kwargs)
    if name.startswith(("_fused_", "_foreach_", "_amp_")):
        return _of_lists(name, func, args, kwargs)
    return _other(name, func, args, kwargs)


def _get(func: Any, args: Any) -> Any:
    with without_torch_function():
        found = func(*args)
    if func in _VIEWS:
        return _marked(found, args[0])
    if func in _SHAPES and INITIALISERS.frame():
        return _shape_of_whole(func, args, {})
    if isinstance(found, torch.Size):
        return _noted(found, args[0])
    if func == _IS_LEAF and (taking := OPTIMIZERS.frame()):
        # By name: that module imports this one.
        state: Any = import_module("flat_param.sharded.state._optim_state")
        state.follow(taking.f_locals["self"])
    return found


def _question(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    if name in _WHOLE_SHAPE and INITIALISERS.frame():
        return _shape_of_whole(func, args, kwargs)
    if name in ("detach", "is_complex") and not torch.compiler.is_compiling():
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if caller.startswith("torch.distributed.") and COLLECTIVES.frame():
            raise _refused("a collective", args, kwargs)
    if name in ("storage", "untyped_storage") and FILES.frame() and any(_pieces_in(args)):
        raise _refused("a save with safetensors", args, kwargs)
    if name in ("numel", "nelement") and Trial.is_on:
        Trial.called.add("numel")
    if name == "detach_" and not args[0].requires_grad:
        return args[0]  # torch refuses views, and gradients are views
    if name == "register_hook" and isinstance(args[0], PieceParameter):
        raise _hook_refused(args[0])
    if name in ("__repr__", "__format__") and not torch.compiler.is_compiling():
        return _text(args[0])
    if func == _SET_GRAD and _fits_whole(args[1], args[0]):
        raise _refused("__set__ of .grad with a whole tensor", args, kwargs)
    with without_torch_function():
        found = func(*args, **kwargs)
    if name == "size":
        return _noted(found, args[0])
    if name == "data_ptr" and not found:
        return id(piece_of(args[0]))  # accelerate tells parameters apart by their addresses
    return _marked(found, args[0]) if name == "detach" else found


def _noted(found: Any, tensor: Tensor) -> Any:
    """Note in a trial that a size is read, unless this rank has whole rows or blocks."""
    if not Trial.is_on or getattr(piece_of(tensor), "has_whole_blocks", False):
        return found
    if isinstance(found, torch.Size):
        return TrialShape(found)
    Trial.called.add("size")
    return found


def _text(tensor: Tensor) -> str:
    piece = piece_of(tensor)
    with without_torch_function():
        what = f"{type(tensor).__name__}({tuple(tensor.shape)}, {tensor.dtype}"
    where = f", '{piece.name}', {piece.extent}" if isinstance(piece, ParamPiece) else ""
    return f"{what}{where})"


def _shape_of_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Answer a question about the shape, of the whole tensor if it has one."""
    piece = piece_of(args[0])
    with without_torch_function():
        whole = (
            torch.empty(piece.shape, device="meta") if isinstance(piece, ParamPiece) else args[0]
        )
        return func(whole, *args[1:], **kwargs)


def _elementwise(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    first = args[0] if args else None
    if name == "copy_" and isinstance(first, (Piece, PieceParameter)) and len(args) > 1:
        args = (first, _cut_source(first, args[1]), *args[2:])
    elif name in ("view_as", "expand_as") and not torch.compiler.is_compiling():
        if args[1] is first and torch.is_grad_enabled() and isinstance(first, PieceParameter):
            raise _not_in_graphs(name, piece_of(first))
        if not isinstance(args[1], (Piece, PieceParameter)) and INITIALISERS.frame():
            return first  # orthogonal_ copies the whole tensor into this view
    try:
        with without_torch_function():
            found = func(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        _explain(name, args, kwargs, error)
        raise
    for each in args:
        if found is each:
            return found
    return _marked(found, *args, *kwargs.values(), name=name)


def _cut_source(target: Tensor, source: Any) -> Any:
    """This rank's elements of a whole tensor that is copied into a piece."""
    piece = piece_of(target)
    if (
        not isinstance(piece, ParamPiece)
        or piece.is_whole
        or isinstance(source, (Piece, PieceParameter))
        or not isinstance(source, Tensor)
    ):
        return source
    with without_torch_function():
        is_whole = tuple(source.shape) == piece.shape
        if not is_whole and source.numel() == prod(piece.shape) and INITIALISERS.frame():
            source, is_whole = source.reshape(piece.shape), True
        return piece.cut(source.detach(), target.detach()) if is_whole else source


def _explain(name: str, args: Any, kwargs: Any, error: Exception) -> None:
    """Raise an error that names the piece, if a function failed that reads pieces."""
    if isinstance(error, _OTHER_ERRORS):
        return
    # A write to a piece, as by an optimizer, is no computation of a module.
    writes = name.endswith("_") or name.startswith("__i")
    for _, piece in _pieces_in((*args[writes:], *kwargs.values())):
        if isinstance(piece, ParamPiece):
            raise piece.outside_unit(f"{name} computes with it") from error
    if writes and any(_fits_whole(each, args[0]) for each in args[1:]):
        raise _refused(f"{name} with a whole tensor", args, kwargs) from error


def _fits_whole(value: Any, tensor: Tensor) -> bool:
    """Whether a value has the shape of the whole tensor, or of rows or columns of it."""
    if not isinstance(value, Tensor) or value.numel() == 1 or value.shape == tensor.shape:
        return False
    shape = getattr(piece_of(tensor), "shape", None)
    if shape is None:
        return False
    try:
        return torch.broadcast_shapes(value.shape, shape) == shape
    except RuntimeError:
        return False


def _marked(found: Any, *args: Any, name: str = "") -> Any:
    """Make results of as many elements as a piece among the arguments pieces, too."""
    if isinstance(found, (tuple, list)):
        made = [_marked(each, *args, name=name) for each in found]
        return made if isinstance(found, list) else type(found)(made)
    if type(found) is not Tensor:
        return found
    first = next(_all_pieces_in(args), None)
    if first is None or (name.startswith("new_") and INITIALISERS.frame()):  # of whole shapes
        return found
    each, piece = first
    with without_torch_function():
        same = found.numel() == each.numel() or name.startswith("view_as_")
        if not same and not piece.is_whole and name[:4] != "new_":
            if isinstance(piece, ParamPiece):
                raise piece.outside_unit(f"{name} computes with it")
            raise _refused(name, (each,), {})
    if same:
        found.__class__ = Piece  # `as_subclass` would add a node to the graph
        setattr(found, PIECE, piece)
    return found


def _norm(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    order = order_of(name, args, kwargs)
    given = args[0] if name == "_foreach_norm" else [args[0]]
    pieces = [getattr(each, PIECE, None) for each in given]
    if order is None or dims_of(name, args, kwargs) is not None or _wants_matrix(name, args):
        return _other(name, func, args, kwargs)
    if all(piece is None or not _is_spread(piece) for piece in pieces):
        with without_torch_function():
            return func(*args, **kwargs)
    dtype = kwargs.get("dtype")
    with without_torch_function():
        local = [plain(each) if dtype is None else plain(each).to(dtype) for each in given]
    parts = [each if each is not None and _is_spread(each) else None for each in pieces]
    Trial.called.add("reduction")
    with torch.no_grad():
        found: Any = norms_of_pieces(local, parts, order)
    if torch.is_grad_enabled():
        found = [_without_gradient(norm, each) for norm, each in zip(found, given, strict=True)]
    return found if name == "_foreach_norm" else found[0]


def _wants_matrix(name: str, args: Any) -> bool:
    """Whether `linalg.norm` is of a matrix: its order is not of the elements."""
    return name == "linalg_norm" and len(args) > 1 and args[1] is not None and args[0].dim() > 1


def _is_spread(piece: Part) -> bool:
    return any(comm.world_size > 1 for comm in piece.spread)


def _without_gradient(value: Any, tensor: Tensor) -> Any:
    """Have a backward through the value of a reduction raise."""
    piece = piece_of(tensor)
    if not torch.is_grad_enabled() or not isinstance(piece, ParamPiece):
        return value
    with without_torch_function():
        if not tensor.requires_grad or not isinstance(value, Tensor):
            return value
        if not value.is_floating_point():
            return value
        parts = vars(value).copy()
        found = NoGradient.apply(tensor, value, piece)
        found.__class__ = type(value)
        vars(found).update(parts)
        return found


def _of_lists(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    if name == "_foreach_max":
        return [_other("amax", torch.amax, (each,), {}) for each in args[0]]
    if not name.endswith("_"):
        with without_torch_function():
            found = func(*args, **kwargs)
        lists = [each for each in (*args, *kwargs.values()) if isinstance(each, (list, tuple))]
        rows = zip(*[each for each in lists if len(each) == len(found)], strict=True)
        return [_marked(one, *row, name=name) for one, row in zip(found, rows, strict=True)]
    searches = name == "_amp_foreach_non_finite_check_and_unscale_" and not Trial.is_on
    pieces = [piece for piece in map(piece_of, args[0]) if piece is not None] if searches else []
    check_all_ranks_search(pieces)
    with without_torch_function():
        found = func(*args, **kwargs)
        if searches:
            found_inf_anywhere(pieces, args[1])
    return found


def _other(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Functions that are not elementwise."""
    module = getattr(func, "__module__", "") or ""
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        packet = getattr(func, "_overloadpacket", func)
        name = packet.__name__
        space = getattr(packet, "_qualified_op_name", "").split("::")[0]
        if "c10d" in space:  # torch.distributed._functional_collectives
            raise _refused(name, args, kwargs)
        if space != "aten":
            return _local(name, func, args, kwargs)
        if name in ELEMENTWISE_FUNCTIONS:
            return _elementwise(name, func, args, kwargs)
    if name in FILLS or module == "torch.nn.init":
        return _draw(name, func, args, kwargs)
    if name in JOINS:
        return _join(func, args, kwargs)
    if name == "any" and INITIALISERS.frame():
        (tensor, piece), *_ = _all_pieces_in(args)
        return any_of_initialised(piece, plain(tensor))  # trunc_normal_ draws again until none is
    pieces = list(_pieces_in((*args, *kwargs.values())))
    if not pieces:
        return _local(name, func, args, kwargs)
    if module.startswith("torch.distributed"):
        raise _refused(name, args, kwargs)
    if module == "torch.autograd":
        raise _not_in_graphs("autograd.grad", pieces[0][1])
    if name in ALONG_ROWS and all(
        isinstance(piece, ParamPiece) and _keeps_rows(name, tensor, piece, args, kwargs)
        for tensor, piece in pieces
    ):
        return _local(name, func, args, kwargs)
    if name in _OF_TWO or (name in REDUCTIONS and dims_of(name, args, kwargs) is None):
        return _reduce(name, pieces, args, kwargs)
    if name in ("__getitem__", "narrow") and isinstance(pieces[0][1], JoinedPieces):
        return _local(name, func, args, kwargs)
    if name == "__getitem__" and not isinstance(args[0], (Piece, PieceParameter)):
        return _elementwise(name, func, args, kwargs)  # a table, with an index for each element
    if name == "__getitem__" and _takes_all(args[1], args[0]):
        return _marked(_local(name, func, args, kwargs), args[0])
    if name in _IN_BLOCKS and all(
        isinstance(piece, ParamPiece) and piece.has_whole_blocks for _, piece in pieces
    ):
        return _local(name, func, args, kwargs)
    if name == "__setitem__" and _is_mask(args[0], args[1]) and not isinstance(args[2], Tensor):
        return _local(name, func, args, kwargs)
    raise _refused(name, args, kwargs)


_IN_BLOCKS = {"pad", "constant_pad_nd"}
"""Functions with which 8-bit optimizers fill the last block."""

_OF_TWO = {"max", "min", "dot", "vdot", "equal", "allclose", "histc"}
"""Reductions with an argument where others have the dimensions."""


def _takes_all(index: Any, tensor: Tensor) -> bool:
    """Whether an index takes all elements of any tensor, such as `x[None]` and `x[:]`.

    8-bit optimizers drop the padding of the last block by `x[: x.numel()]`.
    """
    each = index if isinstance(index, tuple) else (index,)
    if all(one is None or one is Ellipsis or one == slice(None) for one in each):
        return True
    has_blocks = getattr(piece_of(tensor), "has_whole_blocks", False)
    return has_blocks and bool(index == slice(None, tensor.numel()))


def _is_mask(tensor: Tensor, index: Any) -> bool:
    """Whether an index has a truth for each element of this rank, as in Rprop."""
    with without_torch_function():
        return (
            isinstance(index, Piece) and index.dtype == torch.bool and index.shape == tensor.shape
        )


def _local(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    with without_torch_function():
        return func(*args, **kwargs)


def _reduce(name: str, pieces: Sequence[tuple[Tensor, Part]], args: Any, kwargs: Any) -> Any:
    tensor, piece = pieces[0]
    if name in ("max", "min") and len(args) > 1 and isinstance(args[1], Tensor):
        return _elementwise(name, getattr(torch, name), args, kwargs)
    if name in ("max", "min") and (len(args) > 1 or kwargs):
        raise _refused(name, args, kwargs)
    if name in ("dot", "vdot") and len(pieces) < 2:
        raise _refused(name, args, kwargs)
    if args[0] is not tensor and name not in ("equal", "allclose", "dot", "vdot"):
        raise _refused(name, args, kwargs)
    if name in OF_WHOLE and not Trial.is_on:
        if isinstance(piece, JoinedPieces):
            raise _refused(name, args, kwargs)
        comms_of(name, piece)
        with torch.no_grad():
            found = getattr(torch, name)(full_tensor(tensor), *args[1:], **kwargs)
        return _without_gradient(found, tensor)
    args = [_cut_source(tensor, each) for each in args]  # torch.equal(param, whole)
    with without_torch_function():
        local = [plain(each) if isinstance(each, Tensor) else each for each in args]
        with torch.no_grad():
            found = reduce_piece(name, piece, local[0], local[1:], kwargs)
    return _without_gradient(found, tensor)


def _join(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = list(args[0] if args else kwargs["tensors"])
    pieces = [piece_of(each) for each in tensors]
    with without_torch_function():
        found = func(*args, **kwargs)
    if all(piece is None or not _is_spread(piece) or piece.is_whole for piece in pieces):
        return found
    first = next(piece for piece in pieces if piece is not None)
    groups = {
        None if piece is None else tuple([comm.group for comm in piece.spread]) for piece in pieces
    }
    if len(groups) > 1 or any(piece is None or piece.may_miss_ranks for piece in pieces):
        raise _refused("cat", args, kwargs)
    found.__class__ = Piece
    setattr(found, PIECE, JoinedPieces(first.spread, first.device))
    return found


@torch.no_grad()
def _draw(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Draw the whole tensor, as one process would, and keep this rank's elements."""
    given = kwargs.get("tensor", args[0] if args else None)
    piece = piece_of(given)
    if not isinstance(piece, ParamPiece):
        raise _refused(name, args, kwargs)
    rest = args[1:]
    with without_torch_function():
        local = given.detach()
        spec = piece.spec
        if piece.place is None:
            whole = torch.empty_strided(
                spec.shape, spec.stride, dtype=local.dtype, device=local.device
            )
        else:
            whole = torch.empty(piece.shape, dtype=local.dtype, device=local.device)
        if "tensor" in kwargs:
            drawn = func(*args, **{**kwargs, "tensor": whole})
        else:
            drawn = func(whole, *rest, **kwargs)
        if name.endswith("_like"):
            made = torch.empty_like(local, dtype=drawn.dtype)
            found = made.copy_(piece.cut(drawn, made))
        else:
            local.copy_(piece.cut(whole, local))
            return given
    return _marked(found, given)


class Piece(Tensor):
    """This rank's elements of a gradient or of optimizer state, or an elementwise result."""

    __torch_function__: Any = classmethod(_call)

    def full_tensor(self) -> Tensor:
        """The whole tensor, as in a process that has all of it. Collective."""
        return full_tensor(self)

    def to_local(self) -> Tensor:
        """This rank's elements as a plain tensor with the same memory."""
        return plain(self)

    # Methods of DCP, which a piece has if its form in state dicts has them.
    __create_write_items__ = property(lambda self: _write_items_of(present(self)))
    __create_chunk_list__ = property(lambda self: present(self).__create_chunk_list__)
    __get_tensor_shard__ = property(lambda self: present(self).__get_tensor_shard__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        found = memo[id(self)] = as_piece(plain(self).clone(), getattr(self, PIECE))
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        piece = piece_of(self)
        stored = plain(self)
        if isinstance(piece, ParamPiece) and piece.is_cut:
            return present(self).__reduce_ex__(protocol)
        return stored.__reduce_ex__(protocol)


def _class_of(param: PieceParameter) -> type:
    if LOOKING_FOR_DTENSORS.frame():
        from torch.distributed.tensor import DTensor

        return DTensor
    return PieceParameter


class PieceParameter(nn.Parameter):
    """A parameter between steps: this rank's elements, which an optimizer updates."""

    __class__ = property(_class_of)  # `isinstance` asks it
    __torch_function__: Any = classmethod(_call)
    full_tensor = Piece.full_tensor
    to_local = Piece.to_local

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        found = nn.Parameter(plain(self).clone(), self.requires_grad)
        be_piece(found, getattr(self, PIECE))
        memo[id(self)] = found
        return found

    __reduce_ex__ = Piece.__reduce_ex__
    __create_write_items__ = Piece.__create_write_items__
    __create_chunk_list__ = Piece.__create_chunk_list__
    __get_tensor_shard__ = Piece.__get_tensor_shard__


def _write_items_of(shard: Any) -> Any:
    function = shard.__create_write_items__  # AttributeError for a plain tensor
    return lambda name, _: function(name, shard)


allow_foreach(Piece, PieceParameter)


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor without restrictions, with the same memory and version counter."""
    with without_torch_function():
        return tensor.detach().as_subclass(Tensor)


def present(tensor: Tensor) -> Any:
    """A piece in the form of a state dict."""
    piece = piece_of(tensor)
    if not isinstance(piece, ParamPiece):
        raise _refused("full_tensor", (tensor,), {})
    with without_torch_function():
        local = tensor.detach().as_subclass(Tensor)
        if local.numel() != piece.numel:
            raise _refused("full_tensor", (tensor,), {})
        return piece.present(memory_order(local, local.stride()))


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor of a piece. Collective."""
    found = present(tensor)
    full: Tensor = found.full_tensor() if hasattr(found, "full_tensor") else found
    return full


def as_piece(tensor: Tensor, piece: Part) -> Tensor:
    """Return a tensor of this rank's elements as a piece."""
    with without_torch_function():
        found = tensor.as_subclass(Piece)
    setattr(found, PIECE, piece)
    return found


def be_piece(param: nn.Parameter, piece: Part) -> None:
    """Turn a parameter into a piece; the object stays the same."""
    setattr(param, PIECE, piece)
    if type(param) is nn.Parameter:
        param.__class__ = PieceParameter


def _all_pieces_in(args: Iterable[Any]) -> Iterator[tuple[Tensor, Part]]:
    for each in args:
        if isinstance(each, (Piece, PieceParameter)):
            piece = getattr(each, PIECE, None)
            if piece is not None:
                yield each, piece
        elif isinstance(each, (list, tuple)):
            yield from _all_pieces_in(each)


def _pieces_in(args: Iterable[Any]) -> Iterator[tuple[Tensor, Part]]:
    """Tensors of which this rank has not all elements."""
    return (pair for pair in _all_pieces_in(args) if not pair[1].is_whole)


def _keeps_rows(
    name: str, tensor: Tensor, piece: ParamPiece, args: Sequence[Any], kwargs: dict[str, Any]
) -> bool:
    """Whether a reduction only goes along rows or blocks that are whole on this rank."""
    if len(args) > 1 and isinstance(args[1], Tensor):
        return False
    dims = dims_of(name, args, kwargs)
    with without_torch_function():
        shape = tuple(tensor.shape)
    cut = piece.plan.cuts[piece.index]
    if dims is None or len(shape) < 2 or cut.inner is None or piece.is_parallel:
        return False
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    first = min((dim % len(shape) for dim in dims), default=0)
    # In a piece's shape, dimensions of size one precede the dimensions that are not cut.
    if not first or (shape == piece.piece_shape and first < len(shape) - len(cut.inner)):
        return False
    together = prod(shape[first:])  # rows of a piece, or blocks that an optimizer has viewed it as
    return cut.atom_numel % max(together, 1) == 0


def _not_in_graphs(name: str, piece: Any) -> StateError:
    """The error for code that looks for a parameter's node in autograd's graph.

    So do zero-bubble pipelines, and optimizers that step in backward.
    """
    return StateError(
        f"flat_param.fully_shard: {name} looks for parameter {piece.label} in the graph, but only "
        "unsharded parameters are in graphs. Call backward() and read .grad, or use "
        "register_post_accumulate_grad_hook. Of torch's pipelines use GPipe, 1F1B or "
        "Interleaved1F1B."
    )


def _hook_refused(param: Tensor) -> ParameterError:
    return ParameterError(
        f"flat_param.fully_shard: parameter {getattr(param, PIECE).label} has a hook of "
        "register_hook, but autograd only sees unsharded parameters, so it would never be called. "
        "Use register_post_accumulate_grad_hook, which gets this rank's piece."
    )


def _refused(name: str, args: Any, kwargs: Any) -> ParameterError:
    _, piece = next(_all_pieces_in((*args, *kwargs.values())))
    if isinstance(piece, JoinedPieces):
        label, has = piece.label, "some elements of each"
    else:
        label = f"parameter {piece.label} or its gradient"
        has = f"{piece.numel} of {prod(piece.shape)} elements"
    stepped = "In a step, parameters before this one may have been stepped: load a checkpoint."
    return ParameterError(
        f"flat_param.fully_shard: {name} was called with {label}, which is divided over ranks: "
        f"this rank has {has}. Call full_tensor() on every rank for the whole tensor, and "
        "copy_(whole) to write a changed one back, or to_local() for the elements of this rank. "
        "For a loss, make the module that computes with it a unit, or compute between unshard() "
        "and reshard(). For optimizers of whole tensors shard with boundary='tensor'. "
        f"{'Nothing was stepped.' if Trial.is_on else stepped}"
    )
