"""A copy of a flattened module, or of a part of it, needs nothing of the original."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from flat_param import flat_params_of, flatten


def saved(module):
    """Through torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved])
def test_a_copy_is_flat_and_apart(mlp, copied, aliased):
    """A copied module has another buffer and trains."""
    flat = flatten(mlp)
    twin = copied(mlp)
    assert aliased(twin)
    assert flat_params_of(twin) is not flat
    assert flat_params_of(twin).module is twin
    assert torch.equal(flat_params_of(twin).as_vector(), flat.as_vector())
    twin(torch.ones(1, 5)).sum().backward()
    assert flat_params_of(twin).grad_vector().any()
    assert mlp[0].weight.grad is None


def test_a_copy_inside_a_larger_module_is_flat(mlp, aliased):
    """What holds a flattened module can be copied too, tied weights included."""
    mlp.add_module("tied", nn.Linear(5, 7))
    mlp.tied.weight = mlp[0].weight
    flatten(mlp)
    twin = copy.deepcopy(nn.ModuleDict({"body": mlp}))["body"]
    assert aliased(twin)
    assert twin.tied.weight is twin[0].weight


def test_a_copy_takes_in_modules_put_in_later(mlp, aliased):
    """It watches its own tree."""
    flatten(mlp)
    twin = copy.deepcopy(mlp)
    twin(torch.ones(1, 5))
    twin[2] = nn.Linear(7, 2)
    twin(torch.ones(1, 5))
    assert aliased(twin)


def test_a_submodule_copied_or_saved_alone_needs_nothing_from_here(mlp):
    """It is the plain layer that it would be, and its file names no class of this package."""
    flatten(mlp)
    twin = copy.deepcopy(mlp[0])
    twin.weight = nn.Parameter(torch.ones(2, 2))
    file = io.BytesIO()
    torch.save(mlp[0], file)
    assert b"flat_param" not in file.getvalue()
    assert len(file.getvalue()) < 4096
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded.weight = nn.Parameter(torch.ones(3, 3))
    assert list(loaded.state_dict()) == ["weight", "bias"]
    assert mlp[0].weight.shape == (7, 5)
