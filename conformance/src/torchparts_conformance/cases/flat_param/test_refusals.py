"""Parameters that a handle refuses, with the source's messages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._builds import holder, make_handle


@requirement(
    "FP-015", "Integer parameters MUST be refused.", rationale="_flat_param.py fixes the sentence"
)
def test_integer_parameters_are_refused(part, device):
    """Integers have no gradient."""
    module = holder(torch.ones(2, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match="Cannot flatten integer dtype tensors"):
        make_handle(part, module, device)


@requirement(
    "FP-016",
    "A handle MUST refuse parameters of different dtypes and name both.",
    rationale="_flat_param.py fixes the sentence",
)
def test_mixed_dtypes_are_refused(part, device):
    """Both dtypes are named."""
    half = torch.ones(2, dtype=torch.float16, device=device)
    module = holder(torch.ones(2, device=device), half)
    words = "Must flatten tensors with uniform dtype but got torch.float32 and torch.float16"
    with pytest.raises(ValueError, match=words):
        make_handle(part, module, device)


@requirement(
    "FP-017",
    "A handle without original parameters MUST refuse to mix frozen and trainable ones.",
    source="torch.distributed.fsdp.FullyShardedDataParallel",
    quote="parameters that are all frozen or all non-frozen",
)
def test_mixed_trainability_is_refused_without_original_parameters(part, device):
    """A flat parameter is either trained or frozen."""
    frozen = nn.Parameter(torch.ones(2, device=device), requires_grad=False)
    module = holder(torch.ones(2, device=device), frozen)
    with pytest.raises(ValueError, match="uniform `requires_grad` when `use_orig_params=False`"):
        make_handle(part, module, device)
