"""Requirements from the source's own tests."""

from __future__ import annotations

import contextlib
import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from torchparts_conformance import requirement


class Four(nn.Module):
    """Two positional arguments, two positional or keyword ones, and any others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, a, b, c=None, d=None, **kwargs):
        """Combine all arguments."""
        return tuple(self.linear(x) for x in (a, b, c, d))


class KeywordOnly(nn.Module):
    """Two arguments by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, *, a=None, b=None):
        """Combine both arguments."""
        return self.linear(a), self.linear(b)


class Counted(nn.Module):
    """A layer and a dropout; counts forwards in the class, as state may be put back."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        """Count, then run both."""
        Counted.runs += 1
        return torch.tanh(self.dropout(self.linear(x)))


def offloads(part):
    """The wrapper that offloads, if the part has it."""
    return [part.offload_wrapper] if hasattr(part, "offload_wrapper") else []


def is_linear(module):
    """Whether a module is a linear layer."""
    return isinstance(module, nn.Linear)


def build():
    """Three linear layers at two depths."""
    return nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    )


def ways(part, wrapper):
    """The wrapper with each implementation that the part has; a part may have only one."""
    if not hasattr(part, "CheckpointImpl"):
        return [wrapper]
    return [partial(wrapper, checkpoint_impl=impl) for impl in part.CheckpointImpl]


def gradients(module, x):
    """Gradients of parameters and input from seed 0."""
    module.zero_grad()
    x.grad = None
    torch.manual_seed(0)
    module(x).sum().backward()
    return [p.grad.clone() for p in module.parameters()] + [x.grad.clone()]


@requirement(
    "CW-001",
    "A state dict of a wrapped module MUST load into the plain module.",
    source="test_load_activation_checkpointed_module",
)
def test_state_dict_of_wrapped_loads_into_plain(part, device):
    """Keys are those of the plain module, and values are loaded."""
    wrapped = part.checkpoint_wrapper(nn.Linear(10, 10, device=device))
    plain = nn.Linear(10, 10, device=device)
    plain.load_state_dict(copy.deepcopy(wrapped.state_dict()))
    for one, other in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


@requirement(
    "CW-002",
    "A state dict of a plain module MUST load into the wrapped module.",
    source="test_load_activation_checkpointed_module",
)
def test_state_dict_of_plain_loads_into_wrapped(part, device):
    """Plain keys are accepted, also below a parent."""
    wrapped = nn.Sequential(part.checkpoint_wrapper(nn.Linear(10, 10, device=device)))
    plain = nn.Sequential(nn.Linear(10, 10, device=device))
    wrapped.load_state_dict(plain.state_dict())
    for one, other in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


@requirement(
    "CW-003",
    "Keyword arguments MUST reach the wrapped module of every wrapper, with the same results and "
    "`requires_grad` as positional ones.",
    source="test_checkpoint_wrapper_kwarg_support",
)
def test_keywords_act_like_positionals(part, device):
    """Same results, same requires_grad, for both implementations and offload."""
    for wrap in (*ways(part, part.checkpoint_wrapper), *offloads(part)):
        model = wrap(Four().to(device))
        x = torch.ones(4, 10, device=device, requires_grad=True)
        with_keywords = model(x, x, c=x, d=x, e=x, f=x)
        without = model(x, x, x, x)
        assert isinstance(with_keywords, tuple)
        assert len(with_keywords) == 4
        for one, other in zip(with_keywords, without, strict=True):
            assert torch.equal(one, other)
            assert one.requires_grad == other.requires_grad


@requirement(
    "CW-004",
    "A module that takes keyword arguments only MUST run under REENTRANT.",
    source="test_checkpoint_wrapper_kwarg_support",
)
def test_keyword_only_module_under_reentrant(part, device):
    """Both results are right."""
    model = part.checkpoint_wrapper(
        KeywordOnly().to(device), checkpoint_impl=part.CheckpointImpl.REENTRANT
    )
    x = torch.ones(4, 10, device=device, requires_grad=True)
    assert len(model(a=x, b=x)) == 2


@requirement(
    "CW-005",
    "Of the two contexts of `context_fn`, one MUST be entered in forward and the other in "
    "recomputation.",
    source="test_checkpoint_wrapper_args_kwargs",
)
def test_both_contexts_are_entered(part, device):
    """Forward and recomputation run under one context each, in that order."""
    entered = []

    @contextlib.contextmanager
    def note(which):
        entered.append(which)
        yield

    model = part.checkpoint_wrapper(
        nn.Linear(1, 1, device=device), context_fn=lambda: (note("forward"), note("recompute"))
    )
    model(torch.randn(2, 1, device=device)).sum().backward()
    assert entered == ["forward", "recompute"]


@requirement(
    "CW-006",
    "`checkpoint_fn` MUST be called with the wrapped module, the module's arguments, and the "
    "options passed with `checkpoint_fn`.",
    source="test_checkpoint_wrapper_args_kwargs",
)
def test_checkpoint_fn_is_called_with_its_options(part, device):
    """It gets the function, the arguments and the bound options."""
    seen = []

    def engine(function, *args, label, **kwargs):
        seen.append((label, len(args), sorted(kwargs)))
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    model = part.checkpoint_wrapper(Four().to(device), checkpoint_fn=engine, label="mine")
    x = torch.ones(1, 10, device=device, requires_grad=True)
    model(x, x, c=x, d=x)[0].sum().backward()
    assert seen == [("mine", 2, ["c", "d"])]


@requirement(
    "CW-007",
    "A wrapped module MUST save no more bytes for backward than "
    "`torch.utils.checkpoint.checkpoint` of the same module.",
    source="test_checkpoint_wrapper_parity",
)
def test_no_more_is_saved_than_by_a_direct_checkpoint(part, device):
    """Bytes that saved-tensor hooks see, per implementation, without parameters."""
    block = nn.Sequential(*[nn.Linear(16, 16, device=device) for _ in range(3)])
    x = torch.randn(5, 16, device=device, requires_grad=True)

    def kept(call):
        storages = {}

        def pack(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            call(x)
        for parameter in block.parameters():
            storages.pop(parameter.untyped_storage().data_ptr(), None)
        return sum(storages.values())

    # Both implementations of torch's checkpoint save the input only.
    direct = kept(partial(checkpoint, block, use_reentrant=False))
    for wrap in ways(part, part.checkpoint_wrapper):
        assert kept(wrap(block)) <= direct


@requirement(
    "CW-008",
    "Indexing a wrapper MUST index the wrapped module.",
    source="test_forward_missing_attributes",
)
def test_indexing_reaches_the_module(part, device):
    """`wrapped[0]` is the first layer."""
    linear = nn.Linear(1, 1, device=device)
    assert part.checkpoint_wrapper(nn.Sequential(linear, linear))[0] is linear


@requirement(
    "CW-009",
    "Reading an attribute that the wrapper lacks MUST return the wrapped module's attribute.",
    source="test_forward_missing_attributes",
)
def test_missing_attributes_are_the_modules(part, device):
    """Also an attribute that is set on the module later."""
    module = nn.Sequential(nn.Linear(1, 1, device=device))
    wrapped = part.checkpoint_wrapper(module)
    module.note = "bar"
    assert wrapped.note == "bar"


@requirement(
    "CW-010",
    "Names in `named_parameters()` of a wrapper MUST be keys of its state dict.",
    source="test_fqn",
)
def test_parameter_names_are_state_dict_keys(part, device):
    """For the wrapper itself."""
    wrapped = part.checkpoint_wrapper(nn.Linear(10, 10, device=device))
    assert {name for name, _ in wrapped.named_parameters()} <= set(wrapped.state_dict())


@requirement(
    "CW-011",
    "A module under `offload_wrapper` MUST get the plain module's gradients, and MUST hold none "
    "of its activations on an accelerator after forward.",
    source="test_checkpoint_wrapper_cpu_offload",
)
def test_offload_gives_plain_gradients_and_frees_the_device(part, device):
    """On an accelerator, only input and result are allocated after forward."""
    plain = Counted().to(device)
    wrapped = part.offload_wrapper(copy.deepcopy(plain))
    x = torch.randn(2, 8, device=device, requires_grad=True)
    for one, other in zip(gradients(plain, x), gradients(wrapped, x), strict=True):
        torch.testing.assert_close(one, other)
    if device != "cpu":
        layers = part.offload_wrapper(nn.Sequential(*[nn.Tanh() for _ in range(8)]))
        x = torch.randn(1024, 1024, device=device, requires_grad=True)
        accelerator = torch.get_device_module(device)
        before = accelerator.memory_allocated()
        y = layers(x)
        accelerator.synchronize()
        layers(x[:1, :1])
        assert accelerator.memory_allocated() - before < 4 * y.nbytes


@requirement(
    "CW-012",
    "`checkpoint_wrapper` and `offload_wrapper` MUST return a CheckpointWrapper and an "
    "OffloadWrapper that hold the module as `_checkpoint_wrapped_module`.",
    source="test_checkpoint_wrapper_kwarg_support",
)
def test_wrapper_classes_and_the_name_of_the_inner_module(part, device):
    """The module is held unchanged."""
    module = nn.Linear(1, 1, device=device)
    for wrap, kind in (
        (part.checkpoint_wrapper, part.CheckpointWrapper),
        (part.offload_wrapper, part.OffloadWrapper),
    ):
        wrapped = wrap(module)
        assert isinstance(wrapped, kind)
        assert isinstance(wrapped, part.ActivationWrapper)
        assert wrapped._checkpoint_wrapped_module is module


@requirement(
    "CW-013",
    "`apply_activation_checkpointing` with a `check_fn` MUST wrap every selected module below the"
    " root, and not the root.",
    source=(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.apply_activation_checkpointing"
    ),
    quote="This function will not wrap the overall root module",
)
def test_apply_with_check_fn(part, device):
    """Every linear layer is wrapped, the root is not, and the model trains."""
    model = build().to(device)
    part.apply_activation_checkpointing(model, part.checkpoint_wrapper, check_fn=is_linear)
    assert sum(isinstance(m, part.CheckpointWrapper) for m in model.modules()) == 3
    assert sum(map(is_linear, model.modules())) == 3
    model(torch.randn(2, 4, device=device)).sum().backward()
    assert type(model) is nn.Sequential


@requirement("CW-013")
def test_apply_never_wraps_the_root(part, device):
    """Even if everything is selected."""
    model = build().to(device)
    part.apply_activation_checkpointing(model, part.checkpoint_wrapper, check_fn=lambda m: True)
    assert type(model) is nn.Sequential
    assert all(isinstance(child, part.CheckpointWrapper) for child in model)


@requirement(
    "CW-014",
    "`apply_activation_checkpointing` MUST accept a ModuleWrapPolicy and wrap the modules of its "
    "classes.",
    source=(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.apply_activation_checkpointing"
    ),
    quote="A policy to wrap model's submodules with AC",
)
def test_apply_with_module_wrap_policy(part, device):
    """Modules of the policy's classes are wrapped."""
    model = build().to(device)
    part.apply_activation_checkpointing(
        model, part.checkpoint_wrapper, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
    )
    assert sum(isinstance(m, part.CheckpointWrapper) for m in model.modules()) == 3


