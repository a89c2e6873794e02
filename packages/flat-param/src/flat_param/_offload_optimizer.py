"""`offload_optimizer`: optimizer state in CPU memory or in files, fetched bucket by bucket.

Nothing here depends on flat or sharded parameters.

Invariants:
- The optimizer's own step runs once per bucket, with the bucket as its only parameters.
- Tensors with at least one dimension are offloaded. Step counts and other values are not.
- One thread makes all copies, in order. The next bucket is fetched before the current one is
  written back, so the state of at most two buckets is in memory.
- Between steps `optimizer.state` has the stored tensors, so state dicts need no special case.
- After an interrupted step, state is refused until other state is loaded: some buckets were
  stepped and others were not.
"""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from ._errors import StateError
from ._torch_compat import STEP_HOOKS, unhooked_step
from .layout._spec import dense_stride

Opt = TypeVar("Opt", bound=Optimizer)
State = Mapping[Tensor, dict[str, Any]]

_ALIGN_BYTES = 64


def offload_optimizer(
    optimizer: Opt,
    *,
    folder: str | os.PathLike[str] | None = None,
    bucket_numel: int = 1 << 22,
) -> Opt:
    """Keep an optimizer's state in CPU memory or in files between steps.

    In place: call it on an optimizer over any parameters, before making a scheduler for it. Each
    step goes bucket by bucket, while a thread fetches the state of the next bucket and writes back
    that of the previous one. Results are bit-identical to the plain optimizer. `state_dict()` and
    `save_sharded` see all state. `load_state_dict` temporarily needs memory for all state on the
    parameters' device.

    Args:
        optimizer: any `torch.optim.Optimizer` that treats each parameter separately.
        folder: an existing folder for the files, which have no name and vanish with the process;
            default: CPU memory, pinned if there is an accelerator. State of CPU parameters is then
            not moved.
        bucket_numel: elements of parameters that are stepped together; a larger parameter is a
            separate bucket. The state of at most two buckets is in memory. On an accelerator also
            pass a size to `chunks`; otherwise each segment is one parameter.

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
    buckets = _Buckets(_Storage(folder), bucket_numel, unhooked_step(cls))
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

    @property
    def state(self) -> Any:
        """All state by parameter.

        Raises:
            StateError: a step was interrupted.
        """
        state = vars(self)["state"]
        self._buckets.check(state)
        return state

    @state.setter
    def state(self, state: Any) -> None:
        vars(self)["state"] = state

    @property
    def steps_bucket(self) -> bool:
        """True inside the step of one bucket, where `super().step()` calls step hooks again."""
        return self._buckets.is_stepping

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient, bucket by bucket.

        Args:
            closure: computes loss and gradients; called once.

        Returns:
            The loss that the closure returns.
        """
        self._buckets.check(vars(self)["state"])
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._buckets.step(self, vars(self)["state"])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and store it; if that fails, nothing has changed."""
        before = vars(self)["state"], self.param_groups, self._buckets.stored
        self._buckets.stored = {}  # or the state to restore would be overwritten
        try:
            super().load_state_dict(state_dict)
            self._buckets.write_back_all(vars(self)["state"])
        except BaseException:
            vars(self)["state"], self.param_groups, self._buckets.stored = before
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


class _Stored(NamedTuple):
    """A stored tensor, and the device that its state belongs on."""

    tensor: Tensor
    device: torch.device


class _Buckets:
    """Step an optimizer bucket by bucket.

    Args:
        storage: holds the state between steps.
        numel: elements of a bucket; a larger parameter is a separate bucket.
        own_step: the step of the optimizer's class, without hooks.

    Attributes:
        stored: the stored tensors by parameter and key.
    """

    def __init__(self, storage: _Storage, numel: int, own_step: Callable[[Any], object]) -> None:
        self._storage, self._numel, self._own_step = storage, numel, own_step
        self.stored: dict[tuple[Tensor, str], _Stored] = {}
        self._interrupted: tuple[State | None, str] = None, ""
        self.is_stepping = False  # the optimizer's step may read `state`

    def check(self, state: State) -> None:
        """Refuse state of an interrupted step."""
        interrupted, where = self._interrupted
        if interrupted is state and not self.is_stepping:
            raise StateError(
                f"flat_param.offload_optimizer: a step was stopped in {where}, but buckets before "
                "it have stepped and those after it have not. Load parameters and state that were "
                "saved together."
            )

    def step(self, optimizer: Optimizer, state: State) -> None:
        """Step every bucket while the state of the next one is fetched."""
        groups = optimizer.param_groups
        hooks = {key: value for key, value in vars(optimizer).items() if key in STEP_HOOKS}
        try:
            try:
                vars(optimizer).update({key: OrderedDict() for key in hooks})
                self._step_each(optimizer, state, list(self._of(groups)))
            finally:
                self._end(optimizer, groups, hooks)
        finally:  # an interrupt may have cut the first call short
            self._end(optimizer, groups, hooks)

    def _end(
        self, optimizer: Optimizer, groups: list[dict[str, Any]], hooks: dict[str, Any]
    ) -> None:
        optimizer.param_groups = groups
        vars(optimizer).update(hooks)
        self.is_stepping = False

    def _step_each(
        self, optimizer: Optimizer, state: State, buckets: Sequence[dict[str, Any]]
    ) -> None:
        with ThreadPoolExecutor(1, thread_name_prefix="flat_param.offload") as thread:
            copies = _Copies(thread)
            arriving = self._fetch(copies, state, buckets[:1])
            for index, bucket in enumerate(buckets):
                current, arriving = arriving, self._fetch(copies, state, buckets[index + 1 :][:1])
                self.is_stepping = True
                self._interrupted = state, f"bucket {index + 1} of {len(buckets)}"
                fetched = _receive(state, *current)
                self._step_one(optimizer, bucket)
                self._write_back(copies, state, bucket["params"], fetched)
            copies.wait()
            self._interrupted = None, ""

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
        """Run the optimizer's step on one bucket; `_end` restores its groups."""
        before = dict(bucket)
        optimizer.param_groups = [bucket]
        self._own_step(optimizer)
        changed = [key for key in bucket if bucket[key] is not before.get(key)]
        if changed:
            raise StateError(
                f"flat_param.offload_optimizer: {type(optimizer).__name__} changes '{changed[0]}' "
                "of its parameter group in a step, but it steps once per bucket. Use it as it is."
            )

    def _fetch(
        self, copies: _Copies, state: State, buckets: Sequence[dict[str, Any]]
    ) -> tuple[list[tuple[Tensor, str]], Future[list[Tensor]]]:
        """Start fetching the state of at most one bucket."""
        found = [
            ((param, key), stored)
            for bucket in buckets
            for param in bucket["params"]
            for key, value in state.get(param, {}).items()
            if (stored := self.stored.get((param, key))) and stored.tensor is value
        ]
        return [slot for slot, _ in found], copies.fetch([stored for _, stored in found])

    def _write_back(
        self, copies: _Copies, state: State, params: Sequence[Tensor], fetched: list[Tensor]
    ) -> None:
        """Start storing the state of a bucket, without keeping a reference to it."""
        moved = self._places(state, params)
        copies.write_back([(value, place) for _, value, place in moved], fetched=fetched)
        self._show(state, moved)

    def write_back_all(self, state: State) -> None:
        """Store all state; if that fails, nothing has changed."""
        moved: list[_Moved] = []
        for params in self._runs(param for param in state if isinstance(param, Tensor)):
            some = self._places(state, params)
            for _, value, place in some:
                place.copy_(value)
            moved += some
        self._show(state, moved)

    def _places(self, state: State, params: Iterable[Tensor]) -> list[_Moved]:
        """Pair each state tensor to move with its stored tensor."""
        values = {
            (param, key): value
            for param in params
            for key, value in state.get(param, {}).items()
            if self._storage.takes(value)
        }
        places = {slot: self._place_of(slot, value) for slot, value in values.items()}
        new = [slot for slot, place in places.items() if place is None]
        if new:
            made = self._storage.allocate_like([values[slot] for slot in new])
            places.update(zip(new, made, strict=True))
        return [
            _Moved(slot, values[slot], place) for slot, place in places.items() if place is not None
        ]

    def _place_of(self, slot: tuple[Tensor, str], value: Tensor) -> Tensor | None:
        """The stored tensor of earlier steps, if the value has its dtype and strides."""
        known = self.stored.get(slot)
        if known is None or known.tensor is value or known.tensor.dtype != value.dtype:
            return None
        fits = known.tensor.shape == value.shape and known.tensor.stride() == _dense_stride(value)
        return known.tensor if fits else None

    def _show(self, state: State, moved: Iterable[_Moved]) -> None:
        for (param, key), value, place in moved:
            self.stored[param, key] = _Stored(place, value.device)
            state[param][key] = place


