"""Parameters in buckets, and the state of each bucket as it comes and goes.

Rule 1: a bucket is stepped by the optimizer's own step, which is given nothing else. What it
        computes is what it would compute for all parameters: torch's optimizers treat each alone.
        The state of two buckets is in memory at most (Rule 1 of `_mover`).
Rule 2: state is a tensor of one dimension or more. Counts and other values stay with the optimizer.
Rule 3: a step that was stopped has changed some buckets and not others, so its state is refused
        whenever it is asked for, until other state is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._errors import StateError
from ._mover import Mover
from ._tiers import Tier, lay_out, packed_stride

State = Mapping[Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Stored:
    """Where one value of the state lies between steps.

    Args:
        tensor: of a tier.
        device: on which it is computed with.
    """

    tensor: Tensor
    device: torch.device


@dataclass(frozen=True)
class Bucket:
    """Parameters that are stepped together.

    Args:
        group: of the optimizer.
        params: some of the group's.
    """

    group: dict[str, Any]
    params: list[Tensor]


@dataclass(frozen=True)
class Arrival:
    """State on its way to where it is computed with.

    Args:
        places: where the optimizer looks for each value.
        values: what will be there.
    """

    places: list[tuple[dict[str, Any], str]]
    values: Future[list[Tensor]]

    def wait(self) -> list[Tensor]:
        """Give the optimizer what has arrived; the list is the only other place that has it."""
        values = self.values.result()
        for (state, key), value in zip(self.places, values, strict=True):
            state[key] = value
        return values


class Buckets:
    """What an optimizer knows whose state is elsewhere.

    Args:
        tier: where state lies between steps.
        numel: elements of a bucket; a larger parameter is one of its own.
        own_step: of the optimizer's class, without hooks.

    Attributes:
        stored: by parameter and name, what lies there. A value that the optimizer has in its place
            is at hand, and not there yet.
    """

    def __init__(self, tier: Tier, numel: int, own_step: Callable[[Any], object]) -> None:
        self._tier, self._numel, self._own_step = tier, numel, own_step
        self.stored: dict[Tensor, dict[str, Stored]] = {}
        self._stopped: tuple[State | None, str] = None, ""
        self._steps = False  # whether a step is running now, which may look at its state

    def check(self, state: State) -> None:
        """Refuse state that is half stepped, or another process's.

        Raises:
            StateError: see Rule 3, and `Tier.check`.
        """
        stopped, where = self._stopped
        if stopped is state and not self._steps:
            raise StateError(
                f"flat_param.offload_optimizer: a step was stopped in {where}, but buckets before "
                "it have stepped and those after it have not. Load parameters and state that were "
                "saved together."
            )
        self._tier.check()

    def step(self, optimizer: Optimizer, state: State) -> None:
        """Step every bucket, with the state of the next one on its way."""
        groups = optimizer.param_groups
        buckets = list(self._of(groups))
        try:
            try:
                with Mover(self._tier) as mover:
                    self._step_each(optimizer, state, buckets, mover)
            finally:
                self._end(optimizer, groups)
        finally:  # again: an interrupt may have come in place of the first
            self._end(optimizer, groups)

    def _end(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        optimizer.param_groups = groups
        self._steps = False

    def _step_each(
        self, optimizer: Optimizer, state: State, buckets: Sequence[Bucket], mover: Mover
    ) -> None:
        arriving = self._fetch(mover, state, buckets[:1])
        for index, bucket in enumerate(buckets):
            arrived, arriving = arriving, self._fetch(mover, state, buckets[index + 1 :][:1])
            self._steps = True
            self._stopped = state, f"bucket {index + 1} of {len(buckets)}"
            used = arrived.wait()
            self._step_one(optimizer, bucket)
            self._put_away(mover, state, bucket.params, used)
        mover.wait()
        self._stopped = None, ""

    def _of(self, groups: Sequence[dict[str, Any]]) -> Iterator[Bucket]:
        """Parameters with gradients, in the optimizer's order."""
        for group in groups:
            trained = [param for param in group["params"] if param.grad is not None]
            for params in self._runs(trained):
                yield Bucket(group, params)

    def _runs(self, params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
        run: list[Tensor] = []
        for param in params:
            if run and sum(map(Tensor.numel, run)) + param.numel() > self._numel:
                yield run
                run = []
            run.append(param)
        if run:
            yield run

    def _step_one(self, optimizer: Optimizer, bucket: Bucket) -> None:
        """Have the optimizer step one bucket; `_end` gives it all its groups back.

        Raises:
            StateError: it keeps something in the group's options, which would count buckets.
        """
        mine = {**bucket.group, "params": bucket.params}
        optimizer.param_groups = [mine]
        self._own_step(optimizer)
        changed = [
            key for key in mine if key != "params" and mine[key] is not bucket.group.get(key)
        ]
        if changed:
            raise StateError(
                f"flat_param.offload_optimizer: {type(optimizer).__name__} changes '{changed[0]}' "
                "of its parameter group in a step, but it steps once per bucket. Use it as it is."
            )

    def _fetch(self, mover: Mover, state: State, buckets: Sequence[Bucket]) -> Arrival:
        """Begin to bring the state of at most one bucket."""
        found = [
            ((state[param], key), stored)
            for bucket in buckets
            for param in bucket.params
            for key, stored in self.stored.get(param, {}).items()
            if state.get(param, {}).get(key) is stored.tensor
        ]
        tensors, devices = [one.tensor for _, one in found], [one.device for _, one in found]
        return Arrival([place for place, _ in found], mover.fetch(tensors, devices))

    def _put_away(
        self, mover: Mover, state: State, params: Sequence[Tensor], used: list[Tensor]
    ) -> None:
        """Begin to move the state of parameters to the tier, and show it there."""
        values, places = self._placed(state, params)
        mover.store(list(values.values()), list(places.values()), used=used)
        self._show(state, values, places)

    def put_away_all(self, state: State) -> None:
        """Move all state to the tier; nothing has changed where that fails."""
        values: dict[tuple[Tensor, str], Tensor] = {}
        places: dict[tuple[Tensor, str], Tensor] = {}
        for params in self._runs(param for param in state if isinstance(param, Tensor)):
            some, of_some = self._placed(state, params)
            for value, place in zip(some.values(), of_some.values(), strict=True):
                place.copy_(value)
            values, places = values | some, places | of_some
        self._show(state, values, places)

    def _placed(
        self, state: State, params: Sequence[Tensor]
    ) -> tuple[dict[tuple[Tensor, str], Tensor], dict[tuple[Tensor, str], Tensor]]:
        """What is to be moved of these parameters' state, and where to."""
        values = {
            (param, key): value
            for param in params
            for key, value in state.get(param, {}).items()
            if self._moves(value)
        }
        places = {at: self._place_of(at, value) for at, value in values.items()}
        new = [at for at, place in places.items() if place is None]
        if new:
            made = lay_out([values[at] for at in new], self._tier)
            places.update(zip(new, made, strict=True))
        return values, {at: place for at, place in places.items() if place is not None}

    def _moves(self, value: Any) -> bool:
        """Whether a value is state that is elsewhere between steps (Rule 2)."""
        return (
            type(value) is Tensor
            and math.prod(value.shape) > 0
            and bool(value.dim())
            and (self._tier.moves(value.device))
        )

    def _place_of(self, at: tuple[Tensor, str], value: Tensor) -> Tensor | None:
        """Where a value lay before, if it still fits there."""
        known = self.stored.get(at[0], {}).get(at[1])
        if known is None or known.tensor is value or known.tensor.dtype != value.dtype:
            return None
        fits = known.tensor.shape == value.shape and known.tensor.stride() == packed_stride(value)
        return known.tensor if fits else None

    def _show(
        self,
        state: State,
        values: Mapping[tuple[Tensor, str], Tensor],
        places: Mapping[tuple[Tensor, str], Tensor],
    ) -> None:
        for (param, key), place in places.items():
            device = values[param, key].device
            self.stored.setdefault(param, {})[key] = Stored(place, device)
            state[param][key] = place
