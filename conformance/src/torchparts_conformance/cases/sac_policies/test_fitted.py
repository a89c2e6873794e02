"""A model whose blocks `fit_` has changed in place: what it takes, and what it stays."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchparts_conformance import requirement

from .test_budget_plans import grown, left


class Block(nn.Module):
    """A gated layer with dropout and a residual; rows that a mask leaves out stay as they are."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x, mask=None):
        """Rows in, rows out."""
        gate, value = self.up(F.layer_norm(x, x.shape[-1:])).chunk(2, dim=-1)
        y = F.dropout(self.down(F.silu(gate) * value), 0.1)
        return x + (y if mask is None else y * mask[:, None])


class Model(nn.Module):
    """A stack of blocks, and a buffer that nothing writes to."""

    def __init__(self, width=32):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(6))
        self.head = nn.Linear(width, 4)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x, mask=None, target=None):
        """Give `out`, and a loss where there is a target."""
        for block in self.blocks:
            x = block(x, mask)
        out = self.head(x) * self.scale
        return {"out": out} if target is None else {"out": out, "loss": F.mse_loss(out, target)}


def seeded(device, rows=512):
    """A model and the batch that it is fitted with."""
    torch.manual_seed(0)
    with torch.device(device):
        return Model(), {"x": torch.randn(rows, 32), "target": torch.randn(rows, 4)}


def step(model, batch, loss=lambda out: out["loss"]):
    """Run a seeded forward and backward; give the loss and the gradients."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    value = loss(model(**batch))
    value.backward()
    return [value.detach(), *(parameter.grad for parameter in model.parameters())]


def taken(model, batch, device):
    """Most bytes in use during a step, by the allocator's own count."""
    held = [*model.parameters(), *model.buffers(), *batch.values()]
    model.zero_grad(set_to_none=True)
    resident = sum(tensor.untyped_storage().nbytes() for tensor in held)
    growth = grown(lambda: model(**batch)["loss"].backward(), device)
    model.zero_grad(set_to_none=True)
    return resident + growth


def fitted(part, model, batch, budget="60%"):
    """What `fit_` says of a model that it was able to change."""
    found = part.fit_(model, batch, budget)
    assert found, "60 % of a step must be found on a stack of six equal blocks"
    return found


@requirement(
    "SP-170",
    level="MUST",
    text=(
        "A step of a model that `fit_` has changed MUST NOT take more memory than the budget, "
        "by the allocator's own count."
    ),
    rationale="a policy that was found has to hold on the model as it trains, not on a copy",
    since="0.1.0",
    profile="budget",
)
@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
def test_step_of_a_fitted_model_is_within_its_budget(part, device, share):
    """The allocator is asked, before and after; the share is of what was before."""
    model, batch = seeded(device)
    step(model, batch)
    plain = taken(model, batch, device)
    fitted(part, model, batch, share)
    assert (
        taken(model, batch, device) <= share * plain * 1.001
    )  # what a step takes can vary so much


@requirement(
    "SP-171",
    level="MUST",
    text=(
        "`undo()` of what `fit_` returns MUST leave the model as if it had never been fitted: "
        "its modules' attributes, and what a step takes; calling it twice MUST be no error."
    ),
    rationale="a change that cannot be taken back has to be paid for at evaluation and export",
    since="0.1.0",
    profile="budget",
)
def test_undo_leaves_nothing(part, device):
    """Attributes, state and memory are those of a model that was never fitted; twice, too."""
    model, batch = seeded(device)
    step(model, batch)
    before = [dict(vars(module)) for module in model.modules()]
    plain = taken(model, batch, device)
    found = fitted(part, model, batch)
    assert taken(model, batch, device) < 0.9 * plain
    for _ in range(2):
        found.undo()
        after = [dict(vars(module)) for module in model.modules()]
        assert [set(now) for now in after] == [set(then) for then in before]
        assert taken(model, batch, device) >= 0.999 * plain


