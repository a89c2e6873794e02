"""The adapter of fairscale, whose `checkpoint_wrapper` came before torch's.

It has one wrapper, and no options but `offload_to_cpu`: nothing to apply it to a model, no offload
wrapper, one implementation. Its flat parameters have an interface of their own, so that
part is not provided.
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
        lacks={
            "ckpt-wrap": {"CW-027": "a module is changed itself, so that none is inside another"}
        },
    )
