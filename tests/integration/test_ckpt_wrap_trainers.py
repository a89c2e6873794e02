"""ckpt-wrap in training loops, adapters, exports and files of other libraries."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _cases import case_of
from _checks import (
    assert_same,
    assert_same_grads,
    assert_same_step,
    shape_of,
    tensors_of,
    twins,
)
from _models import IDS, Case, need
from _trainers import TRAINERS, by_accelerate, by_lightning, by_transformers
from torch import nn

from ckpt_wrap import checkpoint_, checkpoint_wrapper, offload_, unwrap

LANGUAGE = ["Llama", "GPT-2", "T5", "Mixtral"]
models = pytest.mark.parametrize("name", LANGUAGE)


def checkpointed(case: Case, model: nn.Module) -> nn.Module:
    """Checkpoint every block in place."""
    for block in case.blocks_of(model).values():
        checkpoint_(block)
    return model


def trained_alike(
    case: Case, loop: Callable[[nn.Module, Path], None], folder: Path
) -> tuple[nn.Module, nn.Module]:
    """Train with and without checkpointed blocks; weights are the same."""
    model, plain = twins(case)
    before = shape_of(model)
    loop(checkpointed(case, model), folder / "ours")
    loop(plain, folder / "plain")
    assert_same(tensors_of(model.state_dict()), tensors_of(plain.state_dict()))
    after = shape_of(unwrap(model))
    assert after["classes"] == before["classes"] and after["names"] == before["names"]
    return model, plain


@models
def test_trainer_of_transformers(name: str, tmp_path: Path) -> None:
    """`Trainer.train`, two steps, with dropout."""
    trained_alike(case_of(name), by_transformers, tmp_path)


@models
def test_loop_of_accelerate(name: str, tmp_path: Path) -> None:
    """`prepare`, `accumulate`, `clip_grad_norm_`; the saved state has plain keys."""
    trained_alike(case_of(name), by_accelerate, tmp_path)
    files = [tmp_path / kind / "model.safetensors" for kind in ("ours", "plain")]
    assert_same(*(need("safetensors.torch").load_file(file) for file in files))


@models
def test_trainer_of_lightning(name: str, tmp_path: Path) -> None:
    """`Trainer.fit` with the blocks checkpointed in `setup`; the checkpoint has plain names."""
    case = case_of(name)
    model, plain = twins(case)
    by_lightning(model, tmp_path / "ours", functools.partial(checkpointed, case))
    by_lightning(plain, tmp_path / "plain")
    assert_same(tensors_of(model.state_dict()), tensors_of(plain.state_dict()))
    states = [
        torch.load(tmp_path / kind / "last.ckpt", weights_only=False)["state_dict"]
        for kind in ("ours", "plain")
    ]
    assert_same(*states)


@models
def test_trainer_resumes_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    """Saved after two of four steps, continued with and without checkpointed blocks."""
    case = case_of(name)
    settings: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    loop = functools.partial(by_transformers, **settings)
    _, plain = trained_alike(case, loop, tmp_path)
    loaded = type(plain).from_pretrained(tmp_path / "ours" / "checkpoint-4")
    assert_same(tensors_of(loaded.state_dict()), tensors_of(plain.state_dict()))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("layer", ["checkpoint_", "checkpoint_wrapper", "offload_"])
def test_lora(when: str, layer: str, tmp_path: Path) -> None:
    """`get_peft_model` before or after, with dropout: gradients, adapter file, merged weights."""
    peft, safetensors = need("peft"), need("safetensors.torch")
    case = case_of("Llama")
    model, plain = twins(case)

    def change(root: nn.Module) -> None:
        for name, block in case.blocks_of(root).items():
            if layer == "checkpoint_wrapper":
                parent, _, last = name.rpartition(".")
                setattr(root.get_submodule(parent), last, checkpoint_wrapper(block))
            else:
                offload_(block, to=tmp_path) if layer == "offload_" else checkpoint_(block)

    def adapted(root: nn.Module) -> nn.Module:
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        torch.manual_seed(1)
        return peft.get_peft_model(root, config)

    if when == "before":
        change(model)
    ours, theirs = adapted(model), adapted(plain)
    if when == "after":
        change(ours)
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.5)
        for m in (ours, theirs)
    ]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = []
        for m in (ours, theirs):
            loss = case.loss(m)
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        assert_same_grads(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
    for kind, m in (("ours", ours), ("plain", theirs)):
        m.save_pretrained(tmp_path / kind)
    files = [tmp_path / kind / "adapter_model.safetensors" for kind in ("ours", "plain")]
    assert_same(*(safetensors.load_file(file) for file in files))
    merged = [m.merge_and_unload() for m in (ours, theirs)]
    assert_same(*(tensors_of(m.state_dict()) for m in merged))


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Gemma 3", "Mamba"])
def test_generation_is_the_plain_models(name: str) -> None:
    """`generate` with a cache, in evaluation: the same tokens."""
    case = case_of(name)
    model, plain = twins(case)
    checkpointed(case, model)
    outs = [
        m.eval().generate(IDS[:, :3], max_new_tokens=4, do_sample=False, pad_token_id=0)
        for m in (model, plain)
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize("name", ["Llama", "T5", "BERT", "ViT"])
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    """`save_pretrained` of a model with checkpointed blocks writes the plain model's file."""
    case = case_of(name)
    model, plain = twins(case)
    checkpointed(case, model).save_pretrained(tmp_path / "ours")
    plain.save_pretrained(tmp_path / "plain")
    files = [tmp_path / kind / "model.safetensors" for kind in ("ours", "plain")]
    assert_same(*(need("safetensors.torch").load_file(file) for file in files))
    assert_same(
        tensors_of(type(plain).from_pretrained(tmp_path / "ours").state_dict()),
        tensors_of(plain.state_dict()),
    )


