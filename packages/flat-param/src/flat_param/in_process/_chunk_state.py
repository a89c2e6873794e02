"""Convert optimizer state between chunks and separate parameters.

- State of the chunk's shape, such as `exp_avg`, is in the flat buffer's order. Any other state,
  such as `step`, is one value for a whole segment.
- A parameter without state is treated as if its gradients had been zero, as in a chunk.
- Options about how a step is computed, such as `fused`, are taken from the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._errors import StateError
from ..buffers._views import unflatten
from ._chunks import Chunk
from ._flat_segment import FlatSegment

_HOW = ("capturable", "differentiable", "foreach", "fused", "param_names", "params")


def chunks_of(optimizer: Optimizer, segments: Sequence[FlatSegment]) -> list[list[Chunk]]:
    """Return the optimizer's chunks of each segment, in the buffer's order.

    Raises:
        StateError: the optimizer does not have every chunk of these segments exactly once.
    """
    found: list[list[Chunk]] = [[] for _ in segments]
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        at = [i for i, one in enumerate(segments) if getattr(param, "_flat_segment", None) is one]
        if not at:
            raise StateError(
                "flat_param.FlatParams: the optimizer has a parameter of shape "
                f"{tuple(param.shape)} that is not a chunk of this module, but states are "
                "converted between chunks and parameters. Pass the optimizer that was built from "
                "flat.chunks()."
            )
        found[at[0]].append(param)
    for chunks, segment in zip(found, segments, strict=True):
        chunks.sort(key=lambda chunk: chunk._start)
        ends = [0, *(chunk._start + chunk.numel() for chunk in chunks)]
        if [chunk._start for chunk in chunks] != ends[:-1] or ends[-1] != segment.buffer.numel():
            raise StateError(
                f"flat_param.FlatParams: the optimizer's chunks do not cover segment "
                f"'{segment.plan.name}' once, but each parameter has one state. Build the "
                "optimizer from all chunks of one call of flat.chunks()."
            )
    return found


def one_setting(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The options that all groups share, without those of `_HOW`.

    Raises:
        StateError: groups have other options than the first.
    """
    options = [{k: v for k, v in group.items() if k not in _HOW} for group in groups]
    for one in options[1:]:
        if one != options[0]:
            names = sorted(k for k in one | options[0] if one.get(k) != options[0].get(k))
            raise StateError(
                f"flat_param.FlatParams: parameter groups differ in {', '.join(names)}, but a "
                "chunk mixes parameters and has one setting. Train with one group, or keep "
                "separate parameters."
            )
    return options[0]


def by_name(state: Mapping[str, Any], names: Mapping[str, bool]) -> dict[str, Mapping[str, Any]]:
    """Return the state of each parameter, from a state dict by name or by position.

    Positions are looked up in `param_names`, if torch's optimizer has saved that.

    Args:
        state: `{"state": {key: values}, "param_groups": [...]}`.
        names: of all parameters in the module's order, and whether each requires grad.

    Raises:
        StateError: names are unknown, or the state is for another number of parameters.
    """
    keys = [key for group in state["param_groups"] for key in group["params"]]
    trainable = [name for name, trains in names.items() if trains]
    if all(isinstance(key, str) for key in keys):
        wrong = [key for key in keys if key not in names]
        if wrong:
            raise StateError(
                f"flat_param.FlatParams.load_optimizer_state: the state has {wrong[:3]}, but the "
                "module has no parameters of these names. Load the state of the same model."
            )
        return {name: state["state"][name] for name in trainable if name in state["state"]}
    saved = [name for group in state["param_groups"] for name in group.get("param_names", ())]
    order = trainable if len(keys) == len(trainable) else list(names)
    if sorted(saved) == sorted(order):
        order = saved
    if len(keys) != len(order):
        raise StateError(
            f"flat_param.FlatParams.load_optimizer_state: the state is of {len(keys)} parameters, "
            f"but the module has {len(names)}, {len(trainable)} of them trainable. Load the state "
            "of an optimizer over its parameters; a state over chunks goes to "
            "optimizer.load_state_dict."
        )
    positions = dict(zip(order, keys, strict=True))
    return {n: state["state"][positions[n]] for n in trainable if positions[n] in state["state"]}


@torch.no_grad()
def to_parameters(
    optimizer: Optimizer, segment: FlatSegment, chunks: Sequence[Chunk]
) -> dict[str, dict[str, Any]]:
    """Return the state of each parameter of a segment; copies."""
    states = [optimizer.state.get(chunk, {}) for chunk in chunks]
    layout = segment.plan.layout
    out: dict[str, dict[str, Any]] = {spec.name: {} for spec in layout.specs}
    for key in dict.fromkeys(chain(*states)):
        values = [state.get(key) for state in states]
        if _have_shapes(key, values, chunks):
            parts = [
                torch.zeros_like(chunk) if value is None else value
                for chunk, value in zip(chunks, values, strict=True)
            ]
            for name, view in unflatten(torch.cat(parts), layout).items():
                out[name][key] = view.clone()
        else:
            for state in out.values():
                state[key] = _only(key, values, segment)
    return {name: state for name, state in out.items() if state}


@torch.no_grad()
def to_chunks(
    states: Mapping[str, Mapping[str, Any]], segment: FlatSegment, chunks: Sequence[Chunk]
) -> list[dict[str, Any]]:
    """Return the state of each chunk of a segment, from that of its parameters; copies."""
    layout = segment.plan.layout
    held = [states.get(spec.name, {}) for spec in layout.specs]
    out: list[dict[str, Any]] = [{} for _ in chunks]
    for key in dict.fromkeys(chain(*held)):
        values = [state.get(key) for state in held]
        if _have_shapes(key, values, layout.specs):
            dtype = next(value.dtype for value in values if value is not None)
            flat = torch.zeros(layout.numel, dtype=dtype, device=segment.buffer.device)
            for value, view in zip(values, unflatten(flat, layout).values(), strict=True):
                if value is not None:
                    view.copy_(value)
            for chunk, state in zip(chunks, out, strict=True):
                state[key] = flat[chunk._start : chunk._start + chunk.numel()].clone()
        else:
            for state in out:
                state[key] = _only(key, values, segment)
    return out


def _have_shapes(key: str, values: Sequence[Any], owners: Sequence[Any]) -> bool:
    """Whether all values are tensors of their owners' shapes; `step` is one for a segment."""
    pairs = [(v, each) for v, each in zip(values, owners, strict=True) if v is not None]
    return (
        key != "step"
        and bool(pairs)
        and all(isinstance(v, Tensor) and tuple(v.shape) == tuple(each.shape) for v, each in pairs)
    )


def _only(key: str, values: Sequence[Any], segment: FlatSegment) -> Any:
    """A copy of the common value; None if there is none, as for momentum of plain SGD."""
    present = [value for value in values if value is not None]
    if key == "step":  # a parameter that was never stepped
        present = [value for value in present if value != 0] or present
    if any(not _same(value, present[0]) for value in present):
        raise StateError(
            f"flat_param.FlatParams: '{key}' differs between parameters of segment "
            f"'{segment.plan.name}', but a chunk has one value for all its parameters. Keep "
            "separate parameters, or start with a new optimizer."
        )
    value = present[0] if present else None
    return value.clone() if isinstance(value, Tensor) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)
