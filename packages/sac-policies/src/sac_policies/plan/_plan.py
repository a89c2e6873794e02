"""Watches a step on each level on fake tensors, and recommends a mixture for a device."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from .._errors import BudgetError
from .._tensors import tensors_in
from .._torch_compat import fake_mode, storage_bytes, storage_key
from ..budget._checkpointed import Checkpointed
from ..budget._levels import AGAIN, INPUTS_AWAY, KEEPS, LEVELS
from ..budget._levels import MATMULS as KEEPS_MATMULS
from ..budget._repeating import repeating
from ..policies._builders import save_ops
from ..policies._catalogue import ATTENTION, CONVOLUTIONS, MATMULS
from ._alike import find_blocks
from ._devices import Device
from ._mixture import SLICES, Measured, Step, offloaded
from ._model import OPTIMIZERS, Batch, Subject, build
from ._watch import watch_step

PLAIN, OFFLOADED = LEVELS[KEEPS], LEVELS[INPUTS_AWAY]
_POLICIES = {
    LEVELS[KEEPS_MATMULS]: save_ops(MATMULS, ATTENTION, CONVOLUTIONS),
    LEVELS[AGAIN]: None,
}


@dataclass(frozen=True)
class Estimate:
    """What a step takes on a device, with all blocks on each level and in a mixture.

    Attributes:
        name: class of the model.
        device: that it is planned for.
        batch: sequences, and tokens of each.
        optimizer: name of it.
        parameters: how many there are.
        parameter_bytes: of parameters and buffers.
        gradient_bytes: of all gradients.
        optimizer_bytes: of the optimizer's state.
        budget_bytes: what a step may take.
        plain: without checkpointing.
        uniform: by level, a step with all blocks on it.
        recommended: the fastest mixture that fits; None where none does.
        smallest: the mixture that takes the least.
        sliced: the fastest mixture that fits with logits and loss in slices; None as above.
        smallest_sliced: the mixture that takes the least with them.
        block_count: how many blocks there are.
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
    plain: Step
    uniform: dict[str, Step]
    recommended: Step | None
    smallest: Step
    sliced: Step | None
    smallest_sliced: Step
    block_count: int
    block_name: str

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch[0] * self.batch[1]

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
    """Plan a training step of a model on a device, without either.

    Args:
        source: of the model, see `build`.
        device: to plan for.
        batch: sequences, and tokens of each.
        optimizer: one of `OPTIMIZERS`.
        dtype: of a transformers model.
        budget_bytes: what a step may take; by default 95 % of the device's memory.

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
            int(0.95 * device.memory_bytes) if budget_bytes is None else budget_bytes,
        )


def _estimate(
    subject: Subject, device: Device, batch: Batch, optimizer: str, budget_bytes: int
) -> Estimate:
    model = subject.model
    trained = [each for each in model.parameters() if each.requires_grad]
    gradient_bytes = _bytes(trained)
    factor, tensors = OPTIMIZERS[optimizer]
    state_bytes = int(factor * gradient_bytes)
    parameter_bytes = _bytes([*model.parameters(), *model.buffers()])
    resident = parameter_bytes + state_bytes + _bytes(tensors_in(subject.batch))
    found = find_blocks([block for _, block in repeating(model)], subject.loss_of)
    blocks = found.modules
    levels = {PLAIN: watch_step(model, found, subject.loss_of, device)}
    for name, policy in _POLICIES.items():
        regions = [Checkpointed(block, policy=policy) for block in blocks]
        with ExitStack() as stack:
            for region in regions:
                region.put()
                stack.callback(region.undo)
            levels[name] = watch_step(model, found, subject.loss_of, device)
    levels[OFFLOADED] = offloaded(levels[LEVELS[AGAIN]], found.input_bytes, device.copy_seconds(1))
    measured = Measured(
        levels,
        len(blocks),
        resident + device.workspace_bytes,
        device.seconds(0, tensors * gradient_bytes),
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
        plain=measured.step(PLAIN, len(blocks), PLAIN),
        uniform={name: measured.step(name, len(blocks), name) for name in levels},
        recommended=measured.fastest(budget_bytes),
        smallest=measured.smallest(),
        sliced=measured.fastest(budget_bytes, SLICES),
        smallest_sliced=measured.smallest(SLICES),
        block_count=len(blocks),
        block_name=type(blocks[0]).__name__,
    )


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum({storage_key(each): storage_bytes(each) for each in tensors}.values())
