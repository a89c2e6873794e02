"""What `fully_shard` is given is looked at first and refused in words; nothing has changed then."""

from __future__ import annotations

import math
import re
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from flat_param import (
    LayoutError,
    ParameterError,
    StateError,
    full_state_dict,
    fully_shard,
    save_sharded,
)

pytestmark = pytest.mark.usefixtures("group_of_one")

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "precision": (
        {"mp_policy": torch.bfloat16},
        StateError,
        "mp_policy is torch.bfloat16, but it must be a policy of torch",
    ),
    "dtype": (
        {"mp_policy": MixedPrecisionPolicy(output_dtype=torch.int64)},
        LayoutError,
        "output_dtype of mp_policy is torch.int64, but torch computes in floating point",
    ),
    "small dtype": (
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float8_e4m3fn)},
        LayoutError,
        "param_dtype of mp_policy is torch.float8_e4m3fn, but torch computes in floating point",
    ),
    "offload": (
        {"offload_policy": "cpu"},
        StateError,
        "offload_policy is 'cpu', but it says where shards are kept",
    ),
    "placement": (
        {"shard_placement_fn": lambda param: None},
        StateError,
        "shard_placement_fn is given, but shards are ranges of a flat buffer",
    ),
    "mesh": ({"mesh": 2}, StateError, "mesh is 2, but it must be a DeviceMesh"),
    "init": ({"init_fn": "zeros"}, StateError, "init_fn is 'zeros', but it is called with each"),
    "freeing": ({"reshard_after_forward": "no"}, StateError, "got 'no'. Pass True or False."),
    "ranks": ({"reshard_after_forward": 8}, StateError, "fewer ranks with a 2-D mesh"),
    "ignored name": (
        {"ignored_params": ["weight"]},
        ParameterError,
        "ignored_params has a str, but it must be a set of parameters",
    ),
    "ignored": (
        {"ignored_params": nn.Parameter(torch.ones(2, 2))},
        ParameterError,
        "ignored_params has a Tensor, but it must be a set of parameters",
    ),
    "ignored module": (
        {"ignored_params": nn.Linear(2, 2)},
        ParameterError,
        "ignored_params has a Linear, but it must be a set of parameters",
    ),
}


@pytest.mark.parametrize(("given", "error", "text"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused_by_name(
    given: dict[str, Any], error: type[Exception], text: str
) -> None:
    """Each says what it is instead."""
    module = nn.Linear(2, 2)
    with pytest.raises(error, match=re.escape(text)):
        fully_shard(module, **given)
    assert type(module) is nn.Linear


LINEAR = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ([], "the list of modules is empty"),
        ([LINEAR, LINEAR], "a Linear of the list is inside another module of the list"),
        ([LINEAR, nn.Sequential(LINEAR)], "a Linear of the list is inside another module"),
        ([LINEAR, torch.ones(2)], "module is of type Tensor, but it must be a module or a list"),
        (torch.ones(2), "module is of type Tensor, but it must be a module or a list of modules"),
        (nn.Linear, "module is the class Linear, but it must be a module or a list of modules"),
        (nn.ModuleList([nn.Linear(2, 2)]), "ModuleList has no forward"),
        (nn.ParameterDict({"a": torch.ones(2)}), "ParameterDict has no forward"),
    ],
)
def test_what_is_never_called_is_no_unit(module: Any, text: str) -> None:
    """Its parameters would be whole at no time."""
    with pytest.raises(StateError, match=re.escape(text)):
        fully_shard(module)


def test_container_that_is_called_is_a_unit() -> None:
    """A subclass of ModuleList that defines forward."""

    class Sum(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([each(x) for each in self]).sum(0)

    assert fully_shard(Sum([nn.Linear(2, 2)]))(torch.ones(1, 2)).shape == (1, 2)


def test_gradient_of_the_whole_parameter_is_refused() -> None:
    """A step would add it to a piece; it stays as it is."""
    module = nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ParameterError, match=r"'weight' has a gradient .* Call zero_grad\(\)"):
        fully_shard(module)
    assert module.weight.grad is not None
    module.zero_grad()
    fully_shard(module)


def test_units_without_parameters_have_none_to_offload() -> None:
    """They have no device, and run."""
    policy = CPUOffloadPolicy()
    inner = fully_shard(nn.ReLU(), offload_policy=policy)
    module = fully_shard(nn.Sequential(inner), offload_policy=policy)
    assert module(torch.ones(2)).tolist() == [1.0, 1.0]


