"""Offloads that forget who waits for whom; each fails what it declares, on the simulated device.

They change the package itself, so each needs a process of its own (`tests/test_broken_order.py`).
"""

from __future__ import annotations

import torch

from ckpt_wrap.offload import _host_tier, _offload_scheduler, _offloaded_storage
from torchparts_conformance.mutants import mutant

AREA = "ckpt-wrap"
Tier, Link, Copy = _host_tier.HostStored, _host_tier.StreamLink, _host_tier.StreamCopy
Scheduler, Storage = _offload_scheduler.OffloadScheduler, _offloaded_storage.OffloadedStorage


@mutant(area=AREA, kills={"CW-112"})
def host_memory_is_handed_on_by_the_current_device(part):
    """Keeps host buffers for the next user, for which the current device's stream waits."""
    free, read = {}, {}
    real_discard, real_in, real_out = Tier.discard, Link.copy_in, Link.copy_out
    real_empty = torch.empty

    def copy_in(self, out):
        back = real_in(self, out)
        read[out.host.data_ptr()] = back.ended
        return back

    def discard(self):
        out = self._out
        real_discard(self)
        if out is not None and (end := read.pop(out.host.data_ptr(), None)) is not None:
            free.setdefault(out.host.numel(), []).append((out.host, out.ended, end))

    def copy_out(self, source):
        def empty(numel, **options):
            if not options.get("pin_memory") or not free.get(numel):
                return real_empty(numel, **options)
            host, *ends = free[numel].pop(0)
            current = torch.accelerator.current_stream()
            for end in ends:
                current.wait_event(end)
            return host

        torch.empty = empty
        try:
            return real_out(self, source)
        finally:
            torch.empty = real_empty

    Tier.discard, Link.copy_in, Link.copy_out = discard, copy_in, copy_out
    return part


@mutant(area=AREA, kills={"CW-112", "CW-118"})
def storages_are_brought_back_for_each_read(part):
    """Forgets what was fetched early when it is read."""
    real = Storage.read

    def read(self):
        if self.source is None and isinstance(self.stored, Tier) and self._fetched is not None:
            self.drop_fetched()
        return real(self)

    Storage.read = read
    return part


@mutant(area=AREA, kills={"CW-113"})
def changes_are_noticed_while_the_source_is_there(part):
    """Looks at the version only before the copy has ended."""
    real = Storage.read

    def read(self):
        if self.source is None and isinstance(self.stored, Tier):
            self._guard = None
        return real(self)

    Storage.read = read
    return part


@mutant(area=AREA, kills={"CW-114"})
def fetched_memory_belongs_to_the_current_stream(part):
    """Takes memory for what is fetched early on the stream that is current then."""

    def copy_in(self, out):
        device = out.stream.device
        _, into = self._of(device)
        flat = torch.empty(out.host.numel(), dtype=torch.uint8, device=device)
        into.wait_stream(out.stream)
        with _host_tier._On(into):
            flat.copy_(out.host, non_blocking=True)
        return Copy(flat, out.host, out.stream, into.record_event(), into)

    Link.copy_in = copy_in
    return part


@mutant(area=AREA, kills={"CW-112", "CW-114", "CW-115", "CW-116", "CW-117", "CW-118"})
def sources_go_before_they_are_copied(part):
    """Lets go of a source, or of what was fetched and not read, without waiting for its copy."""

    def release(self):
        self.tensor = None

    Copy.release = release
    return part


@mutant(area=AREA, kills={"CW-112", "CW-114", "CW-115", "CW-116", "CW-117", "CW-118"})
def readers_do_not_wait(part):
    """Hands out what was fetched before the bytes are back."""
    Copy.wait = lambda self: None
    return part


@mutant(area=AREA, kills={"CW-115"})
def the_allocator_holds_sources_back(part):
    """Records the copying streams on all memory, and waits for nothing."""

    def release(self):
        tensor, self.tensor = self.tensor, None
        if tensor is not None:
            for stream in link._of(tensor.device):
                tensor.record_stream(stream)

    real_in = Link.copy_in

    def copy_in(self, out):
        self._of(out.stream.device)[1].wait_event(out.ended)
        return real_in(self, out)

    link = Link()
    made = Link._of
    Link._of = lambda self, device: made(link, device)
    Copy.release, Link.copy_in = release, copy_in
    return part


@mutant(area=AREA, kills={"CW-116", "CW-117"})
def storages_are_let_go_of_by_the_next_call(part):
    """Holds the storages of a call until the next one begins."""
    held = []
    real_begin, real_send = Scheduler.begin, Scheduler.send

    def begin(self, device):
        held.clear()
        return real_begin(self, device)

    def send(self, storage, order):
        if isinstance(self.tier, _host_tier.HostTier):
            held.append(storage)
        real_send(self, storage, order)

    Scheduler.begin, Scheduler.send = begin, send
    return part
