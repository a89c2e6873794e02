"""`apply_activation_checkpointing` where the source goes wrong, and bad input."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from torchparts_conformance import requirement

PREFIX = "_checkpoint_wrapped_module"


def is_linear(module):
    """Whether it is a linear layer."""
    return isinstance(module, nn.Linear)


FORMS = (
    {"check_fn": is_linear},
    {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})},
    {"auto_wrap_policy": CustomPolicy(is_linear)},
)


@requirement(
    "CW-033",
    level="MUST",
    text=(
        "A shared module MUST get one wrapper that stands in all its places, whatever the form "
        "of the policy."
    ),
    rationale=(
        "reproduced on torch 2.13: only the first place, or two wrappers, by form of the policy"
    ),
    since="0.1.0",
    profile="robust",
)
def test_a_shared_module_gets_one_wrapper_everywhere(part, device):
    """Twice in one parent, once in another."""
    for form in FORMS:
        shared = nn.Linear(2, 2, device=device)
        model = nn.Sequential(shared, shared, nn.Sequential(shared))
        part.apply_activation_checkpointing(model, part.checkpoint_wrapper, **form)
        assert isinstance(model[0], part.CheckpointWrapper)
        assert model[0] is model[1] is model[2][0], form


@requirement(
    "CW-034",
    level="SHOULD",
    text="Applying twice, or meeting a shared container twice, SHOULD NOT wrap a module twice.",
    rationale="reproduced on torch 2.13: wraps the inner module again",
    since="0.1.0",
    profile="robust",
)
def test_applying_twice_wraps_once(part, device):
    """The inner module is the layer itself."""
    for form in FORMS:
        model = nn.Sequential(nn.Linear(2, 2, device=device))
        for _ in range(2):
            part.apply_activation_checkpointing(model, part.checkpoint_wrapper, **form)
        assert type(getattr(model[0], PREFIX)) is nn.Linear, form


@requirement("CW-034")
def test_a_shared_container_is_visited_once(part, device):
    """Its layer has one wrapper."""
    for form in FORMS:
        container = nn.Sequential(nn.Linear(2, 2, device=device))
        model = nn.ModuleDict({"a": nn.Sequential(container), "b": nn.Sequential(container)})
        part.apply_activation_checkpointing(model, part.checkpoint_wrapper, **form)
        assert type(getattr(container[0], PREFIX)) is nn.Linear, form
