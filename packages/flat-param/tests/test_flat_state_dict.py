"""What `state_dict()` of a flattened module holds."""

import pytest
import torch
from torch import nn

from flat_param import flat_params_of, flatten


def storages(state):
    """The storage of each entry: where it begins, and its size."""
    return [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in state.values()]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.bool, torch.int64],
)
def test_what_a_state_dict_holds_looks_apart_and_costs_no_memory(holder, dtype):
    """Each tensor's storage is that tensor alone, at the address of its parameter."""
    tensors = (torch.randn(3, 4), torch.randn(5, 2).t(), torch.ones(()))
    model = holder(*(tensor.to(dtype) for tensor in tensors))
    flatten(model)
    state = model.state_dict()
    params = list(model.parameters())
    assert storages(state) == [(p.data_ptr(), p.numel() * p.itemsize) for p in params]
    for value, param in zip(state.values(), params, strict=True):
        assert (value.shape, value.stride()) == (param.shape, param.stride())
        assert value.tolist() == param.tolist()
        assert not value.requires_grad
        assert type(value) is torch.Tensor


def test_tied_names_have_one_storage(mlp):
    """The same object, so that `torch.save` writes it once; others are apart."""
    mlp.add_module("tied", nn.Linear(5, 7))
    mlp.tied.weight = mlp[0].weight
    flatten(mlp)
    state = mlp.state_dict()
    first, second = state["0.weight"], state["tied.weight"]
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
    assert len(set(storages(state))) == len(state) - 1


def test_a_state_dict_reads_and_writes_the_model(mlp):
    """As a plain module's does; with `keep_vars=True` it holds the parameters."""
    flatten(mlp)
    mlp.state_dict()["0.weight"].zero_()
    assert not mlp[0].weight.any()
    kept = mlp.state_dict(keep_vars=True)
    assert all(kept[name] is param for name, param in mlp.named_parameters())
    before = {name: value.clone() for name, value in mlp.state_dict().items()}
    mlp.load_state_dict(mlp.state_dict())
    mlp.load_state_dict(mlp.state_dict(), assign=True)
    assert all(torch.equal(value, before[name]) for name, value in mlp.state_dict().items())
    home = flat_params_of(mlp).as_vector().data_ptr()
    assert mlp[0].weight.data_ptr() == home


def test_what_was_given_outlives_the_model(mlp):
    """The stretch keeps the memory."""
    flatten(mlp)
    state, before = mlp.state_dict(), [param.tolist() for param in mlp.parameters()]
    mlp[0] = mlp[2] = nn.Identity()
    assert [value.tolist() for value in state.values()] == before


def test_what_was_given_outlives_the_move_to_shared_memory():
    """It keeps the old memory; later state dicts hold the shared memory."""
    model = nn.Linear(512, 512)
    flat = flatten(model)
    state = model.state_dict()
    before = model.weight.detach().clone()
    model.share_memory()
    junk = [torch.full((512 * 512 + 512,), 7.0) for _ in range(8)]
    assert torch.equal(state["weight"], before)
    del junk  # until here it would be in the memory, if that were free
    flat.as_vector().zero_()
    assert torch.equal(state["weight"], before)
    assert not model.state_dict()["weight"].any()
    assert flat.as_vector().is_shared()