def _receive(
    state: State, slots: Sequence[tuple[Tensor, str]], values: Future[list[Tensor]]
) -> list[Tensor]:
    """Move fetched state into the optimizer; only the returned list also refers to it."""
    fetched = values.result()
    for (param, key), value in zip(slots, fetched, strict=True):
        state[param][key] = value
    return fetched


class _Moved(NamedTuple):
    """State and the stored tensor for it."""

    slot: tuple[Tensor, str]
    value: Tensor
    place: Tensor


class _Copies:
    """Copies between storage and device for one step.

    On an accelerator they run on a separate stream. The thread waits for that stream, so memory
    that a copy uses is neither freed nor read.
    """

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._streams: dict[torch.device, torch.Stream] = {}
        self._last: Future[None] | None = None

    def fetch(self, stored: Sequence[_Stored]) -> Future[list[Tensor]]:
        """Start copying stored state to its devices."""

        @torch.no_grad()
        def copy() -> list[Tensor]:
            out = []
            for tensor, device in stored:
                with self._on_stream(device):
                    near = torch.empty_strided(
                        tensor.shape, _dense_stride(tensor), dtype=tensor.dtype, device=device
                    )
                    out.append(near.copy_(tensor, non_blocking=True))
            self._synchronize()
            return out

        return self._thread.submit(copy)

    def write_back(self, pairs: list[tuple[Tensor, Tensor]], *, fetched: list[Tensor]) -> None:
        """Start copying state to storage once the work queued so far is done."""
        self.wait()
        devices = {value.device for value in (*fetched, *(near for near, _ in pairs))}
        queued = {device: _record_event(device) for device in devices if device.type != "cpu"}

        @torch.no_grad()
        def copy() -> None:
            while pairs:
                value, place = pairs.pop()
                with self._on_stream(value.device, queued.get(value.device)):
                    place.copy_(value, non_blocking=True)
                self._synchronize()
            for event in queued.values():
                event.synchronize()
            fetched.clear()

        self._last = self._thread.submit(copy)

    def wait(self) -> None:
        """Wait for the last copy to storage, and raise its error."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def _on_stream(
        self, device: torch.device, after: torch.Event | None = None
    ) -> AbstractContextManager[object]:
        if device.type == "cpu":
            return nullcontext()
        stream = self._streams.setdefault(device, torch.Stream(device))
        if after is not None:
            stream.wait_event(after)
        return stream

    def _synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def _record_event(device: torch.device) -> torch.Event:
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


class _Storage:
    """Memory for state between steps: CPU memory, or files of a folder.

    CPU memory is pinned where there is an accelerator. A file is mapped and unlinked, so it
    vanishes with the process. Its space is reserved at once: a full disk raises an error here, and
    does not crash the process at a later write.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._folder = None if folder is None else os.fspath(folder)
        if self._folder is not None:
            _map_file(self._folder, _ALIGN_BYTES)

    def takes(self, value: Any) -> bool:
        """Whether a value is stored here between steps."""
        if type(value) is not Tensor or not value.dim() or not value.numel():
            return False
        return self._folder is not None or value.device.type != "cpu"

    def allocate_like(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Uninitialised tensors like `values`, in one allocation."""
        ends = [0]
        for value in values:
            ends.append(
                ends[-1] + -(-value.numel() * value.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
            )
        if self._folder is not None:
            memory = _map_file(self._folder, ends[-1])
        else:
            pin = torch.accelerator.is_available()
            memory = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=pin)
        return [
            _view_like(value, memory[start:end])
            for value, start, end in zip(values, ends, ends[1:], strict=False)
        ]


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


def _view_like(value: Tensor, memory: Tensor) -> Tensor:
    flat = memory.view(value.dtype)
    return flat.as_strided(value.shape, _dense_stride(value), flat.storage_offset())


def _dense_stride(value: Tensor) -> tuple[int, ...]:
    return dense_stride(tuple(value.shape), value.stride())
