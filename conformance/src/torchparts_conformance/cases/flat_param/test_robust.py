"""Cases that torch 2.13 fails, through the source's own names."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._builds import blocks, holder, make_handle, survives

SENTINELS = torch.full((20,), -1.0)


@requirement(
    "FP-021",
    "A parameter that leaves holes in memory MUST keep its values.",
    rationale="silent corruption reproduced on 2.13: as_strided reads the neighbour's memory",
)
def test_a_column_slice_keeps_its_values(part, device):
    """A parameter with gaps in memory does not read other elements."""
    assert survives(part, device, torch.arange(24.0).view(4, 6)[:, :3], SENTINELS)


@requirement(
    "FP-022", "A scalar parameter MUST be flattened.", rationale="IndexError reproduced on 2.13"
)
def test_a_scalar_parameter_is_flattened(part, device):
    """Parameters with zero dimensions are supported."""
    assert survives(part, device, torch.tensor(3.0), SENTINELS)


@requirement(
    "FP-025",
    "An expanded parameter MUST keep its values.",
    rationale="storage out of bounds on 2.13",
)
def test_an_expanded_parameter_keeps_its_values(part, device):
    """Several indices of one element become several elements."""
    assert survives(part, device, torch.ones(1).expand(4), SENTINELS)


@requirement(
    "FP-026",
    "Parameters that the module does not own MUST be refused.",
    rationale="silently dropped on 2.13",
)
def test_foreign_parameters_are_refused(part, device):
    """A parameter that is not in the module is not silently dropped."""
    model, _ = blocks(device, torch.float32)
    params = [*model.parameters(), nn.Parameter(torch.ones(100, device=device))]
    with pytest.raises(ValueError, match="100"):
        make_handle(part, model, device, params=params)
    assert len(list(model.parameters())) == len(params) - 1


@requirement(
    "FP-028",
    "A deep copy of a flattened module MUST compute the same results and share nothing with the "
    "original.",
    rationale="RuntimeError reproduced on 2.13",
)
def test_a_flattened_module_is_deep_copied(part, device):
    """The copy computes the same results and shares nothing."""
    model, x = blocks(device, torch.float32)
    handle = make_handle(part, model, device)
    twin = copy.deepcopy(model)
    expected = model(x)
    with torch.no_grad():
        handle.flat_param.zero_()
    assert torch.equal(twin(x), expected)


@requirement(
    "FP-031",
    "Flattening SHOULD move parameters in place, without holding them twice.",
    rationale="construction holds everything twice on 2.13: 382 MiB more for 100M parameters",
)
def test_parameters_move_in_place(part, device):
    """The given tensors share memory with the flat parameter, so nothing is held twice."""
    model, _ = blocks(device, torch.float32)
    params = list(model.parameters())
    home = make_handle(part, model, device).flat_param.untyped_storage().data_ptr()
    assert all(param.untyped_storage().data_ptr() == home for param in params)


@requirement(
    "FP-033",
    "Two parameters that share memory but are different objects MUST keep sharing it, or MUST be "
    "refused by name.",
    rationale=(
        "reproduced on 2.13: both are copied, and writing to one no longer writes to the other"
    ),
)
def test_shared_memory_of_parameters_stays_shared_or_is_refused(part, device):
    """Writing to one writes to the other, or an error names both."""
    base = torch.ones(6, device=device)
    module = holder(nn.Parameter(base[:4]), nn.Parameter(base[2:]))
    refusal = ""
    try:
        make_handle(part, module, device)
    except ValueError as error:
        refusal = str(error)
    else:
        with torch.no_grad():
            module.p0[3] = 5.0
    named = "p0" in refusal and "p1" in refusal
    assert named or module.p1.tolist() == [1.0, 5.0, 1.0, 1.0]
