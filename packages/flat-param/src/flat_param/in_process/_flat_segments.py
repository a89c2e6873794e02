"""All segments of one module, kept flat for as long as the module lives.

- Values of the planned shape, dtype and device are copied into the buffer.
- A new parameter object of another shape, or of another flattened module or unit, is refused by
  name when it is assigned.
- Other changes of shape, dtype, device or trainability cause a new plan. Chunks in an optimizer
  follow it if they can, see `Chunks`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import VectorError
from ..buffers._overlap import check_apart
from ..buffers._owners import FLATTENED, UNIT, Owner, check_owners
from ..layout._layout import plan_segments
from ..layout._spec import check_grads, check_one_device, collect_params
from ._aliasing import Tree, registered
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
        self._align_bytes = align_bytes
        self._handle: torch.utils.hooks.RemovableHandle | None = None
        self._start()
        try:
            self._rebuild()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self.all, self.closed = (), False
        self._chunks = Chunks()
        self._tree: Tree | None = None
        self._owner: Owner | None = None
        self._places: dict[tuple[int, str], tuple[FlatSegment, int]] = {}
        self._is_stale = False  # whether the next use plans again
        self._tree_is_stale = False  # whether the next use walks the tree

    def bind(self, flat: object) -> None:
        """Install the hooks and the flat view on the root."""
        self._handle = self.module.register_forward_pre_hook(self.before_forward)
        vars(self.module)["_apply"] = self.apply_module
        vars(self.module)["_flat_params"] = flat

    @torch.inference_mode(False)
    @torch.no_grad()
    def close(self) -> None:
        """Give every tensor separate memory, and remove all hooks from the module.

        Raises:
            StateError: a backward is running; then nothing has changed.
        """
        copies = [pair for segment in self.all for pair in segment.copies()]
        for segment in self.all:
            segment.grad.close()
        for tensor, copied in copies:
            tensor.data = copied
        self._chunks.detach()
        tree = self._tree or Tree(self.module, self.assigned)  # a copy carries bound methods
        tree.leave()
        if self._handle is not None:
            self._handle.remove()
        for name in ("_apply", "_flat_params"):
            vars(self.module).pop(name, None)
        if self._owner is not None:
            self._owner.drop()
        self._start()
        self.closed = True

    @property
    def trainable(self) -> tuple[FlatSegment, ...]:
        """The segments whose parameters require gradients."""
        return tuple(segment for segment in self.all if segment.plan.trainable)

    def find(self, name: str | None) -> FlatSegment:
        """Return the segment with a name; for None the only trainable one, or the only one.

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
        """Make leaves over the trainable segments, which are attached again at every new plan."""
        return self._chunks.make(self.trainable, numel)

    def sync(self) -> None:
        """Copy in parameters whose storage was replaced, and follow changes of the tree."""
        if self._tree_is_stale or self._tree is None or self._tree.changed():
            self._look_over()
        moved = [(segment, index) for segment in self.all for index in segment.moved()]
        if not moved and not self._is_stale:
            return
        if self._is_stale or not all(s.fits(index, s.params[index]) for s, index in moved):
            self._rebuild()
            return
        self._check_apart([segment.params[index] for segment, index in moved])
        for segment, index in moved:
            segment.adopt(index, segment.params[index])

    def _look_over(self) -> None:
        """Collect the registered parameters again; return whether they have changed."""
        self._watch_tree()
        homes = {id(param): (s, at) for s in self.all for at, param in enumerate(s.params)}
        places = registered(self.module)
        self._is_stale |= homes.keys() != {id(param) for _, _, param in places}
        self._is_stale |= len(places) != len(self._places)
        if not self._is_stale:
            self._set_places([(owner, name, *homes[id(param)]) for owner, name, param in places])

    def _watch_tree(self) -> None:
        before, self._tree = self._tree, Tree(self.module, self.assigned)
        self._tree_is_stale = False
        if before is not None:
            before.leave(self._tree)

    @torch.inference_mode(False)
    def _rebuild(self) -> None:
        """Plan again for the module's present parameters, and move them into new buffers."""
        specs, params = collect_params(self.module)
        named = [(spec.name, param) for spec, param in zip(specs, params, strict=True)]
        self._check_owners(named)
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
            self._use(segments, places)
        except BaseException:
            for segment in segments:
                segment.grad.close()
            raise
        self._watch_tree()

    def _use(self, segments: list[FlatSegment], places: list[_Place]) -> None:
        before, self.all = self.trainable, tuple(segments)
        self._is_stale = False
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

    def assigned(self, owner: nn.Module, attribute: str, param: nn.Parameter | None) -> None:
        """Copy in a newly registered parameter, or mark the plan as stale."""
        place = self._places.get((id(owner), attribute))
        if place is None or param is None:
            self._tree_is_stale = True
            return
        segment, index = place
        if param is segment.params[index]:
            return
        if any(param is known for each in self.all for known in each.params):
            self._is_stale = True
            return
        spec = segment.plan.layout.specs[index]
        check_shape(spec.name, param, spec.shape)
        self._check_owners([(spec.name, param)])
        self._check_apart([param])
        if segment.fits(index, param) and list(self._places.values()).count(place) == 1:
            segment.adopt(index, param)
        else:
            self._is_stale = True

    def _check_owners(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        check_owners("FlatParams", self.module, named, (UNIT, FLATTENED), never=UNIT)

    def _check_apart(self, params: Sequence[nn.Parameter]) -> None:
        """Refuse tensors that share another parameter's memory."""
        if any(segment.contains(param) for segment in self.all for param in params):
            check_apart("FlatParams", self.module, params)

    def apply_module(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move or cast the module, then flatten the result; replaces the root's `_apply`."""
        result = type(self.module)._apply(self.module, fn, recurse)
        self._is_stale |= not all(segment.has_strides() for segment in self.all)
        self._tree_is_stale = True  # `_apply` makes new parameters if `.data` cannot be set
        self.sync()
        return result

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Copy in parameters whose memory was replaced; a no-op while tracing."""
        if not torch.compiler.is_compiling():
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
        self._handle = state["handle"]
        # The module itself is restored after this; its tree is walked at the first use.
        self._start()
        segments = [FlatSegment(plan, params) for plan, params in state["segments"]]
        self._use(
            segments,
            [(own, name, segments[no], at) for own, name, no, at in state["owners"]],
        )


_Place = tuple[nn.Module, str, FlatSegment, int]


def _outline(segments: Sequence[FlatSegment]) -> str:
    """Properties that two flat views must share to be combined; interned for fast comparison."""
    layouts = [segment.plan.layout for segment in segments]
    places = [[(s.name, s.shape, s.stride) for s in layout.specs] for layout in layouts]
    return sys.intern(repr([(lay.dtype, lay.offsets) for lay in layouts] + places))
