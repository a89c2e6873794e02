"""Each built-in rule saves the values that its arguments describe."""

from __future__ import annotations

import functools

import pytest
import torch

from sac_policies import (
    MATMULS,
    PolicyError,
    report,
    save_by_shape,
    save_every_nth,
    save_modules,
    save_ops,
    scoped,
)
from sac_policies.policies._rules import is_inside


def _kept(function, *args, policy):
    return [f"{row.op}[{row.index}]" for row in report(function, *args, policy=policy).kept]


def _three(p, q):
    return ((p @ q).sin() @ q).sin() @ q


@pytest.fixture
def ab():
    """Give two (4, 4) leaves."""
    torch.manual_seed(0)
    return torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)


@pytest.mark.parametrize(("phase", "kept"), [(0, [0, 2]), (1, [1])])
def test_every_nth_counts_from_its_phase(phase, kept, ab):
    """Of three matmuls, n=2 saves the first and third, or the second."""
    rows = report(_three, *ab, policy=save_every_nth("aten.mm", n=2, phase=phase)).kept
    assert [row.index for row in rows] == kept


def test_every_nth_counts_its_operators_together(ab):
    """mm and sin share one count: mm, sin, mm, sin, mm."""
    kept = _kept(_three, *ab, policy=save_every_nth("aten.mm", "aten.sin", n=2))
    assert kept == ["aten.mm.default[0]", "aten.mm.default[1]", "aten.mm.default[2]"]


def test_shape_matches_with_any_size(ab):
    """None in a shape matches any size."""
    kept = _kept(lambda p, q: p @ q[:, :3], *ab, policy=save_by_shape((None, 3)))
    assert kept == ["aten.slice.Tensor[0]", "aten.mm.default[0]"]


def test_scope_restricts_a_policy(make_block, x):
    """A scoped rule only decides inside its modules."""
    rows = report(make_block(), x, policy=scoped(save_ops(MATMULS), "qkv", "out")).kept
    assert [row.module for row in rows] == ["qkv", "out"]


@pytest.mark.parametrize("wrap", [lambda b: b, lambda b: b.forward, functools.partial])
def test_paths_start_at_the_module_behind_a_call(wrap, make_block, x):
    """Also for a method and a partial."""
    rows = report(wrap(make_block()), x, policy=save_modules("up")).kept
    assert {row.module for row in rows} == {"up"}


@pytest.mark.parametrize(
    ("path", "glob", "inside"),
    [
        ("attn", "attn", True),
        ("blocks.3.attn.out", "attn", True),
        ("blocks.3.attn.out", "blocks.*.attn", True),
        ("blocks.3.attn.out", "blocks.?", True),
        ("attention", "attn", False),
        ("", "attn", False),
        ("L['self'].attn", "attn", True),
    ],
)
def test_glob_matches_a_run_of_components(path, glob, inside):
    """A glob matches a module and everything below it, wherever the path starts."""
    assert is_inside(path, glob) is inside


def test_modules_need_a_module(ab):
    """A plain function has no module paths."""
    with pytest.raises(PolicyError, match="function is neither a module"):
        report(torch.mm, *ab, policy=save_modules("up"))
