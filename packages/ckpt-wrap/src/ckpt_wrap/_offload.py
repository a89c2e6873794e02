"""Run a function, and offload the tensors that it saves until backward reads them.

- Parameters, buffers, storages below `min_bytes` and tensors that the tier refuses stay.
- Each storage is offloaded once, for all saved tensors that share it. If these have different
  version counters, it is offloaded once per counter.
- Reading a tensor that was changed in place since it was saved is an error, as without offload.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy

from ckpt_wrap._ambient import is_checkpointing
from ckpt_wrap._errors import OffloadError, describe, owner
from ckpt_wrap._host_tier import captures_calls_on
from ckpt_wrap._offload_scheduler import CallStorages, OffloadScheduler, scheduler_for
from ckpt_wrap._offloaded_storage import (
    Counters,
    OffloadedStorage,
    OffloadStats,
    changed_message,
)
from ckpt_wrap._options import OffloadOptions
from ckpt_wrap._torch_compat import (
    active_transform,
    break_graph,
    counter_owner,
    is_exporting,
    is_parameter_view,
    never_compiled_inside,
    next_node_number,
    storage_key,
    version_of,
)

Unpack = Callable[[], torch.Tensor]  # is in the graph instead of a saved tensor


class OffloadCall:
    """One call of one function: its saved tensors, packed and unpacked."""

    def __init__(
        self, scheduler: OffloadScheduler, counters: Counters, module: nn.Module | None, where: str
    ) -> None:
        self._scheduler = scheduler
        self._storages: CallStorages | None = None  # of this call, once it saved one
        self._devices: set[torch.device] = set()
        self._counters = counters
        self._where = where
        self._module = module
        self._state_keys: set[Any] | None = None
        self._node = -1  # number of the node that saved last
        self._pending: list[OffloadedStorage] = []

    @torch.no_grad()
    @never_compiled_inside  # compiled modules call it when they save
    def pack(self, tensor: torch.Tensor) -> Unpack:
        """Return a function that returns the saved tensor."""
        node = next_node_number()
        if node != self._node:
            self._send_pending()
            self._node = node
        parts = split(tensor)
        if parts is not None:
            packed = {name: self.pack(part) for name, part in parts[0].items()}
            return partial(_joined, type(tensor), packed, parts[1], tensor.size(), tensor.stride())
        if not self._leaves(tensor):
            self._counters.counts.kept += 1
            return partial(self._kept, tensor.detach(), version_of(tensor))
        view = tensor.storage_offset(), tensor.size(), tensor.stride()
        kind = torch.Tensor if isinstance(tensor, nn.Parameter) else type(tensor)
        return partial(self._offloaded, self._storage_of(tensor), kind, tensor.dtype, view)

    @staticmethod
    @torch.no_grad()
    @never_compiled_inside
    def unpack(packed: Unpack) -> torch.Tensor:
        """Return the saved tensor.

        Raises:
            OffloadError: it was changed in place since it was saved.
        """
        return packed()

    def _kept(self, tensor: torch.Tensor, version: int) -> torch.Tensor:
        if version_of(tensor) != version:
            raise OffloadError(changed_message(self._where))
        return tensor

    def _offloaded(
        self, storage: OffloadedStorage, kind: type[torch.Tensor], dtype: torch.dtype, view: Any
    ) -> torch.Tensor:
        assert self._storages is not None
        self._scheduler.read_from(self._storages, storage)
        tensor = torch.empty(0, dtype=dtype, device=storage.device)
        tensor.set_(storage.read().untyped_storage(), *view)
        return tensor if kind is torch.Tensor else tensor.as_subclass(kind)

    def _leaves(self, tensor: torch.Tensor) -> bool:
        """Whether a saved tensor is offloaded."""
        nbytes = storage_bytes(tensor) if is_plain(tensor) else 0
        return (
            nbytes >= max(1, self._scheduler.options.min_bytes)
            and self._scheduler.tier.takes(tensor.device)
            and not is_parameter_view(tensor)
            and storage_key(tensor) not in self._state()
        )

    def _state(self) -> set[Any]:
        """Return storages of the module's parameters and buffers."""
        if self._state_keys is None:
            module = self._module
            owned = () if module is None else itertools.chain(module.parameters(), module.buffers())
            self._state_keys = {storage_key(t) for t in owned if not is_lazy(t) and is_plain(t)}
        return self._state_keys

    def _storage_of(self, tensor: torch.Tensor) -> OffloadedStorage:
        if tensor.device not in self._devices:
            self._devices.add(tensor.device)
            if captures_calls_on(tensor.device):
                raise OffloadError(
                    f"ckpt_wrap.offload_: a graph is being captured around module {self._where}, "
                    "but a replay would not run the schedule of copies. Take offload_ off with "
                    "unwrap before capturing."
                )
        call = self._storages = self._storages or CallStorages(self._scheduler.order)
        key = storage_key(tensor), id(counter_owner(tensor))
        storage = self._scheduler.storages.get(key)
        if storage is not None and storage.shares(tensor):
            self._counters.counts.shared += 1
            return storage
        storage = OffloadedStorage(tensor, self._counters, self._where)
        self._scheduler.storages[key] = storage
        call.add(storage)
        if tensor.requires_grad:
            self._scheduler.send(storage, call.order)
        else:
            self._pending.append(storage)
        return storage

    def _send_pending(self) -> None:
        """Start copying the tensors that an earlier operator saved.

        An operator may write a tensor after saving it, as `rrelu` does with its noise. A result
        that requires grad is complete when it is saved.
        """
        pending, self._pending = self._pending, []
        for storage in pending:
            assert self._storages is not None
            self._scheduler.send(storage, self._storages.order)

    def finish(self) -> None:
        """The call has ended: copy the rest, and release sources that are copied or older."""
        self._send_pending()
        call = self._storages
        self._scheduler.order.settle(before_call=0 if call is None else call.number)


