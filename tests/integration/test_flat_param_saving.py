"""flat-param: files that other libraries write of a flattened model, and read."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _checks import assert_same, tensors_of
from _flat import TIED, assert_flat, llama, pair, small, step, tied_llama
from _models import need
from torch import nn


def size(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("make", [small, llama, tied_llama])
def test_accelerate_saves_a_flattened_model(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """`Accelerator.save_model` writes all weights once, as many bytes as for the plain model."""
    accelerate, safetensors = need("accelerate"), need("safetensors.torch")
    model, plain = pair(make)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.save_model(model, tmp_path / "flat")
    accelerator.save_model(plain, tmp_path / "plain")
    files = [tmp_path / kind / "model.safetensors" for kind in ("flat", "plain")]
    assert_same(*(safetensors.load_file(file) for file in files))
    assert files[0].stat().st_size == files[1].stat().st_size


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("make", [llama, tied_llama])
def test_accelerate_saves_and_loads_a_state_of_training(
    make: Callable[[], nn.Module], safe: bool, tmp_path: Path
) -> None:
    """`save_state`, two more steps, `load_state`: the model is restored and still flat."""
    accelerate = need("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model, plain = pair(make)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    for either, its in ((model, optimizer), (plain, reference)):
        step(either, its)
        its.zero_grad()
    accelerator.save_state(tmp_path, safe_serialization=safe)
    step(model, optimizer)
    optimizer.zero_grad()
    accelerator.load_state(tmp_path)
    assert_same(tensors_of(model.state_dict()), tensors_of(plain.state_dict()))
    assert_flat(model)
    assert step(model, optimizer) == step(plain, reference)
    assert_same(tensors_of(model.state_dict()), tensors_of(plain.state_dict()))


@pytest.mark.parametrize("make", [llama, *TIED])
def test_safetensors_saves_and_loads_a_model(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """`save_model` and `load_model`, into a flattened and into a plain model."""
    safetensors = need("safetensors.torch")
    model, plain = pair(make)
    safetensors.save_model(model, str(tmp_path / "flat"))
    safetensors.save_model(plain, str(tmp_path / "plain"))
    assert size(tmp_path / "flat") == size(tmp_path / "plain")
    assert_same(*(safetensors.load_file(tmp_path / kind) for kind in ("flat", "plain")))
    for other in pair(make):
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        assert safetensors.load_model(other, str(tmp_path / "flat")) == (set(), [])
        assert_same(tensors_of(other.state_dict()), tensors_of(plain.state_dict()))


@pytest.mark.parametrize("make", [llama, *TIED])
def test_transformers_saves_a_flattened_model(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """`save_pretrained` and `from_pretrained`; tied weights are written once."""
    model, plain = pair(make)
    model.save_pretrained(tmp_path / "flat")
    plain.save_pretrained(tmp_path / "plain")
    assert size(tmp_path / "flat") == size(tmp_path / "plain")
    loaded = type(plain).from_pretrained(tmp_path / "flat")
    assert_same(tensors_of(loaded.state_dict()), tensors_of(plain.state_dict()))


@pytest.mark.parametrize("part", [False, True])
def test_torch_saves_what_it_is_given(part: bool) -> None:
    """A saved state dict, of the model or of one layer, is as large as the plain model's."""
    model, plain = pair(tied_llama)
    sizes = []
    for either in (model, plain):
        file = io.BytesIO()
        torch.save((either.model.layers[0] if part else either).state_dict(), file)
        sizes.append(file.tell())
        file.seek(0)
        state = torch.load(file)
        if not part:
            either.load_state_dict(state)
    assert sizes[0] == sizes[1]
    assert_same(tensors_of(model.state_dict()), tensors_of(plain.state_dict()))


def test_distributed_checkpoints_hold_a_flattened_model(tmp_path: Path) -> None:
    """`torch.distributed.checkpoint` saves the `state_dict` and loads it in place."""
    dcp = need("torch.distributed.checkpoint")
    model, plain = pair(tied_llama)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict()}, checkpoint_id=str(tmp_path))
        with torch.no_grad():
            model.lm_head.weight.zero_()
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=str(tmp_path))
    # Without `load_state_dict`: the loaded tensors share the model's memory.
    assert_same(tensors_of(model.state_dict()), tensors_of(plain.state_dict()))
    assert_flat(model)
