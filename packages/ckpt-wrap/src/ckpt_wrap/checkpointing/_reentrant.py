"""The reentrant implementation, for any arguments and any result.

`torch.utils.checkpoint` sees tensors only where they are arguments or results themselves, so
the tensors of a call are handed to it one by one and put back into place inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from ckpt_wrap._errors import RecomputeError, changed_input_message, is_in_place_error
from ckpt_wrap._phase import FirstRun, SecondRun
from ckpt_wrap._torch_compat import never_compiled_inside
from ckpt_wrap._where import Where
from ckpt_wrap.checkpointing._call import Arguments, refused_error
from ckpt_wrap.checkpointing._module_state import ModuleState
from ckpt_wrap.checkpointing._object_tensors import Refused
from ckpt_wrap.checkpointing._tree import fill, flatten


class ReentrantCall:
    """What forward runs, and backward runs again: tensors in, tensors out.

    Args:
        function: what is called.
        arguments: its arguments, taken apart.
        buffers: those of the module it is, if it is one.
        order: for each tensor in the arguments, its place among those handed in.
        where: the module, for messages.
        check: whether the second run must have the results of the first.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        buffers: ModuleState,
        order: Sequence[int],
        *,
        where: Where,
        check: bool,
    ) -> None:
        self.where = where
        self.template: Any = None
        self.ran_again = False
        self._function = function
        self._arguments = arguments
        self._buffers = buffers
        self._order = order
        self._check = check
        self._results: list[tuple[Any, ...]] | None = None

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors of the result; what else is in it is in `template`."""
        self.ran_again = self._results is not None
        inputs = [tensors[index] for index in self._order]
        found: list[torch.Tensor] = []
        try:
            self.template = flatten(self._run(inputs), found)
        except Refused as refused:
            raise refused_error(refused, self.where) from refused
        results = [(tensor.shape, tensor.dtype, tensor.device) for tensor in found]
        if self._results is None:
            self._results = results
        elif self._check and results != self._results:
            raise RecomputeError(
                f"ckpt_wrap.{self.where.made_by}: the result of module {self.where} is {results} "
                f"in recomputation, but was {self._results} in forward. "
                "Make its forward depend on its inputs only."
            )
        return tuple(found)

    def _run(self, inputs: list[torch.Tensor]) -> Any:
        objects = self._arguments.objects
        first = self._results is None
        args, kwargs = self._arguments.filled(inputs, objects.live() if first else objects.values())
        with self._arguments.weights.put_in(inputs):
            if not first:
                with self._buffers.put_in() as put_in, SecondRun(put_in):
                    return self._function(*args, **kwargs)
            self._buffers.begin()
            with FirstRun(self._buffers):
                result = self._function(*args, **kwargs)
            self._buffers.end(keep=True)
        objects.settle()
        return result


class ReentrantCheckpoint(CheckpointFunction):
    """Torch's node, with errors that say which module they are about."""

    @staticmethod
    def forward(
        ctx: Any, call: ReentrantCall, preserve_rng_state: bool, *tensors: torch.Tensor
    ) -> Any:
        ctx.call = call
        return CheckpointFunction.forward(ctx, call, preserve_rng_state, *tensors)

    @staticmethod
    @never_compiled_inside
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.call.ran_again = False
        try:
            return CheckpointFunction.backward(ctx, *grads)
        except RuntimeError as error:
            message = _explained(error, ctx.call)
            if not message:
                raise
            raise RecomputeError(message) from error


def _explained(error: RuntimeError, call: ReentrantCall) -> str:
    """What torch's error means, if it is not the module's own."""
    if call.ran_again:
        return ""
    if "incompatible with .grad()" in str(error):
        return (
            f"ckpt_wrap.{call.where.made_by}: module {call.where} is checkpointed with REENTRANT, "
            "but that works with neither autograd.grad() nor backward(inputs=...). "
            "Call backward() without inputs, or use NO_REENTRANT."
        )
    return changed_input_message(call.where) if is_in_place_error(error) else ""


def checkpoint_reentrant(
    function: Callable[..., Any],
    arguments: Arguments,
    buffers: ModuleState,
    *,
    preserve_rng_state: bool,
    check: bool,
    where: Where,
) -> Any:
    """Call `function` with the arguments, reentrantly.

    Where no tensor requires grad, parameters of the function still get theirs. A tensor passed
    twice is one tensor inside too, so that its gradients add up in the order they always do.
    """
    tensors, arguments.tensors = arguments.tensors, []
    unique = list({id(tensor): tensor for tensor in tensors}.values())
    position = {id(tensor): index for index, tensor in enumerate(unique)}
    order = [position[id(tensor)] for tensor in tensors]
    call = ReentrantCall(function, arguments, buffers, order, where=where, check=check)
    results = ReentrantCheckpoint.apply(call, preserve_rng_state, *unique, *_anchor(unique))
    return fill(call.template, results)


def _anchor(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """A tensor that requires grad, where a reentrant checkpoint would otherwise see none."""
    if any(tensor.requires_grad for tensor in tensors):
        return ()
    return (torch.empty(0, requires_grad=True),)
