"""A model's repeated blocks are found and checkpointed; likely mistakes give a warning."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ckpt_wrap import (
    CheckpointWrapper,
    ModuleError,
    OptionError,
    PolicyError,
    apply_activation_checkpointing,
    checkpoint_,
    checkpoint_layers_,
    checkpoint_wrapper,
    offload_stats,
    unwrap,
)


class Layer(nn.Module):
    """A block with experts."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width)) for _ in range(3))

    def forward(self, x):
        return torch.tanh(self.experts[0](torch.tanh(self.up(x))))


class Stage(nn.Module):
    """Several blocks of one width."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(width) for _ in range(count))


class Model(nn.Module):
    """An encoder and a decoder."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer() for _ in range(count))})
        self.decoder = nn.Sequential(*[Layer() for _ in range(2)])

    def forward(self, x):
        for layer in self.encoder["layer"]:
            x = layer(x)
        return self.head(self.decoder(x))


def _gradients(model):
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_layers_of_encoder_and_decoder_are_found():
    """The result lists them; gradients are plain, and only inputs are kept."""
    plain = Model()
    model = copy.deepcopy(plain)
    found = checkpoint_layers_(model)
    assert found == (
        "encoder.layer.0",
        "encoder.layer.1",
        "encoder.layer.2",
        "decoder.0",
        "decoder.1",
    )
    assert all(map(torch.equal, _gradients(plain), _gradients(model)))
    runs = []
    for layer in (*model.encoder["layer"], *model.decoder):
        layer.up.register_forward_hook(lambda *_: runs.append(1))
    _gradients(model)
    assert len(runs) == 10


def test_every_second_layer_with_inputs_in_a_folder(tmp_path):
    """Every second layer is counted from the first of each list."""
    model = Model()
    found = checkpoint_layers_(model, every=2, offload=tmp_path)
    assert found == ("encoder.layer.0", "encoder.layer.2", "decoder.0")
    model(torch.ones(256, 4).requires_grad_()).sum().backward()
    assert offload_stats(model).copies_out == 3


def test_blocks_inside_growing_stages_are_found():
    """Stages of different widths are not repeated blocks."""
    model = nn.Sequential(Stage(4, 2), Stage(8, 2), Stage(16, 3))
    found = checkpoint_layers_(model)
    parents = [name.rpartition(".")[0] for name in found]
    assert parents == ["0.blocks"] * 2 + ["1.blocks"] * 2 + ["2.blocks"] * 3


@pytest.mark.parametrize(
    "model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Layer()], ids=repr
)
def test_a_model_without_repeated_blocks_is_refused(model):
    """A list of plain layers or of experts does not count as repeated blocks."""
    with pytest.raises(ModuleError, match=r"has no nn\.ModuleList, nn"):
        checkpoint_layers_(model)


@pytest.mark.parametrize("every", [0, True])
def test_every_is_a_number_of_at_least_one(every):
    """A bool is refused."""
    model = Model()
    with pytest.raises(OptionError, match="option 'every' is"):
        checkpoint_layers_(model, every=every)
    assert {type(block) for block in model.decoder} == {Layer}


def _is_layer(name, module):
    return isinstance(module, Layer)


def test_rule_selects_by_name_and_module():
    """In model order; unselected modules are unchanged, and `unwrap` removes all layers."""
    model = Model()
    assert checkpoint_layers_(model, lambda name, m: _is_layer(name, m) and "encoder" in name) == (
        "encoder.layer.0",
        "encoder.layer.1",
        "encoder.layer.2",
    )
    assert {type(block) for block in model.decoder} == {Layer}
    assert checkpoint_layers_(model, lambda name, _: {} if name == "head" else None) == ("head",)
    unwrap(model)
    names = ("encoder.layer.0", "encoder.layer.2", "decoder.1")
    assert checkpoint_layers_(model, _is_layer, every=2) == names
    unwrap(model)
    assert {type(block) for block in model.encoder["layer"]} == {Layer}
    assert type(model.head) is nn.Linear


def test_options_of_the_rule_are_added_to_those_for_all():
    """Options of the rule take precedence."""
    model = Model()

    def rule(name, module):
        return isinstance(module, Layer) and {"early_stop": name == "decoder.1"}

    checkpoint_layers_(model, rule, early_stop=True, preserve_rng_state=False)
    options = [vars(block)["_ckpt_wrap"].checkpoint.options for block in model.decoder]
    assert [each.early_stop for each in options] == [False, True]
    assert not any(each.preserve_rng_state for each in options)


