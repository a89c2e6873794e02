"""Optimizer state goes from separate parameters to chunks and back, and training goes on."""

import copy

import pytest
import torch
from torch import nn

from flat_param import StateError, flatten

OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.0, foreach=False),
    "AMSGrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, foreach=False),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.001, momentum=0.9, foreach=False),
    "SGD without momentum": lambda params: torch.optim.SGD(params, lr=0.001, foreach=False),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, foreach=False),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, foreach=False),
}


class Tied(nn.Module):
    """Sizes that need gaps, a scalar, a frozen parameter, a tied one, and one never used."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(5, 7)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (self.first(x).sin() * self.last(x) * self.scale).sum(-1)


def train(module, optimizer, steps):
    """Train on the same batches each time."""
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(step)
        module(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()


def same_values(one, other):
    """Whether all parameters are equal and finite."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) and a.isfinite().all() for a, b in pairs)


def make(name, numel, *, steps=3):
    """A model trained with separate parameters, and its flat copy with an optimizer over chunks."""
    torch.manual_seed(0)
    plain = Tied()
    optimizer = OPTIMIZERS[name](plain.parameters())
    train(plain, optimizer, steps)
    module = copy.deepcopy(plain)
    flat = flatten(module)
    return plain, optimizer, flat, OPTIMIZERS[name](flat.chunks(numel))


@pytest.mark.parametrize("numel", [1, 8, 1 << 18])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_over_chunks_and_back(name, numel):
    """The next steps are those of separate parameters, every bit, in both directions."""
    plain, optimizer, flat, chunked = make(name, numel)
    flat.load_optimizer_state(chunked, optimizer.state_dict())
    train(plain, optimizer, 3)
    train(flat.module, chunked, 3)
    assert same_values(plain, flat.module)
    again = copy.deepcopy(plain)
    named = [n for n, p in again.named_parameters() if p.requires_grad]
    state = flat.optimizer_state(chunked)
    assert state["param_groups"][0]["params"] == named
    separate = OPTIMIZERS[name](p for p in again.parameters() if p.requires_grad)
    separate.load_state_dict(state)
    train(plain, optimizer, 3)
    train(again, separate, 3)
    assert same_values(plain, again)


def test_state_has_the_shapes_of_parameters_and_no_gaps():
    """As a plain optimizer's, but for the parameter that never had a gradient: it has zeros."""
    _, optimizer, flat, chunked = make("AdamW", 8)
    flat.load_optimizer_state(chunked, optimizer.state_dict())
    state = flat.optimizer_state(chunked)["state"]
    assert set(state) == {"first.weight", "first.bias", "last.bias", "scale", "unused"}
    for name, param in flat.module.named_parameters():
        if name not in state:
            assert name == "frozen"
            continue
        assert state[name]["exp_avg"].shape == param.shape
        assert state[name]["step"] == 3
    assert not state["unused"]["exp_avg"].any()
    average = state["scale"]["exp_avg"].zero_()  # a copy, which is saved without its neighbours
    assert flat.optimizer_state(chunked)["state"]["scale"]["exp_avg"].any()
    assert average.untyped_storage().nbytes() == average.nbytes


def test_options_are_the_states_but_for_how_a_step_is_computed():
    """The learning rate comes along, `foreach` stays."""
    _, optimizer, flat, _ = make("AdamW", 8)
    chunked = torch.optim.AdamW(flat.chunks(8), lr=0.5, fused=True)
    flat.load_optimizer_state(chunked, optimizer.state_dict())
    (group,) = chunked.param_groups
    assert (group["lr"], group["fused"], group["foreach"]) == (0.01, True, None)
    train(flat.module, chunked, 1)
    assert flat.optimizer_state(chunked)["state"]["scale"]["step"] == 4


def test_state_before_the_first_step_is_none():
    """Nothing to convert is no error."""
    _, optimizer, flat, chunked = make("AdamW", 8, steps=0)
    flat.load_optimizer_state(chunked, optimizer.state_dict())
    assert flat.optimizer_state(chunked)["state"] == {} and not chunked.state


def _two_groups(plain):
    params = list(plain.parameters())
    return torch.optim.SGD([{"params": params[:1]}, {"params": params[1:], "lr": 0.3}], lr=0.1)


def _other_steps(optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["step"] += 1
    return state


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda plain, optimizer: _two_groups(plain).state_dict(), "parameter groups differ in lr"),
        (lambda plain, optimizer: _other_steps(optimizer), "'step' differs between parameters"),
        (
            lambda plain, optimizer: OPTIMIZERS["AdamW"](
                [nn.Parameter(torch.ones(2))]
            ).state_dict(),
            "the state is of 1 parameters, but the module has 6, 5 of them trainable",
        ),
        (
            lambda plain, optimizer: {
                "state": {},
                "param_groups": [{"lr": 1.0, "params": ["another.weight"]}],
            },
            r"the state has \['another.weight'\]",
        ),
    ],
    ids=["two settings", "other steps", "other model", "other names"],
)
def test_state_that_does_not_fit_is_refused(wrong, said):
    """The error names the difference, and the optimizer is unchanged."""
    plain, optimizer, flat, chunked = make("AdamW", 8)
    flat.load_optimizer_state(chunked, optimizer.state_dict())
    before = copy.deepcopy(chunked.state_dict())
    with pytest.raises(StateError, match=said):
        flat.load_optimizer_state(chunked, wrong(plain, optimizer))
    after = chunked.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for index, state in before["state"].items():
        assert all(torch.equal(state[key], after["state"][index][key]) for key in state)


def test_optimizer_that_is_not_of_all_chunks_is_refused():
    """Parameters in place of chunks, chunks of another module, and only some of them."""
    plain, _, flat, _ = make("SGD", 8)
    with pytest.raises(StateError, match=r"shape \(\) that is not a chunk of this module"):
        flat.optimizer_state(OPTIMIZERS["SGD"](plain.parameters()))
    with pytest.raises(StateError, match="not a chunk of this module"):
        flat.optimizer_state(OPTIMIZERS["SGD"](flatten(plain).chunks()))
    for some in (flat.chunks(8)[1:], flat.chunks(8)[:-1], [*flat.chunks(8), *flat.chunks(16)]):
        with pytest.raises(StateError, match="do not cover segment 'float32' once"):
            flat.optimizer_state(OPTIMIZERS["SGD"](some))


def test_positions_are_looked_up_in_saved_names():
    """An optimizer whose order is not the module's: shapes would fit the wrong parameter, too."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    named = [(name, model.get_parameter(name)) for name in ("1.weight", "1.bias", "0.weight")]
    named.append(("0.bias", model[0].bias))
    optimizer = torch.optim.SGD(named, lr=0.1, momentum=0.9)
    model(torch.randn(2, 3)).square().sum().backward()
    optimizer.step()
    flat = flatten(model)
    chunked = torch.optim.SGD(flat.chunks(), lr=0.1, momentum=0.9)
    flat.load_optimizer_state(chunked, optimizer.state_dict())
    found = flat.optimizer_state(chunked)["state"]
    for name, param in named:
        assert torch.equal(
            found[name]["momentum_buffer"], optimizer.state[param]["momentum_buffer"]
        )
