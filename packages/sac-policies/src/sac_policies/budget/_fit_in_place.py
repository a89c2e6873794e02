"""Checkpoints a model's blocks in place until a measured step fits a budget.

Rule 1. Regions are the modules that repeat, or else that are called again, in the order in which
        they run. What they keep is said by operator, so another loss, batch or branch than the
        measured one is no error.
Rule 2. There are a few levels, from nothing recomputed to everything. Between two of them, the
        first blocks are on the lower one: what they keep lives longest.
Rule 3. A level is accepted only after a step on it was measured within the budget.
Rule 4. All that is changed is an attribute `forward` of each region; `undo` takes it away.
Rule 5. A region that writes to its buffers has no second forward: running statistics would count
        a batch twice.
Rule 6. All ranks decide from the same numbers, the largest peak of each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from .._checkpoint import checkpoint
from .._errors import BudgetError
from ..policies._budget_plan import Infeasible
from ..policies._builders import recompute_all, save_ops
from ..policies._policies import Policy
from ._agree import check_equal
from ._repeating import Seen, called_again, repeating
from ._sizes import Budget, budget_bytes, format_size
from ._step import Loss, Step, check_step

LEVELS = ("keeps everything", "keeps matmuls", "recomputes everything", "runs again")
"""What a region does: no checkpointing; costly operators kept; nothing kept and values replayed;
nothing kept and a second forward, for what no replay can rebuild."""


@dataclass(frozen=True)
class RegionFit:
    """What one region of the model does.

    Attributes:
        path: of the module.
        level: one of "keeps everything", "keeps matmuls" (attention and convolutions, too),
            "recomputes everything" and "runs again".
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
        plain_bytes: the same without checkpointing.
        budget_bytes: the budget.
        regions: what each does, in the order in which they run.
        rounds: (regions that are checkpointed, peak) of each step that was measured, in order.
    """

    peak_bytes: int
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
            f"{share:.0f} % of {format_size(self.plain_bytes)} without checkpointing"
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
    without checkpointing, and then few steps more: the first blocks keep less, or recompute
    everything, until a step fits. About eight steps are run. Collective where a process group is
    initialised.

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
            search.put(0)
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
        if level == 1 and self.operators:
            return RegionFit(self.path, LEVELS[1], save_ops(*self.operators), "auto")
        again = level == 3 and self.runs_again
        engine = "contexts" if again else "recipe"
        return RegionFit(self.path, LEVELS[3 if again else 2], recompute_all(), engine)


class _Search:
    """Rungs of a ladder, from nothing checkpointed to everything run again (Rule 2)."""

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
        self._levels = [0, 1, 2, 3] if any(seen.operators.values()) else [0, 2, 3]
        self._rounds: list[tuple[int, int]] = []

    def run(self, budget: Budget) -> InPlaceFit | Infeasible:
        """Find the lowest rung that fits, by halves; every answer was measured (Rule 3)."""
        count = len(self._regions)
        plain = self._peak(0)
        allowed = budget_bytes(budget, total_bytes=plain)
        if plain <= allowed:
            return self._found(0, plain, plain, allowed)
        # From the most that can be done: what no replay rebuilds may make that one peak higher.
        for high in range((len(self._levels) - 1) * count, 0, -max(count, 1)):
            peak = self._peak(high)
            if peak <= allowed:
                break
        else:
            self.put(0)
            return Infeasible(allowed, min(peak for _, peak in self._rounds))
        low = 0
        while high - low > 1:
            middle = (low + high) // 2
            measured = self._peak(middle)
            low, high, peak = (
                (low, middle, measured) if measured <= allowed else (middle, high, peak)
            )
        return self._found(high, peak, plain, allowed)

    def _found(self, rung: int, peak: int, plain: int, allowed: int) -> InPlaceFit:
        done = self.put(rung)
        modules = tuple(region.module for region in self._regions)
        return InPlaceFit(peak, plain, allowed, done, tuple(self._rounds), modules)

    def _peak(self, rung: int) -> int:
        done = self.put(rung)
        peak = self._step.peak(self._model)
        self._rounds.append((sum(region.policy is not None for region in done), peak))
        return peak

    def put(self, rung: int) -> tuple[RegionFit, ...]:
        """Have all regions do what they do on a rung."""
        level, first = divmod(rung, len(self._regions)) if self._regions else (0, 0)
        done = []
        for number, region in enumerate(self._regions):
            does = region.at(self._levels[level + (number < first)])
            _release(region.module)
            if does.policy is not None:
                own = _Checkpointed(region.module, does.policy, does.engine)
                region.module.forward = own
            done.append(does)
        return tuple(done)
