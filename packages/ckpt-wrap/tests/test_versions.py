"""Modules see the versions that were saved for them, whichever side was wrapped, and how."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs

from ckpt_wrap import (
    _torch_compat,
    checkpoint_,
    checkpoint_wrapper,
    clean_name,
    clean_state_dict,
    offload_wrapper,
)


class Leaf(nn.Module):
    """Notes the version it is loaded from."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.seen = []

    def forward(self, x):
        """Add the weight."""
        return x + self.weight

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        self.seen.append(local_metadata.get("version"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Block(Leaf):
    """A block with a leaf inside it."""

    _version = 2

    def __init__(self, wrap) -> None:
        super().__init__()
        self.inside = nn.ModuleList([wrap(Leaf())])


LAYERS = {
    "plain": lambda m: m,
    "in place": checkpoint_,
    "nested": checkpoint_wrapper,
    "nested twice": lambda m: checkpoint_wrapper(offload_wrapper(m)),
    "torch": torchs.checkpoint_wrapper,
    "torch twice": lambda m: torchs.checkpoint_wrapper(torchs.offload_wrapper(m)),
}
OURS = [layer for layer in LAYERS if "torch" not in layer and layer != "plain"]


def _build(layer, root):
    wrap = LAYERS[layer]
    block = wrap(Block(wrap))
    return block if root else nn.ModuleDict({"a": block})


def _seen(model):
    leaves = [m for m in model.modules() if isinstance(m, Leaf)]
    found = {type(leaf)._version: leaf.seen[:] for leaf in leaves}
    for leaf in leaves:
        leaf.seen.clear()
    return found


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("into", OURS)
@pytest.mark.parametrize("saved", LAYERS)
def test_each_module_sees_its_own_version(saved, into, root):
    """A block and the leaf below it, at the root and below it, from any layer into ours."""
    state = _build(saved, root).state_dict()
    names = list(state._metadata)
    model = _build(into, root)
    for _ in range(2):
        model.load_state_dict(state)
        assert _seen(model) == {2: [2], 3: [3]}
    if into != "in place":
        assert list(state._metadata) == names


@pytest.mark.parametrize("into", OURS)
def test_a_module_with_two_names_sees_its_version_under_both(into):
    """torch loads it once for each of its names."""
    shared = Leaf()
    state = nn.ModuleDict({"a": nn.ModuleList([shared, shared])}).state_dict()
    model = nn.ModuleDict({"a": LAYERS[into](nn.Sequential(shared, shared))})
    model.load_state_dict(state)
    assert shared.seen == [3, 3]


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("saved", ["nested", "in place"])
def test_what_ours_saved_has_the_plain_versions(saved, root):
    """Loaded into the plain model, and the metadata is the plain model's."""
    plain = _build("plain", root)
    state = _build(saved, root).state_dict()
    assert state._metadata == plain.state_dict()._metadata
    plain.load_state_dict(state)
    assert _seen(plain) == {2: [2], 3: [3]}


@pytest.mark.parametrize("saved", ["torch", "torch twice"])
def test_a_cleaned_state_dict_keeps_the_versions(saved):
    """What torch's wrapper saved loads into the plain model with every version."""
    plain = _build("plain", False)
    plain.load_state_dict(clean_state_dict(_build(saved, False).state_dict()))
    assert _seen(plain) == {2: [2], 3: [3]}


def test_without_versions_there_are_none():
    """A plain dict of tensors says nothing of versions, wrapped or not."""
    for layer in OURS:
        model = _build(layer, False)
        model.load_state_dict(dict(model.state_dict()))
        assert _seen(model) == {2: [None], 3: [None]}


def test_the_wrapped_module_sees_its_version_without_load_state_dict(monkeypatch):
    """Code that goes through the modules itself hands over the wrapper's part."""
    monkeypatch.setattr(_torch_compat, "_LOAD_STATE_DICT", None)
    state = _build("plain", False).state_dict()
    model = _build("nested", False)
    model.load_state_dict(state)
    assert _seen(model)[2] == [2]
    model.load_state_dict(_build("torch", False).state_dict())
    assert _seen(model) == {2: [2], 3: [3]}


def test_a_load_that_fails_can_be_repeated():
    """An error half-way leaves nothing behind that the next load stumbles over."""
    model = _build("nested", False)
    state = model.state_dict()

    def fail(*_):
        raise ValueError("once")

    hook = model["a"].register_load_state_dict_pre_hook(fail)
    with pytest.raises(ValueError, match="once"):
        model.load_state_dict(state)
    hook.remove()
    _seen(model)
    model.load_state_dict(state)
    assert _seen(model) == {2: [2], 3: [3]}
    assert "_load_from_state_dict" not in vars(model["a"]._checkpoint_wrapped_module)


def test_assign_reaches_the_module_below():
    """`assign=True` puts the tensors of the state dict into the wrapped modules."""
    model = _build("nested", False)
    state = OrderedDict((name, torch.ones(2)) for name in model.state_dict())
    model.load_state_dict(state, assign=True)
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == state[name].data_ptr()


def test_only_whole_parts_of_a_name_are_the_wrappers():
    """A module of the user's with a similar name keeps it; the wrapped root has no name."""
    assert (
        clean_name("my_checkpoint_wrapped_module.weight") == "my_checkpoint_wrapped_module.weight"
    )
    assert clean_name("_checkpoint_wrapped_module") == ""
    assert clean_name("a._checkpoint_wrapped_module") == "a"
