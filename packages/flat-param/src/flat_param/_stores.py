"""Edge: all segments of one module, kept flat for as long as the module lives.

Rule 1: whatever a parameter's new storage, shape decides: the planned shape is copied into the
buffer, another shape is refused by name before anything changes.
Rule 2: a new dtype, device or trainability makes a new plan. Leaves handed to an optimizer follow
it where the trainable segments keep their sizes, and it is refused where they do not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._aliasing import watch, watch_tree
from ._chunks import Chunk, attach, make_chunk
from ._errors import StateError, VectorError
from ._layout import Segment, plan_segments
from ._overlap import check_apart, overlap, shared_error
from ._spec import ParamSpec, check_one_device, collect_params
from ._store import SegmentStore, check_shape


class Stores:
    """The segments of one module.

    Attributes:
        module: the flattened root.
        all: every segment, in plan order.
        outline: equal for two modules whose vectors can be combined.
        tree_changed: a module was put into the tree, perhaps with other parameters.
    """

    module: nn.Module
    all: tuple[SegmentStore, ...]
    outline: str
    tree_changed: bool

    def __init__(self, module: nn.Module, *, align_bytes: int) -> None:
        self.module = module
        self.all = ()
        self._align_bytes = align_bytes
        self._chunks: list[Chunk] = []
        self.tree_changed = False
        self._rebuild()

    @property
    def trainable(self) -> tuple[SegmentStore, ...]:
        """The segments whose parameters require gradients."""
        return tuple(store for store in self.all if store.plan.trainable)

    def find(self, segment: str | None) -> SegmentStore:
        """The segment of a name; for None the only trainable one, or the only one.

        Raises:
            VectorError: no segment or several match.
        """
        candidates = [store for store in self.all if store.plan.name == segment]
        if segment is None:
            candidates = list(self.trainable if len(self.all) > 1 else self.all)
        if len(candidates) == 1:
            return candidates[0]
        raise VectorError(
            f"flat_param.FlatParams: segment {segment!r} matches {len(candidates)} of "
            f"{[store.plan.name for store in self.all]}, but exactly one is needed. "
            "Name one of them."
        )

    def chunks(self, numel: int) -> list[Chunk]:
        """New leaves over the trainable segments, re-attached at every new plan (Rule 2)."""
        made = [
            make_chunk(store, start, min(start + numel, store.plan.layout.numel))
            for store in self.trainable
            for start in range(0, store.plan.layout.numel, numel)
        ]
        self._chunks += made
        return made

    def sync(self) -> None:
        """Take back parameters whose storage was replaced (Rules 1 and 2)."""
        if self.tree_changed:
            self.tree_changed = False
            watch_tree(self)
            known = {id(param) for store in self.all for param in store.params}
            self._stale |= known != {id(param) for param in self.module.parameters()}
        moved = [(store, index) for store in self.all for index in store.moved()]
        if not moved and not self._stale:
            return
        for store, index in moved:
            spec = store.plan.layout.specs[index]
            check_shape(spec.name, store.params[index], spec.shape)
            self._check_place(spec.name, store.params[index])
        if self._stale or not all(s.accepts(s.params[index]) for s, index in moved):
            self._rebuild()
        else:
            for store, index in moved:
                store.adopt(index, store.params[index])

    @torch.inference_mode(False)
    def _rebuild(self) -> None:
        """Plan and migrate anew from what the module holds now."""
        specs, params = collect_params(self.module)
        check_one_device(specs, params)
        check_apart("flatten", self.module, params)
        plans = plan_segments(specs, align_bytes=self._align_bytes)
        self._check_chunks(plans)
        by_name = dict(zip((spec.name for spec in specs), params, strict=True))
        for store in self.all:
            store.grad.close()
        stores = [
            SegmentStore(plan, [by_name[spec.name] for spec in plan.layout.specs]) for plan in plans
        ]
        self._build(
            stores, [_owner(self.module, name) for spec in specs for name in spec.names], specs
        )
        watch_tree(self)

    def _build(
        self,
        stores: list[SegmentStore],
        owners: list[tuple[nn.Module, str]],
        specs: Sequence[ParamSpec],
    ) -> None:
        before, self.all = self.trainable, tuple(stores)
        self._owners, self._specs, self._stale = owners, tuple(specs), False
        homes = {
            spec.name: (store, index)
            for store in stores
            for index, spec in enumerate(store.plan.layout.specs)
        }
        names = (spec.name for spec in specs for _ in spec.names)
        self._places = {
            (id(owner), attribute): homes[name]
            for (owner, attribute), name in zip(owners, names, strict=True)
        }
        self.outline = _outline(stores)
        self._reattach_chunks(before)
        watch(self, owners)

    def _check_chunks(self, plans: Sequence[Segment]) -> None:
        """Chunks survive a new plan only where the trainable segments keep their sizes."""
        now = [store.plan.layout.numel for store in self.trainable]
        if self._chunks and now != [plan.layout.numel for plan in plans if plan.trainable]:
            raise StateError(
                "flat_param.FlatParams: the trainable segments changed, but chunks are in use. "
                "Make new chunks and a new optimizer from a new flatten."
            )

    def _reattach_chunks(self, before: tuple[SegmentStore, ...]) -> None:
        after = dict(zip(before, self.trainable, strict=False))
        for chunk in self._chunks:
            attach(chunk, after[chunk._store], chunk._start)

    def assigned(self, owner: nn.Module, attribute: str, param: nn.Parameter) -> None:
        """A parameter is about to be registered in an owner: take it in, or plan anew later."""
        store, index = self._places[id(owner), attribute]
        if param is store.params[index]:
            return
        spec = store.plan.layout.specs[index]
        check_shape(spec.name, param, spec.shape)
        if self._is_tied(param):
            self._stale = True
            return
        self._check_place(spec.name, param)
        if store.accepts(param) and not spec.aliases:
            store.adopt(index, param)
        else:
            self._stale = True

    def _lying_in(self, param: Tensor) -> list[SegmentStore]:
        home = param.untyped_storage().data_ptr()
        return [
            store for store in self.all if store.buffer.untyped_storage().data_ptr() == home != 0
        ]

    def _is_tied(self, param: Tensor) -> bool:
        """Whether the object is one of this module's parameters, under another name."""
        return any(param is known for store in self._lying_in(param) for known in store.params)

    def _check_place(self, name: str, param: Tensor) -> None:
        """Refuse a tensor that lies in another parameter's place."""
        for store in self._lying_in(param):
            for spec, view in zip(store.plan.layout.specs, store.views(), strict=True):
                if spec.name != name and spec.numel and overlap(view, param):
                    raise shared_error(
                        "FlatParams", f"parameter '{name}'", f"parameter '{spec.name}'"
                    )

    # What the module calls instead of its class's methods; see the table in `_aliasing`

    def apply_module(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move or cast the module, then flatten what came of it."""
        result = type(self.module)._apply(self.module, fn, recurse)
        self._stale |= any(store.moved() for store in self.all)
        self.sync()
        return result

    def zero_module_grad(self, set_to_none: bool = True) -> None:
        """Clear the parameters' gradients; the flat one follows when it is read."""
        if set_to_none and self._knows_all():
            for store in self.all:
                for param in store.params:
                    param.grad = None
        else:
            type(self.module).zero_grad(self.module, set_to_none)
        for store in self.trainable:
            store.grad.doubt()

    def _knows_all(self) -> bool:
        """Whether clearing the parameters known here is all that the module's class would do."""
        changed = self._stale or self.tree_changed
        return not changed and type(self.module).zero_grad is nn.Module.zero_grad

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Take back what was moved; traced code keeps what it was traced with."""
        if torch.compiler.is_compiling():
            return
        for store in self.all:
            store.grad.before_forward()
        self.sync()

    def __getstate__(self) -> dict[str, Any]:
        plans = [(store.plan, store.params) for store in self.all]
        return {
            "module": self.module,
            "align_bytes": self._align_bytes,
            "segments": plans,
            "owners": self._owners,
            "specs": self._specs,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.module, self._align_bytes = state["module"], state["align_bytes"]
        # The module itself is restored after this, and can be walked at the first use.
        self._chunks, self.all, self.tree_changed = [], (), True
        stores = [SegmentStore(plan, params) for plan, params in state["segments"]]
        self._build(stores, state["owners"], state["specs"])


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def _outline(stores: Sequence[SegmentStore]) -> str:
    """What two flat views must share to be combined; interned, so that equal ones compare fast."""
    layouts = [store.plan.layout for store in stores]
    places = [[(s.name, s.shape, s.stride) for s in layout.specs] for layout in layouts]
    return sys.intern(repr([(lay.dtype, lay.offsets) for lay in layouts] + places))
