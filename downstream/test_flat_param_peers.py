"""flat-param in the hands of other people's libraries, as their users call them.

Each test says what users do and what must hold: the same numbers, bit for bit, as with a module
that was never flattened. A library that is missing, or cannot be imported, is a skip that names it.
"""

from __future__ import annotations

import copy
import importlib
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flat_param

torch.set_num_threads(1)

# What a library warns of is its own affair; here it would be an error.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def need(name: str) -> ModuleType:
    """A library, or a skip that says why it cannot be used."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported: {error}")


# What is compared


def tensors_of(state: dict[str, Any]) -> dict[str, Tensor]:
    """Copies, so that they outlive the model."""
    return {name: value.detach().clone() for name, value in state.items()}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """The same names, and the same values bit for bit."""
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Each parameter's gradient, by name."""
    return {name: param.grad for name, param in model.named_parameters()}


def assert_same_grads(ours: nn.Module, theirs: nn.Module) -> None:
    """The same parameters have gradients, and the same ones bit for bit."""
    first, second = grads_of(ours), grads_of(theirs)
    assert first.keys() == second.keys()
    some = {name for name, grad in second.items() if grad is not None}
    assert some
    assert {name for name, grad in first.items() if grad is not None} == some
    assert [name for name in some if not torch.equal(first[name], second[name])] == []


def assert_flat(model: nn.Module) -> None:
    """Every parameter lies in a buffer of the model's flat view."""
    flat = flat_param.flat_params_of(model)
    assert flat is not None
    homes = {flat.as_vector(name).untyped_storage().data_ptr() for name in flat.layouts}
    assert {param.untyped_storage().data_ptr() for param in model.parameters()} == homes


# Models, made from a configuration: nothing is fetched

VOCABULARY = 48
IDS = torch.arange(12).view(2, 6)


def llama(*, tied: bool = False) -> nn.Module:
    """Two layers, without dropout; embeddings tied on request."""
    t = need("transformers")
    config = t.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return t.LlamaForCausalLM(config)


def tied_llama() -> nn.Module:
    """With one weight for input and output."""
    return llama(tied=True)


def gpt2() -> nn.Module:
    """Two layers; tied."""
    t = need("transformers")
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return t.GPT2LMHeadModel(
        t.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=16, **none)
    )


def bert() -> nn.Module:
    """Two layers; weight and bias of the head are tied."""
    t = need("transformers")
    config = t.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return t.BertForMaskedLM(config)


def t5() -> nn.Module:
    """Encoder and decoder, whose embeddings are one."""
    t = need("transformers")
    config = t.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return t.T5ForConditionalGeneration(config)


MODELS = [llama, tied_llama, gpt2, bert, t5]
TIED = [tied_llama, gpt2, bert, t5]


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A model, flattened, and the same one plain."""
    plain = make()
    model = copy.deepcopy(plain)
    flat_param.flatten(model)
    return model, plain


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> float:
    """Forward, backward, and an optimizer's step where there is one; the loss."""
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    return loss.item()


def small() -> nn.Module:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


# Saving: every weight is in the file, and files are as large as the plain model's


def size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("make", [small, llama, tied_llama])
def test_accelerate_saves_a_flattened_model(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """`Accelerator.save_model` writes all weights once, and as many bytes as for the plain one."""
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
    """`save_state`, two more steps, `load_state`: the model is what it was, and still flat."""
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
    """`save_model` and `load_model`, into a flattened model and into a plain one."""
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
    """`save_pretrained` and `from_pretrained`; tied weights are written once, as for the plain."""
    model, plain = pair(make)
    model.save_pretrained(tmp_path / "flat")
    plain.save_pretrained(tmp_path / "plain")
    assert size(tmp_path / "flat") == size(tmp_path / "plain")
    loaded = type(plain).from_pretrained(tmp_path / "flat")
    assert_same(tensors_of(loaded.state_dict()), tensors_of(plain.state_dict()))


@pytest.mark.parametrize("part", [False, True])
def test_torch_saves_what_it_is_given(part: bool) -> None:
    """`torch.save` of a state dict, or of one layer's, is as large as the plain model's."""
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
    """`torch.distributed.checkpoint` saves what `state_dict` gives and loads it in place."""
    dcp = need("torch.distributed.checkpoint")
    model, plain = pair(tied_llama)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict()}, checkpoint_id=str(tmp_path))
        with torch.no_grad():
            model.lm_head.weight.zero_()
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=str(tmp_path))
    # Without `load_state_dict`: the tensors that were read into are the model's memory.
    assert_same(tensors_of(model.state_dict()), tensors_of(plain.state_dict()))
    assert_flat(model)


