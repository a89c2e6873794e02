"""Properties that hold for anything of a kind."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ckpt_wrap import (
    checkpoint_,
    clean_name,
    make_plan,
    unwrap,
)
from ckpt_wrap._wrapper import PREFIX

few = settings(max_examples=40, deadline=None, derandomize=True)


MODEL = nn.Sequential(
    nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1), nn.ReLU(), nn.Sequential(nn.ReLU())), nn.ReLU()
)
NAMES = [name for name, module in MODEL.named_modules() if name]


@few
@given(st.sets(st.sampled_from(NAMES), min_size=1))
def test_planning_applying_and_unwrapping_is_the_identity(chosen):
    """Whatever is selected, unwrap gives every class back."""
    before = [type(m) for m in MODEL.modules()]
    plan = make_plan(MODEL, lambda name, _: name in chosen)
    assert set(plan.names) == chosen
    plan.apply(plan.apply(MODEL))
    assert sum(type(m) not in before for m in MODEL.modules()) == len(chosen)
    unwrap(MODEL)
    assert [type(m) for m in MODEL.modules()] == before


@few
@given(
    st.lists(st.sampled_from(["a", "b", "b" + PREFIX[:-1], PREFIX[:-1]]), min_size=1, max_size=5)
)
def test_cleaning_names_is_idempotent(parts):
    """A clean name stays, and has none of the wrapper's parts unless it is nothing else."""
    name = clean_name(".".join([*parts, "weight"]))
    assert PREFIX[:-1] not in name.split(".")
    assert clean_name(name) == name


@few
@given(st.integers(1, 4), st.booleans(), st.booleans())
def test_checkpointing_never_changes_gradients(depth, early_stop, preserve):
    """Any depth of nesting and any options give the plain gradients (no randomness here)."""
    torch.manual_seed(depth)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(depth)])
    x = torch.randn(2, 3, requires_grad=True)

    def run():
        model.zero_grad()
        model(x).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = run()
    for module in model.modules():
        checkpoint_(module, early_stop=early_stop, preserve_rng_state=preserve)
    assert all(map(torch.equal, expected, run()))
