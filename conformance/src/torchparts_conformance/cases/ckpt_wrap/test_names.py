"""Names, state dicts and attributes of a model with wrappers in it."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from torchparts_conformance import requirement

PREFIX = "_checkpoint_wrapped_module"


class Block(nn.Module):
    """A layer, a buffer, a flag, and a version of its own."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(2))
        self.flag = 1
        self.versions = []

    def forward(self, x):
        """Run."""
        return self.linear(x) * self.flag

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        self.versions.append(local_metadata.get("version"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def models(part, device):
    """A plain model and the same with its first child wrapped."""
    wrapped = part.checkpoint_wrapper(Block().to(device))
    rest = nn.BatchNorm1d(2, device=device)
    plain = nn.Sequential(OrderedDict(a=Block().to(device), b=nn.BatchNorm1d(2, device=device)))
    return plain, nn.Sequential(OrderedDict(a=wrapped, b=rest))


def zero_linear(device):
    """A layer whose results are all zero."""
    linear = nn.Linear(2, 2, device=device)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


@requirement(
    "CW-020",
    level="MUST",
    text=(
        "Names of parameters and buffers of a model with a wrapped child MUST be those of the "
        "plain model."
    ),
    rationale=(
        "reproduced on torch 2.13: named_parameters() of the parent carries the wrapper's "
        "prefix; hao-ai-lab/FastVideo#1192"
    ),
    since="0.1.0",
    profile="robust",
    torch_deviation="torch 2.13: named_parameters() of the parent carries the wrapper's prefix",
)
def test_parameter_and_buffer_names(part, device):
    """In the plain model's order."""
    plain, wrapped = models(part, device)
    for names in ("named_parameters", "named_buffers"):
        expected = [name for name, _ in getattr(plain, names)()]
        assert [name for name, _ in getattr(wrapped, names)()] == expected


@requirement(
    "CW-021",
    level="MUST",
    text="Names in `named_modules()` MUST be those of the plain model.",
    rationale="reproduced on torch 2.13: named_modules() carries the wrapper's prefix",
    since="0.1.0",
    profile="robust",
    torch_deviation="torch 2.13: named_modules() carries the wrapper's prefix",
)
def test_module_names(part, device):
    """No name has the wrapper's part."""
    plain, wrapped = models(part, device)
    assert {n for n, _ in wrapped.named_modules()} == {n for n, _ in plain.named_modules()}


@requirement(
    "CW-022",
    level="MUST",
    text=(
        "`load_state_dict(dict(model.named_parameters()))` and a state dict whose keys carry "
        "the prefix MUST load."
    ),
    rationale=(
        "reproduced on torch 2.13: the prefix is added a second time; facebookresearch/d2go#578"
    ),
    since="0.1.0",
    profile="robust",
    torch_deviation="torch 2.13: the prefix is added a second time",
)
def test_named_parameters_load(part, device):
    """What `named_parameters` gives, `load_state_dict` takes."""
    _, wrapped = models(part, device)
    wrapped.load_state_dict(dict(wrapped.named_parameters()), strict=False)
    result = wrapped.load_state_dict(dict(wrapped.named_parameters()), strict=False)
    assert not result.unexpected_keys
    assert not [key for key in result.missing_keys if "weight" in key or "bias" in key]


@requirement("CW-022")
def test_keys_with_the_prefix_load(part, device):
    """A state dict written with the prefix arrives whole."""
    _, wrapped = models(part, device)
    old = {k.replace("a.", f"a.{PREFIX}."): v + 1 for k, v in wrapped.state_dict().items()}
    wrapped.load_state_dict(old)
    assert torch.equal(wrapped.state_dict()["a.count"], torch.ones(2, device=device))


@requirement(
    "CW-023",
    level="MUST",
    text="Missing, unexpected and mismatched keys MUST be reported under the user's names.",
    rationale="reproduced on torch 2.13: messages show the wrapper's prefix",
    since="0.1.0",
    profile="robust",
    torch_deviation="torch 2.13: messages show the wrapper's prefix",
)
def test_load_errors_name_the_users_keys(part, device):
    """Missing, unexpected and mismatched keys, raised and returned."""
    _, wrapped = models(part, device)
    state = dict(wrapped.state_dict())
    del state["a.linear.bias"]
    state["a.extra"] = torch.ones(1, device=device)
    state["a.count"] = torch.ones(3, device=device)
    with pytest.raises(RuntimeError) as error:
        wrapped.load_state_dict(state)
    for part_of in ('"a.linear.bias"', '"a.extra"', "size mismatch for a.count"):
        assert part_of in str(error.value)
    result = wrapped.load_state_dict(
        {k: v for k, v in state.items() if k != "a.count"}, strict=False
    )
    assert set(result.missing_keys) == {"a.linear.bias", "a.count"}
    assert result.unexpected_keys == ["a.extra"]


@requirement(
    "CW-024",
    level="MUST",
    text=(
        "A module MUST see its own `_version` when its state dict moves between wrapped and plain."
    ),
    rationale="reproduced on torch 2.13: the version seen is the wrapper's, or None",
    since="0.1.0",
    profile="robust",
    torch_deviation="torch 2.13: the version seen is the wrapper's, or None",
)
def test_versions_travel(part, device):
    """Wrapped to plain and plain to wrapped."""
    plain, wrapped = models(part, device)
    plain.load_state_dict(wrapped.state_dict())
    wrapped.load_state_dict(plain.state_dict())
    assert plain.a.versions == [2]
    assert wrapped.a.versions == [2]


@requirement(
    "CW-025",
    level="MUST",
    text="`get_buffer` through a wrapper MUST find the wrapped module's buffer.",
    rationale="reproduced on torch 2.13: AttributeError: not a buffer",
    since="0.1.0",
    profile="robust",
    torch_deviation="torch 2.13: AttributeError: not a buffer",
)
def test_get_buffer(part, device):
    """By the plain name."""
    _, wrapped = models(part, device)
    assert wrapped.get_buffer("a.count").shape == (2,)


@requirement(
    "CW-026",
    level="MUST",
    text="A layer set through a wrapper MUST be the one that runs and the one that is saved.",
    rationale="reproduced on torch 2.13: forward and state_dict keep the old layer",
    since="0.1.0",
    profile="robust",
    torch_deviation="torch 2.13: forward and state_dict keep the old layer",
)
def test_a_layer_set_through_the_wrapper_counts(part, device):
    """Forward and state dict both see it."""
    _, wrapped = models(part, device)
    setattr(wrapped.get_submodule("a"), "linear", zero_linear(device))  # noqa: B010  # as LoRA does
    assert not wrapped.a(torch.ones(1, 2, device=device)).any()
    assert not wrapped.state_dict()["a.linear.weight"].any()


@requirement(
    "CW-027",
    level="MUST",
    text=(
        "Attributes, parameters and buffers set, registered or deleted through a wrapper MUST "
        "be the wrapped module's."
    ),
    rationale="reproduced on torch 2.13: they land on the wrapper",
    since="0.1.0",
    profile="robust",
    torch_deviation="torch 2.13: they land on the wrapper",
)
def test_attributes_are_set_and_deleted_inside(part, device):
    """A flag, a parameter, a buffer."""
    _, wrapped = models(part, device)
    wrapper, inner = wrapped.a, getattr(wrapped.a, PREFIX)
    wrapper.flag = 7
    assert inner.flag == 7
    del wrapper.flag
    assert not hasattr(inner, "flag")
    wrapper.register_buffer("extra", torch.ones(1, device=device))
    wrapper.register_parameter("scale", nn.Parameter(torch.ones(1, device=device)))
    assert inner.extra is wrapper.extra
    assert inner.scale is wrapper.scale
    wrapper.count = torch.ones(2, device=device)
    assert inner.count.all()


@requirement(
    "CW-028",
    level="MUST",
    text=(
        "Length, iteration, membership, item assignment, item deletion and `dir` of a wrapper "
        "MUST be the wrapped module's."
    ),
    rationale="reproduced on torch 2.13: TypeError, and KeyError from `in`",
    since="0.1.0",
    profile="robust",
    torch_deviation="torch 2.13: TypeError, and KeyError from `in`",
)
def test_containers(part, device):
    """Sequential and ModuleDict."""
    first = nn.Linear(1, 1, device=device)
    wrapped = part.checkpoint_wrapper(nn.Sequential(first, nn.ReLU()))
    assert len(wrapped) == 2
    assert next(iter(wrapped)) is first
    assert first in wrapped
    wrapped[0] = nn.Tanh()
    del wrapped[1]
    assert [type(m) for m in wrapped] == [nn.Tanh]
    assert "a" in part.checkpoint_wrapper(nn.ModuleDict({"a": nn.ReLU()}))
    assert "in_features" in dir(part.checkpoint_wrapper(first))
    assert part.checkpoint_wrapper(first)


@requirement(
    "CW-029",
    level="MUST",
    text="A wrapper made by `__new__` alone MUST answer AttributeError for an unknown attribute.",
    rationale="reproduced on torch 2.13: RecursionError",
    since="0.1.0",
    profile="robust",
    torch_deviation="torch 2.13: RecursionError",
)
def test_an_empty_instance(part, device):
    """AttributeError, not RecursionError."""
    with pytest.raises(AttributeError):
        _ = part.CheckpointWrapper.__new__(part.CheckpointWrapper).anything


@requirement(
    "CW-030",
    level="MUST",
    text="`torch.nn.utils.prune` MUST work on a wrapped leaf.",
    rationale="reproduced on torch 2.13: KeyError: 'weight'",
    since="0.1.0",
    profile="robust",
    torch_deviation="torch 2.13: KeyError: 'weight'",
)
def test_prune(part, device):
    """Half of the weights are zero, and the wrapped layer trains."""
    wrapped = part.checkpoint_wrapper(nn.Linear(4, 4, device=device))
    prune.l1_unstructured(wrapped, "weight", amount=0.5)
    wrapped(torch.ones(1, 4, device=device)).sum().backward()
    assert (wrapped.weight == 0).sum() == 8
    assert wrapped.weight_orig.grad is not None


@requirement(
    "CW-051",
    level="MUST",
    text=(
        "A module below a wrapped one MUST see its own `_version` when a plain state dict is "
        "loaded."
    ),
    rationale="reproduced on torch 2.13: the version seen is None",
    since="0.1.0",
    profile="robust",
    torch_deviation="torch 2.13: the version seen is None",
)
def test_versions_travel_below_the_wrapped_module(part, device):
    """A block inside a wrapped container, under a parent."""
    plain, block = nn.Sequential(nn.Sequential(Block().to(device))), Block().to(device)
    wrapped = nn.Sequential(part.checkpoint_wrapper(nn.Sequential(block)))
    wrapped.load_state_dict(plain.state_dict())
    assert block.versions == [2]


class CopiesItself(nn.Module):
    """Has a way of its own to be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        """Run."""
        return self.linear(x)

    def __deepcopy__(self, memo):
        twin = CopiesItself()
        twin.load_state_dict(self.state_dict())
        return twin


@requirement(
    "CW-053",
    level="MUST",
    text=(
        "A deepcopy of a wrapper MUST be a wrapper, also where the wrapped module has a "
        "`__deepcopy__`."
    ),
    rationale="reproduced on torch 2.13: the copy is one of the wrapped module",
    since="0.1.0",
    profile="robust",
    torch_deviation="torch 2.13: the copy is one of the wrapped module",
)
def test_deepcopy_around_a_module_that_copies_itself(part, device):
    """A wrapper around a module of the same class."""
    twin = copy.deepcopy(part.checkpoint_wrapper(CopiesItself().to(device)))
    assert isinstance(twin, part.CheckpointWrapper)
    assert type(getattr(twin, PREFIX)) is CopiesItself


class Counting(OrderedDict):
    """Counts how many entries are gone through."""

    visited = 0

    def __iter__(self):
        Counting.visited += len(self)
        return super().__iter__()

    def keys(self):
        """All keys, counted."""
        Counting.visited += len(self)
        return super().keys()

    def items(self):
        """All items, counted."""
        Counting.visited += len(self)
        return super().items()


@requirement(
    "CW-049",
    level="MUST",
    text="`state_dict()` of a model MUST NOT go through all its entries once per wrapper.",
    rationale="reproduced on torch 2.13: every wrapper scans the whole dict",
    since="0.1.0",
    profile="robust",
    torch_deviation="torch 2.13: every wrapper scans the whole dict",
)
def test_state_dict_does_not_scan_all_entries_per_wrapper(part, device):
    """Two hundred wrapped layers: entries visited stay near the number of entries."""
    model = nn.Sequential(
        *[part.checkpoint_wrapper(nn.Linear(1, 1, device=device)) for _ in range(200)]
    )
    Counting.visited = 0
    state = model.state_dict(destination=Counting())
    assert Counting.visited <= 5 * 400
    assert len(state) == 400
