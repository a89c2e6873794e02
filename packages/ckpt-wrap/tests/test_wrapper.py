"""The drop-in wrappers."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from ckpt_wrap import (
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    checkpoint_wrapper,
    offload_wrapper,
)

WRAPPERS = [
    partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    checkpoint_wrapper,
    offload_wrapper,
]


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, a, b, c=None, d=None, **kwargs):
        return tuple(self.linear(x) for x in (a, b, c, d))


def test_state_dict_moves_between_wrapped_and_plain():
    """A wrapped module's state dict loads into a plain one and back."""
    wrapped = checkpoint_wrapper(
        nn.Linear(10, 10, bias=False),
        checkpoint_fn=checkpoint,
        use_reentrant=True,
        preserve_rng_state=False,
    )
    plain = nn.Linear(10, 10, bias=False)
    plain.load_state_dict(copy.deepcopy(wrapped.state_dict()))
    assert torch.equal(plain.weight, wrapped.weight)
    with torch.no_grad():
        plain.weight.add_(0.5)
    wrapped.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert torch.equal(plain.weight, wrapped.weight)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_keyword_arguments_reach_the_module(wrapper):
    """Keyword tensors are passed on and change nothing about what requires grad."""
    model = wrapper(Keywords())
    assert isinstance(model, OffloadWrapper if wrapper is offload_wrapper else CheckpointWrapper)
    x = torch.ones(4, 10, requires_grad=True)
    with_keywords = model(x, x, c=x, d=x, e=x, f=x)
    without = model(x, x, x, x)
    assert len(with_keywords) == 4
    for one, other in zip(with_keywords, without, strict=True):
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad


@pytest.mark.parametrize("checkpoint_fn", [None, checkpoint])
def test_context_fn_is_entered_for_forward_and_recompute(checkpoint_fn):
    """Each of the two contexts is entered once per step."""
    entered = []

    @contextlib.contextmanager
    def note(which):
        entered.append(which)
        yield

    options = {} if checkpoint_fn is None else {"use_reentrant": False}
    model = checkpoint_wrapper(
        nn.Linear(1, 1),
        checkpoint_fn=checkpoint_fn,
        context_fn=lambda: (note("forward"), note("recompute")),
        **options,
    )
    model(torch.randn(2, 1)).sum().backward()
    assert entered == ["forward", "recompute"]


def test_missing_attributes_are_the_inner_modules():
    """Indexing and unknown attributes go to the wrapped module."""
    linear = nn.Linear(1, 1)
    inner = nn.Sequential(linear, linear)
    wrapped = CheckpointWrapper(inner)
    inner.note = "bar"
    assert wrapped[0] is linear
    assert wrapped.note == "bar"


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_are_those_of_the_plain_model(wrapper):
    """Parameters, buffers, modules and state dict have the same names, at any depth."""

    def build(wrap):
        inner = nn.Sequential(wrap(nn.Linear(2, 2)), nn.BatchNorm1d(2))
        return nn.Sequential(OrderedDict(a=wrap(inner), b=nn.Linear(2, 2)))

    plain, wrapped = build(lambda module: module), build(wrapper)
    for names in ("named_parameters", "named_buffers"):
        assert list(dict(getattr(plain, names)())) == list(dict(getattr(wrapped, names)()))
    assert {n for n, _ in plain.named_modules()} == {n for n, _ in wrapped.named_modules()}
    assert list(plain.state_dict()) == list(wrapped.state_dict())
    assert plain.state_dict()._metadata == wrapped.state_dict()._metadata


