"""What a handle refuses, in words that the source fixed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._builds import holder, make_handle


@requirement("FP-015")
def test_integer_parameters_are_refused(part, device):
    """A gradient of integers has no meaning."""
    module = holder(torch.ones(2, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match="Cannot flatten integer dtype tensors"):
        make_handle(part, module, device)


@requirement("FP-016")
def test_mixed_dtypes_are_refused(part, device):
    """Both dtypes are named."""
    half = torch.ones(2, dtype=torch.float16, device=device)
    module = holder(torch.ones(2, device=device), half)
    words = "Must flatten tensors with uniform dtype but got torch.float32 and torch.float16"
    with pytest.raises(ValueError, match=words):
        make_handle(part, module, device)


@requirement("FP-017")
def test_mixed_trainability_is_refused_without_original_parameters(part, device):
    """One flat parameter is trained or is not."""
    frozen = nn.Parameter(torch.ones(2, device=device), requires_grad=False)
    module = holder(torch.ones(2, device=device), frozen)
    with pytest.raises(ValueError, match="uniform `requires_grad` when `use_orig_params=False`"):
        make_handle(part, module, device)


@requirement("FP-018")
def test_a_flat_parameter_is_not_flattened_again(part, device):
    """Nesting would lose the names."""
    flat = make_handle(part, holder(torch.ones(2, device=device)), device).flat_param
    assert isinstance(flat, part.FlatParameter)
    module = nn.Module()
    module.register_parameter("flat", flat)
    with pytest.raises(ValueError, match="FlatParameter"):
        make_handle(part, module, device)
