"""A private name of torch is found, or it is not there: nothing is raised, and nothing guessed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import mod_tracker._torch_compat as compat
from mod_tracker._torch_compat._look_up import look_up

ONLY_WITH_CUDA = {"_C._cuda_attach_out_of_memory_observer"}


def names_asked_for():
    """Every dotted name that a file of the room looks up, from its source."""
    for path in sorted(Path(compat.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = getattr(getattr(node, "func", None), "id", None)
            if called == "look_up" and isinstance(node.args[0], ast.Constant):
                yield node.args[0].value


@pytest.mark.parametrize("dotted", sorted(set(names_asked_for())))
def test_every_name_asked_for_is_there(dotted):
    """On this torch: a name that is misspelt would be as one that torch lacks, for ever."""
    if dotted in ONLY_WITH_CUDA and not torch.backends.cuda.is_built():
        pytest.skip("this torch was built without CUDA")
    assert look_up(dotted) is not None


def test_name_is_found_below_torch():
    """At any depth; it is the object itself."""
    assert look_up("Tensor") is torch.Tensor
    assert look_up("nn.functional.relu") is torch.nn.functional.relu


@pytest.mark.parametrize(
    "dotted", ["no_such", "no_such.deeper", "_C.no_such", "_C.no_such.deeper.still", ""]
)
def test_name_that_is_not_there_is_none(dotted):
    """Wherever the way to it ends."""
    assert look_up(dotted) is None


@pytest.mark.parametrize("dotted", ["no_such.__class__", "_C.no_such.__doc__", "no_such.__eq__"])
def test_names_of_nothing_are_not_taken_for_torchs(dotted):
    """None has names as well, and the way to a name that is not there leads to it."""
    assert look_up(dotted) is None


def test_name_that_torch_has_set_to_none_is_none(monkeypatch):
    """As a build without a part of it does."""
    monkeypatch.setattr(torch, "_left_out", None, raising=False)
    assert look_up("_left_out") is look_up("_left_out.deeper") is None


def test_name_is_looked_for_each_time(monkeypatch):
    """One that comes later, as with a lazy import, is found then."""
    assert look_up("_comes_later.Module") is None
    monkeypatch.setattr(torch, "_comes_later", torch.nn, raising=False)
    assert look_up("_comes_later.Module") is torch.nn.Module
