"""State dict versions reach each module, saved from plain, nested or in-place models."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs

from ckpt_wrap import _CHECKPOINT_WRAPPED_MODULE as WRAPPED
from ckpt_wrap import checkpoint_, checkpoint_wrapper, clean_state_dict, offload_wrapper


class Leaf(nn.Module):
    """Records the version that it is loaded from."""

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
}
OURS = [layer for layer in LAYERS if layer != "torch"]


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
    """A block and its leaf, at the root and below, saved and loaded under any layer.

    Keys of a model under torch's wrapper are cleaned first.
    """
    state = _build(saved, root).state_dict()
    if saved == "torch":
        state = clean_state_dict(state)
    assert state._metadata == _build("plain", root).state_dict()._metadata
    model = _build(into, root)
    for _ in range(2):
        model.load_state_dict(state)
        assert _seen(model) == {2: [2], 3: [3]}


@pytest.mark.parametrize("into", OURS)
def test_state_dict_of_torchs_wrapper_loads_as_it_is(into):
    """With torch's prefix in its keys, at the root and below it."""
    for root in (True, False):
        state = _build("torch", root).state_dict()
        values = {name: torch.rand(2) for name in state}
        model = _build(into, root)
        model.load_state_dict({**state, **values} if into != "plain" else clean_state_dict(values))
        assert all(map(torch.equal, model.state_dict().values(), values.values()))


@pytest.mark.parametrize("into", ["nested", "nested twice"])
def test_load_works_after_one_that_failed(into):
    """An error during loading leaves the wrapper usable."""
    model = _build(into, False)
    state = model.state_dict()

    def fail(*_):
        raise ValueError("once")

    for place in (model["a"], model["a"].inside[0]):
        hook = place.register_load_state_dict_pre_hook(fail)
        with pytest.raises(ValueError, match="once"):
            model.load_state_dict(state)
        hook.remove()
        assert [name for name, _ in model["a"].named_children()] == ["_checkpoint_wrapped_module"]
        _seen(model)
        model.load_state_dict(state)
        assert _seen(model) == {2: [2], 3: [3]}


def test_assign_reaches_the_wrapped_module():
    """`assign=True` puts the tensors of the state dict into the wrapped modules."""
    model = _build("nested", False)
    state = OrderedDict((name, torch.ones(2)) for name in model.state_dict())
    model.load_state_dict(state, assign=True)
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == state[name].data_ptr()


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("weight", "weight"),
        (f"{WRAPPED}.weight", "weight"),
        (f"a.{WRAPPED}.{WRAPPED}.b.{WRAPPED}.weight", "a.b.weight"),
        (f"a.{WRAPPED}", "a"),
        (WRAPPED, ""),
        ("", ""),
        (f"a.my{WRAPPED}.weight", f"a.my{WRAPPED}.weight"),
        (f"a.{WRAPPED}s.weight", f"a.{WRAPPED}s.weight"),
    ],
)
def test_a_clean_name_has_no_wrappers_part(name, clean):
    """The prefix is removed at the start, middle and end; longer names that contain it are kept."""
    assert list(clean_state_dict({name: 1})) == [clean]
