"""The parameters of one module as flat vectors, in one process.

A call that names no segment means the only trainable one. Gaps between parameters are zero before
and after every call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._errors import StateError, VectorError
from .._torch_compat import norms_of
from ..buffers._views import unflatten, zero_gaps_
from ..layout._arguments import check_is_optimizer
from ..layout._layout import FlatLayout
from ._chunk_state import by_name, chunks_of, one_setting, to_chunks, to_parameters
from ._chunks import make_chunks
from ._flat_segment import FlatSegment
from ._flat_segments import FlatSegments

_BLOCK = 1 << 16
"""Elements of one float32 sum in a norm: one over ten million squares is off by 3e-4."""


class FlatParams:
    """The flat view of a module; made by `flatten`.

    Example:
        >>> import torch
        >>> from flat_param import flatten
        >>> model = torch.nn.Linear(4, 4)
        >>> flat = flatten(model)
        >>> optimizer = torch.optim.AdamW(flat.chunks(), fused=True)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> norm = flat.clip_(1.0)
        >>> optimizer.step()
        >>> flat.zero_grad()
    """

    def __init__(self, module: nn.Module, flat_segments: FlatSegments) -> None:
        self._module, self._made_of = module, flat_segments

    @property
    def _flat_segments(self) -> FlatSegments:
        """The segments, planned again if the module has changed."""
        self._made_of.sync()
        return self._made_of

    @property
    def module(self) -> nn.Module:
        """The flattened root."""
        return self._module

    def __repr__(self) -> str:
        if self._made_of.closed:
            return f"FlatParams({type(self.module).__name__}, unflattened)"
        parts = ", ".join(f"{s.plan.name}: {s.plan.layout.numel}" for s in self._flat_segments.all)
        return f"FlatParams({type(self.module).__name__}, {parts})"

    @property
    def layouts(self) -> dict[str, FlatLayout]:
        """Layout of each segment, by segment name."""
        return {one.plan.name: one.plan.layout for one in self._flat_segments.all}

    @property
    def numel(self) -> int:
        """Elements of the default vector, gaps included."""
        return self._flat_segments.find(None).plan.layout.numel

    def as_vector(self, segment: str | None = None) -> Tensor:
        """The parameters of a segment as one vector, without a copy.

        Writing to it writes to the parameters, which a backward through an earlier forward does not
        notice. Leave gaps zero, or use `load_vector`. Get it again
        after the module was moved or a parameter was replaced.

        Returns:
            `(numel,)`, outside autograd.

        Raises:
            VectorError: no such segment, or several are trainable and none was named.
        """
        return self._flat_segments.find(segment).buffer

    def grad_vector(self, segment: str | None = None) -> Tensor:
        """Return the gradients of a segment as one vector, without a copy; None reads as zero.

        Returns:
            `(numel,)`.

        Raises:
            StateError: the segment is frozen.
        """
        return self._flat_segments.find(segment).grad

    @torch.no_grad()
    def load_vector(self, vector: Tensor, segment: str | None = None) -> None:
        """Copy a vector into the parameters; its values in gaps are dropped.

        Args:
            vector: `(numel,)`; any dtype and device that `copy_` takes.
            segment: name; default: the only trainable one.

        Raises:
            VectorError: no tensor, or the numel differs; then nothing has changed.
        """
        one = self._flat_segments.find(segment)
        layout = one.plan.layout
        _check_vector("load_vector", vector, one)
        zero_gaps_(one.buffer.copy_(vector), layout)
        one.raise_versions(0, layout.numel)

    def functional_call(self, vectors: Tensor | Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        """Run the module with parameters taken from a vector; differentiable, and vmap-able.

        Args:
            vectors: `(numel,)`, or one vector per trainable segment in `layouts` order.
            args: for the module's forward.
            kwargs: for the module's forward.

        Raises:
            VectorError: not one vector of the right size per trainable segment.

        Example:
            >>> import torch
            >>> from flat_param import flatten
            >>> flat = flatten(torch.nn.Linear(3, 2))
            >>> population = torch.randn(5, flat.numel)
            >>> run = torch.vmap(flat.functional_call, in_dims=(0, None))
            >>> run(population, torch.ones(4, 3)).shape
            torch.Size([5, 4, 2])
        """
        segments = self._flat_segments.trainable
        given: list[Any] = list(vectors) if isinstance(vectors, (list, tuple)) else [vectors]
        if len(given) != len(segments):
            raise VectorError(
                f"flat_param.FlatParams.functional_call: got {len(given)} vectors, but the module "
                f"has {len(segments)} trainable segments. Pass one vector for each."
            )
        params: dict[str, Tensor] = {}
        for vector, segment in zip(given, segments, strict=True):
            _check_vector("functional_call", vector, segment)
            params.update(unflatten(vector, segment.plan.layout))
        return torch.func.functional_call(self.module, params, args, kwargs)

    @torch.no_grad()
    def norm(self, ord: float = 2.0) -> Tensor:
        """Return the norm of all trainable parameters as one vector; a 0-dim tensor."""
        return _joint_norm([one.buffer for one in self._flat_segments.trainable], ord)

    @torch.no_grad()
    def grad_norm(self, ord: float = 2.0) -> Tensor:
        """Return the norm of all gradients as one vector; a 0-dim tensor; None counts as zero."""
        return _joint_norm([one.grad for one in self._flat_segments.trainable], ord)

    @torch.no_grad()
    def clip_(self, max_norm: float, *, ord: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`.

        Returns:
            The norm before clipping, as from `torch.nn.utils.clip_grad_norm_`. On CPU nothing is
            written if nothing needs to shrink; elsewhere the factor stays on the device.

        Raises:
            VectorError: `max_norm` is no number of at least 0.
        """
        is_tensor = isinstance(max_norm, Tensor)  # on the device, so it is not read here
        if not is_tensor and not (isinstance(max_norm, Real) and max_norm >= 0):
            raise VectorError(
                f"flat_param.FlatParams.clip_: max_norm is {max_norm!r}, but gradients are scaled "
                "to a norm of at least 0. Pass a number such as 1.0."
            )
        grads = [one.grad for one in self._flat_segments.trainable]
        total = _joint_norm(grads, ord)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        if total.device.type != "cpu" or factor.item() < 1.0:
            for grad in grads:
                grad.mul_(factor.to(grad.dtype))
        return total

    @torch.no_grad()
    def lerp_(self, other: FlatParams, weight: float) -> None:
        """Move the parameters towards another module's: `self += weight * (other - self)`.

        An exponential moving average with decay `d` is `ema.lerp_(live, 1 - d)`. Segments that
        are frozen on both sides are left alone.

        Args:
            other: of a module with the same parameters, such as a deep copy.
            weight: 0 keeps, 1 copies.

        Raises:
            VectorError: the layouts differ, or `other` is no flat view; then nothing has changed.
        """
        if not isinstance(other, FlatParams):
            raise VectorError(
                f"flat_param.FlatParams.lerp_: other is of type {type(other).__name__}, but it "
                "must be FlatParams. Pass what flatten returned, or flat_params_of(module)."
            )
        mine, theirs = self._flat_segments, other._flat_segments
        if mine.outline != theirs.outline:
            raise VectorError(
                f"flat_param.FlatParams.lerp_: {self!r} and {other!r} have different layouts, but "
                "they must match. Use a deep copy of the module."
            )
        for one, another in zip(mine.all, theirs.all, strict=True):
            if one.plan.trainable or another.plan.trainable:
                one.buffer.lerp_(another.buffer, weight)
                one.raise_versions(0, one.plan.layout.numel)

    def zero_grad(self) -> None:
        """Zero every gradient with one fill per segment; gradients that are None stay None."""
        for one in self._flat_segments.trainable:
            one.zero_grad()

    def chunks(self, numel: int | None = None) -> list[nn.Parameter]:
        """Leaves over the trainable segments, to hand to torch's optimizers.

        They share memory and gradients with the parameters, so stepping them steps the module,
        and they follow it through `.to()`. `zero_grad()` of an optimizer over them zeroes gradients
        in place, so copy those that you keep. Optimizers must work element by element, with one
        learning rate for all: a chunk crosses the boundaries of parameters. The state of an
        optimizer over separate parameters is loaded by `load_optimizer_state`. If such a state is
        passed to the optimizer's `load_state_dict`, that raises `ValueError`, or the next step
        raises `StateError`.

        Args:
            numel: elements per leaf. Default: 262144 on a CPU, where a leaf and its state should
                fit in the cache; on other devices the whole segment, as each leaf costs time.

        Raises:
            VectorError: `numel` is no whole number of at least 1.
        """
        if numel is not None and (type(numel) is not int or numel < 1):
            raise VectorError(
                f"flat_param.FlatParams.chunks: numel is {numel!r}, but a chunk has a whole number "
                "of elements, at least one. Pass such a number, or leave it out."
            )
        return list(make_chunks(self._flat_segments, numel))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Convert the state of an optimizer over chunks to one over the module's parameters.

        Args:
            optimizer: built from all chunks of one `chunks()` call, with a single setting.

        Returns:
            `{"state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}`, tensors
            in the parameters' shapes, copies. An optimizer of separate parameters loads it.

        Raises:
            ParameterError: `optimizer` is no optimizer.
            StateError: not all of the optimizer's parameters are chunks of this module, groups
                have several settings, or a value such as `step` differs between chunks.
        """
        check_is_optimizer("FlatParams.optimizer_state", optimizer)
        segments = self._flat_segments.trainable
        options = one_setting(optimizer.param_groups)
        state: dict[str, dict[str, Any]] = {}
        for segment, chunks in zip(segments, chunks_of(optimizer, segments), strict=True):
            state |= to_parameters(optimizer, segment, chunks)
        names = [name for name, param in self.module.named_parameters() if param.requires_grad]
        return {
            "state": {name: state[name] for name in names if name in state},
            "param_groups": [{**options, "params": names}],
        }

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load the state of an optimizer over separate parameters into one over chunks.

        A parameter without state is treated as if its gradients had been zero. Options of how a
        step is computed, such as `fused`, stay those of `optimizer`; the others come from the
        state.

        Args:
            optimizer: built from all chunks of one `chunks()` call.
            state: of `torch.optim.Optimizer.state_dict`, by position, over all parameters or the
                trainable ones in the module's order; or by name, from `optimizer_state`.

        Raises:
            ParameterError: `optimizer` is no optimizer.
            StateError: as for `optimizer_state`, or the state is for other parameters; then nothing
                has changed.
        """
        check_is_optimizer("FlatParams.load_optimizer_state", optimizer)
        if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
            raise StateError(
                "flat_param.FlatParams.load_optimizer_state: state is no state dict of an "
                "optimizer, which has the keys 'state' and 'param_groups'. Pass "
                "optimizer.state_dict(), or what optimizer_state() returned."
            )
        segments = self._flat_segments.trainable
        names = {name: param.requires_grad for name, param in self.module.named_parameters()}
        options, states = one_setting(state["param_groups"]), by_name(state, names)
        found: dict[Tensor, dict[str, Any]] = {}
        for segment, chunks in zip(segments, chunks_of(optimizer, segments), strict=True):
            found |= zip(chunks, to_chunks(states, segment, chunks), strict=True)
        now = optimizer.state_dict()
        order = [param for group in optimizer.param_groups for param in group["params"]]
        new = {index: found[param] for index, param in enumerate(order) if found[param]}
        groups = [{**group, **options, "params": group["params"]} for group in now["param_groups"]]
        optimizer.load_state_dict({"state": new, "param_groups": groups})


def _check_vector(function: str, vector: Any, segment: FlatSegment) -> None:
    """Refuse a value that is no vector of the segment's size."""
    numel = segment.plan.layout.numel
    if not isinstance(vector, Tensor):
        found = f"is of type {type(vector).__name__}"
    elif vector.shape != (numel,):
        found = f"has shape {tuple(vector.shape)}"
    else:
        return
    raise VectorError(
        f"flat_param.FlatParams.{function}: a vector {found}, but segment '{segment.plan.name}' "
        f"has ({numel},). Build it like as_vector(); under vmap, one row per call."
    )


def _joint_norm(vectors: Sequence[Tensor], ord: float) -> Tensor:
    """Return the norm of several vectors as one; a 0-dim tensor; zero for no vectors."""
    blocks = [block for vector in vectors for block in vector.split(_BLOCK) if block.numel()]
    if not blocks:  # some orders raise for empty vectors
        return torch.linalg.vector_norm(vectors[0]) if vectors else torch.tensor(0.0)
    norms = torch.stack(list(norms_of(blocks, ord)))
    # Order 0 counts nonzero elements, so these add up.
    return norms.sum() if ord == 0 else torch.linalg.vector_norm(norms, ord)
