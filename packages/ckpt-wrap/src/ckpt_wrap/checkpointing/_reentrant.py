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
from ckpt_wrap._torch_compat import (
    never_compiled_inside,
    next_hook_number,
    remove_hooks,
    version_of,
)
from ckpt_wrap._where import Where
from ckpt_wrap.checkpointing._arguments import Arguments
from ckpt_wrap.checkpointing._module_state import ModuleState


class ReentrantCall:
    """The function that forward runs, and backward runs again: tensors in, tensors out.

    Args:
        function: the called function.
        given: its arguments, for forward.
        arguments: the arguments taken apart.
        state: the state of the module, if the function is one.
        order: for each tensor in the arguments, its position among the inputs.
        where: the module, for messages.
        check: whether the results of recomputation must be like those of forward.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        given: tuple[tuple[Any, ...], dict[str, Any]],
        arguments: Arguments,
        state: ModuleState,
        order: Sequence[int],
        *,
        where: Where,
        check: bool,
    ) -> None:
        self.where = where
        self.result: Arguments | None = None
        self.ran_again = False
        self._function = function
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = given
        self._arguments = arguments
        self._state = state
        self._order = order
        self._check = check
        self._changed_input = False  # by forward, in place
        self._results: list[tuple[Any, ...]] = []

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors of the result; the rest of it is in `result`."""
        inputs = [tensors[index] for index in self._order]
        given, self._given = self._given, None
        self.ran_again = given is None
        self.result = Arguments([self._run(given, inputs)], {})
        found = self.result.tensors
        results = [(tensor.shape, tensor.dtype, tensor.device) for tensor in found]
        if not self.ran_again:
            self._results = results
        elif self._check and results != self._results:
            raise RecomputeError(
                f"ckpt_wrap.{self.where.made_by}: the result of module {self.where} is {results} "
                f"in recomputation, but was {self._results} in forward. "
                "Make its forward depend on its inputs only."
            )
        if self.ran_again:
            self.result = None
        return tuple(found)

    def _run(
        self, given: tuple[tuple[Any, ...], dict[str, Any]] | None, inputs: list[torch.Tensor]
    ) -> Any:
        if given is None:
            if self._changed_input:
                raise RecomputeError(changed_input_message(self.where))
            args, kwargs = self._arguments.filled(inputs, self.where, rebuild=True)
            first_hook = next_hook_number()
            try:
                with self._state.put_in(inputs), SecondRun():
                    return self._function(*args, **kwargs)
            finally:
                remove_hooks(range(first_hook, next_hook_number()), inputs, self._state.module)
        versions = list(map(version_of, inputs))
        with FirstRun(self._state):
            result = self._function(*given[0], **given[1])
        self._changed_input = versions != list(map(version_of, inputs))
        self._state.end(keep=True)
        self._arguments.end(inputs, self.where)
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
    given: tuple[tuple[Any, ...], dict[str, Any]],
    arguments: Arguments,
    state: ModuleState,
    *,
    preserve_rng_state: bool,
    check: bool,
    where: Where,
) -> Any:
    """Call `function` with the arguments, reentrantly.

    Where no tensor requires grad, parameters of the function still get theirs. A tensor passed
    twice is one input, so that its gradients add up in the order they always do.
    """
    tensors, arguments.tensors = arguments.tensors + state.begin(), []
    unique = list({id(tensor): tensor for tensor in tensors}.values())
    position = {id(tensor): index for index, tensor in enumerate(unique)}
    order = [position[id(tensor)] for tensor in tensors]
    call = ReentrantCall(function, given, arguments, state, order, where=where, check=check)
    results = ReentrantCheckpoint.apply(call, preserve_rng_state, *unique, *_anchor(unique))
    result, call.result = call.result, None
    assert result is not None
    return result.filled(results, where, rebuild=True)[0][0]


def _anchor(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """A tensor that requires grad, where a reentrant checkpoint would otherwise see none."""
    if any(tensor.requires_grad for tensor in tensors):
        return ()
    return (torch.empty(0, requires_grad=True),)
