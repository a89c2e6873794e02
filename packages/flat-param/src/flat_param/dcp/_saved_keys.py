"""The names under which a checkpoint keeps parameters, optimizer state and options."""

from __future__ import annotations

from typing import Any

from .._errors import CheckpointError

MODEL, STATE, GROUPS = "model.", "optim.state.", "optim.param_groups"


def nested_path(key: str) -> tuple[Any, ...]:
    """Where a key belongs in the nested state dict.

    Raises:
        CheckpointError: the key begins as one of the optimizer's and does not go on as one.

    Example:
        >>> nested_path("optim.state.head.weight.step")
        ('optim', 'state', 'head.weight', 'step')
    """
    if key.startswith(MODEL):
        return ("model", key[len(MODEL) :])
    if key.startswith(STATE) and "." in key[len(STATE) :]:
        return ("optim", "state", *key[len(STATE) :].rsplit(".", 1))
    if key.startswith(GROUPS + "."):
        position, _, option = key[len(GROUPS) + 1 :].partition(".")
        if option and len(position) < 10 and position.isascii() and position.isdigit():
            return ("optim", "param_groups", int(position), option)
    if key.startswith((STATE, GROUPS)):
        raise CheckpointError(
            f"flat_param.load: the checkpoint has the key '{key[:80]}', but optimizer state is "
            f"under '{STATE}<parameter>.<name>' and options under '{GROUPS}.<number>.<option>'. "
            "It is damaged or foreign: load another one."
        )
    return (key,)
