"""Run a function as a region of the tape engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._torch_compat import saved_tensor_hooks
from ..policies._modules import root_of
from ..policies._policies import Policy
from ..policies._unmatched import watches
from ._observed import Observed
from ._recorders import Table, tables
from ._tape import Region, Tape, tape_here


def run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    policy: Policy,
    check: str = "default",
    observer: Observed | None = None,
) -> Any:
    """Call `function` so that backward replays what `policy` does not keep.

    Args:
        function: called once; backward calls single operators again.
        args: its positional arguments.
        kwargs: its keyword arguments.
        policy: what to keep.
        check: "default", "bits" or "none". "default" compares
            in the first forward of a function under a policy.
        observer: sees every call that the policy is asked about.

    Raises:
        PolicyError: the policy reads modules, and there is no module to name paths from.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    watch = watches.of(policy)
    is_new = watch.is_new(function)
    checks = check == "bits" or (is_new and check == "default")
    # In the first forward, a new table lists only the operators of this region, for warnings.
    table = Table() if is_new else tables.of(policy)
    region = Region(policy, table, watch, root_of(function), checks, observer)
    hooks = saved_tensor_hooks()
    tape = tape_here(hooks)
    watch.running += 1
    try:
        if tape is None:
            out = Tape(region, hooks).run(function, args, kwargs)
        else:
            out = tape.run_inside(region, function, args, kwargs)
    finally:
        watch.running -= 1
    if is_new or watch.open:
        watch.forward_ended(policy, region.seen(), function)
    return out
