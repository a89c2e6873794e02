"""Run a training step for measurements, leaving the model unchanged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from .._errors import BudgetError, shown
from .._tensors import is_accelerator, tensors_in
from .._torch_compat import is_fake
from ..trials._batches import Batches, tensors_behind
from ..trials._functions import named_by
from ..trials._objects import Objects
from ..trials._rollback import Rollback
from ._agree import check_equal, largest, largest_each
from ._measure import Interval, Marks, bytes_of, free_bytes
from ._optimizer import check_optimizer, existing_bytes, state_bytes
from ._sizes import Budget, budget_bytes

Loss = Callable[[Any], torch.Tensor]
Reset = Callable[[nn.Module], object]
UsersStep = Callable[[nn.Module, Any], object]
"""Runs forward and backward of a model on a batch."""
BACKWARD = "backward"
"""Key of the interval from the beginning of backward until the next mark; of later backwards in
the same step, with their number."""


def check_step(model: object, loss: object, step: object) -> None:
    """Raise a `BudgetError` for a model that cannot be measured, or a loss that is no function."""
    if not isinstance(model, nn.Module):
        raise BudgetError(
            f"sac_policies.fit_: model {shown(model)} is a {type(model).__name__}, but the "
            "state of a module is put back after measuring. Pass an nn.Module."
        )
    _check_callable("loss", loss, "a scalar, from the model's output")
    _check_callable("step", step, "what a step runs, such as trainer.training_step")
    if loss is not None and step is not None:
        raise BudgetError(
            "sac_policies.fit_: loss and step are passed, but a step computes its own loss. Pass "
            "one of them."
        )
    for each in named_by(step):
        if isinstance(each, Iterator):
            raise BudgetError(
                f"sac_policies.fit_: step reads from a {type(each).__name__}, but the position of "
                "an iterator cannot be restored after a measured step. Use the batch that step is "
                "given."
            )
    lazy = [name for name, each in model.named_parameters() if is_lazy(each)]
    if lazy:
        raise BudgetError(
            f"sac_policies.fit_: parameter {lazy[0]!r} is not initialized, but a step that "
            "initializes it cannot be undone. Run the model on a batch once, then call fit_."
        )


def check_order(batch: object, make_batch: object, budget: Budget | None) -> Budget:
    """Return the budget.

    Raises:
        BudgetError: batch and budget are missing or in the wrong order, the batch is a loader, or
            there are two sources of batches.
    """
    if isinstance(batch, (str, float)) and not isinstance(budget, (str, int, float)):
        raise BudgetError(
            f"sac_policies.fit_: batch is {shown(batch)} and budget is {shown(budget)}, but the "
            f"order is model, batch, budget. Write fit_(model, batch, {batch!r})."
        )
    if isinstance(batch, (DataLoader, Iterator)):
        raise BudgetError(
            f"sac_policies.fit_: batch {shown(batch)} is a {type(batch).__name__}, but one batch "
            "is measured. Pass next(iter(loader))."
        )
    _check_callable("make_batch", make_batch, "a batch, or pass the batch itself as batch=")
    if (batch is None) is (make_batch is None):
        raise BudgetError(
            f"sac_policies.fit_: {'no batch' if batch is None else 'batch and make_batch'} is "
            "passed, but a step needs one source of batches. Pass batch, or make_batch=, a "
            "function that makes one."
        )
    if budget is None:
        raise BudgetError(
            "sac_policies.fit_: budget is None, but blocks are chosen for a number of bytes. Pass "
            'bytes, "6 GiB", or a share of the plain step such as "60%".'
        )
    return budget


def _check_callable(name: str, given: object, does: str) -> None:
    if not (given is None or callable(given)):
        raise BudgetError(
            f"sac_policies.fit_: {name} {shown(given)} is a {type(given).__name__}, but it is "
            f"called in each measured step. Pass a function for {does}."
        )


_being_fitted: dict[object, set[nn.Module]] = {}
_lock = threading.Lock()


@contextmanager
def only_one(model: nn.Module) -> Iterator[None]:
    """Note that a model is being fitted.

    Raises:
        BudgetError: one of its modules is being fitted, by another thread or around this call.
    """
    call, modules = object(), set(model.modules())
    try:
        with _lock:
            if not all(map(modules.isdisjoint, list(_being_fitted.values()))):
                raise BudgetError(
                    "sac_policies.fit_: the model is being fitted, by another thread or by a call "
                    "that has not returned, but its steps are measured one after another. Wait for "
                    "it."
                )
            _being_fitted[call] = modules
        yield
    finally:
        _being_fitted.pop(call, None)  # the first call here, so no interrupt comes before it


class Step:
    """One forward and backward of a model on one batch.

    Args:
        model: on the device it trains on.
        batch: a tuple of its arguments, a dict (or another mapping, such as a tokenizer's result)
            of its keyword arguments, or its one argument. With `step`, any object.
        loss: from its output to a scalar; by default its own loss, else the sum of its tensors.
        optimizer: its state is in memory during each step.
        step: runs forward and backward, in place of a call of the model and its loss.
        make_batch: makes the batch of each step; then `batch` is not used.
        reset: called with the model before each step.

    Attributes:
        model: the model.
        device: of its parameters.
        is_users: whether the user's own function runs forward and backward.

    Raises:
        BudgetError: `optimizer` is not an optimizer, or its state is not known; or there is no
            batch for each step, see `Batches`.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: Loss | None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        step: UsersStep | None = None,
        make_batch: Callable[[], Any] | None = None,
        reset: Reset | None = None,
    ) -> None:
        self.model, self._optimizer, self._reset = model, optimizer, reset
        self.is_users = step is not None
        self._function = step or (lambda model, batch: loss_of(model, batch, loss).backward())
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        if optimizer is not None:
            check_optimizer(optimizer)
        self._batches = Batches(batch, make_batch)
        own = step or loss
        roots = [model] if own is None else [model, own]
        self._rollback = Rollback(*roots, tensors=tensors_behind(batch))
        seen = Objects(roots).seen
        self._modules = [each for each in seen if isinstance(each, nn.Module)]
        _check_trainers(seen)

    @contextmanager
    def trials(self) -> Iterator[None]:
        """Let steps run; restore at the end, also after an interrupt, what they changed.

        Raises:
            BudgetError: `make_batch` or `reset` raises, or the shapes of batches differ.
        """
        with self._rollback.entered():
            for _ in range(2):
                self._prepare()
            self.check_data()
            yield

    def _prepare(self) -> None:
        """Put everything into the state before a step: it draws the same numbers each time."""
        self._rollback.restore()
        if self._reset is not None:
            try:
                self._reset(self.model)
            except Exception as error:
                raise BudgetError(
                    f"sac_policies.fit_: reset raised {type(error).__name__}: {error}. It is "
                    "called with the model before each measured step; pass a function that takes "
                    "the model."
                ) from error
        self._batches.next()
        torch.manual_seed(0)  # routing and dropout affect a step's memory

    def run(self) -> None:
        """Run forward and backward; gradients of earlier runs are dropped."""
        self._prepare()
        self._run()

    def _run(self, marks: Marks | None = None) -> None:
        backwards = 0

        def begins() -> None:
            nonlocal backwards
            if marks is not None:
                marks.mark(f"{BACKWARD} {backwards}" if backwards else BACKWARD)
            backwards += 1

        with self._rollback.watching(begins):
            result = self._function(self.model, self._batches.batch)
        if not backwards:
            is_loss = isinstance(result, torch.Tensor) and result.requires_grad
            raise BudgetError(
                "sac_policies.fit_: step returned without a backward, but memory is measured over "
                "forward and backward. "
                + ("Call backward() on the loss inside of it." if is_loss else "Run both in it.")
            )

    def settle_buckets(self) -> None:
        """Run steps in which DDP makes the buckets that it keeps. Collective.

        DDP rebuilds them in the forward after its first backward; with a static graph, the first
        backward also differs from later ones. Buckets are as large as the gradients.
        """
        if any(isinstance(each, DistributedDataParallel) for each in self.model.modules()):
            for _ in range(2):
                self.run()

    def intervals(self, marks: Marks) -> list[Interval]:
        """Run a step; return its intervals, with the maximum over ranks. Collective."""
        self._prepare()
        self._settle()
        own = marks.intervals(lambda: self._run(marks))
        keys = [each.key for each in own]
        check_equal(repr(keys), what="order of blocks")
        rows = [(one.grown, one.most, one.ns, one.away) for one in own]
        numbers = iter(largest_each([number for row in rows for number in row]))
        return [Interval(*each) for each in zip(keys, *[numbers] * len(rows[0]), strict=True)]

    def resident(self) -> int:
        """Return bytes of parameters, buffers, batch and state; maximum over ranks. Collective."""
        return largest(bytes_of(self._tensors(), device=self.device) + self.optimizer_bytes())

    def available(self) -> int:
        """Bytes that a step may take on its accelerator; minimum over ranks. Collective.

        Free bytes, and those of the step's tensors, gradients, and optimizer state.
        """
        tensors = [*self._tensors(), *(p.grad for p in self.model.parameters())]
        state = existing_bytes(self._optimizer, self.device) if self._optimizer else 0
        own = bytes_of(tensors, device=self.device) + state
        return -largest(-(free_bytes(self.device) + own))

    def check_data(self) -> None:
        """Raise a `BudgetError` for tensors without data: steps are measured."""
        if any(is_fake(each) for each in self._tensors()):
            raise BudgetError(
                "sac_policies.fit_: the model or its batch has no data (fake, or on the meta "
                "device), but what a step takes is measured. Pass real tensors, or plan without "
                "them: python -m sac_policies plan --help."
            )

    def _tensors(self) -> list[torch.Tensor]:
        own = [(*each._parameters.values(), *each._buffers.values()) for each in self._modules]
        held = [tensor for tensors in own for tensor in tensors if tensor is not None]
        return [
            *self.model.parameters(),
            *self.model.buffers(),
            *held,
            *self._batches.tensors,
        ]

    def optimizer_bytes(self) -> int:
        """Bytes of the state of the optimizer, and of those that the step itself steps."""
        found = {id(each): each for each in (self._optimizer, *self._rollback.optimizers) if each}
        for each in found.values():
            check_optimizer(each)
        return sum(state_bytes(each, self.device) for each in found.values())

    def _settle(self) -> None:
        """Free leftover memory of the previous step."""
        if is_accelerator(self.device):
            # A device's backward thread frees a graph when it starts the next one, here an empty
            # one.
            none = torch.zeros(0, device=self.device, requires_grad=True)
            torch.autograd.grad(none * 1.0, none, grad_outputs=none.detach())


