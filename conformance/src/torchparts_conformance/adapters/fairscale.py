"""The adapter of fairscale, whose `checkpoint_wrapper` came before torch's.

It has no offload wrapper and no `apply_activation_checkpointing`; cases that need them show it.
Its flat parameters have an interface of their own, so that part is not provided.
"""

from __future__ import annotations

from importlib.metadata import version

from torchparts_conformance import Implementation


def implementation() -> Implementation:
    """Adapt the installed fairscale."""
    return Implementation(
        name="fairscale",
        version=version("fairscale"),
        distributions=("fairscale",),
        parts={"ckpt-wrap": "fairscale.nn.checkpoint"},
    )
