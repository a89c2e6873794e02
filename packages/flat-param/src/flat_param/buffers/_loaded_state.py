"""Refuse optimizer steps with state that was made for other parameters.

torch loads state by position and compares no shapes. The number of parameters may agree by chance,
as for a module before and after sharding. Fused kernels then read as many elements of the state as
the parameter has now, beyond the state's end or in another parameter's state.

- Each optimizer is checked before its first step, and before the first step after each load.
- torch's elementwise optimizers have only counts and state of the parameter's shape. State of any
  other shape is an error.
- Other optimizers may have any state, but they never see the full parameter of a piece. So it is an
  error if all state under one key has the full shape of its parameter. One shape with a single
  dimension is accepted, since it may agree by chance.
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


_Found = tuple[Any, str, tuple[int, ...]]


class LoadedStates:
    """Optimizers whose state was checked against parameters of one kind, such as chunks.

    Args:
        mark: an attribute that such parameters have, and no others.
        refusal: returns the error for a parameter, the state's key and the state's shape.
        whole: the attribute with the full parameter's shape.
    """

    def __init__(
        self,
        mark: str,
        refusal: Callable[[Any, str, tuple[int, ...]], Exception],
        whole: str = "",
    ) -> None:
        self._mark, self._refusal, self._whole = mark, refusal, whole
        self._fit: WeakSet[Optimizer] = WeakSet()
        self._tell_of_loads: WeakSet[Optimizer] = WeakSet()

    def install(self) -> None:
        """Check every optimizer from now on, before each step."""
        register_optimizer_step_pre_hook(self.check)

    def forget(self) -> None:
        """Check all optimizers again, after parameters have changed."""
        self._fit.clear()

    def check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Raise before a step with state that belongs to other parameters."""
        if optimizer in self._fit:
            return
        for param, key, shape in self._misfits(optimizer):
            raise self._refusal(param, key, shape)
        self._fit.add(optimizer)
        if optimizer not in self._tell_of_loads:
            self._tell_of_loads.add(optimizer)
            optimizer.register_load_state_dict_post_hook(self._fit.discard)

    def _misfits(self, optimizer: Optimizer) -> Iterator[_Found]:
        classes = type(optimizer).__mro__  # offloading adds a class of this package
        own = next(cls for cls in classes if not cls.__module__.startswith("flat_param."))
        found = (each for each in self._shaped(optimizer) if each[2] != tuple(each[0].shape))
        return found if own in ELEMENTWISE else self._of_wholes(found)

    def _shaped(self, optimizer: Optimizer) -> Iterator[_Found]:
        """Yield all state with a shape, of parameters of the kind."""
        for group in optimizer.param_groups:
            for param in group["params"]:
                if hasattr(param, self._mark):
                    for key, value in optimizer.state.get(param, {}).items():
                        if isinstance(value, Tensor) and value.dim():
                            yield param, key, tuple(value.shape)

    def _of_wholes(self, misfits: Iterator[_Found]) -> Iterator[_Found]:
        """State with the whole parameters' shapes."""
        by_key: dict[str, list[_Found]] = {}
        for found in misfits:
            by_key.setdefault(found[1], []).append(found)
        for each in by_key.values():
            shapes = {shape for _, _, shape in each}
            if any(shape != getattr(param, self._whole, None) for param, _, shape in each):
                continue
            if len(shapes) > 1 or any(len(shape) > 1 for shape in shapes):
                yield each[0]
