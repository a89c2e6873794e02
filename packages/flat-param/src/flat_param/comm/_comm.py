"""The only file that calls torch.distributed collectives; counts calls and bytes.

- A collective that fails raises `CommError` on every rank and names the ranks that are gone.
- Within one communicator, every rank starts the same collectives in the same order. Collectives
  whose order may differ between ranks use another communicator, see Note [Two communicators] in
  _groups.py.
- Captured collectives run in replays only. They are not in the trail, since one rank may abandon a
  capture, and code outside of the capture cannot wait for them.
- With gloo, gathers of two ranks and sums are all_to_all. gloo's all_gather receives into separate
  memory and copies from there, and its reduce_scatter sends more bytes than needed. Its all_to_all
  receives in place and copies only what a rank sends to itself: nothing if two ranks exchange
  halves. Sums are added in the order of ranks, so they are deterministic.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from ctypes import string_at
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from .._errors import CommError
from ._exit import dropped_at_exit
from ._streams import HERE, is_capturing
from ._trail import Trail

# torch 2.13 renamed the single-tensor collectives and warns about the old names.
_all_gather: Callable[..., dist.Work | None] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

_POLL = timedelta(seconds=0.5)
_POLLS_OF_A_DEADLOCK = 4
_KEPT_BUFFERS = 3


@dataclass(frozen=True)
class CommCount:
    """Collectives of one kind on this rank.

    Attributes:
        calls: collectives started.
        wire_bytes: bytes this rank sends in a bandwidth-optimal algorithm, for all calls.
    """

    calls: int = 0
    wire_bytes: int = 0


@dataclass
class CommLog:
    """Calls and bytes of this rank, by kind of collective."""

    counts: dict[str, CommCount] = field(default_factory=dict)

    def add(self, kind: str, wire_bytes: int) -> None:
        """Count one call of `kind` that sends `wire_bytes` bytes."""
        seen = self.counts.get(kind) or CommCount()
        self.counts[kind] = CommCount(seen.calls + 1, seen.wire_bytes + wire_bytes)

    def reset(self) -> None:
        """Forget everything counted so far."""
        self.counts.clear()


class BufferPool:
    """Temporary flat buffers that are reused by the units of one tree.

    On CPU a freed large buffer goes back to the system, and the next one costs a page fault and
    4 KiB of zeros per page. So three buffers of each dtype are cached: in backward one is being
    filled, one is being sent, and one receives. They are freed with the tree's modules. On other
    devices torch's allocator caches memory, and nothing is kept here.
    """

    def __init__(self) -> None:
        self._free: dict[torch.dtype, list[Tensor]] = {}

    def acquire(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised buffer of at least `numel` elements; see `release`."""
        kept = self._free.get(dtype, []) if device.type == "cpu" else []
        for index, buffer in enumerate(kept):
            if buffer.numel() >= numel:
                return kept.pop(index)
        return torch.empty(numel, dtype=dtype, device=device)

    def release(self, buffer: Tensor) -> None:
        """Return a buffer to the pool. The larger ones are kept."""
        if buffer.device.type == "cpu":
            kept = self._free.setdefault(buffer.dtype, [])
            kept.append(buffer)
            kept.sort(key=Tensor.numel)
            del kept[:-_KEPT_BUFFERS]


@dataclass
class Pending:
    """A collective under way; `wait` returns when its result may be read.

    Attributes:
        label: the collective, in words.
        number: of the collective in its group.
        home: runs a block on the stream that waits; by default the current one.
        device: the device that runs it; None if the host waits.
        captured: whether it is part of a graph.
    """

    comm: Communicator
    label: str
    work: dist.Work | None = None
    number: int = 0
    finish: Callable[[], object] | None = None
    home: AbstractContextManager[None] = HERE
    device: torch.device | None = None
    captured: bool = False

    def then(self, step: Callable[[], object]) -> Pending:
        """Run `step` at the end of `wait`, after earlier steps; returns self."""
        first = self.finish
        self.finish = step if first is None else lambda: (first(), step())
        return self

    def wait(self) -> None:
        """Wait for the result. Not a collective; a second call does nothing."""
        with self.home:
            if self.work is not None:
                self.comm.finish(self)
                self.work = None
            last, self.finish = self.finish, None
            if last is not None:
                last()

    def leave(self) -> None:
        """Wait without reading the result, so that its memory can be reused. Not a collective."""
        if self.device is not None and self.captured != is_capturing(self.device):
            self.work = self.finish = None  # of another capture
        try:
            self.wait()
        except RuntimeError:
            if not self.captured:
                raise
            self.work = self.finish = None  # the capture is broken, so it will not run


