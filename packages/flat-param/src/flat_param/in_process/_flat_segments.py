"""All segments of one module, kept flat for as long as the module lives.

Whenever the flat view is read, and before each optimizer step over chunks, the module is compared
with the last plan: the same modules, parameters and memory. After any difference (`.to()`, loading
with `assign=True`, a new parameter or module, `param.data = x`) the module is planned again, and
its parameters are copied into new buffers. Chunks follow, or the plan is refused.

Nothing looks at the module in its forward: `functional_call` puts other parameters there for one
call, and a compiled forward would trace the comparison.

The module refers to its segments, and they refer to it weakly, so a deleted module frees its
buffers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import methodcaller
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from .._errors import StateError, VectorError
from ..buffers._overlap import check_apart
from ..buffers._owners import check_whole
from ..layout._layout import FlatLayout, Segment, plan_segments
from ..layout._spec import check_grads, check_one_device, collect_params
from ._flat_segment import FlatSegment, unflattened

ATTRIBUTE = "_flat_segments"
"""Name under which a flattened root has its segments."""

_values = methodcaller("values")  # of a scripted module, which has no dict


class FlatSegments:
    """The segments of one module.

    Attributes:
        all: every segment, in plan order.
        outline: equal for two modules whose vectors can be combined.
        chunks: leaves of optimizers, attached again after every new plan.
        closed: whether the module was unflattened.
    """

    all: tuple[FlatSegment, ...]
    outline: tuple[Any, ...]
    closed: bool

    def __init__(self, module: nn.Module, *, align_bytes: int) -> None:
        self.__setstate__({"module": module, "align_bytes": align_bytes})
        self._plan(module)
        vars(module).update({ATTRIBUTE: self, "_apply": self.apply_module})

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self._module(), "align_bytes": self._align_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copied module is restored after this. Its first use plans it.
        self._module, self._align_bytes = ref(state["module"]), state["align_bytes"]
        self.all, self.outline, self.closed = (), (), False
        self.chunks: list[Any] = []
        self._kept: list[nn.Module] = []
        self._registries: list[Any] = []
        self._tensors: list[Tensor] = []
        self._seen: list[int] | None = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def close(self, module: nn.Module) -> None:
        """Give every tensor separate memory, and leave nothing on the module."""
        params = [param for segment in self.all for param in segment.params]
        grads = [param.grad for param in params if param.grad is not None]
        held: list[Tensor] = [*params, *(grad for grad in grads if not grad.requires_grad)]
        copies = [tensor.detach().clone() for tensor in held]
        for segment in self.all:
            segment.close()
        for tensor, copied in zip(held, copies, strict=True):
            tensor.data = copied
        self.closed, self.all, self.chunks, self._tensors = True, (), [], []
        vars(module).pop("_apply", None)
        vars(module).pop(ATTRIBUTE, None)  # last: if this is interrupted, it can be called again

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

    def sync(self) -> None:
        """Plan again if a module, a parameter or its memory was replaced.

        Raises:
            ParameterError: parameters share memory, belong to another module, or have gradients
                of other shapes; names them.
            StateError: the module was unflattened, or chunks cannot follow.
        """
        module = self._module()
        if self.closed:
            raise unflattened(type(module).__name__)
        if module is None or torch.compiler.is_compiling() or self._now() == self._seen:
            return
        self._plan(module)

    def _now(self) -> list[int]:
        """What is registered, and where its memory is; 100 ns for each module and parameter."""
        registered = chain.from_iterable(map(_values, self._registries))
        return [*map(id, registered), *map(Tensor.data_ptr, self._tensors)]

    @torch.inference_mode(False)
    def _plan(self, module: nn.Module) -> None:
        """Plan for the module's present parameters, and move them into new buffers."""
        specs, params = collect_params(module)
        named = [(spec.name, param) for spec, param in zip(specs, params, strict=True)]
        check_whole("FlatParams", named, own=self.all)
        check_one_device("flatten", specs, [param.device for param in params])
        check_apart("flatten", module, params)
        check_grads(specs, params)
        plans = plan_segments(specs, align_bytes=self._align_bytes)
        self._check_chunks(plans)
        for segment in self.all:
            segment.close()
        self._seen = None
        before, by_name = self.trainable, dict(named)
        self.all = tuple(
            [FlatSegment(p, [by_name[s.name] for s in p.layout.specs], self.sync) for p in plans]
        )
        after = dict(zip(map(id, before), self.trainable, strict=False))
        for chunk in self.chunks:
            chunk.attach(after[id(chunk._flat_segment)])
        self.outline = tuple(_outline(plan.layout) for plan in plans)
        root, *self._kept = module.modules()  # so that no other object gets the same `id`
        self._registries = [
            registry
            for each in (root, *self._kept)
            for registry in (each._modules, each._parameters)
        ]
        self._tensors = [each for one in self.all for each in (one.buffer, *one.params)]
        self._seen = self._now()

    def _check_chunks(self, plans: Sequence[Segment]) -> None:
        """Refuse a plan in which an optimizer's state would be of other elements."""
        now = [_places(segment.plan.layout) for segment in self.trainable]
        if self.chunks and now != [_places(plan.layout) for plan in plans if plan.trainable]:
            raise StateError(
                "flat_param.FlatParams: the trainable segments changed, but chunks are in use. "
                "Call flat_param.unflatten(module), flatten it again, and build a new optimizer."
            )

    def apply_module(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move or cast the module, then flatten the result; replaces the root's `_apply`."""
        module = self._module()
        assert module is not None
        result = type(module)._apply(module, fn, recurse)
        self.sync()
        return result


def _places(layout: FlatLayout) -> tuple[Any, ...]:
    return layout.offsets, *((spec.shape, spec.stride) for spec in layout.specs)


def _outline(layout: FlatLayout) -> tuple[Any, ...]:
    return layout.dtype, *(spec.name for spec in layout.specs), *_places(layout)
