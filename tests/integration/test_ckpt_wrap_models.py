"""ckpt-wrap on blocks of other libraries' models, as in a training script."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _cases import GROUPED, each, of_transformers
from _checks import assert_same_step, kept_bytes, shape_of, tensors_of, twins
from _models import IDS, Case, need
from torch import nn

from ckpt_wrap import (
    apply_activation_checkpointing,
    checkpoint_,
    checkpoint_layers_,
    checkpoint_wrapper,
    offload_,
    offload_stats,
    offload_wrapper,
    unwrap,
)


def nested(case: Case, model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Replace every block by a wrapper, with the function named like torch's."""
    blocks = {id(block) for block in case.blocks_of(model).values()}
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: id(module) in blocks
    )


@each
def test_blocks_checkpointed_in_place(case: Case) -> None:
    """`checkpoint_` on every block, with default caches; applied twice, then undone."""
    model, plain = twins(case)
    before = shape_of(model)
    names = list(case.blocks_of(model))
    for block in case.blocks_of(model).values():
        checkpoint_(block)
    assert list(model.state_dict()) == before["names"]
    assert list(case.blocks_of(model) if not case.blocks else names) == names
    for _ in range(2):
        assert_same_step(case, model, plain)
    assert unwrap(model) is model
    assert shape_of(model) == before
    assert_same_step(case, model, plain)


@each
def test_fewer_bytes_are_kept(case: Case) -> None:
    """Fewer bytes are alive after a forward than with the plain model."""
    model, plain = twins(case)
    for block in case.blocks_of(model).values():
        checkpoint_(block)
    ours, theirs = (kept_bytes(lambda m=m: case.loss(m)) for m in (model, plain))
    assert ours < theirs, f"{ours} of {theirs} bytes"


@each
def test_blocks_in_wrappers(case: Case) -> None:
    """`apply_activation_checkpointing` with `checkpoint_wrapper`; names stay plain."""
    model, plain = twins(case)
    before = shape_of(model)
    nested(case, model, checkpoint_wrapper)
    assert list(model.state_dict()) == before["names"]
    assert [name for name, _ in model.named_parameters()] == [n for n, _ in before["parameters"]]
    for _ in range(2):
        assert_same_step(case, model, plain)
    assert shape_of(unwrap(model)) == before
    assert_same_step(case, model, plain)


@each
def test_blocks_offloaded_to_a_folder(case: Case, tmp_path: Path) -> None:
    """`offload_` on every block: files are written, and none are left after backward."""
    model, plain = twins(case)
    before = shape_of(model)
    for block in case.blocks_of(model).values():
        offload_(block, to=tmp_path, min_bytes=1)
    for _ in range(2):
        assert_same_step(case, model, plain)
    stats = [offload_stats(block) for block in case.blocks_of(model).values()]
    assert sum(each.copies_out for each in stats) > 0
    assert sum(each.bytes_away for each in stats) == 0
    assert [file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size] == []
    assert shape_of(unwrap(model)) == before


@each
def test_blocks_checkpointed_and_offloaded(case: Case, tmp_path: Path) -> None:
    """Both on one block, in either order, in place and as wrappers."""
    model, plain = twins(case)
    for index, block in enumerate(case.blocks_of(model).values()):
        first, second = (checkpoint_, offload_) if index % 2 else (offload_, checkpoint_)
        for layer in (first, second):
            layer(block, to=tmp_path, min_bytes=1) if layer is offload_ else layer(block)
    assert_same_step(case, model, plain)
    other = copy.deepcopy(plain)
    nested(case, other, lambda block: offload_wrapper(checkpoint_wrapper(block)))
    assert_same_step(case, other, plain)


