"""Checkpoints a model's blocks in place so that a measured step fits a budget.

Regions are the modules that repeat, or that one step calls several times. If they do not fit the
budget, the blocks of lists inside them are tried, then segments of Sequentials. A step is measured
with all regions on each level. `_intervals` predicts the peak and time of every mixture from those
steps, and the fastest mixture that fits is measured before it is accepted. Policies name operators,
so later steps may use another loss, batch or branch than the measured one. All ranks use the
maximum of each number over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .._errors import BudgetError, MutationError, RecomputeError, SacError
from .._torch_compat._module_calls import around_calls, graph_breaks, is_compiled, is_taggable
from ._agree import check_equal, from_first_rank, largest
from ._checkpointed import (
    Checkpointed,
    Forwards,
    ReplacedForward,
    Tagged,
    is_checkpointed,
    release,
    release_copied,
    replacement_of,
)
from ._elsewhere import said_of
from ._helps import what_helps
from ._intervals import Steps, marked
from ._levels import HIDDEN_AWAY, KEEPING, KEEPS, LEVELS, RECOMPUTES, Candidate, RegionFit
from ._link import Hidden, hidden_by
from ._measure import Interval, Marks, highest
from ._progress import Progress
from ._repeating import Calls, called_again, check_compiled, inside, kind_of, repeating
from ._segments import Division, divide
from ._sizes import Budget, format_size
from ._solve import Infeasible
from ._step import Limit, Loss, Reset, Step, UsersStep, check_order, check_step, only_one

_TRIES = 2
"""Mixtures that are measured until one fits."""


@dataclass(frozen=True)
class InPlaceFit:
    """A model with checkpointed blocks, and the memory of a step.

    Attributes:
        peak_bytes: most memory in use during a step; at most the budget.
        plain_bytes: `peak_bytes` without checkpointing.
        predicted_bytes: prediction for `peak_bytes`, from steps at single levels.
        budget_bytes: the budget less the reserve.
        regions: each region and its level, in the order in which regions run.
        idle: blocks that the measured step did not run, and their levels. A step fits if it runs
            idle blocks instead of others of their class; a step that runs more blocks may take
            more.
        rounds: (number of checkpointed regions, peak) of each measured step, in order.
        elsewhere: regions that other code recomputes, and how to turn that off; "" if there are
            none.
    """

    peak_bytes: int
    plain_bytes: int
    predicted_bytes: int
    budget_bytes: int
    regions: tuple[RegionFit, ...]
    idle: tuple[RegionFit, ...]
    rounds: tuple[tuple[int, int], ...]
    elsewhere: str
    _checkpointed: tuple[ReplacedForward, ...]

    def undo(self) -> None:
        """Undo the checkpointing; a second call does nothing.

        Wrappers that users put around a block's forward stay, and call the block's original
        forward.
        """
        for region in self._checkpointed:
            region.undo()

    def __str__(self) -> str:
        """Format one line in total, and one for each group of regions."""
        taken, plain = self.peak_bytes, self.plain_bytes
        lines = [
            f"a step takes {format_size(taken)} of {format_size(self.budget_bytes)}, "
            f"{100 * taken / plain:.0f} % of {format_size(plain)} without checkpointing "
            f"(predicted: {format_size(self.predicted_bytes)})"
        ]
        lines += [f"   {group}" for group in _groups(self.regions)]
        if self.idle:
            lines.append(
                f"   not run when measured, so a step that runs more blocks may take more: "
                f"{'; '.join(_groups(self.idle))}"
            )
        if self.elsewhere:
            lines.append(f"   {self.elsewhere}")
        return "\n".join(lines)


def _groups(regions: Sequence[RegionFit]) -> list[str]:
    """Write a line for each level, with its regions."""
    found = []
    for level in LEVELS:
        those = [region for region in regions if region.level == level]
        paths = [region.path or "the model" for region in those]
        if paths:
            between = f"{paths[0]} to {paths[-1]}" if len(paths) > 1 else paths[0]
            kinds = ", ".join(dict.fromkeys(region.kind for region in those))
            found.append(f"{len(paths)} x {level}: {between} ({kinds})")
    return found


def fit_(
    model: nn.Module,
    batch: Any = None,
    budget: Budget | None = None,
    *,
    loss: Loss | None = None,
    step: UsersStep | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    reserve: Budget = 0,
    make_batch: Callable[[], Any] | None = None,
    reset: Reset | None = None,
    quiet: bool = False,
) -> InPlaceFit | Infeasible:
    """Checkpoint blocks of a model in place, no more than needed for a step to fit `budget`.

    Finds the modules that repeat (layers of a transformer, blocks of a network). Measures a step,
    which is a call of the model and a backward of its loss, or what `step` does,
    without checkpointing, and one with all of them on each of two levels. Accelerators have four
    levels: inputs can be offloaded, and so can values whose copies are hidden behind the forward.
    Then chooses the level of each module so that a step is as fast as possible. One or two more
    steps confirm that the mixture fits. At most eight steps are run, thirteen on accelerators. If
    no choice fits and the blocks are stages with lists of blocks, the blocks in those lists are
    tried next; then segments of consecutive children of `nn.Sequential` modules, chosen by their
    measured sizes. Collective.

    Later steps run each forward once. Backward calls single operators again, so counters, hooks,
    buffers, attributes and random numbers are those of the plain model; values that cannot be
    recomputed are kept. If a value that is read again was changed, backward raises an error.

    Measured steps leave no trace. Parameters, buffers, gradients, attributes of modules, the batch,
    and random numbers of torch, Python and NumPy are restored before each step and at the end, also
    after an error; so are objects that `step` names, such as a trainer. Optimizers that `step`
    steps change nothing, and their state counts. Functions of `register_post_accumulate_grad_hook`
    are not called; if an optimizer can be reached from them, the step is measured with gradients
    that are freed at once.

    Blocks that other code recomputes (a switch of transformers or diffusers, ckpt_wrap, torch's
    wrapper) are found; the result says how to turn that off. If it is turned on later, the next
    step warns.

    Args:
        model: on the device it trains on, in the mode it trains in.
        batch: a tuple of its arguments, a dict of its keyword arguments, or its one argument. Each
            step gets a copy, which shares the tensors.
        budget: most memory that a step may take: bytes (int), "6 GiB", a fraction ("60%",
            0.6) of what it takes without checkpointing, or "device": what is free now on the
            model's accelerator, with what the model, the batch, gradients and `optimizer` have
            there. Counts parameters, buffers, gradients, the batch and all that a forward and
            backward allocate; not the buckets that DDP keeps.
        loss: from the model's output to a scalar; by default the output's own `loss`, else the
            sum of its float tensors.
        step: called with the model and a batch; runs forward and backward as the training loop
            does, with its loss, scaling and accumulation. For example `trainer.training_step` of
            transformers and TRL. `batch` may then be any object.
        optimizer: its state counts in the peak: what it has, and what its first step will make.
            That is known for torch's elementwise optimizers; others need to have run a step.
        reserve: how much of the budget stays free, for the allocator and other programs: bytes,
            text, or a fraction of the budget.
        make_batch: makes a batch for each measured step, in place of `batch`: for batches that
            cannot be copied. All must have the same shapes.
        reset: called with the model before each measured step: for state that the user resets
            before each step and that is not in attributes of modules.
        quiet: whether to print nothing. By default each measured step prints a line to the standard
            error, if that is a terminal.

    Returns:
        The levels, with `undo()`. Or an `Infeasible`, which is false, with the smallest peak that
        was measured and the levels of that step; the model is then unchanged.

    Raises:
        BudgetError: `model` is not a module, has uninitialized parameters, was fitted before, is
            being fitted or is compiled as a whole; the batch cannot be copied, or `make_batch` or
            `reset` fails; the budget does not parse or is "device" on a CPU; the optimizer's state
            is not known; the output has no gradient; `step` runs no backward, runs none of the
            model's blocks, or reads an iterator; or ranks have other blocks.

    Example:
        >>> import torch
        >>> model = nn.Sequential(*[nn.TransformerEncoderLayer(16, 2) for _ in range(4)])
        >>> found = fit_(model, torch.ones(8, 4, 16), "80%")
        >>> found.peak_bytes <= 0.8 * found.plain_bytes
        True
        >>> found.undo()
    """
    check_step(model, loss, step)
    budget = check_order(batch, make_batch, budget)
    limit, progress = Limit(budget, reserve), Progress(quiet)
    measured = Step(model, batch, loss, optimizer, step=step, make_batch=make_batch, reset=reset)
    for module in model.modules():
        release_copied(module)
    fitted = [path for path, module in model.named_modules() if is_checkpointed(module)]
    if fitted:
        raise BudgetError(
            f"sac_policies.fit_: module {fitted[0]!r} is checkpointed by an earlier fit_, but a "
            "budget is divided once. Call undo() on its result."
        )
    measured.check_data()
    limit.settle(measured)
    forwards = None
    try:
        with only_one(model), measured.trials():
            forwards = Forwards(model)
            measured.settle_buckets()
            tried: list[Infeasible] = []
            check_compiled(model, repeating(model))
            with progress.step("which finds blocks"), Calls(model) as calls:
                measured.run()
            for division in _divisions(model, measured, calls):
                search = _Search(model, measured, division, calls, progress)
                found = search.run(limit)
                if isinstance(found, InPlaceFit):
                    return found
                tried.append(found)
    except BaseException:  # the caller gets no result to undo
        if forwards is not None:
            forwards.put_back()
        raise
    return min(tried, key=lambda each: each.smallest_bytes)


def _divisions(model: nn.Module, step: Step, calls: Calls) -> Iterator[Division]:
    """Yield the blocks of a model, the blocks inside them, and segments of Sequentials."""
    regions = repeating(model)
    if regions[0][1] is model:
        regions = called_again(model, calls) or regions
    last = regions
    while regions:
        yield Division(regions)
        last, regions = regions, inside(regions)
    segments = divide(model, last, step, calls)
    if segments is not None:
        yield segments


class _Search:
    """Finds the level of each region."""

    def __init__(
        self,
        model: nn.Module,
        step: Step,
        division: Division,
        calls: Calls,
        progress: Progress | None = None,
    ) -> None:
        self._step, self._division = step, division
        self._progress = progress or Progress(quiet=True)
        count = RECOMPUTES + 1 if step.device.type == "cpu" else len(LEVELS)
        self._usable = list(range(count))
        self._rounds: list[tuple[int, int]] = []
        self._tried: dict[int, list[str]] = {}
        regions = division.regions
        modules, ran = dict(regions), calls.ran(regions)
        self._elsewhere = said_of(model, regions, calls.recomputed)
        self._cause = self._elsewhere or _why_little(model, regions, any_ran=bool(ran))
        if step.is_users and not ran:
            raise BudgetError(
                f"sac_policies.fit_: step called none of the model's {len(regions)} blocks "
                f"({regions[0][0] or 'the model'}, ...), but these are checkpointed. Call the "
                "model that step is given, or fit the model that it calls."
            )
        self._regions = [_candidate(path, modules[path]) for path in ran]
        self._idle = [_candidate(path, module) for path, module in regions if path not in ran]
        check_equal(repr(ran), what="block")

    @property
    def _levels(self) -> int:
        """Number of levels; a choice has positions among those that are usable."""
        return len(self._usable)

    def run(self, limit: Limit) -> InPlaceFit | Infeasible:
        """Measure each level, choose a mixture, and measure it."""
        self._division.put()
        uniform = [(level,) * len(self._regions) for level in range(len(LEVELS))]
        intervals = [self._intervals(uniform[0])]
        peaks = [self._peak(intervals[0])]
        allowed = limit.allowed(peaks[0])
        if peaks[0] <= allowed:
            return self._found(uniform[0], peaks[0], peaks[0], peaks[0], allowed)
        if HIDDEN_AWAY in self._usable:
            self._hide_copies()
        self._learn()
        for level in range(1, self._levels):
            intervals.append(self._intervals(uniform[level]))
            peaks.append(self._peak(intervals[level]))
        steps, before = self._steps(intervals), self._step.resident()
        room = allowed - before
        fitting = [level for level, peak in enumerate(peaks) if peak <= allowed]
        for _ in range(_TRIES):
            choice = steps.choose(room)
            if choice is None and fitting:
                break
            done = choice or steps.least()
            peak = self._peak(self._intervals(done))
            if peak <= allowed:
                return self._found(done, peak, before + steps.growth(done), peaks[0], allowed)
            if choice is None:
                break
            room -= peak - allowed
        if not fitting:
            self.undo()
            smallest = min(peak for _, peak in self._rounds)
            share = f"{100 * smallest / peaks[0]:.0f} % of what it takes without checkpointing"
            how = ", ".join([share, *self._tried[smallest]])
            helps = what_helps(self._step, intervals[0], smallest, allowed)
            return Infeasible(allowed, smallest, how, helps, self._cause)
        best = min(fitting, key=lambda level: sum(cost[level] for cost in steps.costs))
        return self._found(uniform[best], peaks[best], peaks[best], peaks[0], allowed)

    def _steps(self, intervals: list[list[Interval]]) -> Steps:
        return Steps([kind_of(region.module) for region in self._regions], intervals)

    def _peak(self, intervals: list[Interval]) -> int:
        return self._step.resident() + highest(intervals)

    def _found(
        self, choice: tuple[int, ...], peak: int, predicted: int, plain: int, allowed: int
    ) -> InPlaceFit:
        done = self.put(choice)
        modules = [region.module for region in (*self._regions, *self._idle)]
        put = (*filter(None, map(replacement_of, modules)), *self._division.divided)
        idle = tuple(
            region.at(level)
            for region, level in zip(self._idle, self._idle_levels(choice), strict=True)
        )
        rounds = tuple(self._rounds)
        said = self._elsewhere
        return InPlaceFit(peak, plain, predicted, allowed, done, idle, rounds, said, put)

    def _hide_copies(self) -> None:
        """Choose for each kind of block the values whose copies its forward hides. Collective."""
        regions = [each for each in self._regions if not each.is_compiled]
        found: dict[type[nn.Module], Hidden] = {}

        def begin(number: int, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
            kind = kind_of(regions[number].module)
            if kind not in found:
                found[kind] = hidden_by(call, args, kwargs, self._step.device)

        with around_calls([each.module for each in regions], begin):
            self._step.run()
        kinds = [kind_of(each.module) for each in self._regions]
        chosen = from_first_rank([found.get(kind, (None, 0)) for kind in kinds])
        for at, (plan, size) in enumerate(chosen):
            self._regions[at] = replace(self._regions[at], hidden=plan, hidden_bytes=size)

    def _learn(self) -> None:
        """Run the first step of each level, which compiles and compares bits. Collective.

        If compiled code with tags has graph breaks on any rank, no compiled region is tagged. A
        level whose step changes a value that backward reads is left out.

        Raises:
            MutationError, RecomputeError: no level is left that checkpoints.
        """
        usable, errors = [KEEPS], list[SacError]()
        for level in self._usable[1:]:
            self.put((level,) * len(self._regions))
            try:
                with self._progress.step(f"the first in which each block {LEVELS[level]}"):
                    self._first_step()
            except (MutationError, RecomputeError) as error:
                errors.append(error)
            else:
                usable.append(level)
        if errors and usable == [KEEPS]:
            raise errors[0]
        self._usable = usable

    def _first_step(self) -> None:
        if not any(each.is_compiled and each.is_taggable for each in self._regions):
            self._step.run()
        elif largest(self._breaks()):
            self._regions = [replace(each, is_taggable=False) for each in self._regions]
            self._idle = [replace(each, is_taggable=False) for each in self._idle]

    def _breaks(self) -> bool:
        """Whether the compiler refuses tagged code, as with side effects, or breaks its graph."""
        before = graph_breaks()
        try:
            self._step.run()
        except RuntimeError:  # if the compiler did not raise it, later steps raise it again
            return True
        return graph_breaks() > before

    def _intervals(self, choice: tuple[int, ...]) -> list[Interval]:
        """Put each region on a level, and measure a step. Collective."""
        done = self.put(choice)
        marks, groups = Marks(self._step.device), _groups(done)
        with self._progress.step("; ".join(groups)) as told:
            with marked([region.module for region in self._regions], marks):
                found = self._step.intervals(marks)
            peak = self._peak(found)
            told.append(format_size(peak))
        self._rounds.append((sum(region.level != LEVELS[KEEPS] for region in done), peak))
        self._tried.setdefault(peak, groups)
        return found

    def undo(self) -> None:
        """Put all regions on the level that keeps everything, and restore divided forwards."""
        self.put((0,) * len(self._regions))
        self._division.undo()

    def put(self, choice: Sequence[int]) -> tuple[RegionFit, ...]:
        """Put each region on its level, given by its position among the usable ones."""
        for region, level in zip(self._idle, self._idle_levels(choice), strict=True):
            self._put(region, level)
        return tuple(
            self._put(region, self._usable[at])
            for region, at in zip(self._regions, choice, strict=True)
        )

    def _put(self, region: Candidate, level: int) -> RegionFit:
        does = region.at(level)
        release(region.module)
        if does.policy is None:
            return does
        if region.is_compiled:
            Tagged(region.module, policy=does.policy).put()
        else:
            lag_bytes = region.hidden_bytes if level == HIDDEN_AWAY else 0
            checkpointed = Checkpointed(region.module, policy=does.policy, lag_bytes=lag_bytes)
            checkpointed.has_warned = bool(self._elsewhere)  # the result says so
            checkpointed.put()
        return does

    def _idle_levels(self, choice: Sequence[int]) -> list[int]:
        """Return for each idle block the level that keeps least among blocks of its class."""
        found = []
        levels = [self._usable[at] for at in choice]
        for region in self._idle:
            pairs = list(zip(self._regions, levels, strict=True))
            alike = [n for each, n in pairs if kind_of(each.module) is kind_of(region.module)]
            found.append(min(alike or levels, key=KEEPING.index, default=0))
        return found


def _why_little(
    model: nn.Module, regions: Sequence[tuple[str, nn.Module]], *, any_ran: bool
) -> str:
    """Say why blocks of a model may save little; "" if nothing is known."""
    if not any_ran:
        return f"None of the {len(regions)} blocks was called as a module or by its forward"
    if regions[0][1] is model:
        kind = type(model).__name__
        return f"{kind} has no modules that repeat and have parts, so it is one block as a whole"
    return ""


def _candidate(path: str, module: nn.Module) -> Candidate:
    return Candidate(path, module, is_compiled(module), is_taggable(module))