# Changing a model after flattening


@pytest.mark.parametrize("rows", [VOCABULARY + 8, VOCABULARY - 8])
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("way", ["in place", "unflatten"])
def test_token_embeddings_are_resized_after_flattening(
    make: Callable[[], nn.Module], rows: int, way: str
) -> None:
    """`resize_token_embeddings` between steps; the gradients afterwards are the plain model's."""
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
    """An optimizer over chunks, made after the resize, does what one over plain parameters does."""
    model, plain = pair(make)
    for either in (model, plain):
        torch.manual_seed(1)
        either.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    flat = flat_param.flat_params_of(model)
    assert flat is not None
    flat.sync()
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
    """`fullgraph=True`, though its forward slices a list of modules; the same gradients."""
    torch._dynamo.reset()
    model, plain = pair(llama)
    compiled = torch.compile(
        model if which == "this model is flat" else plain, fullgraph=True, backend="eager"
    )
    compiled(input_ids=IDS, labels=IDS).loss.backward()
    step(plain if which == "this model is flat" else model)
    assert_same_grads(model, plain)


# Training loops of others


def test_lightning_trains_saves_and_loads_a_flattened_module(tmp_path: Path) -> None:
    """`Trainer.fit` with clipping, and its checkpoint; the weights are the plain module's."""
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
    """`Trainer.train` with a checkpoint in between; the weights are the plain model's."""
    t = need("transformers")
    need("accelerate")
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, VOCABULARY, (8, 6))]
    states = []
    for kind, model in zip(("flat", "plain"), pair(llama), strict=True):
        arguments = t.TrainingArguments(
            output_dir=str(tmp_path / kind),
            use_cpu=True,
            max_steps=4,
            save_steps=2,
            per_device_train_batch_size=2,
            report_to=[],
            disable_tqdm=True,
            learning_rate=0.01,
            seed=3,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            t.Trainer(model=model, args=arguments, train_dataset=data).train()
        states.append(tensors_of(model.state_dict()))
        saved = t.AutoModelForCausalLM.from_pretrained(tmp_path / kind / "checkpoint-4")
        assert_same(tensors_of(saved.state_dict()), states[-1])
    assert_same(*states)


def test_timm_models_train_and_are_saved_flat(tmp_path: Path) -> None:
    """A convolutional network with batch norm, its EMA, and the file of its weights."""
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


# What users of fairscale's FlattenParamsWrapper rely on, stated for `flatten`


class Net(nn.Module):
    """An encoder and a decoder; with `shared`, the decoder ends in the embedding's weight."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 16)
        self.net = nn.Transformer(16, 2, 2, 2, 24, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 23, bias=False)
        if shared:
            self.out.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, ids: Tensor) -> Tensor:
        """`(batch, position)` to `(batch, position, word)`."""
        hidden = self.embed(ids)
        out: Tensor = self.out(self.net(hidden, hidden.flip(1)))
        return out


def shared_net() -> nn.Module:
    """A net with one weight for input and output."""
    return Net(shared=True)


def plain_net() -> nn.Module:
    """A net whose parameters are all its own."""
    return Net(shared=False)


NETS = pytest.mark.parametrize("make", [plain_net, shared_net])


@NETS
def test_the_wrapper_and_flatten_have_the_same_elements(make: Callable[[], nn.Module]) -> None:
    """A vector without padding has one element per parameter element, shared ones counted once."""
    wrapper = need("fairscale.nn.misc").FlattenParamsWrapper
    plain = make()
    expected = sum(param.numel() for param in plain.parameters())
    flat = flat_param.flatten(copy.deepcopy(plain), align_bytes=1)
    wrapped = wrapper(copy.deepcopy(plain))
    assert flat.numel == expected == sum(param.numel() for param in wrapped.parameters())
    assert torch.equal(flat.as_vector().norm(), wrapped.flat_param.detach().norm())


@NETS
def test_output_and_norm_after_a_step_are_the_wrappers(make: Callable[[], nn.Module]) -> None:
    """One optimizer over the whole vector, as with the wrapper's flat parameter."""
    wrapper = need("fairscale.nn.misc").FlattenParamsWrapper
    plain = make()
    model = copy.deepcopy(plain)
    flat = flat_param.flatten(model, align_bytes=1)
    wrapped = wrapper(copy.deepcopy(plain))
    ids = torch.randint(0, 23, (2, 5))
    parameters = [list(m.parameters()) for m in (plain, wrapped)] + [flat.chunks(1 << 30)]
    outs, vectors = [], []
    for m, params in zip((plain, wrapped, model), parameters, strict=True):
        optimizer = torch.optim.SGD(params, lr=0.01, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            m(ids).pow(2).sum().backward()
            optimizer.step()
        outs.append(m(ids).detach())
        vectors.append(torch.cat([p.detach().reshape(-1) for p in m.parameters()]))
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(vectors[0], vectors[2])
    torch.testing.assert_close(outs[1], outs[2])


@NETS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_state_dicts_go_both_ways(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    """Plain into flat and flat into plain, buffers included, with the plain names."""
    model, plain = (m.to(dtype) for m in pair(make))
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(2)
        plain.steps.fill_(5)
    assert model.load_state_dict(plain.state_dict()) == ([], [])
    assert_same(tensors_of(model.state_dict()), tensors_of(plain.state_dict()))
    assert_flat(model)
    other = make().to(dtype)
    assert other.load_state_dict(model.state_dict()) == ([], [])
    assert_same(tensors_of(other.state_dict()), tensors_of(plain.state_dict()))


@NETS
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_computes_the_same(
    make: Callable[[], nn.Module], copied: Callable[[nn.Module], nn.Module]
) -> None:
    """A deep copy, and one that was pickled, after a step."""
    model, _ = pair(make)
    ids = torch.randint(0, 23, (2, 5))
    model(ids).sum().backward()
    twin = copied(model)
    assert torch.equal(twin(ids), model(ids))
    assert_flat(twin)


def test_some_parameters_of_a_model_are_flattened() -> None:
    """A part flattened alone; the rest stays as it is, and both train as before."""
    plain = plain_net()
    model = copy.deepcopy(plain)
    inside = {id(param) for param in model.net.parameters()}
    flat = flat_param.flatten(model.net)
    ids = torch.randint(0, 23, (2, 5))
    for either in (model, plain):
        either(ids).sum().backward()
    assert_same_grads(model, plain)
    home = flat.as_vector().untyped_storage().data_ptr()
    lying = {id(p) for p in model.parameters() if p.untyped_storage().data_ptr() == home}
    assert lying == inside


def test_two_parts_are_flattened_apart() -> None:
    """Groups of parameters, each with a vector; the state dict is the plain one."""
    plain = plain_net()
    model = copy.deepcopy(plain)
    flats = [flat_param.flatten(part) for part in (model.net.encoder, model.net.decoder)]
    assert len({flat.as_vector().data_ptr() for flat in flats}) == 2
    assert_same(tensors_of(model.state_dict()), tensors_of(plain.state_dict()))
    ids = torch.randint(0, 23, (2, 5))
    for either in (model, plain):
        either(ids).sum().backward()
    assert_same_grads(model, plain)


def test_a_module_without_parameters_is_refused() -> None:
    """The wrapper takes it; `flatten` says that there is nothing to flatten."""
    with pytest.raises(flat_param.ParameterError, match="has no parameters"):
        flat_param.flatten(nn.Sequential(nn.ReLU()))