@each
def test_frozen_model_with_trained_blocks(case: Case) -> None:
    """All parameters but the last block's are frozen: the same gradients."""
    if case.name in ("UNet2D", "AutoencoderKL"):
        pytest.skip("torch 2.13 crashes in backward of a frozen GroupNorm in channels-last")
    model, plain = twins(case)
    for either in (model, plain):
        either.requires_grad_(False)
        list(case.blocks_of(either).values())[-1].requires_grad_(True)
    for block in case.blocks_of(model).values():
        checkpoint_(block)
    assert_same_step(case, model, plain)


@each
def test_evaluation_is_not_changed(case: Case) -> None:
    """Without gradients, in evaluation, outputs are the plain model's and nothing is kept."""
    model, plain = twins(case)
    for block in case.blocks_of(model).values():
        checkpoint_(block)
    state = tensors_of(model.state_dict())
    with torch.no_grad():
        assert torch.equal(case.loss(model.eval()), case.loss(plain.eval()))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@each
def test_half_precision_by_autocast(case: Case) -> None:
    """Under autocast to bfloat16, recomputation runs in bfloat16."""
    model, plain = twins(case)
    for block in case.blocks_of(model).values():
        checkpoint_(block)
    losses = []
    for either in (model, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = case.loss(either)
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name


@pytest.mark.parametrize("reentrant", [False, True])
@each
def test_beside_transformers_own_checkpointing(case: Case, reentrant: bool) -> None:
    """With `gradient_checkpointing_enable`, which checkpoints the same blocks again."""
    if case.library != "transformers" or not case.make().supports_gradient_checkpointing:
        pytest.skip(f"{case.name} has no gradient_checkpointing_enable")
    model, plain = twins(case)
    for either in (model, plain):
        options = {"use_reentrant": reentrant}
        either.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    for block in case.blocks_of(model).values():
        checkpoint_(block)
    assert_same_step(case, model, plain)


@each
def test_layers_that_are_found_are_the_blocks(case: Case) -> None:
    """`checkpoint_layers_` changes the layers that transformers itself would checkpoint."""
    if case.blocks:
        pytest.skip(f"the blocks of {case.name} are chosen by hand")
    model, plain = twins(case)
    assert set(checkpoint_layers_(model)) == set(case.outer_blocks_of(plain))
    assert_same_step(case, model, plain)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_every_nth_layer_keeps_what_transformers_keeps(every: int) -> None:
    """As many bytes as with `every_n_layers=`, and the plain model's gradients."""
    case = Case(
        "Llama-4",
        "transformers",
        lambda: of_transformers("LlamaForCausalLM", **{**GROUPED, "num_hidden_layers": 4}),
        lambda: {"input_ids": IDS, "labels": IDS, "use_cache": False},
    )
    model, plain = twins(case)
    if not hasattr(plain, "activation_checkpointing_enable"):
        pytest.skip("this transformers has no every_n_layers=")
    theirs = copy.deepcopy(plain)
    theirs.activation_checkpointing_enable(every_n_layers=every)
    assert len(checkpoint_layers_(model, every=every)) == len(range(0, 4, every))
    assert_same_step(case, model, plain)
    ours, of_transformers_, all_ = (
        kept_bytes(lambda m=m: case.loss(m)) for m in (model, theirs, plain)
    )
    assert ours <= of_transformers_ < all_


def test_adapters_switched_before_backward_are_put_back() -> None:
    """Two forwards with different adapters and one backward: each is recomputed with its own."""
    peft = need("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = of_transformers("LlamaForCausalLM", **GROUPED).train()
    model = peft.get_peft_model(model, lora, adapter_name="a")
    model.add_adapter("b", lora)

    def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
        total = torch.zeros(())
        for adapter in "ab":
            model.set_adapter(adapter)  # type: ignore[operator]
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("lora" in name)
            total = total + model(input_ids=IDS, labels=IDS, use_cache=False).loss
        total.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    plain, changed = copy.deepcopy(model), copy.deepcopy(model)
    checkpoint_layers_(changed)
    expected, found = gradients(plain), gradients(changed)
    assert expected.keys() == found.keys()
    assert any(".b." in name for name in expected)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