def loss_of(model: nn.Module, batch: Any, loss: Loss | None = None) -> torch.Tensor:
    """Call a model on a batch; return its loss.

    Args:
        model: the model.
        batch: as for `Step`.
        loss: from its output to a scalar; by default its own loss or scalar, else the sum of its
            tensors.

    Raises:
        BudgetError: the batch is a list that the model does not take, or no tensor of the output
            needs a gradient.
    """
    try:
        if isinstance(batch, Mapping):
            out = model(**batch)
        else:
            out = model(*batch) if isinstance(batch, tuple) else model(batch)
    except (TypeError, AttributeError) as error:
        if isinstance(batch, list):
            raise BudgetError(
                f"sac_policies.fit_: the model raised {type(error).__name__} ({error}) for "
                "batch, a list, which is passed to it as one argument. Pass a tuple of "
                "arguments, or a dict of keyword arguments."
            ) from error
        raise
    if loss is not None:
        return loss(out)
    own = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", out)
    if isinstance(own, torch.Tensor) and own.requires_grad and own.numel() == 1:
        return own
    tensors = [tensor for tensor in tensors_in(out) if tensor.requires_grad]
    if not tensors:
        raise BudgetError(
            "sac_policies.fit_: the model's output has no tensor that needs a "
            "gradient, but a step ends in backward. Pass loss=, from the output to a scalar (a "
            "plan takes it as a third value), or step=, a function that runs forward and backward."
        )
    return torch.stack([tensor.sum().float() for tensor in tensors]).sum()


