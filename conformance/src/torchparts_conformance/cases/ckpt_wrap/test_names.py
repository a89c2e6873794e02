"""Names, state dicts and attributes of a model with wrappers in it."""

from __future__ import annotations

import copy
from collections import OrderedDict

import torch
from torch import nn

from torchparts_conformance import requirement

PREFIX = "_checkpoint_wrapped_module"


class Block(nn.Module):
    """A layer, a buffer, a flag, and a state dict version."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(2))
        self.flag = 1
        self.versions = []

    def forward(self, x):
        """Call the layer."""
        return self.linear(x) * self.flag

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        self.versions.append(local_metadata.get("version"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def models(part, device):
    """A plain model, and a copy with its first child wrapped."""
    wrapped = part.checkpoint_wrapper(Block().to(device))
    rest = nn.BatchNorm1d(2, device=device)
    plain = nn.Sequential(OrderedDict(a=Block().to(device), b=nn.BatchNorm1d(2, device=device)))
    return plain, nn.Sequential(OrderedDict(a=wrapped, b=rest))


@requirement(
    "CW-020",
    "Names of parameters and buffers of a model with a wrapped child MUST be those of the plain "
    "model.",
    rationale=(
        "reproduced on torch 2.13: named_parameters() of the parent carries the wrapper's prefix;"
        " hao-ai-lab/FastVideo#1192"
    ),
)
def test_parameter_and_buffer_names(part, device):
    """In the order of the plain model."""
    plain, wrapped = models(part, device)
    for names in ("named_parameters", "named_buffers"):
        expected = [name for name, _ in getattr(plain, names)()]
        assert [name for name, _ in getattr(wrapped, names)()] == expected


@requirement(
    "CW-021",
    "Names in `named_modules()` MUST be those of the plain model.",
    rationale="reproduced on torch 2.13: named_modules() carries the wrapper's prefix",
)
def test_module_names(part, device):
    """No name contains the wrapper's prefix."""
    plain, wrapped = models(part, device)
    assert {n for n, _ in wrapped.named_modules()} == {n for n, _ in plain.named_modules()}


@requirement(
    "CW-022",
    "`load_state_dict` MUST accept `dict(model.named_parameters())`, and a state dict whose keys "
    "contain the wrapper's prefix.",
    rationale=(
        "reproduced on torch 2.13: the prefix is added a second time; facebookresearch/d2go#578"
    ),
)
def test_named_parameters_load(part, device):
    """`load_state_dict` accepts the names of `named_parameters`."""
    _, wrapped = models(part, device)
    wrapped.load_state_dict(dict(wrapped.named_parameters()), strict=False)
    result = wrapped.load_state_dict(dict(wrapped.named_parameters()), strict=False)
    assert not result.unexpected_keys
    assert not [key for key in result.missing_keys if "weight" in key or "bias" in key]


@requirement("CW-022")
def test_keys_with_the_prefix_load(part, device):
    """Every value of a state dict with the prefix is loaded."""
    _, wrapped = models(part, device)
    old = {k.replace("a.", f"a.{PREFIX}."): v + 1 for k, v in wrapped.state_dict().items()}
    wrapped.load_state_dict(old)
    assert torch.equal(wrapped.state_dict()["a.count"], torch.ones(2, device=device))


class CopiesItself(nn.Module):
    """A module with its own `__deepcopy__`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        """Call the layer."""
        return self.linear(x)

    def __deepcopy__(self, memo):
        twin = CopiesItself()
        twin.load_state_dict(self.state_dict())
        return twin


@requirement(
    "CW-053",
    "A deepcopy of a wrapper MUST be a wrapper, also where the wrapped module has a "
    "`__deepcopy__`.",
    rationale=(
        "reproduced on torch 2.13: the copy is a copy of the wrapped module, without the wrapper"
    ),
)
def test_deepcopy_of_a_module_with_its_own_deepcopy(part, device):
    """The copy is a wrapper around a module of the same class."""
    twin = copy.deepcopy(part.checkpoint_wrapper(CopiesItself().to(device)))
    assert isinstance(twin, part.CheckpointWrapper)
    assert type(getattr(twin, PREFIX)) is CopiesItself
