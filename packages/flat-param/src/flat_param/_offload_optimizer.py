"""`offload_optimizer`: optimizer state in CPU memory or in files, fetched bucket by bucket.

Nothing here depends on flat or sharded parameters.

Invariants:
- The step of the optimizer's class runs once per bucket, on a twin of the optimizer that has only
  the bucket's parameters. So the optimizer keeps its groups and hooks if a step is interrupted.
- Tensors with at least one dimension are offloaded. Step counts and other values are not.
- The state of one bucket is on the device. Copies and steps are queued on the current stream, in
  order, and the host waits for the stream at the end of a step only.
- Between steps `optimizer.state` has the stored tensors, so state dicts need no special case.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from ._errors import StateError
from ._torch_compat import unhooked_step
from .buffers._optimizers import twin_of
from .layout._layout import round_up
from .layout._spec import dense_stride

Opt = TypeVar("Opt", bound=Optimizer)
Slot = tuple[Tensor, str]
"""A parameter, and a key of its state."""

_ALIGN_BYTES = 64


def offload_optimizer(
    optimizer: Opt,
    *,
    folder: str | os.PathLike[str] | None = None,
    bucket_numel: int = 1 << 22,
) -> Opt:
    """Keep an optimizer's state in CPU memory or in files between steps.

    In place: call it on an optimizer over any parameters, before making a scheduler for it. Each
    step goes bucket by bucket: the state of a bucket is fetched, stepped and written back. Results
    are bit-identical to the plain optimizer. `state_dict()` and `save_sharded` see all state.
    `load_state_dict` temporarily needs memory for all state on the parameters' device. A step that
    is interrupted leaves some buckets stepped: load parameters and state that were saved together.

    Args:
        optimizer: any `torch.optim.Optimizer` that treats each parameter separately.
        folder: an existing folder for the files, which have no name and vanish with the process;
            default: CPU memory, pinned if there is an accelerator. State of CPU parameters is then
            not moved.
        bucket_numel: elements of parameters that are stepped together; a larger parameter is a
            separate bucket. The state of one bucket is in memory. On an accelerator also pass a
            size to `chunks`; otherwise each segment is one parameter.

    Returns:
        The optimizer, of a subclass of its class.

    Raises:
        StateError: the optimizer combines parameters or is differentiable, its state is already
            offloaded, a scheduler wraps its step, `bucket_numel` is below 1, or the folder is not
            writable. Then nothing has changed.

    Example:
        >>> layer = torch.nn.Linear(3, 2)
        >>> optimizer = offload_optimizer(torch.optim.AdamW(layer.parameters(), lr=0.1))
        >>> layer(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[layer.weight])
        ['exp_avg', 'exp_avg_sq', 'step']
    """
    _check(optimizer, bucket_numel)
    cls = type(optimizer)
    buckets = _Buckets(cls, folder, bucket_numel)
    buckets.write_back_all(optimizer.state)
    step = Optimizer.profile_hook_step(OffloadedOptimizer.step)
    step.hooked = True  # type: ignore[attr-defined]  # or torch would add its hooks once more
    vars(optimizer)["_buckets"] = buckets
    optimizer.__class__ = type(
        f"Offloaded{cls.__name__}", (OffloadedOptimizer, cls), {"step": step}
    )
    return optimizer


class OffloadedOptimizer(Optimizer):
    """Base class that `offload_optimizer` adds to an optimizer's class."""

    _buckets: _Buckets

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient, bucket by bucket.

        Args:
            closure: computes loss and gradients; called once.

        Returns:
            The loss that the closure returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._buckets.step(self)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and store it; if that fails, nothing has changed."""
        before = self.state, self.param_groups, self._buckets.stored
        self._buckets.stored = {}  # or the state to restore would be overwritten
        try:
            super().load_state_dict(state_dict)
            self._buckets.write_back_all(self.state)
        except BaseException:
            self.state, self.param_groups, self._buckets.stored = before
            raise

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError(
            f"flat_param.offload_optimizer: {type(self).__name__} cannot be copied or pickled, "
            "but its state is kept elsewhere. Save its state_dict(), and load it into another "
            "one."
        )


def _check(optimizer: Optimizer, bucket_numel: int) -> None:
    """Refuse an optimizer that cannot be stepped bucket by bucket."""
    name = type(optimizer).__name__
    wrong = ""
    if not isinstance(optimizer, Optimizer):
        wrong = "is no optimizer, but its state is moved. Pass one of torch.optim, or a subclass"
    elif isinstance(optimizer, OffloadedOptimizer):
        wrong = "has its state elsewhere already, but there is one such place. Call it once"
    elif isinstance(optimizer, LBFGS):
        wrong = "looks at all parameters together, but they are stepped in buckets. Use another"
    elif any(group.get("differentiable") for group in optimizer.param_groups):
        wrong = "is differentiable, but its state leaves the graph. Pass differentiable=False"
    elif "step" in vars(optimizer):
        wrong = (
            "has a scheduler around its step, but that would go past its state. Make the scheduler "
            "after this call"
        )
    elif type(bucket_numel) is not int or bucket_numel < 1:
        wrong = (
            f"cannot be stepped with bucket_numel={bucket_numel!r}, but a bucket has at least one "
            "element. Pass a whole number above 0"
        )
    if wrong:
        raise StateError(f"flat_param.offload_optimizer: {name} {wrong}.")


class _Buckets:
    """Step an optimizer bucket by bucket.

    Args:
        cls: the optimizer's class.
        folder: for the files; None for CPU memory.
        numel: elements of a bucket; a larger parameter is a separate bucket.

    Attributes:
        stored: the stored tensors by parameter and key.
    """

    def __init__(self, cls: Any, folder: str | os.PathLike[str] | None, numel: int) -> None:
        self._folder = None if folder is None else os.fspath(folder)
        if self._folder is not None:
            _map_file(self._folder, _ALIGN_BYTES)
        self._numel, self._cls = numel, cls
        self.stored: dict[Slot, Tensor] = {}

    def step(self, optimizer: Optimizer) -> None:
        """Fetch, step and store one bucket after another."""
        state, devices = optimizer.state, set[torch.device]()
        try:
            for bucket in self._of(optimizer.param_groups):
                params: list[Tensor] = bucket["params"]
                devices.update(param.device for param in params if param.device.type != "cpu")
                self._fetch(state, params)
                self._step_one(optimizer, bucket)
                self._write_back(state, params)
        finally:
            for device in devices:  # the host may read stored state from now on
                torch.accelerator.current_stream(device).synchronize()

    def _of(self, groups: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Split parameter groups into buckets of parameters with gradients."""
        for group in groups:
            trained = [param for param in group["params"] if param.grad is not None]
            for params in self._runs(trained):
                yield {**group, "params": params}

    def _runs(self, params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
        run: list[Tensor] = []
        for param in params:
            if run and sum(map(Tensor.numel, run)) + param.numel() > self._numel:
                yield run
                run = []
            run.append(param)
        if run:
            yield run

    def _step_one(self, optimizer: Optimizer, bucket: dict[str, Any]) -> None:
        twin, options = twin_of(optimizer, self._cls, [bucket], optimizer.state), dict(bucket)
        own = dict(vars(twin))
        unhooked_step(self._cls)(twin)
        changed = [key for key in bucket if bucket[key] is not options.get(key)]
        changed += [
            key
            for key, value in vars(twin).items()
            if value is not own.get(key) and not key.startswith("_")
        ]
        if changed:
            raise StateError(
                f"flat_param.offload_optimizer: {type(twin).__name__} changes '{changed[0]}' of "
                "itself or of its parameter group in a step, but it steps once per bucket. Use it "
                "as it is."
            )

    @torch.no_grad()
    def _fetch(self, state: Any, params: Sequence[Tensor]) -> None:
        """Put copies of stored state on the device into the optimizer."""
        for param in params:
            for key, value in state.get(param, {}).items():
                if (stored := self.stored.get((param, key))) is not None and stored is value:
                    near = torch.empty_strided(
                        stored.shape,
                        _dense_stride(stored),
                        dtype=stored.dtype,
                        device=param.device,
                    )
                    state[param][key] = near.copy_(stored, non_blocking=True)

    @torch.no_grad()
    def _write_back(self, state: Any, params: Iterable[Tensor]) -> None:
        """Store the state of a bucket."""
        places = self._places(state, params)
        for (param, key), place in places.items():
            place.copy_(state[param][key], non_blocking=True)
        self._show(state, places)

    def write_back_all(self, state: Any) -> None:
        """Store all state; if that fails, nothing has changed."""
        places: dict[Slot, Tensor] = {}
        for params in self._runs(param for param in state if isinstance(param, Tensor)):
            some = self._places(state, params)
            for (param, key), place in some.items():
                place.copy_(state[param][key])
            places |= some
        self._show(state, places)

    def _places(self, state: Any, params: Iterable[Tensor]) -> dict[Slot, Tensor]:
        """The stored tensor for each state tensor to move: that of earlier steps, or a new one."""
        values = {
            (param, key): value
            for param in params
            for key, value in state.get(param, {}).items()
            if self._takes(value)
        }
        places = {
            slot: self.stored[slot]
            for slot, value in values.items()
            if _fits(self.stored.get(slot), value)
        }
        new = [slot for slot in values if slot not in places]
        if new:
            made = _allocate_like([values[slot] for slot in new], self._folder)
            places.update(zip(new, made, strict=True))
        return places

    def _takes(self, value: Any) -> bool:
        """Whether a value is stored between steps."""
        if type(value) is not Tensor or not value.dim() or not value.numel():
            return False
        return self._folder is not None or value.device.type != "cpu"

    def _show(self, state: Any, places: dict[Slot, Tensor]) -> None:
        for (param, key), place in places.items():
            self.stored[param, key] = state[param][key] = place


def _fits(stored: Tensor | None, value: Tensor) -> bool:
    """Whether a stored tensor may be overwritten with a value."""
    if stored is None or stored is value or stored.dtype != value.dtype:
        return False
    return stored.shape == value.shape and stored.stride() == _dense_stride(value)


def _allocate_like(values: Sequence[Tensor], folder: str | None) -> list[Tensor]:
    """Uninitialised tensors like `values`, in one allocation: a file, or CPU memory.

    CPU memory is pinned where there is an accelerator. A file is mapped and unlinked, so it
    vanishes with the process. Its space is reserved at once: a full disk raises an error here, and
    does not crash the process at a later write.
    """
    sizes = [round_up(value.numel() * value.itemsize, _ALIGN_BYTES) for value in values]
    if folder is not None:
        memory = _map_file(folder, sum(sizes))
    else:
        pin = torch.accelerator.is_available()
        memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pin)
    pairs = zip(values, memory.split(sizes), strict=True)
    flat = [(value, part.view(value.dtype)) for value, part in pairs]
    return [e.as_strided(v.shape, _dense_stride(v), e.storage_offset()) for v, e in flat]


def _map_file(folder: str, nbytes: int) -> Tensor:
    """Bytes of a new file without a name."""
    try:
        handle, path = tempfile.mkstemp(prefix="optimizer-state-", dir=folder)
        try:
            _reserve(handle, nbytes)
            return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        finally:
            os.close(handle)
            os.unlink(path)
    except OSError as error:
        raise StateError(
            f"flat_param.offload_optimizer: {nbytes} bytes of state cannot be written to folder "
            f"'{folder}' ({error.strerror}), but state is kept in files there. Pass a writable "
            "folder that exists and has room for all of it, or leave it out to use CPU memory."
        ) from error


def _reserve(handle: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, nbytes)
        return
    zeros = bytes(1 << 20)
    while nbytes > 0:
        nbytes -= os.write(handle, zeros[:nbytes])


def _dense_stride(value: Tensor) -> tuple[int, ...]:
    return dense_stride(tuple(value.shape), value.stride())
