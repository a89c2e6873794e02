"""The contexts of `torch.utils.checkpoint.create_selective_checkpoint_contexts`.

Outside of `torch.compile` torch runs an operator again whose result its policy wants on the host.
Here such a result is kept, and moved when forward has ended: results of the CPU, which are on the
host, stay where they are.

Rule 1. Since torch 2.13 a policy sees the result, which is then known by its storage. Before, it is
        asked first, and a result is known by its place among those that are kept of its operator;
        and recomputation asks it again, which must get the same answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from ckpt_wrap._torch_compat import bypass_hooks, kept_results, storage_key
from ckpt_wrap.checkpointing._arguments import Arguments
from ckpt_wrap.offload._offload import KeptTensor, OffloadCall
from ckpt_wrap.offload._offload_options import OffloadOptions
from ckpt_wrap.offload._offload_scheduler import scheduler_for
from ckpt_wrap.offload._offload_stats import Counters

_NAMES = ("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")
_OFFLOAD = tuple(getattr(CheckpointPolicy, n) for n in _NAMES if hasattr(CheckpointPolicy, n))
_SAVE = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)

Policy = Callable[..., Any]


def honour_offload(
    forward_context: AbstractContextManager[Any],
    recompute_context: AbstractContextManager[Any],
    module: nn.Module | None,
    where: str,
) -> AbstractContextManager[Any]:
    """A context that keeps and moves what the policy of torch's contexts wants offloaded."""
    policy = getattr(forward_context, "policy_fn", None)
    if policy is None or kept_results(forward_context) is None:
        return forward_context
    bypass_hooks(forward_context)
    moving = OffloadingContext(forward_context, policy, module, where)
    forward_context.policy_fn = moving.decide  # type: ignore[attr-defined]  # it has one
    if hasattr(recompute_context, "policy_fn"):  # Rule 1
        recompute_context.policy_fn = partial(_saving_instead, recompute_context.policy_fn)
    return moving


def _saving_instead(policy: Policy, context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """What the policy decides, with offloading turned into saving."""
    decision = policy(context, op, *args, **kwargs)
    return CheckpointPolicy.MUST_SAVE if decision in _OFFLOAD else decision


class OffloadingContext(AbstractContextManager[Any]):
    """Torch's context for forward; at its end, what is to be offloaded leaves."""

    def __init__(
        self,
        context: AbstractContextManager[Any],
        policy: Policy,
        module: nn.Module | None,
        where: str,
    ) -> None:
        self._context = context
        self._policy = policy
        self._module = module
        self._where = where
        self._chosen: set[Any] = set()  # storages, or operators and places: Rule 1
        self._saved: Counter[Any] = Counter()

    def decide(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        """What the policy decides, with offloading turned into saving."""
        decision = self._policy(context, op, *args, **kwargs)
        offloads = decision in _OFFLOAD
        if offloads and hasattr(context, "op_output"):
            tensors = Arguments([context.op_output], {}).tensors
            self._chosen.update(map(storage_key, tensors))
        elif offloads:
            self._chosen.add((op, self._saved[op]))
        if offloads or decision in _SAVE:
            self._saved[op] += 1
        return CheckpointPolicy.MUST_SAVE if offloads else decision

    def __enter__(self) -> Any:
        return self._context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        suppressed = self._context.__exit__(*error)
        if error[0] is None and self._chosen:
            self._move()
        return suppressed

    def _move(self) -> None:
        scheduler = scheduler_for(OffloadOptions())
        call = OffloadCall(scheduler, Counters(scheduler.away), self._module, self._where)
        for op, results, place in kept_results(self._context) or ():
            whole = (op, place) in self._chosen
            results[place] = self._moved(call, results[place], whole=whole)
        call.finish()

    def _moved(self, call: OffloadCall, kept: Any, *, whole: bool) -> Any:
        tensor = getattr(kept, "val", None)
        if isinstance(kept, (tuple, list)):
            return type(kept)([self._moved(call, part, whole=whole) for part in kept])
        if not isinstance(tensor, torch.Tensor):
            return kept
        if not whole and storage_key(tensor) not in self._chosen:
            return kept
        packed = call.pack(tensor)
        return kept if isinstance(packed, KeptTensor) else OffloadedResult(call, packed)


class OffloadedResult:
    """In the place of a result that torch's context kept; answers as torch's holder does."""

    def __init__(self, call: OffloadCall, packed: Any) -> None:
        self._call = call
        self._packed = packed

    def get_val(self, allow_cache_entry_mutation: bool) -> torch.Tensor:
        """The result, brought back."""
        return self._call.unpack(self._packed)
