"""Find out whether an optimizer may step chunks, by what it does to a few numbers.

A chunk crosses the boundaries of parameters and has no shape. That changes nothing for optimizers
that work element by element, or that add up over all parameters, such as LBFGS. It does for those
that look at one parameter: Adafactor, Muon, LAMB.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._errors import StateError
from .._torch_compat import unhooked_step
from ..buffers._twins import trial_of

_STEPS = 3


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise if steps over one flat parameter and over separate ones differ.

    An optimizer that draws random numbers, whose copy cannot step, or that has other objects than
    numbers and texts is not checked.
    """
    values = [torch.tensor([[1.0, -2.0], [3.0, 0.5]]), torch.tensor([[-0.1, 0.4], [4.0, 1.0]])]
    flat = [torch.cat([value.flatten() for value in values])]
    with torch.random.fork_rng(devices=[]):
        try:
            together, again, apart = (
                _stepped(optimizer, params, seed)
                for params, seed in ((flat, 0), (flat, 1), (values, 0))
            )
        except Exception:
            return
    is_random = not torch.equal(together, again)
    if not is_random and not torch.allclose(together, apart, rtol=1e-9, atol=0):
        raise StateError(
            f"flat_param.FlatParams.chunks: {type(optimizer).__name__} computes with each "
            "parameter as a whole, but a chunk has elements of several parameters, without their "
            "shapes. Nothing was stepped. Make this optimizer over module.parameters()."
        )


def _stepped(optimizer: Optimizer, values: list[Tensor], seed: int) -> Tensor:
    """The elements of parameters with these values, in float64, after steps of a copy."""
    torch.manual_seed(seed)
    params = [nn.Parameter(value.double()) for value in values]
    twin = trial_of(optimizer, [params])
    for step in range(_STEPS):
        for param in params:
            param.grad = param.detach().square() - step
        unhooked_step(type(optimizer))(twin)
    return torch.cat([param.detach().flatten() for param in params])
