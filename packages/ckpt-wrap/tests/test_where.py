"""Errors in forward and backward name the module."""

from __future__ import annotations

import contextlib
import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy

from ckpt_wrap import (
    OffloadError,
    OptionError,
    RecomputeError,
    apply_activation_checkpointing,
    checkpoint_,
    checkpoint_layers_,
    checkpoint_wrapper,
    is_recomputing,
    offload_,
)


class Block(nn.Module):
    """Multiplies by an input; runs `second` in recomputation."""

    def __init__(self, second=None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.second = second

    def forward(self, x, scale=None):
        y = x * self.weight
        if self.second is not None and is_recomputing():
            return self.second(y)
        return torch.tanh(y) * (1 if scale is None else torch.sin(scale))


class Model(nn.Module):
    """A model in which the errors concern `layers.1`."""

    def __init__(self, block) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ReLU(), block])

    def forward(self, x, scale=None):
        return self.layers[1](self.layers[0](x), scale=scale)


def _is_block(module):
    return isinstance(module, Block)


def _selected(model, **options):
    checkpoint_layers_(model, lambda _, m: _is_block(m), **options)
    return model


def _applied(make, model, **options):
    apply_activation_checkpointing(model, partial(make, **options), check_fn=_is_block)
    return model


def _alone(make, model, **options):
    model.layers[1] = make(model.layers[1], **options)
    return model


CHECKPOINTS = {
    "selected": (_selected, "'layers.1' (Block)"),
    "applied wrapper": (partial(_applied, checkpoint_wrapper), "'layers.1' (Block)"),
    "applied in place": (partial(_applied, checkpoint_), "'layers.1' (Block)"),
    "in place alone": (partial(_alone, checkpoint_), "Block"),
}
OFFLOADS = {
    "applied": (partial(_applied, offload_), "'layers.1' (Block)"),
    "alone": (partial(_alone, offload_), "Block"),
}
NEXT_STEP = "Make its forward depend on its inputs only."


def _x():
    return torch.ones(2, 3, requires_grad=True)


def _backward_fails(loss, error=RecomputeError):
    with pytest.raises(error) as raised:
        loss.backward()
    return str(raised.value)


@pytest.mark.parametrize("twin_of", [None, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_an_input_changed_in_place(how, twin_of):
    """The error names the module; so it does for copies of the model."""
    change, where = CHECKPOINTS[how]
    model = change(Model(Block()))
    scale = torch.ones(3)
    loss = (model if twin_of is None else twin_of(model))(_x(), scale=scale).sum()
    scale.add_(1)
    assert _backward_fails(loss) == (
        f"ckpt_wrap.checkpoint_: an input of module {where} has been modified by an inplace "
        "operation since the forward, but recomputation needs it as it was. "
        "Change a clone of it, or change it after backward. For a cache that forward fills in "
        "place, pass checkpoint_fn=sac_policies.checkpoint."
    )


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_a_recomputation_that_differs(how):
    """Fewer tensors, other shapes, more tensors."""
    change, where = CHECKPOINTS[how]
    module = f"ckpt_wrap.checkpoint_: module {where} saved"
    loss = change(Model(Block(lambda y: y.sum())))(_x()).sum()
    assert _backward_fails(loss) == f"{module} 2 tensors in recomputation, but 3 in forward. " + (
        NEXT_STEP
    )
    loss = change(Model(Block(lambda y: y.sum())), determinism_check="none")(_x()).sum()
    assert _backward_fails(loss).startswith(f"{module} fewer tensors in recomputation, but 3 in")
    loss = change(Model(Block(lambda y: torch.tanh(y[:, :1]))))(_x()).sum()
    assert _backward_fails(loss).startswith(
        f"ckpt_wrap.checkpoint_: saved tensor 2 of module {where} is (2, 1) of torch.float32"
    )
    loss = change(Model(Block(lambda y: torch.tanh(torch.tanh(y)))), early_stop=False)(_x()).sum()
    assert _backward_fails(loss).startswith(f"{module} more tensors in recomputation, but 3 in")


def test_a_context_that_suppresses_an_exception():
    """Forward has no result to return."""
    module = checkpoint_(
        Block(), context_fn=lambda: (contextlib.suppress(RuntimeError), contextlib.nullcontext())
    )
    with pytest.raises(RecomputeError, match="suppressed an exception of module Block, but then"):
        module(torch.ones(2, 5, requires_grad=True))


@pytest.mark.parametrize("min_bytes", [1, 1024])
@pytest.mark.parametrize("how", OFFLOADS)
def test_a_saved_tensor_changed_in_place(how, min_bytes, tmp_path):
    """The error is the same for a kept and an offloaded tensor."""
    change, where = OFFLOADS[how]
    model = change(Model(Block()), to=tmp_path, min_bytes=min_bytes)
    scale = torch.ones(3, requires_grad=True) * 1
    loss = model(_x(), scale=scale).sum()
    with torch.no_grad():
        scale.add_(1)
    assert _backward_fails(loss, OffloadError) == (
        f"ckpt_wrap.offload_: a tensor saved by module {where} was changed in place after it was "
        "saved, but backward needs it as it was. Change a clone of it, or change it after backward."
    )


def test_offload_around_a_checkpoint_names_the_module(tmp_path):
    """Checkpoint and offload both name the module, in either order of application."""
    model = _applied(offload_, _alone(checkpoint_, Model(Block())), to=str(tmp_path))
    scale = torch.ones(3)
    loss = model(_x(), scale=scale).sum()
    scale.add_(1)
    assert "module 'layers.1' (Block)" in _backward_fails(loss, OffloadError)


def test_wrapping_errors_name_the_module():
    """A wrong option for one module is reported before any module is wrapped."""
    model = Model(Block())
    policy = CustomPolicy(lambda m: isinstance(m, nn.ReLU) or (_is_block(m) and {"bogus": 1}))
    with pytest.raises(OptionError, match=r"This was for module 'layers.1' \(Block\)\.$"):
        apply_activation_checkpointing(model, checkpoint_wrapper, auto_wrap_policy=policy)
    assert [type(m) for m in model.layers] == [nn.ReLU, Block]


class CallsWhatItIsGiven(nn.Module):
    """Its first argument is callable and not a module."""

    def forward(self, function, x):
        return function(x).exp() * 2


def test_an_offloaded_module_that_is_given_a_function_is_named(tmp_path):
    """The error names the module, not the function."""
    module = offload_(CallsWhatItIsGiven(), to=tmp_path)
    kept = []
    out = module(lambda x: kept.append(x.exp()) or kept[0], torch.ones(3, requires_grad=True))
    kept[0].add_(1)
    with pytest.raises(RuntimeError, match="CallsWhatItIsGiven"):
        out.sum().backward()
