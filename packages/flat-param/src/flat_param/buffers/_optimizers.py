"""torch's elementwise optimizers, and copies of an optimizer that step other parameters.

Copies are for trials, and for steps bucket by bucket.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

from torch import optim
from torch.optim import Optimizer

from .._torch_compat import STEP_HOOKS

ELEMENTWISE = frozenset(
    {
        *(optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax),
        *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
    }
)
"""torch's optimizers whose state is counts, and tensors of their parameter's shape."""

_BESIDE = ("state", "param_groups", "defaults", "step")  # a scheduler wraps `step`


def twin_of(optimizer: Optimizer, kind: Any, groups: list[dict[str, Any]], state: Any) -> Any:
    """An optimizer of class `kind` with the same attributes, without hooks.

    If its step calls `super().step()`, torch calls the step hooks of all optimizers. They tell a
    twin by its attribute `is_twin`.
    """
    twin = object.__new__(kind)
    for key, value in vars(optimizer).items():
        if key not in _BESIDE:
            vars(twin)[key] = OrderedDict() if key.startswith("_optimizer_") else value
    vars(twin).update({key: OrderedDict() for key in STEP_HOOKS}, defaults=optimizer.defaults)
    vars(twin).update(param_groups=groups, state=state, is_twin=True)
    return twin


def trial_of(optimizer: Optimizer, params: Iterable[list[Any]]) -> Any:
    """A twin over the `params` of each group that shares nothing with the optimizer.

    Raises:
        TypeError: an attribute or an option is no plain value, so a copy might share its state.
    """
    groups = [
        {**group, "params": own} for group, own in zip(optimizer.param_groups, params, strict=False)
    ]
    twin = twin_of(optimizer, type(optimizer), groups, defaultdict(dict))
    for values in (vars(twin), *groups):
        for key, value in values.items():
            if key not in ("params", "param_groups", "state"):
                values[key] = _copied(value)
    return twin


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value)((key, _copied(each)) for key, each in value.items())
    if isinstance(value, (tuple, list)):
        return type(value)(map(_copied, value))
    if isinstance(value, (bool, int, float, complex, str, type(None))):
        return value
    raise TypeError(f"{type(value).__name__} is no plain value")
