"""Whole parameters for a while, and whole state dicts, in a group of one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from flat_param import ParameterError, StateError, fully_shard, save_sharded

pytestmark = pytest.mark.usefixtures("group_of_one")
PRECISE = MixedPrecisionPolicy(param_dtype=torch.float64)
ROWS = torch.ones(2, 4)


def _layer() -> nn.Module:
    return fully_shard(nn.Linear(4, 3), mp_policy=PRECISE)


class Tied(nn.Module):
    """Two layers of one weight, one of them frozen but for that, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.b.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """Of both."""
        y: Tensor = self.b(self.a(x))
        return y


def _nested() -> nn.Module:
    """A unit with tied weights inside of another."""
    model = nn.Sequential(nn.Linear(4, 4), Tied())
    fully_shard(model[1], mp_policy=PRECISE)
    return fully_shard(model, mp_policy=PRECISE)


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return list(first) == list(second) and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("write_back", [False, True])
def test_what_is_written_stays_only_where_asked(write_back: bool) -> None:
    """And the optimizer's parameters are back afterwards."""
    layer = _layer()
    param, before = layer.weight, layer.weight.detach().clone()
    with layer.whole_params(write_back=write_back), torch.no_grad():
        assert layer.weight.dtype == torch.float32
        layer.weight.mul_(2)
    assert layer.weight is param
    assert torch.equal(param, 2 * before if write_back else before)


def test_stopped_block_writes_nothing_back() -> None:
    """Half of an update is none; parameters are back."""
    model = _nested()
    before, params = _values(model), list(model.parameters())
    with pytest.raises(KeyboardInterrupt), model.whole_params(write_back=True):
        with torch.no_grad():
            model[0].weight.zero_()
        raise KeyboardInterrupt
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert _same(_values(model), before)


def test_tied_and_frozen_parameters_are_so_in_the_block() -> None:
    """One parameter under two names, so that what goes over all of them meets it once."""
    model = _nested()
    before = _values(model)
    names = [name for name, _ in model.named_parameters()]
    with model.whole_params(write_back=True), torch.no_grad():
        assert model[1].a.weight is model[1].b.weight
        assert [name for name, _ in model.named_parameters()] == names
        assert [p.requires_grad for p in model[1].parameters()] == [True, True, False]
        for param in model.parameters():
            param.mul_(2)
    changed = {k: v if k == "1.scale" else 2 * v for k, v in before.items()}
    assert _same(_values(model), changed)


@pytest.mark.parametrize("write_back", [False, True])
def test_set_data_is_written_back_too(write_back: bool) -> None:
    """Where asked; also of a tied weight, and in another dtype."""
    model, value = _nested(), torch.full((4, 4), 0.25, dtype=torch.float16)
    before = _values(model)
    with model.whole_params(write_back=write_back):
        model[1].b.weight.data = value.clone()
        model[0].weight.data = value.clone()
    expected = dict(before)
    if write_back:
        for name in ("0.weight", "1.a.weight", "1.b.weight"):
            expected[name] = value.float()
    assert _same(_values(model), expected)
    assert model[1].a.weight is model[1].b.weight


def _assign(module: nn.Module) -> None:
    module.weight = nn.Parameter(module.weight.detach().clone())


def _remove(module: nn.Module) -> None:
    module.weight = None


def _reshape(module: nn.Module) -> None:
    module.weight.data = torch.ones(2, 8)


@pytest.mark.parametrize("replace", [_assign, _remove, _reshape])
def test_replaced_parameter_is_refused_before_anything_is_written(
    replace: Callable[[nn.Module], None],
) -> None:
    """By name, where it would be written back."""
    model = _nested()
    before = _values(model)
    text = "parameter 'a.weight' of unit '1' was replaced by a"
    with (
        pytest.raises(ParameterError, match=re.escape(text)),
        model.whole_params(write_back=True),
        torch.no_grad(),
    ):
        model[0].weight.zero_()
        replace(model[1].a)
    assert _same(_values(model), before)
    with model.whole_params():
        replace(model[1].a)
    assert _same(_values(model), before)


