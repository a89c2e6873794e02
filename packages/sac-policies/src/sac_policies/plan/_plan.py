"""Watches a step on each level on fake tensors, and recommends a mixture for a device.

Fake tensors cannot be offloaded. The values are kept instead; their bytes and copy times are
corrected afterwards.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from .._errors import BudgetError
from .._tensors import tensors_in
from .._torch_compat import fake_mode
from .._torch_compat._module_calls import around_calls
from ..budget._checkpointed import Checkpointed
from ..budget._helps import SLICES
from ..budget._levels import COSTLY, HIDDEN_AWAY, INPUTS_AWAY, KEEPS, LEVELS, MATMULS, RECOMPUTES
from ..budget._link import SECOND, Link
from ..budget._measure import Interval, bytes_of
from ..budget._profile import profile
from ..budget._repeating import repeating
from ..eager._parted import parted
from ..policies._decisions import Decision
from ..policies._plans import Plan
from ..policies._policies import Policy
from ..policies._rules import RECOMPUTE_ALL
from ._devices import DEVICES, FREE_SHARE, Device
from ._mixture import Measured, StepEstimate, offloaded
from ._model import OPTIMIZERS, Batch, Subject, build
from ._watch import watch_step

PLAIN, OFFLOADED, HIDDEN = LEVELS[KEEPS], LEVELS[INPUTS_AWAY], LEVELS[HIDDEN_AWAY]
_POLICIES = {
    LEVELS[MATMULS]: COSTLY,
    LEVELS[RECOMPUTES]: RECOMPUTE_ALL,
}


@dataclass(frozen=True)
class Estimate:
    """Memory and time of a step on a device, by level and for a mixture.

    Attributes:
        name: class of the model.
        device: the planned device.
        batch: sequences, and tokens of each.
        optimizer: its name.
        parameters: number of parameters.
        parameter_bytes: of parameters and buffers.
        gradient_bytes: of all gradients.
        optimizer_bytes: of the optimizer's state.
        budget_bytes: allowed for a step.
        plain: without checkpointing.
        uniform: by level, a step with all blocks on it.
        most_tokens: by level, the tokens of the largest step that fits.
        recommended: the fastest mixture that fits; None if none does.
        smallest: the mixture with the smallest peak.
        sliced: the fastest mixture that fits if logits and loss are in slices; None if none fits.
        smallest_sliced: the mixture with the smallest peak with slices.
        block_count: number of blocks.
        block_name: class of the first block.
    """

    name: str
    device: Device
    batch: Batch
    optimizer: str
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    budget_bytes: int
    plain: StepEstimate
    uniform: dict[str, StepEstimate]
    most_tokens: dict[str, int]
    recommended: StepEstimate | None
    smallest: StepEstimate
    sliced: StepEstimate | None
    smallest_sliced: StepEstimate
    block_count: int
    block_name: str

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch[0] * self.batch[1]

    @property
    def smallest_device(self) -> Device | None:
        """The device of the table with the least memory on which a step fits; None without one."""
        needed = self.smallest.peak_bytes - self.device.workspace_bytes
        fitting = [
            each
            for each in DEVICES
            if needed + each.workspace_bytes <= FREE_SHARE * each.memory_bytes
        ]
        return min(fitting, key=lambda each: each.memory_bytes, default=None)

    @property
    def state_bytes(self) -> int:
        """Bytes that sharding divides: parameters, gradients and optimizer state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def estimate(
    source: str,
    device: Device,
    batch: Batch,
    *,
    optimizer: str = "adamw",
    dtype: torch.dtype = torch.bfloat16,
    budget_bytes: int | None = None,
) -> Estimate:
    """Plan a training step without the device and without the model's weights.

    Args:
        source: source of the model, see `build`.
        device: the device to plan for.
        batch: sequences, and tokens of each.
        optimizer: one of `OPTIMIZERS`.
        dtype: of a transformers model.
        budget_bytes: allowed for a step; by default 95 % of the device's memory.

    Raises:
        BudgetError: there is no such model or optimizer, or its blocks run more than once.
    """
    if optimizer not in OPTIMIZERS:
        raise BudgetError(
            f"sac_policies plan: optimizer {optimizer!r} is not known. Pass one of "
            f"{', '.join(OPTIMIZERS)}."
        )
    with fake_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _estimate(
            build(source, batch, dtype),
            device,
            batch,
            optimizer,
            int(FREE_SHARE * device.memory_bytes) if budget_bytes is None else budget_bytes,
        )


