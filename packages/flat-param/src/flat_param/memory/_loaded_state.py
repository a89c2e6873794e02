"""Keeps torch's optimizers from stepping with state that was made over other parameters.

torch loads state by position and compares no shapes. Where the number of parameters happens to
agree, as it does for a module before and after sharding, fused kernels read as many elements as
the parameter now has: another stretch than its own, or what lies behind the end.

Rule: each optimizer is looked at before its first step, and before the first one after each load.
      Only torch's own that work element by element are: all their state but counts has its
      parameter's shape. What others keep is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

from torch import Tensor, optim
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

ELEMENTWISE = frozenset(
    {
        *(optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax),
        *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
    }
)


class LoadedStates:
    """The optimizers whose state is known to fit parameters of one kind.

    Args:
        mark: an attribute that such parameters have, and no others.
        refusal: gives the error for a parameter, the name of the state, and its shape.
    """

    def __init__(
        self, mark: str, refusal: Callable[[Any, str, tuple[int, ...]], Exception]
    ) -> None:
        self._mark, self._refusal = mark, refusal
        self._fit: WeakSet[Optimizer] = WeakSet()
        self._tell_of_loads: WeakSet[Optimizer] = WeakSet()

    def install(self) -> None:
        """Look at every optimizer from now on, by a hook that torch calls before each step."""
        register_optimizer_step_pre_hook(self.check)

    def forget(self) -> None:
        """Look at all optimizers again: parameters that they have became other ones."""
        self._fit.clear()

    def check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Raise before a step with state of another shape than its parameter's."""
        if optimizer in self._fit:
            return
        for param, key, shape in self._misfits(optimizer):
            raise self._refusal(param, key, shape)
        self._fit.add(optimizer)
        if optimizer not in self._tell_of_loads:
            self._tell_of_loads.add(optimizer)
            optimizer.register_load_state_dict_post_hook(self._fit.discard)

    def _misfits(self, optimizer: Optimizer) -> Iterator[tuple[Any, str, tuple[int, ...]]]:
        classes = type(optimizer).__mro__  # with state offloaded it has a class of this package
        own = next(cls for cls in classes if not cls.__module__.startswith("flat_param."))
        for group in optimizer.param_groups if own in ELEMENTWISE else ():
            for param in group["params"]:
                if not hasattr(param, self._mark):
                    continue
                for key, value in optimizer.state.get(param, {}).items():
                    has_shape = isinstance(value, Tensor) and value.dim()
                    if has_shape and value.shape != param.shape:
                        yield param, key, tuple(value.shape)
