"""Checkpoints a model's blocks in place so that a measured step fits a budget.

Rule 1. Regions are the modules that repeat, or else that are called again, in the order in which
        they run. What they keep is said by operator, so another loss, batch or branch than the
        measured one is no error.
Rule 2. There are a few levels, from nothing recomputed to everything. A step is measured with all
        regions on each; from those the peak of any mixture is known, and the one that costs least
        time is taken (`_intervals.py`).
Rule 3. What is taken is accepted only after a step with it was measured within the budget.
Rule 4. All that is changed is an attribute `forward` of each region; `undo` takes it away.
Rule 5. A region that writes to its buffers has no second forward: running statistics would count
        a batch twice.
Rule 6. All ranks decide from the same numbers, the largest peak of each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from .._checkpoint import checkpoint
from .._errors import BudgetError
from ..policies._budget_plan import Infeasible
from ..policies._builders import offload, recompute_all, save_ops
from ..policies._policies import Policy
from ._agree import check_equal
from ._intervals import Measured, Steps, marked
from ._measure import Interval, Marks, highest
from ._repeating import Seen, called_again, repeating
from ._sizes import Budget, budget_bytes, format_size
from ._step import Loss, Step, check_step

LEVELS = (
    "keeps everything",
    "keeps matmuls",
    "recomputes everything",
    "runs again",
    "offloads matmuls",
)
"""What a region does: no checkpointing; costly operators kept; nothing kept and values replayed;
nothing kept and a second forward, which also rebuilds what no replay can; costly operators moved to
the host, and a second forward for the rest. The last is for accelerators."""
_TRIES = 3
"""Mixtures that are measured until one fits."""
_MOST_TURNS, _ENOUGH_NS = 5, 2_000_000_000
"""How often levels are timed in turn: as often as that, unless it would take this long."""


@dataclass(frozen=True)
class RegionFit:
    """What one region of the model does.

    Attributes:
        path: of the module.
        level: one of "keeps everything", "keeps matmuls" (attention and convolutions, too),
            "recomputes everything", "runs again", and on accelerators "offloads matmuls".
        policy: for `checkpoint`; None where everything is kept.
        engine: for `checkpoint`.
    """

    path: str
    level: str
    policy: Policy | None
    engine: str


@dataclass(frozen=True)
class InPlaceFit:
    """A model that was changed, and what a step of it takes.

    Attributes:
        peak_bytes: most memory in use during a step; at most the budget.
        predicted_bytes: the same as it was foretold from steps on single levels.
        plain_bytes: the same without checkpointing.
        budget_bytes: the budget.
        regions: what each does, in the order in which they run.
        rounds: (regions that are checkpointed, peak) of each step that was measured, in order.
    """

    peak_bytes: int
    predicted_bytes: int
    plain_bytes: int
    budget_bytes: int
    regions: tuple[RegionFit, ...]
    rounds: tuple[tuple[int, int], ...]
    _modules: tuple[nn.Module, ...]

    def undo(self) -> None:
        """Take the checkpointing off again; nothing is left, and twice is as good as once."""
        for module in self._modules:
            _release(module)

    def __str__(self) -> str:
        """A line for the whole, and one for each group of regions."""
        share = 100 * self.peak_bytes / self.plain_bytes
        lines = [
            f"a step takes {format_size(self.peak_bytes)} of {format_size(self.budget_bytes)}, "
            f"{share:.0f} % of {format_size(self.plain_bytes)} without checkpointing "
            f"(foretold: {format_size(self.predicted_bytes)})"
        ]
        for level in LEVELS:
            paths = [region.path or "the model" for region in self.regions if region.level == level]
            if paths:
                between = f"{paths[0]} to {paths[-1]}" if len(paths) > 1 else paths[0]
                lines.append(f"{len(paths):>4} x {level}: {between}")
        return "\n".join(lines)


def fit_(
    model: nn.Module, batch: Any, budget: Budget, *, loss: Loss | None = None
) -> InPlaceFit | Infeasible:
    """Checkpoint the blocks of a model in place, as little as lets a step fit `budget`.

    Finds the modules that repeat (layers of a transformer, blocks of a network), measures a step
    without checkpointing and one with all of them on each of three levels (four on
    accelerators, where values can be offloaded), and lets each do what costs least time in all. A
    last step confirms that it fits. About a dozen steps are run, short ones more often. Collective
    where a process group is initialised.

    Args:
        model: on the device it trains on, in the mode it trains in. Parameters, buffers,
            gradients and random state are left as they were; names and state dict stay.
        batch: a tuple of its arguments, a dict of its keyword arguments, or its one argument.
        budget: most memory that a step may take: bytes (int), "6 GiB", or a fraction ("60%",
            0.6) of what it takes without checkpointing. Counts parameters, buffers, gradients,
            the batch and all that a forward and backward allocate; not optimiser state.
        loss: from the model's output to a scalar; by default the output's own `loss`, else the
            sum of its float tensors.

    Returns:
        What was done; `undo()` takes it back. Or an `Infeasible`, which is false, with the
        smallest peak that was measured; the model is then as it was.

    Raises:
        BudgetError: `model` is not a module or was fitted before, the budget does not parse, the
            output has no gradient, or ranks have other blocks.

    Example:
        >>> import torch
        >>> model = nn.Sequential(*[nn.TransformerEncoderLayer(16, 2) for _ in range(4)])
        >>> found = fit_(model, torch.ones(8, 4, 16), "80%")
        >>> found.peak_bytes <= 0.8 * found.plain_bytes
        True
        >>> found.undo()
    """
    check_step("fit_", model, loss)
    budget_bytes(budget, total_bytes=0)  # refused before anything runs
    fitted = [path for path, module in model.named_modules() if _is_checkpointed(module)]
    if fitted:
        raise BudgetError(
            f"sac_policies.fit_: module {fitted[0]!r} is checkpointed by an earlier fit_, but a "
            "budget is divided once. Call undo() of what that one returned."
        )
    step, search = Step("fit_", model, batch, loss), None
    try:
        with step.leaving_the_model():
            search = _Search(model, step)
            found = search.run(budget)
    except BaseException:  # whoever is interrupted has nothing to call undo() of
        if search is not None:
            search.undo()
        raise
    return found


class _Checkpointed:
    """A module's `forward` as a region.

    Args:
        module: whose it is; what somebody else had put in the place of its class's is put back.
        policy: what it keeps.
        engine: which engine runs it.
    """

    def __init__(self, module: nn.Module, policy: Policy, engine: str) -> None:
        self.forward, self.policy, self.engine = module.forward, policy, engine
        self.was_replaced = "forward" in vars(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, checkpointed."""
        return checkpoint(self.forward, *args, policy=self.policy, engine=self.engine, **kwargs)