_COMPILED = (
    "ckpt_wrap.offload_: an offloaded module is compiled, but the compiler decides which tensors "
    "are saved, so nothing could be offloaded. Compile modules inside of the offloaded one, or "
    "take offload_ off with unwrap."
)


@cache
def _warn_of_no_device() -> None:
    warnings.warn(
        "ckpt_wrap.offload_: this machine has no accelerator, and the tensors of the CPU are in "
        "host memory already, so offload to 'cpu' moves nothing. Pass a folder as 'to' to move "
        "them to disk.",
        stacklevel=4,
    )


class Offload:
    """Runs functions and offloads the tensors that they save.

    The function runs as it is while gradients are off, inside a checkpointed module (which saves
    nothing), under `torch.func` (which allows no hooks) and while `torch.export` traces.

    Raises:
        OffloadError: the folder cannot be written to.

    Warns:
        UserWarning: tensors would go to host memory, but there is no accelerator. Once in a
            process.
    """

    def __init__(self, options: OffloadOptions, name: str = "") -> None:
        self.options = options
        self.name = name  # of the module, if known; for messages
        self._scheduler = scheduler_for(options)
        self._counters = Counters(self._scheduler.away)
        if self._scheduler.tier.idle:
            _warn_of_no_device()

    def __reduce__(self) -> tuple[type[Offload], tuple[OffloadOptions, str]]:
        return Offload, (self.options, self.name)

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call `function(*args, **kwargs)` and offload the tensors that it saves."""
        if not torch.is_grad_enabled() or is_exporting():
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            break_graph(_COMPILED)
            raise OffloadError(_COMPILED)  # in the frame after the break, which is not compiled
        if self._scheduler.tier.idle or is_checkpointing() or active_transform() is not None:
            return function(*args, **kwargs)
        # If it is around a checkpoint, the function is the checkpoint, and the module is its first
        # argument.
        inside = owner(function) is None and bool(args) and callable(args[0])
        called = args[0] if inside else function
        where = describe(called, self.name)
        call = OffloadCall(self._scheduler, self._counters, owner(called), where)
        with saved_tensors_hooks(call.pack, call.unpack):
            result = function(*args, **kwargs)
        call.finish()
        return result

    @property
    def stats(self) -> OffloadStats:
        """Counts of its copies."""
        return self._counters.snapshot()


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's storage; 0 for one without memory, such as a zero tangent."""
    storage = tensor.untyped_storage()
    try:
        return storage.nbytes() if storage.data_ptr() else 0
    except RuntimeError:  # torch's error for a storage that has no memory
        return 0


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its strides and the bytes of the storage describe the tensor completely."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def split(tensor: Any) -> tuple[dict[str, torch.Tensor], Any] | None:
    """Inner tensors and context of a tensor subclass, or None if it has no `__tensor_flatten__`."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return None
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def _joined(
    kind: Any, parts: dict[str, Unpack], context: Any, size: torch.Size, stride: tuple[int, ...]
) -> torch.Tensor:
    """The tensor subclass that `split` took apart."""
    inner = {name: unpack() for name, unpack in parts.items()}
    whole: torch.Tensor = kind.__tensor_unflatten__(inner, context, size, stride)
    return whole
