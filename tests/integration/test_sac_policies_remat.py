"""Uses of torch-remat, done with sac-policies."""

from __future__ import annotations

import copy

import torch
from _checks import assert_same_grads, kept_bytes
from _models import need
from _regions import PRODUCTS, Block, model_of, ours, step
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sac_policies import checkpoint, recompute_all, save_modules, save_ops


def test_regions_of_source_code() -> None:
    """Where torch-remat marks a region to be saved, `save_modules` names the module."""
    remat = need("torch_remat")

    class Marked(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            up = remat.region(self.up, "up", recompute=False)(y)
            remat.recompute_needs_tensor(up)
            return x + self.down(torch.nn.functional.gelu(up))

    torch.manual_seed(0)
    plain = nn.Sequential(*(Marked() for _ in range(2)))
    for block in plain:
        block.drop.p = 0.0
    model = nn.Sequential(*(Block() for _ in range(2)))
    model.load_state_dict(plain.state_dict())
    for block in model:
        block.drop.p = 0.0
    work = {}
    runs = {
        "theirs": (plain, lambda b, x: remat.checkpoint(region_name="block")(b)(x)),
        "ours": (model, ours(save_modules("up"))),
    }
    losses = []
    for name, (either, run) in runs.items():
        with FlopCounterMode(display=False) as counter:
            losses.append(step(either, run))
        work[name] = counter.get_total_flops()
    assert torch.equal(*losses)
    assert_same_grads(model, plain)
    assert work["ours"] <= work["theirs"]


def test_everything_is_recomputed_as_by_torch_remat() -> None:
    """`checkpoint(region_name=)(f)(x)` and `checkpoint(f, x, policy=recompute_all())`."""
    remat = need("torch_remat")
    plain = model_of()
    for block in plain:
        block.drop.p = 0.0
    model, other = copy.deepcopy(plain), copy.deepcopy(plain)
    loss = step(plain)
    assert torch.equal(step(other, lambda b, x: remat.checkpoint(region_name="b")(b)(x)), loss)
    assert torch.equal(step(model, ours(recompute_all())), loss)
    assert_same_grads(model, plain)
    assert_same_grads(other, plain)


def test_dropout_in_a_region() -> None:
    """torch-remat does not restore random state; ours does, bit-identically."""
    need("torch_remat")
    plain = model_of()
    model = model_of()
    assert torch.equal(step(plain), step(model, ours(save_ops(*PRODUCTS))))
    assert_same_grads(model, plain)


def test_bytes_kept_beside_torch_remat() -> None:
    """With the same saved products, a region keeps no more than a marked one."""
    remat = need("torch_remat")

    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

        def forward(self, x: Tensor) -> Tensor:
            up = remat.region(self.up, "up", recompute=False)(x)
            remat.recompute_needs_tensor(up)
            return self.down(torch.nn.functional.gelu(up))

    block = Marked()
    plain = nn.Sequential(block.up, nn.GELU(), block.down)
    x = torch.randn(64, 32, requires_grad=True)
    marked = kept_bytes(lambda: remat.checkpoint(region_name="b")(block)(x).sum())
    kept = kept_bytes(lambda: checkpoint(plain, x, policy=save_ops(*PRODUCTS)).sum())
    assert kept <= marked
