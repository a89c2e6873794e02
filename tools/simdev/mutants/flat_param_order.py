"""Sharded steps that forget who waits for whom; each fails what it declares, on simdev.

They change the package itself, so each needs a process of its own (`tests/test_broken_order.py`).
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from flat_param.comm import _comm
from flat_param.sharded import _order, _sharded_grads
from torchparts_conformance.mutants import mutant

AREA = "flat-param"


@mutant(area=AREA, kills={"FP-234", "FP-235", "FP-244", "FP-245", "FP-246", "FP-247"})
def nobody_waits_for_collectives(part):
    """Uses what is gathered and summed before it is there."""
    _comm.Communicator.finish = lambda self, pending: None
    return part


@mutant(area=AREA, kills={"FP-234"})
def gradients_are_summed_on_the_current_stream(part):
    """Sums and hands out gradients on whichever stream is current."""
    _sharded_grads.at_home = _comm.at_home = lambda stream: nullcontext()
    return part


@mutant(area=AREA, kills={"FP-236"})
def the_host_waits_at_the_end_of_a_backward(part):
    """Reads what ranks say to each other in the step itself."""
    real = _order._Said.of

    def of(said, labels):
        torch.accelerator.synchronize(said.device)
        return real(said, labels)

    _order._Said.of = of
    return part