@requirement(
    "CW-015",
    "Options that a CustomPolicy returns for a module MUST reach the wrapper of that module.",
    source="torch.distributed.fsdp.wrap.CustomPolicy",
    quote="the dictionary overrides the root's kwargs",
)
def test_apply_with_custom_policy_options(part, device):
    """A dict means options for that module, True means none."""
    model = build().to(device)

    def choose(module):
        if module is model[0]:
            return {"checkpoint_impl": part.CheckpointImpl.REENTRANT}
        return is_linear(module)

    part.apply_activation_checkpointing(
        model, part.checkpoint_wrapper, auto_wrap_policy=CustomPolicy(choose)
    )
    assert model[0].checkpoint_impl is part.CheckpointImpl.REENTRANT
    assert model[1][0].checkpoint_impl is part.CheckpointImpl.NO_REENTRANT


@requirement(
    "CW-016",
    "A policy that is neither callable nor torch's MUST raise a ValueError that says `to be "
    "callable or be a pre-defined wrap policy`.",
    rationale="the source's error contract",
)
def test_apply_with_an_invalid_policy(part, device):
    """The message has torch's sentence."""
    with pytest.raises(ValueError, match="to be callable or be a pre-defined wrap policy"):
        part.apply_activation_checkpointing(build().to(device), auto_wrap_policy=3)


