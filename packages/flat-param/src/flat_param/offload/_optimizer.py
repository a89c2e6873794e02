"""`offload_optimizer`: any optimizer of torch, with its state elsewhere between steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch.optim import LBFGS, Optimizer

from .._errors import StateError
from ._buckets import Buckets
from ._tiers import FolderTier, HostTier, Tier

Opt = TypeVar("Opt", bound=Optimizer)


def offload_optimizer(
    optimizer: Opt,
    *,
    folder: str | os.PathLike[str] | None = None,
    bucket_numel: int = 1 << 22,
) -> Opt:
    """Keep an optimizer's state in CPU memory or in files, except for what is being stepped.

    In place: call it on an optimizer over any parameters, before making a scheduler for it. Each
    step goes bucket by bucket, while a thread fetches the state of the next one and writes back
    that of the last one; parameters and state become what they would without it, to the last bit.
    `state_dict()`, `save_sharded` and the others see all state; `load_state_dict` takes memory for
    all of it on the parameters' device once more, for as long as it runs.

    Args:
        optimizer: of torch or like it; any that treats each parameter separately.
        folder: an existing one for the files, which have no name and vanish with the process;
            default: CPU memory, pinned where there is an accelerator. State that is on the CPU
            stays as it is then.
        bucket_numel: elements of parameters that are stepped together; a larger parameter is a
            bucket of its own. The state of at most two buckets is in memory. On an accelerator
            give `chunks` a size as well, or a segment is one parameter.

    Returns:
        The optimizer, of a subclass of its class.

    Raises:
        StateError: the optimizer looks at all parameters together or is differentiable, has its
            state elsewhere already or a scheduler around its step, `bucket_numel` is below 1, or
            nothing can be written to the folder. Then nothing has changed.

    Example:
        >>> layer = torch.nn.Linear(3, 2)
        >>> optimizer = offload_optimizer(torch.optim.AdamW(layer.parameters(), lr=0.1))
        >>> layer(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[layer.weight])
        ['exp_avg', 'exp_avg_sq', 'step']
    """
    _check(optimizer, bucket_numel)
    tier: Tier = HostTier() if folder is None else FolderTier(folder)
    cls = type(optimizer)
    buckets = Buckets(tier, bucket_numel, _own_step(cls))
    buckets.put_away_all(optimizer.state)
    step = Optimizer.profile_hook_step(OffloadedOptimizer.step)
    step.hooked = True  # type: ignore[attr-defined]  # torch then hooks it no second time
    vars(optimizer)["_buckets"] = buckets
    optimizer.__class__ = type(
        f"Offloaded{cls.__name__}", (OffloadedOptimizer, cls), {"step": step}
    )
    return optimizer


class OffloadedOptimizer(Optimizer):
    """What `offload_optimizer` adds to an optimizer's class. Not to be made by hand."""

    _buckets: Buckets

    @property
    def state(self) -> Any:
        """All state by parameter, wherever it lies.

        Raises:
            StateError: a step was stopped in the middle, or this process is a fork.
        """
        state = vars(self)["state"]
        self._buckets.check(state)
        return state

    @state.setter
    def state(self, state: Any) -> None:
        vars(self)["state"] = state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient, bucket by bucket.

        Args:
            closure: computes the loss again, once; gradients are what it leaves.

        Returns:
            What the closure returns.
        """
        self._buckets.check(vars(self)["state"])
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._buckets.step(self, vars(self)["state"])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and put it where it lies between steps; if that fails, nothing has changed."""
        before = vars(self)["state"], self.param_groups, self._buckets.stored
        self._buckets.stored = {}  # what was loaded before may be what is put back
        try:
            super().load_state_dict(state_dict)
            self._buckets.put_away_all(vars(self)["state"])
        except BaseException:
            vars(self)["state"], self.param_groups, self._buckets.stored = before
            raise

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError(
            f"flat_param.offload_optimizer: {type(self).__name__} cannot be copied or pickled, "
            "but its state is kept elsewhere. Save its state_dict(), and load it into another "
            "one."
        )


def _own_step(cls: type[Optimizer]) -> Callable[[Any], object]:
    """The step of a class without the hooks that torch has put around it, which run once."""
    step = cls.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def _check(optimizer: Optimizer, bucket_numel: int) -> None:
    """Refuse what cannot be stepped bucket by bucket, before anything changes."""
    name = type(optimizer).__name__
    wrong = ""
    if not isinstance(optimizer, Optimizer):
        wrong = "is no optimizer, but its state is moved. Pass one of torch.optim, or a subclass"
    elif isinstance(optimizer, OffloadedOptimizer):
        wrong = "has its state elsewhere already, but there is one such place. Call it once"
    elif isinstance(optimizer, LBFGS):
        wrong = "looks at all parameters together, but they are stepped in buckets. Use another"
    elif any(group.get("differentiable") for group in optimizer.param_groups):
        wrong = "is differentiable, but its state leaves the graph. Pass differentiable=False"
    elif "step" in vars(optimizer):
        wrong = (
            "has a scheduler around its step, but that would go past its state. Make the scheduler "
            "after this call"
        )
    elif bucket_numel < 1:
        wrong = (
            f"was to step buckets of {bucket_numel} elements, but a bucket has at least one. Pass 1"
        )
    if wrong:
        raise StateError(f"flat_param.offload_optimizer: {name} {wrong}.")
