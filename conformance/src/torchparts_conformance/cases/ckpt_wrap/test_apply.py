"""`apply_activation_checkpointing`: cases that torch 2.13 fails, and invalid arguments."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from torchparts_conformance import requirement

PREFIX = "_checkpoint_wrapped_module"


def is_linear(module):
    """Whether a module is a linear layer."""
    return isinstance(module, nn.Linear)


FORMS = (
    {"check_fn": is_linear},
    {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})},
    {"auto_wrap_policy": CustomPolicy(is_linear)},
)


@requirement(
    "CW-033",
    "A module that occurs at several places MUST get one wrapper at all these places, for each "
    "kind of policy.",
    rationale=(
        "reproduced on torch 2.13: wraps only the first place, or makes two wrappers, depending "
        "on the kind of policy"
    ),
)
def test_a_shared_module_gets_one_wrapper_everywhere(part, device):
    """The module occurs twice in one parent and once in another."""
    for form in FORMS:
        shared = nn.Linear(2, 2, device=device)
        model = nn.Sequential(shared, shared, nn.Sequential(shared))
        part.apply_activation_checkpointing(model, part.checkpoint_wrapper, **form)
        assert isinstance(model[0], part.CheckpointWrapper)
        assert model[0] is model[1] is model[2][0], form


@requirement(
    "CW-034",
    "Applying twice, or to a container that occurs twice, SHOULD NOT wrap a module twice.",
    rationale="reproduced on torch 2.13: wraps the inner module again",
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
    """Its layer gets one wrapper."""
    for form in FORMS:
        container = nn.Sequential(nn.Linear(2, 2, device=device))
        model = nn.ModuleDict({"a": nn.Sequential(container), "b": nn.Sequential(container)})
        part.apply_activation_checkpointing(model, part.checkpoint_wrapper, **form)
        assert type(getattr(container[0], PREFIX)) is nn.Linear, form
