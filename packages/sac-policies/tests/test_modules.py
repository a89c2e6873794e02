"""Module paths: which module runs, relative to the region's own."""

from __future__ import annotations

import functools
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from sac_policies.policies._modules import ModulePath, root_of
from sac_policies.policies._rules import is_inside


def test_path_follows_the_running_module(make_block, x):
    """Paths are those of named_modules; the region's own is empty."""
    block = make_block()
    ran = []
    block.up.register_forward_pre_hook(lambda *_: ran.append(path.now))
    path = ModulePath(block)
    with ExitStack() as until:
        path.follow(until)
        block(x)
        assert path.now == ""
    assert ran == ["up"]
    assert path.known == {"", "n1", "n2", "qkv", "out", "up", "down", "drop"}


def test_hooks_are_gone_afterwards(make_block, x):
    """Nothing is followed outside of the with block."""
    block = make_block()
    path = ModulePath(block)
    with ExitStack() as until:
        path.follow(until)
    ran = []
    block.up.register_forward_pre_hook(lambda *_: ran.append(path.now))
    block(x)
    assert ran == [""]


def test_path_survives_an_exception():
    """A module that raises is left again."""

    class Raises(nn.Module):
        def forward(self, x):
            raise RuntimeError("stop")

    module = nn.Sequential(Raises())
    path = ModulePath(module)
    with ExitStack() as until:
        path.follow(until)
        with pytest.raises(RuntimeError):
            module(torch.ones(1))
        assert path.now == ""


def test_root_is_found_behind_methods_and_partials(make_block):
    """A module, its method and a partial of it have the same root; a function has none."""
    block = make_block()
    assert root_of(block) is block
    assert root_of(block.forward) is block
    assert root_of(functools.partial(block, 1)) is block
    assert root_of(torch.sin) is None


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
    """A glob speaks of a module and everything below it, wherever the path starts."""
    assert is_inside(path, glob) is inside
