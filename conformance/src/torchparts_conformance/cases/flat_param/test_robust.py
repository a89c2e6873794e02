"""What the source gets wrong, checkable through its own names."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._builds import (
    Group,
    blocks,
    holder,
    make_handle,
    survives,
)

SENTINELS = torch.full((20,), -1.0)


@requirement(
    "FP-020",
    level="MUST",
    text="A handle MUST work without a process group and without a device.",
    rationale="AttributeError on 2.13; Lightning#21812 asks for it",
    since="0.1.0",
    profile="robust",
    group="sharding",
)
def test_no_process_group_and_no_device_are_needed(part, device):
    """One process is one rank, and the device is where the parameters are."""
    model, x = blocks(device, torch.float32)
    expected = model(x)
    handle = part.FlatParamHandle(list(model.parameters()), model)
    handle.shard()
    assert (handle.rank, handle.world_size) == (0, 1)
    assert handle.device.type == device
    assert torch.equal(model(x), expected)


@requirement(
    "FP-021",
    level="MUST",
    text="A parameter that leaves holes in memory MUST keep its values.",
    rationale="silent corruption reproduced on 2.13: as_strided reads the neighbour's memory",
    since="0.1.0",
    profile="robust",
)
def test_a_column_slice_keeps_its_values(part, device):
    """A parameter that leaves holes in memory does not read its neighbour's elements."""
    assert survives(part, device, torch.arange(24.0).view(4, 6)[:, :3], SENTINELS)


@requirement(
    "FP-022",
    level="MUST",
    text="A scalar parameter MUST be flattened.",
    rationale="IndexError reproduced on 2.13",
    since="0.1.0",
    profile="robust",
)
def test_a_scalar_parameter_is_flattened(part, device):
    """Zero dimensions are a shape like any other."""
    assert survives(part, device, torch.tensor(3.0), SENTINELS)


@requirement(
    "FP-023",
    level="MUST",
    text="Complex parameters MUST be flattened.",
    rationale="refused as integers on 2.13",
    since="0.1.0",
    profile="robust",
)
def test_complex_parameters_are_flattened(part, device):
    """They are no integers."""
    assert survives(part, device, torch.tensor([1 + 2j, 3 - 4j]))


@requirement(
    "FP-024",
    level="MUST",
    text="Parameters of eight-bit floats MUST be aligned like any others.",
    rationale="no multiplication for the padding's dtype on 2.13",
    since="0.1.0",
    profile="robust",
    group="sharding",
)
def test_float8_parameters_are_aligned(part, device):
    """Padding is made without arithmetic that a dtype may lack."""
    tensors = [torch.ones(size).to(torch.float8_e4m3fn) for size in (3, 5)]
    assert survives(part, device, *tensors, use_orig_params=True)


@requirement(
    "FP-025",
    level="MUST",
    text="An expanded parameter MUST keep its values.",
    rationale="storage out of bounds on 2.13",
    since="0.1.0",
    profile="robust",
)
def test_an_expanded_parameter_keeps_its_values(part, device):
    """Several indices that map to one element become several elements."""
    assert survives(part, device, torch.ones(1).expand(4), SENTINELS)


@requirement(
    "FP-026",
    level="MUST",
    text="Parameters that the module does not own MUST be refused.",
    rationale="silently dropped on 2.13",
    since="0.1.0",
    profile="robust",
)
def test_foreign_parameters_are_refused(part, device):
    """A parameter that is not in the module is not silently dropped."""
    model, _ = blocks(device, torch.float32)
    params = [*model.parameters(), nn.Parameter(torch.ones(100, device=device))]
    with pytest.raises(ValueError, match="100"):
        make_handle(part, model, device, params=params)
    assert len(list(model.parameters())) == len(params) - 1