def test_parts_on_meta_are_given_values_and_others_keep_them() -> None:
    """A layer that was loaded before, inside a module on meta; what is tied stays tied."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    module[2] = loaded = nn.Linear(3, 3)
    before = [param.detach().clone() for param in loaded.parameters()]
    fully_shard(module)
    assert all(map(torch.equal, loaded.parameters(), before))
    assert module[1].weight is module[0].weight
    assert not any(param.is_meta for param in module.parameters())


def test_values_beside_meta_tensors_are_kept() -> None:
    """Of a layer whose bias alone is new, and of statistics."""
    layer, norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
    layer.bias = nn.Parameter(torch.empty(3, device="meta"))
    norm.weight = nn.Parameter(torch.empty(3, device="meta"))
    assert norm.running_mean is not None
    norm.running_mean.fill_(7.0)
    before = layer.weight.detach().clone()
    module = fully_shard(nn.Sequential(layer, norm))
    assert torch.equal(layer.weight, before)
    assert norm.running_mean.tolist() == [7.0] * 3
    assert norm.weight.tolist() == [1.0] * 3
    assert not any(param.is_meta for param in module.parameters())


@pytest.mark.parametrize("stop", [0, 1])
def test_module_whose_sharding_was_stopped_is_refused_by_each_use(stop: int) -> None:
    """Here in `init_fn`; tests/stress stops `fully_shard` at each instruction."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 3))

    def init(part: Any) -> None:
        if part is module[stop]:
            raise KeyboardInterrupt
        part.reset_parameters()

    with pytest.raises(KeyboardInterrupt):
        fully_shard(module, init_fn=init)
    text = (
        "flat_param.fully_shard: Sequential was only partly sharded when it was interrupted, but a "
        "rank cannot put its pieces back together. Build the module again on every rank, and shard "
        "that."
    )
    for use in (
        lambda: fully_shard(module),
        lambda: fully_shard(nn.Sequential(module)),
        lambda: full_state_dict(nn.Sequential(module)),
        lambda: save_sharded(module, "never"),
    ):
        with pytest.raises(StateError, match=re.escape(text)):
            use()


@pytest.mark.parametrize("has_reference", [False, True])
def test_optimizer_over_meta_parameters_trains_them_or_raises(has_reference: bool) -> None:
    """Attributes and hooks stay; torch exchanges no tensor that has weak references."""
    with torch.device("meta"):
        layer = nn.Linear(3, 3)
    weight, heard = layer.weight, []
    weight.tag = "no decay"
    weight.register_post_accumulate_grad_hook(heard.append)
    reference = weakref.ref(weight) if has_reference else None
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    fully_shard(layer)
    before = layer.weight.detach().clone()
    layer(torch.ones(2, 3)).sum().backward()
    assert len(heard) == 1
    assert layer.weight.tag == "no decay"
    if has_reference:
        assert reference is not None
        with pytest.raises(ParameterError, match="'weight' was a DTensor or on meta"):
            optimizer.step()
        return
    assert layer.weight is weight
    optimizer.step()
    assert not torch.equal(layer.weight, before)


@pytest.mark.parametrize(
    ("max_norm", "norm_type"),
    [(-1.0, 2), (math.nan, 2), ("a", 2), (None, 2), (1.0, 0), (1.0, math.nan), (1.0, "two")],
)
def test_norm_that_nothing_is_scaled_to_is_refused(max_norm: Any, norm_type: Any) -> None:
    """A negative one would turn the gradients around; they stay."""
    module = fully_shard(nn.Linear(2, 2))
    module(torch.ones(1, 2)).sum().backward()
    before = [param.grad.clone() for param in module.parameters() if param.grad is not None]
    text = f"max_norm is {max_norm!r} and norm_type {norm_type!r}. Pass a max_norm"
    with pytest.raises(StateError, match=re.escape(text)):
        module.clip_grad_norm_(max_norm, norm_type)
    assert all(map(torch.equal, before, [param.grad for param in module.parameters()]))


def test_order_of_a_norm_may_be_a_word() -> None:
    """That torch takes, too: the largest gradient."""
    module = fully_shard(nn.Linear(2, 2))
    (3 * module(torch.ones(1, 2)).sum()).backward()
    assert module.clip_grad_norm_(1.0, "inf") == 3


def test_gradients_of_sharded_parameters_are_not_handed_out() -> None:
    """`torch.autograd.grad` says that a sharded parameter is not in the graph."""
    model = fully_shard(nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(model(torch.ones(2, 3)).sum(), list(model.parameters()))
