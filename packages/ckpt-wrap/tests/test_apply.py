"""`apply_activation_checkpointing`."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from ckpt_wrap import (
    CheckpointWrapper,
    OffloadWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)


def _is_linear(module):
    return isinstance(module, nn.Linear)


def _count(model, *kinds):
    return sum(isinstance(module, kinds) for module in model.modules())


def _build():
    return nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.ModuleList([nn.Linear(4, 4)])
    )


LINEAR_POLICIES = {
    "check_fn": {"check_fn": _is_linear},
    "lambda": {"auto_wrap_policy": partial(lambda_auto_wrap_policy, lambda_fn=_is_linear)},
    "transformer": {
        "auto_wrap_policy": partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
    },
    "class": {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})},
    "custom": {"auto_wrap_policy": CustomPolicy(_is_linear)},
}


@pytest.mark.parametrize("policy", LINEAR_POLICIES)
@pytest.mark.parametrize("wrapper", [checkpoint_wrapper, offload_wrapper])
def test_every_kind_of_policy_wraps_the_same(policy, wrapper):
    """Each selected module has one wrapper, also if applied twice; the root has none."""
    model = _build()
    for _ in range(2):
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrapper, **LINEAR_POLICIES[policy]
        )
        assert _count(model, CheckpointWrapper, OffloadWrapper) == _count(model, nn.Linear) == 3
    assert isinstance(model, nn.Sequential)
    x = torch.randn(2, 4, requires_grad=True)
    for _ in range(3):
        model[1](model[0](x)).sum().backward()
    copy.deepcopy(model)


def test_size_policy_counts_what_is_left_unwrapped():
    """A parent whose parameters are all in wrapped children is not wrapped itself."""
    model = nn.Sequential(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)), nn.Linear(2, 2))
    policy = partial(size_based_auto_wrap_policy, min_num_params=100)
    apply_activation_checkpointing(model, auto_wrap_policy=policy)
    assert [type(m).__name__ for m in model[0]] == ["CheckpointWrapper"] * 2
    assert type(model[0]) is nn.Sequential
    assert type(model[1]) is nn.Linear


def test_another_kind_of_wrapper_goes_inside():
    """Offload applied after checkpoint wraps the inner module, as the source does."""
    model = nn.Sequential(nn.Linear(2, 2))
    apply_activation_checkpointing(model, check_fn=_is_linear)
    apply_activation_checkpointing(model, offload_wrapper, check_fn=_is_linear)
    assert isinstance(model[0], CheckpointWrapper)
    assert isinstance(model[0]._checkpoint_wrapped_module, OffloadWrapper)


def test_a_failing_wrapper_leaves_the_model_alone():
    """When wrapping one module raises, no module is wrapped."""
    model = _build()
    calls = []

    def fail_second(module):
        calls.append(module)
        if len(calls) == 2:
            raise RuntimeError("no")
        return checkpoint_wrapper(module)

    with pytest.raises(RuntimeError, match="no"):
        apply_activation_checkpointing(model, fail_second, check_fn=_is_linear)
    assert _count(model, CheckpointWrapper) == 0


def test_selecting_nothing_warns():
    """A policy that selects nothing is likely a mistake, so it warns once."""
    model = _build()
    with pytest.warns(UserWarning, match="no module below Sequential was selected"):
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.Conv2d))
    assert _count(model, CheckpointWrapper) == 0
