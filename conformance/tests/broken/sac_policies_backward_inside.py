"""Broken backwards that run inside others; each fails exactly what it declares."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from torchparts_conformance.mutants import mutant, overlay

AREA = "sac-policies"


class _Comparisons:
    """What was read in a backward, until it ends; the next one that begins drops it."""

    def __init__(self):
        self.backward, self.open = None, []

    def add(self, before, now):
        """Compare at the end of the backward that runs."""
        this = torch._C._current_graph_task_id()
        if this != self.backward:
            self.open.clear()
            self.backward = this
            torch.autograd.Variable._execution_engine.queue_callback(self.end)
        self.open.append((before, now))

    def end(self):
        """Raise for what has changed."""
        looked, self.open, self.backward = self.open, [], None
        if not all(torch.equal(before, now) for before, now in looked):
            raise RuntimeError("aten.add.Tensor reads something else than in the forward")


@mutant(area=AREA, kills={"SP-209"})
def inner_backward_ends_comparisons_of_the_outer_one(part):
    """Runs a region of a tensor and a list again, and compares the list at the backward's end."""
    comparisons = _Comparisons()

    def checkpoint(function, *args, **kwargs):
        given = args[1] if len(args) == 2 and isinstance(args[1], list) else []
        if not given or torch.compiler.is_compiling():
            return part.checkpoint(function, *args, **kwargs)
        copies = [tensor.detach().clone() for tensor in given]
        out = torch_checkpoint(function, *args, use_reentrant=False)

        def compare(grads):
            for before, now in zip(copies, given, strict=True):
                comparisons.add(before, now)

        out.grad_fn.register_prehook(compare)
        return out

    return overlay(part, checkpoint=checkpoint)
