"""Private names of torch behave as the package needs."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sac_policies import _torch_compat as compat


def test_alias_shares_the_version_counter_below_autograd():
    """If the user modifies the result later, the kept alias has the new version."""
    kept = []

    class Below(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            out = op(*args, **(kwargs or {}))
            kept.append(compat.alias(out))
            return out

    x = torch.ones(2, requires_grad=True)
    with Below():
        out = x.exp()
    before = kept[0]._version
    with torch.no_grad():
        out.add_(1)
    assert kept[0]._version == out._version > before


def test_missing_name_is_refused_in_one_sentence():
    """The error lists the versions that have it."""
    with pytest.raises(ImportError, match=r"needs torch\._C\.gone, which torch .* between 2\.9"):
        compat.find("_C.gone")


def test_func_transform_is_seen():
    """Inside torch.func.grad, and not after it."""
    seen = []

    def function(x):
        seen.append(compat.in_func_transform())
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    assert seen == [True]
    assert not compat.in_func_transform()