class Versioned(nn.Module):
    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(2))
        self.flag = 1
        self.seen = []

    def forward(self, x):
        return self.linear(x) * self.flag

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        self.seen.append(local_metadata.get("version"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_versions_reach_the_module_whichever_side_was_wrapped():
    """Loading wrapped into plain and plain into wrapped, a module sees its own version."""
    plain, wrapped = nn.Sequential(Versioned()), nn.Sequential(checkpoint_wrapper(Versioned()))
    plain.load_state_dict(wrapped.state_dict())
    wrapped.load_state_dict(plain.state_dict())
    wrapped[0].load_state_dict(plain[0].state_dict())
    assert plain[0].seen == [2]
    assert wrapped[0].seen == [2, 2]


def test_old_checkpoints_and_named_parameters_load():
    """Keys with the prefix load, at any depth, and so does `dict(named_parameters())`."""
    model = nn.Sequential(checkpoint_wrapper(checkpoint_wrapper(nn.Linear(2, 2))))
    prefix = "0._checkpoint_wrapped_module._checkpoint_wrapped_module."
    model.load_state_dict({prefix + "weight": torch.ones(2, 2), prefix + "bias": torch.ones(2)})
    assert model[0].weight.eq(1).all()
    model.load_state_dict(dict(model.named_parameters()))
    root = checkpoint_wrapper(nn.Linear(2, 2))
    root.load_state_dict(
        {"_checkpoint_wrapped_module.weight": torch.ones(2, 2), "bias": torch.ones(2)}
    )
    assert root.weight.eq(1).all()


def test_load_errors_use_the_users_names():
    """Missing, unexpected and mismatched keys are reported without the prefix."""
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    wrong = {"0.weight": torch.ones(3, 3), "0.extra": torch.ones(1)}
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(wrong)
    for part in ('"0.bias"', '"0.extra"', "size mismatch for 0.weight"):
        assert part in str(error.value)
    assert "_checkpoint_wrapped_module" not in str(error.value)
    result = model.load_state_dict({}, strict=False)
    assert result.missing_keys == ["0.weight", "0.bias"]


def test_state_dict_hooks_registered_on_the_wrapper_run():
    """A hook given to the wrapper is called when its state dict is taken."""
    wrapped = checkpoint_wrapper(nn.Linear(2, 2))
    called = []
    wrapped.register_state_dict_pre_hook(lambda *args: called.append("pre"))
    wrapped.register_state_dict_post_hook(lambda *args: called.append("post"))
    nn.Sequential(wrapped).state_dict()
    assert called == ["pre", "post"]


@pytest.mark.parametrize("root", [True, False])
def test_load_hooks_registered_on_the_wrapper_run(root):
    """Before and after, at the root and below it, with the names the user knows."""
    wrapped = checkpoint_wrapper(nn.Linear(2, 2))
    model = wrapped if root else nn.Sequential(wrapped)
    called = []

    def rename(module, state_dict, prefix, *rest):
        called.append((module, prefix))
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "old")

    def note(module, incompatible):
        called.append((module, list(incompatible.missing_keys)))

    wrapped.register_load_state_dict_pre_hook(rename)
    wrapped.register_load_state_dict_post_hook(note)
    prefix = "" if root else "0."
    model.load_state_dict({prefix + "old": torch.ones(2, 2)}, strict=False)
    assert called == [(wrapped, prefix), (wrapped, [prefix + "bias"])]
    assert wrapped.weight.eq(1).all()


def test_setting_and_deleting_reach_the_inner_module():
    """Layers, flags, parameters and buffers set through the wrapper are those that count."""
    model = nn.Sequential(checkpoint_wrapper(Versioned()))
    zero = nn.Linear(2, 2)
    nn.init.zeros_(zero.weight)
    nn.init.zeros_(zero.bias)
    model.set_submodule("0.linear", zero)
    assert not model(torch.ones(1, 2)).any()
    assert not model.state_dict()["0.linear.weight"].any()
    wrapped, inner = model[0], model[0]._checkpoint_wrapped_module
    wrapped.flag = 7
    assert inner.flag == 7
    del wrapped.flag
    assert not hasattr(inner, "flag")
    wrapped.register_buffer("extra", torch.ones(1))
    wrapped.register_parameter("scale", nn.Parameter(torch.ones(1)))
    wrapped.add_module("more", nn.ReLU())
    assert {"extra", "scale", "more"} <= set(dir(inner)) & set(dir(wrapped))
    assert model.get_buffer("0.count").shape == (2,)
    assert model.get_parameter("0.linear.weight") is zero.weight
    wrapped.count = torch.ones(2)
    assert inner.count.eq(1).all()
    del wrapped.count
    with pytest.raises(AttributeError):
        model.get_buffer("0.count")


def test_containers_act_as_containers():
    """Length, iteration, membership, item assignment and truth are the inner module's."""
    first = nn.Linear(1, 1)
    wrapped = checkpoint_wrapper(nn.Sequential(first, nn.ReLU()))
    assert len(wrapped) == 2
    assert next(iter(wrapped)) is first
    assert first in wrapped
    wrapped[0] = nn.Tanh()
    del wrapped[1]
    assert [type(m) for m in wrapped] == [nn.Tanh]
    assert "a" in checkpoint_wrapper(nn.ModuleDict({"a": nn.ReLU()}))
    assert checkpoint_wrapper(nn.Linear(1, 1))
    assert not checkpoint_wrapper(nn.Sequential())
    with pytest.raises(TypeError):
        len(checkpoint_wrapper(nn.Linear(1, 1)))


def test_an_empty_instance_has_no_attributes_and_does_not_recurse():
    """An instance made by `__new__` alone answers AttributeError."""
    with pytest.raises(AttributeError, match="no attribute 'anything'"):
        _ = CheckpointWrapper.__new__(CheckpointWrapper).anything


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_copies_and_pickles_work_and_are_independent(wrapper):
    """deepcopy and pickle give wrappers of their own modules, whose dicts they reach."""
    wrapped = wrapper(nn.BatchNorm1d(2))
    for twin in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        twin(torch.randn(3, 2, requires_grad=True)).sum().backward()
        assert wrapped.weight.grad is None
        twin.weight = nn.Parameter(torch.zeros(2))
        assert not twin.state_dict()["weight"].any()
        assert wrapped.state_dict()["weight"].all()
        twin.load_state_dict(wrapped.state_dict())
        assert "running_mean" in twin._buffers


def test_a_subclass_may_set_attributes_of_its_own():
    """A user's wrapper class keeps what its class defines and finds what it set."""

    class Mine(CheckpointWrapper):
        level = 0

        def __init__(self, module):
            super().__init__(module)
            self.level = 3
            self.note = "x"

    wrapped = Mine(nn.Linear(1, 1))
    assert (wrapped.level, wrapped.note) == (3, "x")
    assert not hasattr(wrapped._checkpoint_wrapped_module, "level")


def test_a_recompute_engine_of_ones_own():
    """`checkpoint_fn` gets the function and its arguments, with the options bound."""
    calls = []

    def own_checkpoint(function, *args, label, **kwargs):
        calls.append((label, len(args), sorted(kwargs)))
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    wrapped = checkpoint_wrapper(Keywords(), checkpoint_fn=own_checkpoint, label="mine")
    x = torch.ones(1, 10, requires_grad=True)
    wrapped(x, x, c=x, d=x)[3].sum().backward()
    assert calls == [("mine", 2, ["c", "d"])]
    assert wrapped.checkpoint_fn.func is own_checkpoint
    assert wrapped.checkpoint_fn.keywords == {"label": "mine"}


def test_checkpoint_and_offload_compose_in_either_order(gradients, equal, block_class):
    """Both orders recompute once and give the plain gradients."""
    plain = block_class()
    orders = [
        checkpoint_wrapper(offload_wrapper(copy.deepcopy(plain))),
        offload_wrapper(checkpoint_wrapper(copy.deepcopy(plain))),
    ]
    x = torch.randn(2, 8, requires_grad=True)
    expected = gradients(plain, lambda m: m(x), x)
    for wrapped in orders:
        assert equal(expected, gradients(wrapped, lambda m: m(x), x))
        assert wrapped.calls == 2


@pytest.mark.parametrize("name", ["__scale", "scale__", "_scale"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_attributes_with_underscores_are_those_of_the_module(wrapper, name):
    """Only names with two on both sides are the class's own."""
    inner = nn.Linear(2, 2)
    setattr(inner, name, 3)
    assert getattr(wrapper(inner), name) == 3


def test_prune_and_functional_call_work_through_a_wrapper():
    """Code that reaches into a module's parameters finds them at the wrapper."""
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    x = torch.ones(1, 2)
    assert not torch.func.functional_call(model, zeros, (x,)).any()
    assert model(x).any()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    model(x).sum().backward()
    assert model[0].weight_orig.grad is not None
    assert list(dict(model.named_parameters())) == ["0.bias", "0.weight_orig"]