def test_shared_and_wrapped_modules_have_their_first_plain_name():
    """A rule receives the module inside a wrapper, never the wrapper."""
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleDict({"c": shared})})
    assert checkpoint_layers_(model, lambda _, m: isinstance(m, nn.Linear)) == ("a",)
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    assert checkpoint_layers_(model, lambda *_: True) == ("0",)
    assert type(model[0]._checkpoint_wrapped_module).__mro__[1] is nn.Linear


@pytest.mark.parametrize(
    ("rule", "options", "error", "message"),
    [
        (lambda *_: False, {}, PolicyError, "must select at least one. Classes.*: .*Linear, "),
        (3, {}, PolicyError, "rule is 3, but it must be a function"),
        (nn.ReLU, {}, PolicyError, "such as lambda name, module: isinstance"),
        (_is_layer, {"erly_stop": True}, OptionError, "option 'erly_stop' needs checkpoint_fn="),
        (_is_layer, {"offload": "no/such"}, OptionError, "the path of a folder that exists"),
        (_is_layer, {"offload": 3}, OptionError, "option 'to' is 3, but it must be"),
    ],
)
def test_mistakes_are_explained_and_change_nothing(rule, options, error, message):
    """The message names each mistake, and the model is unchanged."""
    model = Model()
    with pytest.raises(error, match=message):
        checkpoint_layers_(model, rule, **options)
    assert {type(block) for block in model.decoder} == {Layer}


def test_a_whole_model_as_one_region_gives_a_warning():
    """The warning names the list; checkpointing a block or a list that is a segment gives none."""
    with pytest.warns(UserWarning, match=r"3 Layer in 'encoder\.layer' and becomes one region"):
        checkpoint_(Model())
    checkpoint_(Layer())
    checkpoint_(nn.Sequential(*[Layer() for _ in range(4)]))


def test_a_model_that_checkpoints_itself_gives_a_warning():
    """It warns once and names the model's own checkpointing flag."""
    model = Model()
    model.encoder.gradient_checkpointing = True
    with pytest.warns(UserWarning, match=r"'encoder' \(ModuleDict\) has checkpointing") as said:
        checkpoint_layers_(model)
    assert len(said) == 1
    layer = Layer()
    layer.gradient_checkpointing = False
    checkpoint_(layer)
    layer.gradient_checkpointing = True
    with pytest.warns(UserWarning, match="gradient_checkpointing=True"):
        checkpoint_(layer)


class Other(Layer):
    """Another class of block."""


@pytest.mark.parametrize(
    ("blocks", "names"),
    [
        (lambda: nn.ModuleDict({"a": Layer(), "b": Layer(), "head": Other()}), "a b"),
        (lambda: nn.ModuleList([Layer(), Other(), Layer(), nn.Identity()]), "0 1 2"),
        (lambda: nn.Sequential(Layer(), Other(), Layer()), "0 2"),
    ],
    ids=["dict", "list", "sequential"],
)
def test_repeated_blocks_of_each_container(blocks, names):
    """A list has blocks of other classes as well, such as those of a UNet with attention."""
    model = nn.Module()
    model.blocks = blocks()
    assert checkpoint_layers_(model) == tuple(f"blocks.{name}" for name in names.split())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_blocks_name_the_way_that_works():
    """The class of a TorchScript module cannot change; a wrapper works."""
    plain = nn.Sequential(*[torch.jit.script(Layer()) for _ in range(2)])
    with pytest.raises(ModuleError, match=r"is a TorchScript module.* apply_activation_checkpoint"):
        checkpoint_layers_(plain)
    model = nn.Sequential(*plain)
    apply_activation_checkpointing(model, check_fn=lambda module: module in set(plain))
    assert all(isinstance(module, CheckpointWrapper) for module in model)
    for _ in range(3):  # the first runs of TorchScript differ in the last bit
        expected, found = _gradients(plain), _gradients(model)
    assert all(map(torch.allclose, expected, found))


def test_flat_sequential_without_blocks_is_told_to_make_some():
    """A rule would select single layers, which save nothing."""
    with pytest.raises(ModuleError, match="Make blocks of consecutive layers"):
        checkpoint_layers_(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
