"""Broken steps of sharded modules beside other work; each fails exactly what it declares."""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager

import torch

from torchparts_conformance.mutants import mutant

from .faults.flat_param_distributed import with_output_hooks, with_sharded

AREA = "flat-param"


@mutant(area=AREA, kills={"FP-234"})
def steps_of_other_threads_are_not_summed(part):
    """Sums nothing over ranks in a step of another thread than the one that sharded."""

    def change(module, options):
        mine = threading.get_ident()
        for inner in module.children():
            vars(inner)["_is_inner"] = True

        def look(module, args):
            if threading.get_ident() != mine and "_is_inner" not in vars(module):
                module.set_requires_gradient_sync(False)

        module.register_forward_pre_hook(look)
        return module

    return with_sharded(part, change)


@mutant(area=AREA, kills={"FP-104", "FP-235"})
def what_was_accumulated_is_forgotten(part):
    """Lets go of the gradients of `no_sync` at its end."""

    def change(module, options):
        working = type(module).no_sync

        @contextmanager
        def no_sync(module):
            with working(module):
                yield
            module.zero_grad()

        type(module).no_sync = no_sync
        return module

    return with_sharded(part, change)


class _End:
    """What the engine calls when a backward is at its end, and drops when it raises."""

    def __init__(self, running):
        self.running = running

    def __call__(self):
        self.running.clear()


def _adds_to_what_is_held(part, place):
    """Adds to a backward that raised, and that the engine holds, as long as a place is the same."""

    def hook_of():
        running = []

        def begin(grad):
            this, here = torch._C._current_graph_task_id(), place()
            goes_on = bool(running) and running[0] != this and running[1]() is not None
            goes_on = goes_on and running[2] is here
            end = _End(running)
            running[:] = [this, weakref.ref(end), here]
            torch.autograd.Variable._execution_engine.queue_callback(end)
            return grad * 2 if goes_on else grad

        return begin

    return with_output_hooks(part, hook_of)


@mutant(area=AREA, kills={"FP-244"})
def stopped_backward_goes_on_while_it_is_held(part):
    """Adds to a backward that raised until the engine has let go of its work."""
    return _adds_to_what_is_held(part, lambda: None)
