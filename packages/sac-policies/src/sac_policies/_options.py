"""The options of torch's checkpoint, and which of them are allowed with a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._errors import shown

_OPTIONS = ("use_reentrant", "preserve_rng_state", "determinism_check", "early_stop", "debug")
CHECKS = ("default", "bits", "none")
"""When bits are compared: in the first step of each region, in each step, never."""


def split(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate keyword arguments of the function from options of torch's checkpoint."""
    if not kwargs:
        return {}, {}
    own = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
    return own, {name: value for name, value in kwargs.items() if name in _OPTIONS}


def refused_option(kwargs: Mapping[str, Any]) -> str:
    """Return why an option is refused; "" if none is.

    Args:
        kwargs: options of torch's checkpoint; others are ignored.
    """
    if kwargs.get("use_reentrant"):
        return (
            "use_reentrant True goes with a policy, but reentrant checkpointing knows no "
            "policies. Leave it out."
        )
    check = kwargs.get("determinism_check", "default")
    if not (isinstance(check, str) and check in CHECKS):
        return (
            f"determinism_check {shown(check)} is unknown, but it must be one of {CHECKS}. "
            "Leave it out: bits are then compared in the first step of each region."
        )
    if "context_fn" in kwargs:
        return "context_fn is given beside policy, but both decide the same. Give one of them."
    return ""