def _check_trainers(seen: list[Any]) -> None:
    """Refuse a trainer that will turn on checkpointing when training begins."""
    for each in seen:
        settings = getattr(each, "args", None)
        is_on = getattr(settings, "gradient_checkpointing", None) is True
        if is_on and callable(getattr(each, "training_step", None)):
            raise BudgetError(
                f"sac_policies.fit_: {type(each).__name__}.args.gradient_checkpointing is True "
                "(TRL's default), so train() will recompute every layer, whatever fit_ chooses. "
                "Pass gradient_checkpointing=False in its arguments."
            )


_PERCENT = range(2, 101)
"""Bytes that are meant as percent."""


class Limit:
    """A budget and its reserve, checked before anything runs.

    Args:
        budget: bytes, a share of the peak without checkpointing, text, or "device".
        reserve: part that stays free: bytes, text, or a share of the budget.

    Raises:
        BudgetError: one of them is not a size.
    """

    def __init__(self, budget: Budget, reserve: Budget) -> None:
        self._budget, self._reserve = budget, reserve
        self._is_device = isinstance(budget, str) and budget == "device"
        if type(budget) is int and budget in _PERCENT:
            raise BudgetError(
                f"sac_policies.fit_: budget {budget} is {budget} bytes, but a step takes more. "
                f'Write "{budget}%" for a share of the plain step, or "{budget} GiB".'
            )
        for each, what in ((0 if self._is_device else budget, "budget"), (reserve, "reserve")):
            budget_bytes(each, total_bytes=0, what=what)

    def settle(self, step: Step) -> None:
        """Read the device's free memory, before the step runs. Collective.

        Raises:
            BudgetError: the budget is "device" on a device that does not report its free memory.
        """
        if self._is_device:
            self._budget = step.available()

    def allowed(self, plain_bytes: int) -> int:
        """Return the allowed bytes, given the peak without checkpointing."""
        whole = budget_bytes(self._budget, total_bytes=plain_bytes)
        return max(0, whole - budget_bytes(self._reserve, total_bytes=whole, what="reserve"))