@requirement(
    "CW-017",
    "Dropout in a wrapped module MUST drop the same elements in forward and in recomputation.",
    source="torch.utils.checkpoint.checkpoint",
    quote="stashing and restoring the RNG state during each checkpoint",
)
def test_dropout_is_replayed(part, device):
    """Gradients equal the plain module's, under both implementations."""
    plain = Counted().to(device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    expected = gradients(plain, x)
    for wrap in ways(part, part.checkpoint_wrapper):
        wrapped = wrap(copy.deepcopy(plain))
        for one, other in zip(expected, gradients(wrapped, x), strict=True):
            assert torch.equal(one, other), wrap


@requirement(
    "CW-018",
    "A wrapped module MUST run its forward once in forward and once more in backward.",
    source="torch.utils.checkpoint.checkpoint",
    quote="recomputed by re-invoking :attr:`function` in the backward pass",
)
def test_forward_runs_once_more_in_backward(part, device):
    """One run in forward, two after backward."""
    for wrap in ways(part, part.checkpoint_wrapper):
        module = Counted().to(device)
        Counted.runs = 0
        loss = wrap(module)(torch.randn(2, 8, device=device, requires_grad=True)).sum()
        assert Counted.runs == 1, wrap
        loss.backward()
        assert Counted.runs == 2, wrap


@requirement(
    "CW-019",
    "A wrapper MUST survive deepcopy and pickle, and the copy MUST have its own weights.",
    rationale="the source's wrapper does; facebookresearch/fairscale#816",
)
def test_copies_are_independent(part, device):
    """A deep copy and a pickle train without changing the original."""
    wrapped = part.checkpoint_wrapper(nn.Linear(4, 4, device=device))
    for twin in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        twin(torch.randn(2, 4, device=device)).sum().backward()
        assert twin.weight.grad is not None
        assert wrapped.weight.grad is None
        twin.load_state_dict(wrapped.state_dict())