@requirement(
    "FP-027",
    level="MUST",
    text="Padding MUST be zero.",
    rationale="42 on 2.13; the norm of 66 elements grows from 1.9 to 94",
    since="0.1.0",
    profile="robust",
    group="sharding",
)
@pytest.mark.parametrize("world_size", [1, 3])
def test_padding_is_zero(part, device, world_size):
    """The norm of the flat parameter is the norm of the parameters."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(device)
    true = torch.cat([param.detach().flatten() for param in model.parameters()]).norm()
    handle = make_handle(
        part, model, device, use_orig_params=True, process_group=Group(0, world_size)
    )
    torch.testing.assert_close(handle.flat_param.detach().norm(), true)


@requirement(
    "FP-028",
    level="MUST",
    text="A flattened module MUST be deep-copied into one that computes the same, apart.",
    rationale="RuntimeError reproduced on 2.13",
    since="0.1.0",
    profile="robust",
)
def test_a_flattened_module_is_deep_copied(part, device):
    """The copy computes the same, and apart."""
    model, x = blocks(device, torch.float32)
    handle = make_handle(part, model, device)
    twin = copy.deepcopy(model)
    expected = model(x)
    with torch.no_grad():
        handle.flat_param.zero_()
    assert torch.equal(twin(x), expected)


@requirement(
    "FP-029",
    level="MUST",
    text="A saved flat parameter MUST come back with its metadata and without the module.",
    rationale="without its metadata a flat parameter is a row of numbers",
    since="0.1.0",
    profile="robust",
)
def test_a_saved_flat_parameter_keeps_its_metadata(part, device):
    """Names and numels come back, without the module."""
    model, _ = blocks(device, torch.float32)
    flat = make_handle(part, model, device).flat_param
    names, numels = tuple(flat._fqns), tuple(flat._numels)
    file = io.BytesIO()
    torch.save(flat, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, part.FlatParameter)
    assert (tuple(loaded._fqns), tuple(loaded._numels)) == (names, numels)
    assert torch.equal(loaded, flat)
    assert len(file.getvalue()) < 4 * flat.numel() + 20_000


@requirement(
    "FP-030",
    level="MUST",
    text="Offloading to CPU on a CPU-only machine MUST be no error.",
    rationale="RuntimeError reproduced on 2.13; pytorch#106099",
    since="0.1.0",
    profile="robust",
    group="sharding",
)
def test_offloading_to_cpu_on_cpu_is_no_error(part, device):
    """Where parameters compute on CPU, that is where they are offloaded to."""
    model, x = blocks("cpu", torch.float32)
    expected = model(x)
    handle = make_handle(part, model, "cpu", offload_params=True)
    handle.shard()
    handle.init_flat_param_attributes()
    handle.unshard()
    assert torch.equal(model(x), expected)


@requirement(
    "FP-031",
    level="MUST",
    text="Parameters MUST move into the flat parameter in place.",
    rationale="construction holds everything twice on 2.13: 382 MiB more for 100M parameters",
    since="0.1.0",
    profile="robust",
)
def test_parameters_move_in_place(part, device):
    """What was given shares memory with the flat parameter, so nothing is held twice."""
    model, _ = blocks(device, torch.float32)
    params = list(model.parameters())
    home = make_handle(part, model, device).flat_param.untyped_storage().data_ptr()
    assert all(param.untyped_storage().data_ptr() == home for param in params)


@requirement(
    "FP-032",
    level="MUST",
    text=(
        "Shard metadata MUST be built from four fields or six, and compared where both sides "
        "have them."
    ),
    rationale="the fields grew from four to six with pytorch#137382",
    since="0.1.0",
    profile="robust",
    group="sharding",
)
def test_metadata_of_older_sources_is_understood(part, device):
    """Four fields or six; what one side lacks is not compared."""
    fields = {"param_names": ("w",), "param_shapes": (torch.Size([2, 2]),)}
    fields |= {"param_numels": (4,), "param_offsets": ((0, 3),)}
    old = part.FlatParamShardMetadata(**fields)
    extra = {"param_strides": ((2, 1),), "param_contiguities": (True,)}
    new = part.FlatParamShardMetadata(**fields, **extra)
    assert old == new
    assert old != part.FlatParamShardMetadata(**{**fields, "param_names": ("v",)})


@requirement(
    "FP-033",
    level="MUST",
    text=(
        "Two parameters that share memory without being one object MUST go on sharing it, or be"
        " refused by name."
    ),
    rationale=(
        "reproduced on 2.13: both are copied, and writing to one no longer writes to the other"
    ),
    since="0.1.0",
    profile="robust",
)
def test_memory_that_parameters_share_is_not_parted_silently(part, device):
    """Writing to one writes to the other, as before, or an error names both."""
    base = torch.ones(6, device=device)
    module = holder(nn.Parameter(base[:4]), nn.Parameter(base[2:]))
    refusal = ""
    try:
        make_handle(part, module, device)
    except ValueError as error:
        refusal = str(error)
    else:
        with torch.no_grad():
            module.p0[3] = 5.0
    named = "p0" in refusal and "p1" in refusal
    assert named or module.p1.tolist() == [1.0, 5.0, 1.0, 1.0]
