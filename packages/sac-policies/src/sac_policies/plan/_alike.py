"""Run a few of a model's equal blocks, and return empty tensors for the others.

Blocks are equal if their modules, plain attributes, parameters and inputs are equal. An attribute
that contains the block's number may differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from .._errors import BudgetError
from .._tensors import tensors_in
from .._torch_compat._module_calls import call_replaced, called_at

_PLAIN = (bool, int, float, str, type(None))
_REAL = 2
"""Of equal blocks as many run, and the last."""


@dataclass(frozen=True)
class Blocks:
    """Blocks in the order in which they run.

    Attributes:
        modules: the blocks.
        input_bytes: of each block's input.
        like: number of an equal block that runs, for each block that does not.
        outputs: result of an equal block, for each block that does not run.
    """

    modules: list[nn.Module]
    input_bytes: list[int]
    like: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Replace the forward of blocks that have an equal block."""
        with ExitStack() as stack:
            for number in self.like:
                call = partial(_stand_in, self.outputs[number])
                stack.enter_context(call_replaced(self.modules[number], call))
            yield


def find_blocks(candidates: Sequence[nn.Module], run: Callable[[], object]) -> Blocks:
    """Run a forward that calls one of several equal blocks; return the blocks in order.

    Raises:
        BudgetError: none of them is called exactly once.
    """
    calls: list[tuple[nn.Module, int, Hashable]] = []
    outputs: dict[Hashable, Any] = {}
    kinds: Counter[type] = Counter()
    shared = Counter(id(p) for each in candidates for p in each.parameters())

    def call(block: nn.Module, number: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        given = [each for each in tensors_in((args, kwargs)) if each.is_floating_point()]
        is_shared = any(shared[id(p)] > 1 for p in block.parameters())
        key = id(block) if is_shared else (_facts(block, number), _shown((args, kwargs)))
        calls.append((block, given[0].nbytes if given else 0, key))
        if key in outputs:
            return _stand_in(outputs[key], *args, **kwargs)
        out = forward(*args, **kwargs)
        outputs[key] = _layouts(out)
        return out

    with ExitStack() as stack:
        for block in candidates:
            number = kinds[type(block)]
            kinds[type(block)] += 1
            forward = getattr(block, called_at(block))
            stack.enter_context(call_replaced(block, partial(call, block, number, forward)))
        run()
    times = Counter(block for block, *_ in calls)
    once = [each for each in calls if times[each[0]] == 1]
    if not once:
        raise BudgetError(
            "sac_policies plan: no block of the model runs exactly once in a step. Plans are for "
            "models that are stacks of blocks."
        )
    found = Blocks([block for block, *_ in once], [size for _, size, _ in once])
    groups: dict[Hashable, list[int]] = {}
    for number, (*_, key) in enumerate(once):
        groups.setdefault(key, []).append(number)
    for key, numbers in groups.items():
        for number in numbers[_REAL:-1] if outputs[key] is not None else ():
            found.like[number] = numbers[_REAL - 1]
            found.outputs[number] = outputs[key]
    return found


def _facts(block: nn.Module, number: int) -> Hashable:
    """Return the properties that equal blocks share."""
    found: list[Hashable] = []
    for name, module in block.named_modules():
        plain = tuple(
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, _PLAIN) and (type(value), value) != (int, number)
        )
        tensors = {**module._parameters, **module._buffers}
        found.append((name, type(module), plain, _shown(sorted(tensors.items()))))
    return tuple(found)


def _shown(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.requires_grad
    if isinstance(value, dict):
        return tuple((key, _shown(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_shown, value))
    return value if isinstance(value, _PLAIN) else id(value)


def _layouts(out: Any) -> Any:
    """Return sizes, strides, dtypes and devices of a tensor or tuple; None for other outputs."""
    if isinstance(out, torch.Tensor):
        return torch.Size(out.shape), out.stride(), out.dtype, out.device
    if type(out) is tuple and all(isinstance(each, torch.Tensor) for each in out):
        return list(map(_layouts, out))
    return None


def _stand_in(layouts: Any, *args: Any, **kwargs: Any) -> Any:
    outputs = layouts if isinstance(layouts, list) else [layouts]
    found = _StandIn.apply(outputs, *tensors_in((args, kwargs)))
    return found if isinstance(layouts, list) else found[0]


class _StandIn(torch.autograd.Function):
    """Returns empty tensors. In backward, inputs get empty gradients."""

    @staticmethod
    def forward(ctx: Any, outputs: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.layouts = [_layouts(each) for each in inputs]
        return tuple(
            torch.empty_strided(size, stride, dtype=dtype, device=device)
            for size, stride, dtype, device in outputs
        )

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor | None, ...]:
        found: list[torch.Tensor | None] = [None]
        for needed, layout in zip(ctx.needs_input_grad[1:], ctx.layouts, strict=True):
            size, stride, dtype, device = layout
            empty = torch.empty_strided(size, stride, dtype=dtype, device=device)
            found.append(empty if needed else None)
        return tuple(found)