def _estimate(
    subject: Subject, device: Device, batch: Batch, optimizer: str, budget_bytes: int
) -> Estimate:
    model = subject.model
    trained = [each for each in model.parameters() if each.requires_grad]
    gradient_bytes = bytes_of(trained)
    factor, tensors = OPTIMIZERS[optimizer]
    state_bytes = int(factor * gradient_bytes)
    parameter_bytes = bytes_of([*model.parameters(), *model.buffers()])
    resident = parameter_bytes + state_bytes + bytes_of(tensors_in(subject.batch))
    blocks, inputs = _blocks(subject)
    step = partial(watch_step, model, blocks, subject.loss_of, device)
    levels = {PLAIN: step()}
    for name, policy in _POLICIES.items():
        levels[name] = _checkpointed(step, ((block, policy) for block in blocks))
    copy = device.copy_seconds(1)
    levels[OFFLOADED] = offloaded(levels[LEVELS[RECOMPUTES]], inputs, copy)
    hidden = _hidden(subject, blocks, inputs, levels[PLAIN], device)
    spans = _checkpointed(step, zip(blocks, (policy for policy, _ in hidden), strict=True))
    levels[HIDDEN] = offloaded(spans, [size for _, size in hidden], copy)
    resident += device.workspace_bytes
    seconds = device.seconds(0, tensors * gradient_bytes)
    whole, sliced = (
        Measured(levels, len(blocks), resident, seconds, slices) for slices in (1, SLICES)
    )
    return Estimate(
        name=subject.name,
        device=device,
        batch=batch,
        optimizer=optimizer,
        parameters=sum(each.numel() for each in model.parameters()),
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=state_bytes,
        budget_bytes=budget_bytes,
        plain=whole.uniform(PLAIN),
        uniform={name: whole.uniform(name) for name in levels},
        most_tokens={
            name: max(0, int(batch[0] * batch[1] * whole.most_times(name, budget_bytes)))
            for name in levels
        },
        recommended=whole.fastest(budget_bytes),
        smallest=whole.smallest(),
        sliced=sliced.fastest(budget_bytes),
        smallest_sliced=sliced.smallest(),
        block_count=len(blocks),
        block_name=type(blocks[0]).__name__,
    )


def _blocks(subject: Subject) -> tuple[list[nn.Module], list[int]]:
    """Run a forward; return the blocks that it calls once, in order, and bytes of their inputs.

    Raises:
        BudgetError: it calls none exactly once.
    """
    candidates = [block for _, block in repeating(subject.model)]
    calls: list[tuple[nn.Module, int]] = []

    def begin(number: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        given = [each for each in tensors_in((args, kwargs)) if each.is_floating_point()]
        calls.append((candidates[number], given[0].nbytes if given else 0))

    with around_calls(candidates, begin):
        subject.loss_of()
    times = Counter(block for block, _ in calls)
    once = [each for each in calls if times[each[0]] == 1]
    if not once:
        raise BudgetError(
            "sac_policies plan: no block of the model runs exactly once in a step. Plans are for "
            "models that are stacks of blocks."
        )
    return [block for block, _ in once], [size for _, size in once]


def _checkpointed(
    step: Callable[[], list[Interval]], regions: Iterable[tuple[nn.Module, Policy]]
) -> list[Interval]:
    with ExitStack() as stack:
        for block, policy in regions:
            region = Checkpointed(block, policy=policy)
            region.put()
            stack.callback(region.undo)
        return step()


def _hidden(
    subject: Subject,
    blocks: Sequence[nn.Module],
    inputs: Sequence[int],
    plain: Sequence[Interval],
    device: Device,
) -> list[tuple[Policy, int]]:
    """Choose the values whose copies a block's forward hides; return their bytes with the inputs.

    Blocks of one class with equally large inputs offload the same values.
    """
    ns = {span.key: span.ns for span in plain}
    rate = 1 / device.copy_seconds(1)
    kinds = list(zip(map(type, blocks), inputs, strict=True))
    found: dict[tuple[type[nn.Module], int], tuple[Policy, int]] = {}

    def begin(number: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        kind, input_bytes = kinds[number], inputs[number]
        if kind in found:
            return
        found[kind] = RECOMPUTE_ALL, input_bytes
        if parted(forward, args, kwargs) is None:
            return
        trace = profile(forward, *args, **kwargs)
        link = Link(rate, rate, ns[number, 0, False] / SECOND)
        away = {item.op for item in link.hidden(trace, input_bytes)}
        if away:
            rows = sorted((trace.ops[op].key, Decision.SAVE) for op in away)
            size = sum(size for (op, _), size in trace.replayable.items() if op in away)
            found[kind] = Plan(tuple(rows)), input_bytes + size

    with around_calls(blocks, begin):
        subject.loss_of()
    return [found[kind] for kind in kinds]