class Communicator:
    """Collectives over one process group, in one order; without a group, of this rank alone.

    Attributes:
        log: where calls are counted.
        number: of the unit that uses the communicator, see _trail.py.
        unit: the name of that unit, for messages.
        trail: the collectives that this rank has started in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, log: CommLog) -> None:
        self.group = group
        self.log = log
        self.number = 0
        self.unit = ""
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.trail = None if group is None else Trail.of(group)
        self._backends = {} if self.trail is None else self.trail.backends
        if group is not None:
            dropped_at_exit(self, "group")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CommError(
            "flat_param.fully_shard: a gradient of a sharded module cannot be pickled with the "
            "ranks that it is spread over. Save grad.detach(), or full_state_dict(module)."
        )

    def all_gather(self, out: Tensor, shard: Tensor) -> Pending:
        """Fill `out` (world * shard,) from every rank's `shard` (shard,). Collective."""
        if self.world_size == 1:
            if out.data_ptr() != shard.data_ptr():
                out.copy_(shard)
            return Pending(self, "all_gather")
        sent = (self.world_size - 1) * shard.nbytes
        out, shard = out.view(torch.uint8), shard.view(torch.uint8)  # every backend moves bytes
        if self.world_size == 2 and self._backends.get(out.device.type) == "gloo":
            mine, theirs = self._halves(out)
            mine.copy_(shard)
            return self._exchange("all_gather", sent, theirs, shard)
        return self._start("all_gather", sent, _all_gather, out, shard)

    def reduce_scatter(self, out: Tensor, full: Tensor, *, pool: BufferPool) -> Pending:
        """Sum `full` (world * shard,) over ranks into this rank's `out` (shard,). Collective.

        `full` must stay untouched until `wait` returns. `pool` has temporary buffers.
        """
        if self.world_size == 1:
            out.copy_(full)
            return Pending(self, "reduce_scatter")
        sent = (self.world_size - 1) * out.nbytes
        out, full = _real(out), _real(full)
        if self._backends.get(full.device.type) != "gloo":
            return self._start("reduce_scatter", sent, _reduce_scatter, out, full)
        mine, given = self._halves(full) if self.world_size == 2 else (None, full)
        buffer = pool.acquire(given.numel(), dtype=full.dtype, device=full.device)
        received = buffer[: given.numel()]

        def add_up() -> None:
            parts = received.split(out.numel()) if mine is None else (mine, received)
            first, second, *others = parts
            torch.add(first, second, out=out)  # a third of the time of a sum over few rows
            for other in others:
                out.add_(other)
            pool.release(buffer)

        return self._exchange("reduce_scatter", sent, received, given).then(add_up)

    def _halves(self, full: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's half of `full`, and the other rank's."""
        size = full.numel() // 2
        first, second = full[:size], full[size:]
        return (second, first) if self.rank else (first, second)

    def _exchange(self, what: str, sent: int, out: Tensor, given: Tensor) -> Pending:
        """Send parts of `given` to all ranks; of two ranks, all of it to the other one."""
        sizes = None
        if self.world_size == 2:
            sizes = [given.numel(), 0] if self.rank else [0, given.numel()]
        return self._start(what, sent, dist.all_to_all_single, out, given, sizes, sizes)

    def all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, *, of_unit: bool = True
    ) -> Pending:
        """Reduce `tensor` over ranks in place. Collective.

        `of_unit`: True if the tensor belongs to the communicator's unit, False if to several units.
        """
        if self.world_size == 1:
            return Pending(self, "all_reduce")
        sent = 2 * (self.world_size - 1) * tensor.nbytes // self.world_size
        return self._start("all_reduce", sent, dist.all_reduce, _real(tensor), op, of_unit=of_unit)

    def broadcast(self, tensor: Tensor) -> Pending:
        """Give every rank the `tensor` of the group's first rank, in place. Collective."""
        if self.world_size == 1:
            return Pending(self, "broadcast")
        return self._start("broadcast", tensor.nbytes, partial(dist.broadcast, group_src=0), tensor)

    def share(self, note: Any) -> list[Any]:
        """Return every rank's small picklable `note`. Collective; the ranks trust each other.

        torch's `all_gather_object` needs numpy.
        """
        if self.world_size == 1:
            return [note]
        self.log.add("share", 0)
        device = None if "cpu" in self._backends else torch.accelerator.current_accelerator()
        data = torch.frombuffer(bytearray(pickle.dumps(note)), dtype=torch.uint8).to(device)
        size = torch.tensor([data.numel()], device=device)
        sizes = [torch.empty_like(size) for _ in range(self.world_size)]
        try:
            dist.all_gather(sizes, size, group=self.group)
            padded = data.new_zeros(max(int(each) for each in sizes))
            padded[: data.numel()] = data
            found = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(found, padded, group=self.group)
        except RuntimeError as error:
            raise self._fault("share", str(error)) from error
        here = [each.cpu() for each in found]
        texts = [string_at(each.data_ptr(), int(n)) for each, n in zip(here, sizes, strict=True)]
        return [pickle.loads(text) for text in texts]

    def finish(self, pending: Pending) -> None:
        """Wait for a collective; raise `CommError` that names dead ranks if it fails."""
        work, label, trail = pending.work, pending.label, self.trail
        if work is None or trail is None:
            return
        if pending.device is not None:
            work.wait()  # orders the current stream; the backend's watchdog names dead ranks
            return
        polls = 0
        try:
            while True:
                try:
                    work.wait(_POLL)
                    return
                except RuntimeError as error:
                    if work.is_completed():
                        raise self._fault(label, str(error)) from error
                trouble = trail.trouble()
                if trouble:
                    raise self._fault(label, trouble)
                polls += 1
                reason = (
                    "" if polls % _POLLS_OF_A_DEADLOCK else trail.deadlock(label, pending.number)
                )
                if reason:
                    trail.diagnosis(reason)
                    raise CommError(
                        f"flat_param.fully_shard: {reason}, but all ranks must run the same units "
                        "in the same order. Look for a unit that only some ranks have called, and "
                        "restart from the last checkpoint."
                    )
        finally:
            if polls >= _POLLS_OF_A_DEADLOCK:
                trail.stop_waiting()

    def _start(
        self,
        what: str,
        sent: int,
        call: Callable[..., dist.Work | None],
        tensor: Tensor,
        *args: object,
        of_unit: bool = True,
    ) -> Pending:
        trail = self.trail
        assert trail is not None, "it has a group"
        self.log.add(what, sent)
        label = f"{what} of {self.unit}" if of_unit and self.unit else what
        is_gloo = self._backends.get(tensor.device.type) == "gloo"
        device = None if is_gloo else tensor.device
        captured = device is not None and is_capturing(device)
        if not captured:
            mark = f"{what} {self.number if of_unit else ''} {tensor.nbytes}".encode()
            trail.started += 1
            trail.checksum = zlib.crc32(mark, trail.checksum)
            trail.recent.append(label)
        number = 0 if captured else trail.started
        try:
            work = call(tensor, *args, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self._fault(label, str(error)) from error
        return Pending(self, label, work, number, device=device, captured=captured)

    def _fault(self, label: str, reason: str) -> CommError:
        assert self.trail is not None, "it has a group"
        return CommError(
            f"flat_param.fully_shard: {self.trail.diagnosis(reason)} did not complete the "
            f"collective {label}, but every rank of the group must. Call it on every rank, not "
            "under 'if rank == 0'; if a rank has ended, restart from the last checkpoint. "
            f"({reason.splitlines()[0]})"
        )


def _real(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones: sums are equal, and backends support them."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