def _is_checkpointed(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), _Checkpointed)


def _release(module: nn.Module) -> None:
    own = vars(module).get("forward")
    if isinstance(own, _Checkpointed):
        if own.was_replaced:
            module.forward = own.forward
        else:
            del module.forward


@dataclass(frozen=True)
class _Region:
    path: str
    module: nn.Module
    operators: tuple[Any, ...]
    """Costly ones that ran in it."""
    runs_again: bool
    """Whether it may: a second forward would count running statistics twice."""

    def at(self, level: int) -> RegionFit:
        """What it does on a level."""
        if level == 0:
            return RegionFit(self.path, LEVELS[0], None, "auto")
        if level == 4 and self.runs_again and self.operators:
            return RegionFit(self.path, LEVELS[4], offload(*self.operators), "contexts")
        if level in (1, 4) and self.operators:
            return RegionFit(self.path, LEVELS[1], save_ops(*self.operators), "auto")
        again = level >= 3 and self.runs_again
        engine = "contexts" if again else "recipe"
        return RegionFit(self.path, LEVELS[3 if again else 2], recompute_all(), engine)


class _Search:
    """Finds what each region is to do."""

    def __init__(self, model: nn.Module, step: Step) -> None:
        self._model, self._step = model, step
        regions = repeating(model)
        if regions[0][1] is model:
            regions = called_again(model, lambda: step.run(model)) or regions
        with Seen(regions) as seen:
            step.run(model)
        modules = dict(regions)
        self._regions = [
            _Region(path, modules[path], tuple(ops), path not in seen.wrote)
            for path, ops in seen.operators.items()
        ]
        check_equal(repr(list(seen.operators)), what="block", where="fit_")
        self._levels = len(LEVELS) - (step.device.type == "cpu")
        self._rounds: list[tuple[int, int]] = []

    def run(self, budget: Budget) -> InPlaceFit | Infeasible:
        """Measure each level, choose, and measure what was chosen (Rules 2 and 3)."""
        resident, count = self._step.resident(), len(self._regions)
        intervals = [self._intervals(0)]
        uniform = [resident + highest(intervals[0])]
        allowed = budget_bytes(budget, total_bytes=uniform[0])
        if uniform[0] <= allowed:
            return self._found((0,) * count, uniform[0], uniform[0], uniform[0], allowed)
        self._learn()
        for level in range(1, self._levels):
            intervals.append(self._intervals(level))
            uniform.append(resident + highest(intervals[level]))
        kinds = [type(region.module) for region in self._regions]
        steps = Steps(kinds, list(map(Measured, intervals, self._times())))
        room = allowed - resident
        for _ in range(_TRIES):
            choice = steps.choose(room)
            if choice is None:
                break
            predicted = resident + steps.growth(choice)
            peak = self._peak(choice)
            if peak <= allowed:
                return self._found(choice, peak, predicted, uniform[0], allowed)
            room -= peak - allowed
        fitting = [level for level, peak in enumerate(uniform) if peak <= allowed]
        if not fitting:
            self._peak(steps.least())
            self.undo()
            return Infeasible(allowed, min(peak for _, peak in self._rounds))
        best = min(fitting, key=lambda level: sum(cost[level] for cost in steps.costs))
        return self._found((best,) * count, uniform[best], uniform[best], uniform[0], allowed)

    def _found(
        self, choice: tuple[int, ...], peak: int, predicted: int, plain: int, allowed: int
    ) -> InPlaceFit:
        done = self.put(choice)
        modules = tuple(region.module for region in self._regions)
        return InPlaceFit(peak, predicted, plain, allowed, done, tuple(self._rounds), modules)

    def _learn(self) -> None:
        """Have first forwards find out what later ones need not keep, on whichever level."""
        for level in (1, 2):
            self.put((level,) * len(self._regions))
            self._step.run(self._model)

    def _intervals(self, level: int) -> list[Interval]:
        done = self.put((level,) * len(self._regions))
        marks = Marks(self._step.device)
        with marked([region.module for region in self._regions], marks):
            found = self._step.intervals(self._model, marks)
        self._note(done, self._step.resident() + highest(found))
        return found

    def _times(self) -> list[dict[Any, int]]:
        """By level, the least time of each interval; short steps are run again, in turns."""
        found: list[dict[Any, int]] = []
        for _ in range(_MOST_TURNS):
            turn = [self._time(level) for level in range(self._levels)]
            pairs = zip(found or turn, turn, strict=True)
            found = [
                {key: min(ns, again.get(key, ns)) for key, ns in own.items()}
                for own, again in pairs
            ]
            if sum(sum(own.values()) for own in turn) * _MOST_TURNS > _ENOUGH_NS:
                break
        return found

    def _time(self, level: int) -> dict[Any, int]:
        self.put((level,) * len(self._regions))
        marks = Marks(self._step.device, clock=True)
        with marked([region.module for region in self._regions], marks):
            return self._step.times(self._model, marks)

    def _peak(self, choice: tuple[int, ...]) -> int:
        done = self.put(choice)
        peak = self._step.peak(self._model)
        self._note(done, peak)
        return peak

    def _note(self, done: tuple[RegionFit, ...], peak: int) -> None:
        self._rounds.append((sum(region.policy is not None for region in done), peak))

    def undo(self) -> None:
        """Have all regions keep everything."""
        self.put((0,) * len(self._regions))

    def put(self, choice: Sequence[int]) -> tuple[RegionFit, ...]:
        """Have each region do what it does on its level."""
        done = []
        for region, level in zip(self._regions, choice, strict=True):
            does = region.at(level)
            _release(region.module)
            if does.policy is not None:
                own = _Checkpointed(region.module, does.policy, does.engine)
                region.module.forward = own
            done.append(does)
        return tuple(done)