@pytest.mark.parametrize("name", ["BERT", "ViT", "ResNet"])
@pytest.mark.parametrize("when", ["checkpointed", "after unwrapping"])
def test_export(name: str, when: str) -> None:
    """`torch.export` of a model with checkpointed blocks, and after undoing them."""
    case = case_of(name)
    model, plain = twins(case)
    checkpointed(case, model)
    if when == "after unwrapping":
        for either in (model, plain):
            case.loss(either).backward()
        unwrap(model)
    inputs = {key: value for key, value in case.inputs().items() if key != "labels"}
    program = torch.export.export(model.eval(), (), inputs, strict=False)
    out, expected = program.module()(**inputs), plain.eval()(**inputs)
    assert torch.equal(out.logits, expected.logits)


@pytest.mark.parametrize("name", ["UNet2D", "DiT"])
def test_moving_average_of_diffusers(name: str) -> None:
    """`EMAModel` over a checkpointed model: averages equal the plain model's."""
    averages = []
    kind = need("diffusers.training_utils").EMAModel
    case = case_of(name)
    model, plain = twins(case)
    checkpointed(case, model)
    for either in (model, plain):
        average = kind(either.parameters(), decay=0.5)
        optimizer = torch.optim.SGD(either.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            case.loss(either).backward()
            optimizer.step()
            average.step(either.parameters())
        averages.append(average.shadow_params)
    assert all(torch.equal(a, b) for a, b in zip(*averages, strict=True))


@models
def test_copies_of_a_checkpointed_model(name: str) -> None:
    """`deepcopy` of a model with changed blocks trains like the plain one."""
    case = case_of(name)
    model, plain = twins(case)
    assert_same_step(case, copy.deepcopy(checkpointed(case, model)), plain)


@pytest.mark.parametrize("trainer", list(TRAINERS))
def test_offload_in_a_training_loop(trainer: str, tmp_path: Path) -> None:
    """Blocks offloaded to a folder in each trainer: the same weights, and an empty folder."""
    case = case_of("Llama")
    model, plain = twins(case)
    away = tmp_path / "away"
    away.mkdir()
    for block in case.blocks_of(model).values():
        offload_(block, to=away, min_bytes=1)
    for kind, either in (("ours", model), ("plain", plain)):
        TRAINERS[trainer](either, tmp_path / kind)
    assert_same(tensors_of(model.state_dict()), tensors_of(plain.state_dict()))
    assert [f for f in away.rglob("*") if f.is_file() and f.stat().st_size] == []