USES: dict[str, Callable[[nn.Module], object]] = {
    "forward": lambda model: model(ROWS),
    "inner forward": lambda model: model[1](ROWS),
    "again": lambda model: model.whole_params().__enter__(),
    "load": lambda model: model.load_state_dict({}, strict=False),
    "move": lambda model: model.double(),
    "unshard": lambda model: model.unshard(),
    "shard around": lambda model: fully_shard(nn.Sequential(model)),
    "save": lambda model: save_sharded(model, "nowhere"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("gathered", [False, True])
def test_what_reads_shards_is_refused_in_the_block(
    use: Callable[[nn.Module], object],
    gathered: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    """The copies stay, and nothing written to them comes to the parameters by a side door."""
    monkeypatch.chdir(tmp_path)
    model = _nested()
    if gathered:
        model.set_reshard_after_forward(False)
        model(ROWS)
    before = _values(model)
    with model.whole_params(), torch.no_grad():
        copy = model[0].weight
        model[0].weight.mul_(2)
        with pytest.raises(StateError, match=r"flat_param.whole_params: the module has copies of"):
            use(model)
        assert model[0].weight is copy
        assert torch.equal(copy, 2 * before["0.weight"])
    assert _same(_values(model), before)


def test_state_dict_in_the_block_has_what_is_there() -> None:
    """The values written in the block, and the copies stay."""
    model = _nested()
    before = _values(model)
    with model.whole_params(), torch.no_grad():
        model[0].weight.mul_(2)
        found = _values(model)
        assert model[0].weight.shape == (4, 4)
    assert _same(found, {**before, "0.weight": 2 * before["0.weight"]})
    assert _same(_values(model), before)


class Asks(nn.Linear):
    """Does something in its forward and in its backward."""

    ask: Callable[..., None]

    def forward(self, x: Tensor) -> Tensor:
        """Of the layer."""
        self.ask()
        y = super().forward(x)
        y.register_hook(self.ask)
        return y * 1


TEXT = "called inside forward or backward"


@pytest.mark.parametrize("use", ["whole_params", "state_dict"])
def test_steps_refuse_whole_parameters(use: str) -> None:
    """In forward and in backward; allowed again afterwards."""
    layer = fully_shard(Asks(4, 4), mp_policy=PRECISE)

    def ask(*_: object) -> None:
        with pytest.raises(StateError, match=re.escape(TEXT)):
            layer.state_dict() if use == "state_dict" else layer.whole_params().__enter__()
        asked.append(layer.weight.dtype)

    asked: list[torch.dtype] = []
    layer.ask = ask
    layer(ROWS.double()).sum().backward()
    assert asked == [torch.float64] * 2
    with layer.whole_params():
        assert layer.weight.shape == (4, 4)


def test_written_and_loaded_values_replace_what_was_gathered() -> None:
    """A forward before them, without a backward, keeps nothing that the next one reads."""
    layer = _layer()
    zeros = {name: torch.zeros_like(value) for name, value in _values(layer).items()}
    layer(ROWS.double())
    with layer.whole_params(write_back=True):
        layer.weight.data.fill_(2)
    assert torch.equal(layer(ROWS.double()) - layer.state_dict()["bias"], 8 * torch.ones(2, 3))
    layer.load_state_dict(zeros)
    assert not layer(ROWS.double()).any()


def test_state_dict_takes_the_plain_modules_arguments() -> None:
    """A prefix, and a dict to fill; its values are no gradients' business."""
    model = _nested()
    found = model.state_dict(prefix="net.")
    assert next(iter(found)) == "net.0.weight"
    kept = model.state_dict(keep_vars=True)
    assert not any(value.requires_grad for value in kept.values())


def test_state_loads_in_any_dtype_and_in_part() -> None:
    """What is loaded replaces what was gathered; what is not there stays, and is named."""
    model = _nested()
    model.set_reshard_after_forward(False)
    before = _values(model)
    model(ROWS)
    state = {"0.weight": torch.full((4, 4), 0.5, dtype=torch.bfloat16), "more": torch.ones(1)}
    result = model.load_state_dict(state, strict=False)
    assert result.unexpected_keys == ["more"]
    assert result.missing_keys == [name for name in before if name != "0.weight"]
    assert _same(_values(model), {**before, "0.weight": torch.full((4, 4), 0.5)})
    with torch.no_grad():
        inner = nn.functional.linear(ROWS.double(), torch.full((4, 4), 0.5).double())
        expected = model[1](inner + before["0.bias"])
        assert torch.equal(model(ROWS), expected)