@requirement(
    "SP-216",
    level="MUST",
    text=(
        "`undo()` of what `fit_` returned MUST also undo blocks whose `forward` something else "
        "was put around since: that MUST stay and be called, and a step MUST take, and give, "
        "what it does without checkpointing."
    ),
    rationale=(
        "profilers and adapters put themselves around a block's forward: under one the "
        "checkpointing went on, and a later `fit_` took its steps for those without"
    ),
    since="0.1.0",
    profile="budget",
)
def test_undo_reaches_blocks_that_something_was_put_around(part, device):
    """What was put there is called in either step, and the second one is plain's."""
    model, batch = seeded(device)
    expected = [value.clone() for value in step(model, batch)]
    plain, calls = taken(model, batch, device), []
    found = fitted(part, model, batch)

    def around(own):
        return lambda *args, **kwargs: (calls.append(1), own(*args, **kwargs))[1]

    for block in model.blocks:
        block.forward = around(block.forward)
    put = [block.forward for block in model.blocks]
    assert taken(model, batch, device) < 0.9 * plain
    found.undo()
    assert [block.forward for block in model.blocks] == put
    calls.clear()
    assert taken(model, batch, device) >= 0.999 * plain
    assert len(calls) >= len(put)
    assert all(map(torch.equal, step(model, batch), expected))


OTHERS = {
    "fewer rows": lambda x, y: ({"x": x[:100], "target": y[:100]}, None),
    "a mask": lambda x, y: ({"x": x, "target": y, "mask": (x[:, 0] > 0).to(x.dtype)}, None),
    "another loss": lambda x, y: ({"x": x}, lambda out: out["out"].logsumexp(-1).mean()),
    "half precision": lambda x, y: ({"x": x, "target": y}, None),
}


@requirement(
    "SP-172",
    level="MUST",
    text=(
        "A model that was fitted with one batch and loss MUST train with another length, a "
        "mask, another loss and autocast, with the gradients of no checkpointing, bitwise."
    ),
    rationale=(
        "Trainer computes another loss than the one a plan was made with, and a padded batch "
        "brings a mask: a plan for one call raised"
    ),
    since="0.1.0",
    profile="budget",
)
@pytest.mark.parametrize("other", OTHERS)
def test_fitted_model_trains_on_what_it_was_not_fitted_with(part, device, other):
    """No error; loss and gradients are those of the model without checkpointing, bitwise."""
    model, batch = seeded(device)
    plain = copy.deepcopy(model)
    fitted(part, model, batch)
    given, loss = OTHERS[other](batch["x"], batch["target"])
    half = other == "half precision"
    options = {} if loss is None else {"loss": loss}
    with torch.autocast(device.split(":")[0], dtype=torch.bfloat16, enabled=half):
        expected, found = step(plain, given, **options), step(model, given, **options)
    assert all(map(torch.equal, expected, found))


@requirement(
    "SP-173",
    level="MUST",
    text=(
        "A fitted model MUST have the gradients of the model without checkpointing, bitwise, "
        "random numbers included, and leave the generator where that one leaves it."
    ),
    rationale="each block is divided in its own way, and the sum has to be the plain step",
    since="0.1.0",
    profile="budget",
)
@pytest.mark.parametrize("budget", ["90%", "75%", "60%"])
def test_gradients_of_a_fitted_model_are_the_plain_ones(part, device, budget):
    """Bitwise, with dropout, in two steps in a row; the generator ends where it did."""
    model, batch = seeded(device)
    plain = copy.deepcopy(model)
    fitted(part, model, batch, budget)
    for _ in range(2):
        expected, state = step(plain, batch), torch.get_rng_state()
        assert all(map(torch.equal, expected, step(model, batch)))
        assert torch.equal(state, torch.get_rng_state())


@requirement(
    "SP-174",
    level="MUST",
    text=(
        "`fit_` MUST change the model in place: modules, classes, parameters, names and the "
        "state dict MUST stay those it had."
    ),
    rationale="optimizers, adapters and checkpoints hold on to names and objects",
    since="0.1.0",
    profile="budget",
)
def test_fitted_model_is_the_object_it_was(part, device):
    """Modules, classes, parameters, names and the state dict, on both sides of `undo`."""
    model, batch = seeded(device)

    def identity():
        state = model.state_dict()
        modules = [(name, id(module), type(module)) for name, module in model.named_modules()]
        named = [(name, id(parameter)) for name, parameter in model.named_parameters()]
        return modules, named, [(key, value.data_ptr()) for key, value in state.items()]

    before = identity()
    found = fitted(part, model, batch)
    assert identity() == before
    found.undo()
    assert identity() == before


