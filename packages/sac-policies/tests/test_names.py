"""`name` is a no-op in eager code and an operator in compiled code."""

from __future__ import annotations

import torch

from sac_policies import checkpoint, checkpoint_name, recompute_all, save_named


def test_name_returns_the_tensor_itself():
    """Outside of a region, naming has no cost."""
    x = torch.ones(2)
    assert checkpoint_name(x, "x") is x


def test_name_inside_another_policys_region_is_free(counting):
    """A policy without names ignores them."""
    x = torch.ones(2, requires_grad=True)
    with counting() as counts:
        checkpoint(lambda p: checkpoint_name(p.sin(), "s"), x, policy=recompute_all())
    assert counts["aten.sin.default"] == 1
    assert counts["sac_policies.named.default"] == 0


def test_compiled_name_is_an_operator_with_a_gradient():
    """Under torch.compile, the name becomes an operator that copies."""
    torch.compiler.reset()
    x = torch.ones(3, requires_grad=True)
    compiled = torch.compile(
        lambda p: checkpoint_name(p.sin(), "s").cos(), backend="aot_eager", fullgraph=True
    )
    (got,) = torch.autograd.grad(compiled(x).sum(), x)
    (wanted,) = torch.autograd.grad(x.sin().cos().sum(), x)
    torch.testing.assert_close(got, wanted)


def test_named_views_keep_the_storage_they_are_of(counting):
    """Naming a part of a matmul's output keeps the whole output."""
    x = torch.randn(4, 4, requires_grad=True)

    def body(p):
        left, right = (p @ p).chunk(2, dim=-1)
        return checkpoint_name(left, "left").sin() * right.cos()

    out = checkpoint(body, x, policy=save_named("left"))
    with counting() as counts:
        out.sum().backward()
    assert counts["aten.mm.default"] == 2
