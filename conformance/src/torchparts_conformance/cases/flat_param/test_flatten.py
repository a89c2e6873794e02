"""`flatten` in one process: parameters and gradients as one vector."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._builds import blocks, holder


def _lies_in(tensor, vector):
    start, stop = vector.data_ptr(), vector.data_ptr() + vector.nbytes
    return start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= stop


def _aliased(model, flat):
    """Every parameter lies in the memory of a vector, and every vector has one."""
    vectors = [flat.as_vector(name) for name in flat.layouts]
    found = [[_lies_in(param, vector) for vector in vectors] for param in model.parameters()]
    return all(map(any, found)) and all(map(any, zip(*found, strict=True)))


@requirement(
    "FP-050",
    "Parameters MUST keep their identity and values and MUST become views of one vector.",
    rationale=(
        "users ask for all parameters as one vector: pytorch#2794, pytorch#49723, pytorch#38655"
    ),
    profile="flatten",
)
def test_parameters_are_views_of_one_vector(part, device):
    """Same objects and values in one memory; writing to the vector writes to them."""
    model, _ = blocks(device, torch.float32)
    before = [(param, param.detach().clone()) for param in model.parameters()]
    flat = part.flatten(model)
    assert _aliased(model, flat)
    for (param, value), now in zip(before, model.parameters(), strict=True):
        assert param is now
        assert torch.equal(param, value)
    flat.as_vector().zero_()
    assert not any(param.any() for param in model.parameters())


@requirement(
    "FP-051",
    "Gradients MUST be views of one vector, however they were cleared before.",
    rationale=(
        "users ask for all gradients as one vector: pytorch#2794, pytorch#49723, pytorch#38655"
    ),
    profile="flatten",
)
@pytest.mark.parametrize("clear", ["none", "zero", "flat"])
def test_gradients_are_views_of_one_vector(part, device, clear):
    """However gradients were cleared, backward writes to the flat gradient, bitwise right."""
    plain, x = blocks(device, torch.float32)
    plain(x).sum().backward()
    model, _ = blocks(device, torch.float32)
    flat = part.flatten(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        if clear == "flat":
            flat.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=clear == "none")
        model(x).sum().backward()
    vector = flat.grad_vector()
    assert all(_lies_in(param.grad, vector) for param in model.parameters())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@requirement(
    "FP-052",
    "An optimizer built before flattening MUST still train the module.",
    rationale="with FSDP1 on 2.13 it silently trains nothing",
    profile="flatten",
)
def test_an_optimizer_built_before_trains(part, device):
    """Parameters keep their identity, so the optimizer trains the flattened module."""
    model, x = blocks(device, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flat = part.flatten(model)
    before = flat.as_vector().clone()
    model(x).sum().backward()
    optimizer.step()
    assert not torch.equal(flat.as_vector(), before)


@requirement(
    "FP-053",
    "A parameter that got no gradient in backward MUST have None as its gradient.",
    rationale="FSDP1 gives zeros on 2.13, and weight decay moves the parameter",
    profile="flatten",
)
def test_an_unused_parameter_keeps_no_gradient(part, device):
    """Weight decay does not move parameters without a gradient."""
    model, x = blocks(device, torch.float32)
    flat = part.flatten(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = model.blocks[0][1].weight.detach().clone()
    model.embed(x).sum().backward()
    optimizer.step()
    assert model.blocks[0][1].weight.grad is None
    assert torch.equal(model.blocks[0][1].weight, before)
    assert _aliased(model, flat)


@requirement(
    "FP-055",
    "Clipping MUST give the norm and gradients of torch's clip_grad_norm_, without padding.",
    rationale="padding of 42 enters every reduction on 2.13",
    profile="flatten",
)
@pytest.mark.parametrize("max_norm", [0.1, 1e9])
def test_clipping_equals_torchs(part, device, max_norm):
    """Same norm and gradients as `clip_grad_norm_`, with sizes that need padding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(device)
    plain, x = copy.deepcopy(model), torch.rand(5, 5).to(device)
    flat = part.flatten(model)
    for either in (model, plain):
        either(x).pow(2).sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    torch.testing.assert_close(flat.clip_(max_norm), expected)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@requirement(
    "FP-058",
    "Parameters SHOULD be views of the vector again right after casts and loads, and at the next "
    "use of the vector after assignments.",
    rationale="pytorch#151223",
    profile="flatten",
)
@pytest.mark.parametrize("change", ["to", "load", "assign", "parameter"])
def test_aliasing_survives_casts_loads_and_assignments(part, device, change):
    """After a cast, a load, a load with assign, or a new parameter: still one vector."""
    model, _ = blocks(device, torch.float32)
    flat = part.flatten(model)
    if change == "to":
        model.double()
    elif change == "parameter":
        model.embed.weight = nn.Parameter(torch.ones(8, 6, device=device))
    else:
        state = {name: value.clone() + 1 for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=change == "assign")
    if change in ("assign", "parameter"):
        flat.as_vector()
    pointer = model.embed.weight.data_ptr()
    assert pointer == flat.as_vector().data_ptr()
    assert _aliased(model, flat)


@requirement(
    "FP-060",
    "Each combination of dtype and requires_grad MUST have a separate vector.",
    rationale="pytorch#104690; the most frequent complaint of FSDP1's users",
    profile="flatten",
)
def test_dtypes_and_frozen_parts_have_separate_segments(part, device):
    """One vector per (dtype, requires_grad); values are kept in each."""
    frozen = nn.Parameter(torch.full((5,), 3.0), requires_grad=False)
    tensors = [torch.ones(3), torch.full((4,), 2.0, dtype=torch.bfloat16), frozen]
    model = holder(*tensors).to(device)
    flat = part.flatten(model)
    assert list(flat.layouts) == ["float32", "bfloat16", "float32.frozen"]
    assert [param.tolist() for param in model.parameters()] == [[1.0] * 3, [2.0] * 4, [3.0] * 5]


@requirement(
    "FP-061",
    "Parameters of any stride and dtype MUST keep their values.",
    rationale="silent corruption on 2.13",
    profile="flatten",
)
def test_any_stride_and_dtype_survives(part, device):
    """Slices, transposes, scalars, empty and complex tensors keep values and dense strides."""
    tensors = [
        torch.arange(24.0).view(4, 6)[:, :3],
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(5.0),
        torch.ones(0, 2),
        torch.tensor([1 + 2j]),
        torch.ones(1).expand(3),
    ]
    model = holder(*(tensor.to(device) for tensor in tensors))
    part.flatten(model)
    for param, tensor in zip(model.parameters(), tensors, strict=True):
        assert param.tolist() == tensor.tolist()
        assert param.stride() == tensor.clone().stride()


@requirement(
    "FP-064",
    "A compiled forward SHOULD keep gradients in the flat vector, without a graph break.",
    rationale="hooks that Dynamo cannot trace cause graph breaks",
    profile="flatten",
)
def test_a_compiled_forward_keeps_gradients_flat(part, device):
    """No graph break, and gradients are in the flat gradient."""
    model, x = blocks(device, torch.float32)
    flat = part.flatten(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        model.zero_grad()
        compiled(x).sum().backward()
    vector = flat.grad_vector()
    assert all(_lies_in(param.grad, vector) for param in model.parameters())