@requirement(
    "SP-175",
    level="MUST",
    text=(
        "A budget that no change of the blocks fits MUST give a false value with the smallest "
        "memory of a step that was measured, and leave the model as it was."
    ),
    rationale="whoever asks for too little has to learn what can be had",
    since="0.1.0",
    profile="budget",
)
def test_budget_that_nothing_fits_changes_nothing(part, device):
    """A false value with the smallest peak that was measured, which is then found."""
    model, batch = seeded(device)
    step(model, batch)
    plain = taken(model, batch, device)
    found = part.fit_(model, batch, 1000)
    assert not found
    assert 1000 < found.smallest_bytes < plain
    assert taken(model, batch, device) >= 0.999 * plain
    assert part.fit_(model, batch, found.smallest_bytes + 4096)


@requirement(
    "SP-176",
    level="MUST",
    text=(
        "`fit_` MUST leave parameters, gradients, buffers, the batch, the mode and random state"
        " as they were."
    ),
    rationale="measuring is not training",
    since="0.1.0",
    profile="budget",
)
def test_fitting_a_model_is_not_training_it(part, device):
    """Values, gradients, buffers, mode and random state are those from before."""
    model, batch = seeded(device)
    step(model, batch)
    grads = [parameter.grad for parameter in model.parameters()]
    held = (*model.parameters(), *grads, *model.buffers(), *batch.values())
    before = [tensor.clone() for tensor in held]
    state = torch.get_rng_state()
    fitted(part, model, batch)
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert all(map(torch.equal, before, held))
    assert torch.equal(state, torch.get_rng_state())
    assert all(module.training for module in model.modules())


@requirement(
    "SP-182",
    level="MUST",
    text=(
        "A forward of a model that `fit_` has changed for a budget of kept bytes MUST NOT leave"
        " more bytes in use than the budget, by the allocator's own count, and its gradients "
        "MUST be those of no checkpointing, bitwise."
    ),
    rationale=(
        "a budget of the peak is a promise for one step; what is kept is what grows with "
        "micro-batches in flight"
    ),
    since="0.1.0",
    profile="budget",
)
@pytest.mark.parametrize("share", [0.8, 0.5, 0.3])
def test_forward_of_a_fitted_model_leaves_no_more_than_its_budget(part, device, share):
    """The allocator is asked, before and after; the share is of what was left before."""
    model, batch = seeded(device)
    plain = copy.deepcopy(model)
    step(model, batch)
    model.zero_grad(set_to_none=True)
    before = left(lambda: model(**batch)["loss"], device)
    found = part.fit_(model, batch, share, of="kept")
    assert found, f"{share:.0%} of what a stack of six equal blocks keeps must be found"
    assert left(lambda: model(**batch)["loss"], device) <= share * before * 1.001
    assert all(map(torch.equal, step(plain, batch), step(model, batch)))


class Normed(nn.Module):
    """A block with running statistics, which divides by a buffer that it has just changed."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("size", torch.ones(()))

    def forward(self, x, mask=None):
        """Rows in, rows out."""
        y = self.down(torch.tanh(self.up(self.norm(x))))
        with torch.no_grad():
            self.size.mul_(0.9).add_(y.abs().mean())
        return x + F.dropout(y / self.size, 0.1)


@requirement(
    "SP-183",
    level="MUST",
    text=(
        "After each step a fitted model MUST have the buffers of the model without "
        "checkpointing, bitwise, whichever of its blocks run a second time."
    ),
    rationale="a second forward counts running statistics twice",
    since="0.1.0",
    profile="budget",
)
@pytest.mark.parametrize("share", [0.8, 0.5, 0.3])
def test_buffers_of_a_fitted_model_count_a_batch_once(part, device, share):
    """Each block averages, and computes with an average; in two steps in a row."""
    model, batch = seeded(device)
    with torch.device(device):
        model.blocks = nn.ModuleList(Normed(32) for _ in range(4))
    plain = copy.deepcopy(model)
    assert part.fit_(model, batch, share, of="kept")
    for _ in range(2):
        step(plain, batch)
        step(model, batch)
        assert all(map(torch.equal, plain.buffers(), model.buffers()))
