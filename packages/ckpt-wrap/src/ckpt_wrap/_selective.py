"""Torch: the contexts of `torch.utils.checkpoint.create_selective_checkpoint_contexts`.

Outside of `torch.compile` torch runs an operator again whose result its policy wants on the host.
Here such a result is kept, and moved when forward has ended: results of the CPU, which are on the
host, stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from ckpt_wrap._mover import mover_for
from ckpt_wrap._offload import Kept, OffloadCall
from ckpt_wrap._offload_options import OffloadOptions
from ckpt_wrap._offload_stats import Counters
from ckpt_wrap._torch_compat import kept_results, storage_key
from ckpt_wrap._tree import flatten

_NAMES = ("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")
_OFFLOAD = tuple(getattr(CheckpointPolicy, n) for n in _NAMES if hasattr(CheckpointPolicy, n))


def honour_offload(
    forward_context: AbstractContextManager[Any], module: nn.Module | None, where: str
) -> AbstractContextManager[Any]:
    """A context that keeps and moves what the policy of torch's context wants offloaded."""
    policy = getattr(forward_context, "policy_fn", None)
    if policy is None or kept_results(forward_context) is None:
        return forward_context
    moving = Moving(forward_context, policy, module, where)
    forward_context.policy_fn = moving.decide  # type: ignore[attr-defined]  # it has one
    return moving


class Moving(AbstractContextManager[Any]):
    """Torch's context for forward; at its end, what is to be offloaded leaves."""

    def __init__(
        self,
        context: AbstractContextManager[Any],
        policy: Callable[..., Any],
        module: nn.Module | None,
        where: str,
    ) -> None:
        self._context = context
        self._policy = policy
        self._module = module
        self._where = where
        self._chosen: set[Any] = set()

    def decide(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        """What the policy decides, with offloading turned into saving."""
        decision = self._policy(context, op, *args, **kwargs)
        if decision not in _OFFLOAD:
            return decision
        tensors: list[torch.Tensor] = []
        flatten(context.op_output, tensors)
        self._chosen.update(map(storage_key, tensors))
        return CheckpointPolicy.MUST_SAVE

    def __enter__(self) -> Any:
        return self._context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        suppressed = self._context.__exit__(*error)
        if error[0] is None and self._chosen:
            self._move()
        return suppressed

    def _move(self) -> None:
        mover = mover_for(OffloadOptions())
        call = OffloadCall(mover, Counters(), self._module, self._where)
        for results, place in kept_results(self._context) or ():
            results[place] = self._moved(call, results[place])
        mover.finish(call)

    def _moved(self, call: OffloadCall, kept: Any) -> Any:
        tensor = getattr(kept, "val", None)
        if isinstance(kept, (tuple, list)):
            return type(kept)([self._moved(call, part) for part in kept])
        if not isinstance(tensor, torch.Tensor) or storage_key(tensor) not in self._chosen:
            return kept
        packed = call.pack(tensor)
        return kept if isinstance(packed, Kept) else Away(call, packed)


class Away:
    """In the place of a result that torch's context kept; answers as torch's holder does."""

    def __init__(self, call: OffloadCall, packed: Any) -> None:
        self._call = call
        self._packed = packed

    def get_val(self, allow_cache_entry_mutation: bool) -> torch.Tensor:
        """The result, brought back."""
        return self._call.unpack(self._packed)
