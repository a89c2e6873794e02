"""All segments of one module, kept flat for as long as the module lives.

Rule 1: values of the planned shape are copied into the buffer, wherever they come from. A new
parameter object of another shape, or of another flattened module or unit, is refused by name as it
is assigned.
Rule 2: a new shape, dtype, device or trainability makes a new plan, which leaves handed to an
optimizer follow if they can; see `Chunks`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import VectorError
from ..buffers._overlap import check_apart, overlap, shared_error
from ..buffers._owners import FLATTENED, UNIT, Owner, check_owners, check_unowned
from ..layout._layout import plan_segments
from ..layout._spec import check_grads, check_one_device, collect_params
from ._aliasing import Tree, register, registered, save
from ._chunks import Chunk, Chunks
from ._flat_segment import FlatSegment, check_shape


class FlatSegments:
    """The segments of one module.

    Attributes:
        module: the flattened root.
        all: every segment, in plan order.
        outline: equal for two modules whose vectors can be combined.
        closed: whether the module was unflattened.
    """

    module: nn.Module
    all: tuple[FlatSegment, ...]
    outline: str
    closed: bool

    def __init__(self, module: nn.Module, *, align_bytes: int) -> None:
        self.module = module
        self.all, self.closed = (), False
        self._align_bytes = align_bytes
        self._chunks = Chunks()
        self._tree: Tree | None = None
        self._owner: Owner | None = None
        self._places: dict[tuple[int, str], tuple[FlatSegment, int]] = {}
        self._is_invalid = False  # whether to look the tree over at the next use
        self._handle: torch.utils.hooks.RemovableHandle | None = None
        try:
            self._rebuild()
        except BaseException:
            self.close()
            raise

    def bind(self, flat: object) -> None:
        """Place on the root what keeps it flat, and its flat view."""
        self._handle = self.module.register_forward_pre_hook(self.before_forward)
        vars(self.module).update({name: getattr(self, own) for name, own in _ON_ROOT.items()})
        vars(self.module)["_flat_params"] = flat

    @torch.inference_mode(False)
    @torch.no_grad()
    def close(self) -> None:
        """Give everything memory of its own, and take off all that was placed on the module.

        Raises:
            StateError: a backward is running; nothing has changed then.
        """
        copies = [pair for segment in self.all for pair in segment.copies()]
        for segment in self.all:
            segment.grad.close()
        for tensor, copied in copies:
            tensor.data = copied
        self._chunks.detach()
        tree = self._tree or Tree(self.module, self)  # a copy carries methods of its classes
        tree.leave()
        if self._handle is not None:
            self._handle.remove()
        for name in (*_ON_ROOT, "_flat_params"):
            vars(self.module).pop(name, None)
        self.all, self._tree, self._places, self.closed = (), None, {}, True
        self._owner = None

    @property
    def trainable(self) -> tuple[FlatSegment, ...]:
        """The segments whose parameters require gradients."""
        return tuple(segment for segment in self.all if segment.plan.trainable)

    def find(self, name: str | None) -> FlatSegment:
        """The segment of a name; for None the only trainable one, or the only one.

        Raises:
            VectorError: no segment or several match.
        """
        candidates = [segment for segment in self.all if segment.plan.name == name]
        if name is None:
            candidates = list(self.trainable if len(self.all) > 1 else self.all)
        if len(candidates) == 1:
            return candidates[0]
        raise VectorError(
            f"flat_param.FlatParams: segment {name!r} matches {len(candidates)} of "
            f"{[segment.plan.name for segment in self.all]}, but exactly one is needed. "
            "Name one of them."
        )

    def chunks(self, numel: int | None) -> list[Chunk]:
        """New leaves over the trainable segments, re-attached at every new plan (Rule 2)."""
        return self._chunks.make(self.trainable, numel)

    def sync(self) -> None:
        """Take back parameters whose storage was replaced (Rules 1 and 2)."""
        if self._tree_changed():
            self._look_over()
        moved = [(segment, index) for segment in self.all for index in segment.moved()]
        if not moved and not self._stale:
            return
        self._stale |= not all(segment.keeps_shape(index) for segment, index in moved)
        if not self._stale:
            for segment, index in moved:
                self._check_place(segment.plan.layout.specs[index].name, segment.params[index])
        if self._stale or not all(s.accepts(s.params[index]) for s, index in moved):
            self._rebuild()
        else:
            for segment, index in moved:
                segment.adopt(index, segment.params[index])

    def _look_over(self) -> None:
        """Find where parameters are registered now, and whether there are others."""
        self._watch_tree()
        homes = {id(param): (s, at) for s in self.all for at, param in enumerate(s.params)}
        places = registered(self.module)
        self._stale |= homes.keys() != {id(param) for _, _, param in places}
        self._stale |= len(places) != len(self._places)
        if not self._stale:
            self._set_places([(owner, name, *homes[id(param)]) for owner, name, param in places])

    def _tree_changed(self) -> bool:
        return self._is_invalid or self._tree is None or self._tree.changed()

    def _watch_tree(self) -> None:
        before, self._tree, self._is_invalid = self._tree, Tree(self.module, self), False
        if before is not None:
            before.leave(self._tree)

    @torch.inference_mode(False)
    def _rebuild(self) -> None:
        """Plan and migrate anew from what the module holds now."""
        specs, params = collect_params(self.module)
        named = [(spec.name, param) for spec, param in zip(specs, params, strict=True)]
        check_owners("FlatParams", self.module, named, (UNIT, FLATTENED))
        check_unowned("FlatParams", named, UNIT)
        check_one_device(specs, params)
        check_apart("flatten", self.module, params)
        check_grads(specs, params)
        plans = plan_segments(specs, align_bytes=self._align_bytes) if specs else ()
        self._chunks.check(self.trainable, plans)
        by_name = dict(named)
        for segment in self.all:
            segment.grad.close()
        segments: list[FlatSegment] = []
        try:
            for plan in plans:
                own = [by_name[spec.name] for spec in plan.layout.specs]
                segments.append(FlatSegment(plan, own))
            homes = {id(param): (s, at) for s in segments for at, param in enumerate(s.params)}
            places = [(owner, name, *homes[id(p)]) for owner, name, p in registered(self.module)]
            self._build(segments, places)
        except BaseException:
            for segment in segments:
                segment.grad.close()
            raise
        self._watch_tree()

    def _build(self, segments: list[FlatSegment], places: list[_Place]) -> None:
        before, self.all = self.trainable, tuple(segments)
        self._stale = False
        self._owner = Owner(FLATTENED, self.module, self._named())
        self._set_places(places)
        self.outline = _outline(segments)
        self._chunks.follow(before, self.trainable)

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for segment in self.all:
            specs = segment.plan.layout.specs
            yield from zip((spec.name for spec in specs), segment.params, strict=True)

    def _set_places(self, places: list[_Place]) -> None:
        self._owners = places
        self._places = {(id(owner), name): (segment, at) for owner, name, segment, at in places}

    # What the modules of the tree tell; see `_aliasing`

    def assigned(self, owner: nn.Module, attribute: str, param: nn.Parameter | None) -> None:
        """A parameter has been registered in an owner: take it in, or plan anew later."""
        place = self._places.get((id(owner), attribute))
        if place is None or param is None:
            self._is_invalid = True
            return
        segment, index = place
        if param is segment.params[index]:
            return
        if self._is_known(param):
            self._stale = True
            return
        spec = segment.plan.layout.specs[index]
        check_shape(spec.name, param, spec.shape)
        check_owners("FlatParams", self.module, [(spec.name, param)], (UNIT, FLATTENED))
        check_unowned("FlatParams", [(spec.name, param)], UNIT)
        self._check_place(spec.name, param)
        if segment.accepts(param) and list(self._places.values()).count(place) == 1:
            segment.adopt(index, param)
        else:
            self._stale = True

    def separate(self, owner: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Let a state dict's tensors look as apart as a plain module's; see `_flat_segment`."""
        if self._tree is None:
            self._watch_tree()  # a copy, not used before: its modules do not carry ours yet
        for attribute, param in owner._parameters.items():
            segment, index = self._places.get((id(owner), attribute), (None, 0))
            value = state.get(prefix + attribute)
            if segment is not None and param is segment.params[index] and type(value) is Tensor:
                segment.separate(index, value)

    def holds(self, owner: nn.Module) -> bool:
        """Whether a parameter registered directly in the owner lies in a buffer."""
        registered_here = owner._parameters.items()  # of a scripted module, it is no dict
        return any((id(owner), attribute) in self._places for attribute, _ in registered_here)

    def _is_known(self, param: Tensor) -> bool:
        """Whether the object is one of this module's parameters, under another name."""
        return any(param is known for segment in self.all for known in segment.params)

    def _check_place(self, name: str, param: Tensor) -> None:
        """Refuse a tensor that lies in another parameter's place."""
        for segment in self.all if param.numel() else ():
            if not segment.contains(param):
                continue
            for spec, view in zip(segment.plan.layout.specs, segment.views(), strict=True):
                if spec.name != name and spec.numel and overlap(view, param):
                    raise shared_error(
                        "FlatParams", f"parameter '{name}'", f"parameter '{spec.name}'"
                    )

    # What the root calls instead of its class's methods; see the table in `_aliasing`

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter of the root's own."""
        register(self.module, name, param, (self,))

    def save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save the root's own parameters."""
        save(self.module, destination, prefix, keep_vars, (self,))

    def apply_module(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move or cast the module, then flatten what came of it."""
        result = type(self.module)._apply(self.module, fn, recurse)
        self._stale |= any(segment.moved() for segment in self.all)
        self._is_invalid = (
            True  # where a tensor cannot become another in place, objects are replaced
        )
        self.sync()
        return result

    def zero_module_grad(self, set_to_none: bool = True) -> None:
        """Clear the parameters' gradients; the flat one follows when it is read."""
        if set_to_none and self._knows_all():
            for segment in self.all:
                for param in segment.params:
                    param.grad = None
        else:
            type(self.module).zero_grad(self.module, set_to_none)
        for segment in self.trainable:
            segment.grad.invalidate()

    def _knows_all(self) -> bool:
        """Whether clearing the parameters known here is all that the module's class would do."""
        changed = self._stale or self._tree_changed()
        return not changed and type(self.module).zero_grad is nn.Module.zero_grad

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Take back what was moved; traced code keeps what it was traced with."""
        if torch.compiler.is_compiling():
            return
        for segment in self.all:
            segment.grad.end_if_stopped()
        self.sync()

    def __getstate__(self) -> dict[str, Any]:
        numbers = {id(segment): number for number, segment in enumerate(self.all)}
        return {
            "module": self.module,
            "align_bytes": self._align_bytes,
            "handle": self._handle,
            "segments": [(segment.plan, segment.params) for segment in self.all],
            "owners": [(own, name, numbers[id(s)], at) for own, name, s, at in self._owners],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.module, self._align_bytes = state["module"], state["align_bytes"]
        self._handle, self.closed = state["handle"], False
        # The module itself is restored after this, and can be walked at the first use.
        self._chunks, self.all, self._places = Chunks(), (), {}
        self._tree, self._is_invalid = None, True
        segments = [FlatSegment(plan, params) for plan, params in state["segments"]]
        self._build(
            segments,
            [(own, name, segments[no], at) for own, name, no, at in state["owners"]],
        )


_Place = tuple[nn.Module, str, FlatSegment, int]

_ON_ROOT = {
    "_apply": "apply_module",
    "zero_grad": "zero_module_grad",
    "register_parameter": "register_parameter",
    "_save_to_state_dict": "save_to_state_dict",
}


def _outline(segments: Sequence[FlatSegment]) -> str:
    """What two flat views must share to be combined; interned, so that equal ones compare fast."""
    layouts = [segment.plan.layout for segment in segments]
    places = [[(s.name, s.shape, s.stride) for s in layout.specs] for layout in layouts]
    return sys.intern(repr([(lay.dtype, lay.offsets) for lay in layouts] + places))
