"""The better interfaces together on one model in one process."""

from __future__ import annotations

import torch

from torchparts_conformance import requirement
from torchparts_conformance.cases.combined._training import (
    PRODUCTS,
    checkpoint_blocks,
    make_model,
    offload_blocks,
)


@requirement(
    "CB-013",
    level="MUST",
    text=(
        "A model that is flat, offloaded and checkpointed in place MUST keep the state-dict "
        "keys, and load the state, of the plain model."
    ),
    rationale="checkpoints outlive the way a model was trained",
    since="0.1.0",
    profile="in-place",
)
def test_state_dict_is_plain(parts, device):
    """Keys are those of the plain model, and states load both ways."""
    plain, model = make_model(device), make_model(device)
    parts.flat_param.flatten(model)
    offload_blocks(parts, checkpoint_blocks(parts, model, PRODUCTS))
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1)
    model.load_state_dict(plain.state_dict())
    again = make_model(device)
    again.load_state_dict(model.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
