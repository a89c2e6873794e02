"""flat-param: flattened models that other libraries resize, adapt, compile and train."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _checks import assert_same, assert_same_grads, tensors_of
from _flat import MODELS, TIED, assert_flat, llama, pair, small, step
from _models import IDS, VOCABULARY, need
from _trainers import by_transformers
from torch import Tensor, nn

import flat_param

# Changing a model after flattening


@pytest.mark.parametrize("rows", [VOCABULARY + 8, VOCABULARY - 8])
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("way", ["in place", "unflatten"])
def test_token_embeddings_are_resized_after_flattening(
    make: Callable[[], nn.Module], rows: int, way: str
) -> None:
    """`resize_token_embeddings` between steps; later gradients equal the plain model's."""
    model, plain = pair(make)
    for either in (model, plain):
        step(either)
        either.zero_grad()
        if way == "unflatten" and either is model:
            flat_param.unflatten(model)
        torch.manual_seed(1)
        either.resize_token_embeddings(rows, mean_resizing=False)
        if way == "unflatten" and either is model:
            flat_param.flatten(model)
    assert step(model) == step(plain)
    assert model.get_input_embeddings().weight.shape[0] == rows
    assert_same_grads(model, plain)
    assert_same(tensors_of(model.state_dict()), tensors_of(plain.state_dict()))
    assert_flat(model)


@pytest.mark.parametrize("make", TIED)
def test_resized_embeddings_stay_tied_and_train(make: Callable[[], nn.Module]) -> None:
    """An optimizer over chunks, made after the resize, trains like one over plain parameters."""
    model, plain = pair(make)
    for either in (model, plain):
        torch.manual_seed(1)
        either.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    flat = flat_param.flat_params_of(model)
    assert flat is not None
    ours = torch.optim.SGD(flat.chunks(), lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        ours.zero_grad()
        theirs.zero_grad()
        assert step(model, ours) == step(plain, theirs)
    assert_same(tensors_of(model.state_dict()), tensors_of(plain.state_dict()))


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_trains_in_a_flattened_model(when: str, tmp_path: Path) -> None:
    """`get_peft_model` before or after `flatten`: gradients, adapter file and merged weights."""
    peft, safetensors = need("peft"), need("safetensors.torch")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    plain = llama()
    model = copy.deepcopy(plain)
    if when == "after":
        flat_param.flatten(model)
    torch.manual_seed(1)
    ours = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    theirs = peft.get_peft_model(plain, copy.deepcopy(config))
    if when == "before":
        flat_param.flatten(ours)
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.5)
        for m in (ours, theirs)
    ]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert step(ours, optimizers[0]) == step(theirs, optimizers[1])
    assert_same_grads(ours, theirs)
    ours.save_pretrained(tmp_path / "flat")
    theirs.save_pretrained(tmp_path / "plain")
    names = [tmp_path / kind / "adapter_model.safetensors" for kind in ("flat", "plain")]
    assert_same(*(safetensors.load_file(name) for name in names))
    merged, reference = ours.merge_and_unload(), theirs.merge_and_unload()
    assert_same(tensors_of(merged.state_dict()), tensors_of(reference.state_dict()))


# Compiling


@pytest.mark.parametrize("which", ["another model is flat", "this model is flat"])
def test_llama_compiles_into_one_graph(which: str) -> None:
    """`fullgraph=True`, although its forward slices a module list; the same gradients."""
    torch._dynamo.reset()
    model, plain = pair(llama)
    compiled = torch.compile(
        model if which == "this model is flat" else plain, fullgraph=True, backend="eager"
    )
    compiled(input_ids=IDS, labels=IDS).loss.backward()
    step(plain if which == "this model is flat" else model)
    assert_same_grads(model, plain)


# Training loops of other libraries


def test_lightning_trains_saves_and_loads_a_flattened_module(tmp_path: Path) -> None:
    """`Trainer.fit` with clipping, and its checkpoint; weights equal the plain module's."""
    lightning = need("lightning.pytorch")

    class Task(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = small()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return self.net(batch[0]).pow(2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    plain = Task()
    model = copy.deepcopy(plain)
    flat_param.flatten(model)
    data = torch.utils.data.TensorDataset(torch.randn(8, 4))
    for task, folder in ((model, tmp_path / "flat"), (plain, tmp_path / "plain")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = lightning.Trainer(
                max_epochs=2,
                accelerator="cpu",
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                enable_checkpointing=False,
                gradient_clip_val=0.5,
                default_root_dir=folder,
            )
            trainer.fit(task, torch.utils.data.DataLoader(data, batch_size=4))
        trainer.save_checkpoint(folder / "last.ckpt")
    assert_same(tensors_of(model.state_dict()), tensors_of(plain.state_dict()))
    assert_flat(model)
    assert (tmp_path / "flat/last.ckpt").stat().st_size == (
        tmp_path / "plain/last.ckpt"
    ).stat().st_size
    loaded = torch.load(tmp_path / "flat/last.ckpt", weights_only=False)["state_dict"]
    assert_same(loaded, tensors_of(plain.state_dict()))


def test_a_trainer_of_transformers_trains_a_flattened_model(tmp_path: Path) -> None:
    """`Trainer.train` with a checkpoint in between; weights equal the plain model's."""
    t = need("transformers")
    states = []
    for kind, model in zip(("flat", "plain"), pair(llama), strict=True):
        by_transformers(model, tmp_path / kind, max_steps=4, save_strategy="steps", save_steps=2)
        states.append(tensors_of(model.state_dict()))
        saved = t.AutoModelForCausalLM.from_pretrained(tmp_path / kind / "checkpoint-4")
        assert_same(tensors_of(saved.state_dict()), states[-1])
    assert_same(*states)


def test_timm_models_train_and_are_saved_flat(tmp_path: Path) -> None:
    """A convolutional network with batch norm, its EMA, and its weights file."""
    timm, safetensors = need("timm"), need("safetensors.torch")

    def make() -> nn.Module:
        return timm.create_model("resnet10t", pretrained=False, num_classes=4)

    model, plain = pair(make)
    x = torch.randn(2, 3, 32, 32)
    for either in (model, plain):
        either(x).pow(2).mean().backward()
    assert_same_grads(model, plain)
    average = need("timm.utils").ModelEmaV3(model, decay=0.5)
    average.update(model)
    safetensors.save_model(average.module, str(tmp_path / "ema"))
    assert set(safetensors.load_file(tmp_path / "ema")) == set(plain.state_dict())
