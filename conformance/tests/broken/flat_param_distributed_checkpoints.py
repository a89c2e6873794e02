"""Broken checkpoints of sharded modules; each fails exactly the requirements that it declares."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from torchparts_conformance.mutants import mutant

from .faults.flat_param_distributed import with_sharded


def _with_state(part, mend):
    """The part with a change to the state dict of sharded modules."""

    def change(module, options):
        whole = type(module).state_dict

        def state_dict(self, *args, **kwargs):
            state = whole(self, *args, **kwargs)
            if kwargs.get("destination") is None:
                state.update({name: mend(_whole(tensor)) for name, tensor in state.items()})
            return state

        type(module).state_dict = state_dict
        return module

    return with_sharded(part, change)


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@mutant("FP-106")
def state_dict_has_a_dimension_of_copies(part):
    """Adds a leading dimension to every tensor of a state dict."""
    return _with_state(part, lambda tensor: tensor.unsqueeze(0))


@mutant("FP-106 FP-177")
def state_dict_is_in_double(part):
    """Returns every value in another dtype."""
    return _with_state(part, Tensor.double)
