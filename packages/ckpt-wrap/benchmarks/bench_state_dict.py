"""What does `state_dict()` cost where every leaf is wrapped, and how does it grow?"""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs

from ckpt_wrap import checkpoint_, checkpoint_wrapper

WRAPS = {
    "plain": lambda module: module,
    "in place": checkpoint_,
    "nested": checkpoint_wrapper,
    "torch's wrapper": torchs.checkpoint_wrapper,
}


def _build(wrap, blocks):
    return nn.Sequential(
        *[
            nn.Sequential(wrap(nn.Linear(4, 4)), wrap(nn.LayerNorm(4)), wrap(nn.Linear(4, 4)))
            for _ in range(blocks)
        ]
    )


@pytest.mark.parametrize("blocks", [200, 800])
def test_state_dict(blocks, side_by_side, figure):
    """At 800 blocks: at most 1.1 times plain in place, and twice nested."""
    models = {name: _build(wrap, blocks) for name, wrap in WRAPS.items()}
    assert {len(model.state_dict()) for model in models.values()} == {6 * blocks}
    took = side_by_side({n: m.state_dict for n, m in models.items()}, number=1, rounds=15)
    figure("in place over plain", took["in place"] / took["plain"], must=1.1)
    figure("nested over plain", took["nested"] / took["plain"], must=2)
