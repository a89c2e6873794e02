"""The tensors in the objects that a call is given; the rules are those of `_objects`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from ckpt_wrap._errors import is_in_place_error
from ckpt_wrap._torch_compat import Saved, save_tensor, version_of

# Tensors that a checkpointed call has put into an object, see Rule 4.
_put_there: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


class Refused(Exception):
    """A call cannot be made again with its objects as they were, see Rule 3.

    Args:
        what: the tensor or object it is about.
        rule: what happened to it, what should not have, and what to do.
    """

    def __init__(self, what: str, rule: str) -> None:
        super().__init__(what, rule)
        self.what = what
        self.rule = rule


def note_put_there(tensor: torch.Tensor) -> None:
    """Note that a checkpointed call has put the tensor into an object."""
    _put_there[id(tensor)] = tensor


def is_put_there(tensor: torch.Tensor) -> bool:
    """Whether a checkpointed call has put the tensor into an object."""
    return isinstance(tensor, Gone) or _put_there.get(id(tensor)) is tensor


class Leaf:
    """Stands for a tensor in an object that is made again; see Rule 4 for `keep`."""

    __slots__ = ("_at", "_gone", "_saved", "_version")

    def __init__(self, tensor: torch.Tensor, at: str, *, keep: bool) -> None:
        self._at = at
        self._version = version_of(tensor)
        self._gone: Gone | None = None
        self._saved: Saved | TensorWeakRef
        if not keep:
            self._saved = TensorWeakRef(tensor)
            self._gone = Gone.instead_of(tensor, at)
        else:
            self._saved = save_tensor(tensor)

    def get(self) -> torch.Tensor:
        """The tensor, or one in its place that may be asked for its shape only."""
        if self._gone is None:
            try:
                return self._saved.unpack()  # type: ignore[union-attr]  # not a weak reference
            except RuntimeError as error:
                if not is_in_place_error(error):
                    raise
                raise Refused(
                    self._at,
                    "was changed in place since the forward, but recomputation needs it as it "
                    "was. Change a clone of it instead, or change it after backward.",
                ) from error
        tensor: torch.Tensor | None = self._saved()  # type: ignore[operator]  # a weak reference
        return self._gone if tensor is None or version_of(tensor) != self._version else tensor


_ASKS_FOR_SHAPE = frozenset(
    [
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.stride,
        *(getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "_version")),
    ]
)


class Gone(torch.Tensor):
    """In the place of a tensor that the caller has given up, see Rule 4."""

    at: str

    @staticmethod
    def instead_of(tensor: torch.Tensor, at: str) -> Gone:
        """One of the shape and type of `tensor`, without its values."""
        gone = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").as_subclass(Gone)
        gone.at = at
        return gone

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _ASKS_FOR_SHAPE:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise Refused(
            next(a.at for a in _flat(args, kwargs) if isinstance(a, Gone)),
            "was put there by another checkpointed module and given up or changed since the "
            "forward, but recomputation reads it. Keep the argument until backward has run.",
        )


def _flat(args: Any, kwargs: Any) -> Iterator[Any]:
    for arg in [*args, *(kwargs or {}).values()]:
        yield from _flat(arg, None) if isinstance(arg, (tuple, list)) else (arg,)
