"""The catalogue's names exist, and each has a reason."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from sac_policies import ATTENTION, CONVOLUTIONS, MATMULS, report, save_ops
from sac_policies.policies import CATALOGUE


@pytest.mark.parametrize("group", CATALOGUE, ids=lambda group: group.entry)
def test_every_entry_has_a_reason(group):
    """Names are unique and none lacks its reason."""
    assert len(set(group.names)) == len(group.names)
    assert all(len(reason.split()) > 1 for _, reason in group.reasons)


@pytest.mark.parametrize("group", CATALOGUE, ids=lambda group: group.entry)
def test_most_aten_names_exist_in_this_torch(group):
    """Misspelt names would never match; at most one in ten may belong to other versions."""
    names = [name.split(".")[1] for name in group.names if name.startswith("aten.")]
    unknown = [name for name in names if not hasattr(torch.ops.aten, name)]
    assert len(unknown) * 10 <= len(names)


@pytest.mark.parametrize(
    ("group", "function"),
    [
        (MATMULS, lambda x: F.linear(x, x, x[0])),
        (
            ATTENTION,
            lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3),
        ),
        (CONVOLUTIONS, lambda x: F.conv1d(x[None], x[:, :, None])),
    ],
    ids=["matmuls", "attention", "convolutions"],
)
def test_groups_find_what_runs_on_cpu(group, function):
    """The operator that runs on CPU is in the group for its function."""
    x = torch.ones(4, 4, requires_grad=True)
    assert report(function, x, policy=save_ops(group)).kept
